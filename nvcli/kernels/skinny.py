"""Triton kernels: matrix products of two to sixteen rows, where the weights still decide.

Like `gemv` a program owns a few rows of W and has all of them in its registers before it waits for
the activations; unlike it, it multiplies on the tensor cores. The columns are cut into one slice a
warp: a chain of products over all columns would take longer than reading the weights. So x has to
be short enough to be held at once, in at most three pieces; longer ones are the library's.

    y = x W^T               linear
    silu(gate) * up of it   swiglu
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels.cuts import SKINNY_ROWS
from nvcli.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.kernels.cuts import Skinny


@triton.jit  # type: ignore[untyped-decorator]
def _load_weights(w_ptr, n, k, N, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows n [R] of W, columns k [S, C] -> [S, R, C]."""
    at = n[None, :, None].to(tl.int64) * K + k[:, None, :]
    return tl.load(w_ptr + at, mask=(n < N)[None, :, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _product(x, w, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """[S, M, C], [S, R, C] -> [S, M, R] float32: a slice a warp."""
    return tl.dot(x, tl.permute(w, (0, 2, 1)), input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _skinny_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, K]
    w_ptr,  # [N, K], or [2 N, K] with SwiGLU: gate, then up
    y_ptr,  # [T, N]
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SWIGLU: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    # 1. The weights, before anything is waited for.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    WIDTH: tl.constexpr = PIECE // SLICES
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, SLICES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    w = _load_weights(w_ptr, n, k, N, K)
    w_2, w_3, up_w = w, w, w
    if PIECES > 1:
        w_2 = _load_weights(w_ptr, n, PIECE + k, N, K)
    if PIECES > 2:
        w_3 = _load_weights(w_ptr, n, 2 * PIECE + k, N, K)
    if SWIGLU:
        up_w = _load_weights(w_ptr + N * K, n, k, N, K)
    if PDL:
        tl.extra.cuda.gdc_wait()

    # 2. All rows of x against them, and the sum over the slices.
    row = tl.arange(0, ROWS)
    is_row = (row < num_rows)[None, :, None]
    x_ptrs = x_ptr + row[None, :, None] * K + k[:, None, :]
    x = tl.load(x_ptrs, mask=is_row, other=0.0)
    parts = _product(x, w, PRECISION)
    if PIECES > 1:
        parts += _product(tl.load(x_ptrs + PIECE, mask=is_row, other=0.0), w_2, PRECISION)
    if PIECES > 2:
        parts += _product(tl.load(x_ptrs + 2 * PIECE, mask=is_row, other=0.0), w_3, PRECISION)
    y = tl.sum(parts, axis=0)
    if SWIGLU:
        y = y * tl.sigmoid(y) * tl.sum(_product(x, up_w, PRECISION), axis=0)
    to = y_ptr + row[:, None].to(tl.int64) * N + n[None, :]
    mask = (row < num_rows)[:, None] & (n < N)[None, :]
    tl.store(to, y.to(y_ptr.dtype.element_ty), mask=mask)


def linear(x: Tensor, weight: Tensor, cut: Skinny, out: Tensor | None = None) -> Tensor:
    """x W^T. Reference: `reference.linear`.

    x:       [T, K], T at most SKINNY_ROWS, K as many powers of two as the cut has pieces
    weight:  [N, K]
    out:     [T, N], contiguous; made where it is not given

    Reads N K elements of weights once.
    """
    return _launch(x, weight, weight.shape[0], cut, out, is_swiglu=False)


def swiglu(x: Tensor, weight: Tensor, cut: Skinny) -> Tensor:
    """silu(gate) * up, both from x W^T. Reference: `reference.silu_and_mul` of `reference.linear`.

    x:        [T, K], K a power of two
    weight:   [2F, K], gate above up
    returns   [T, F]
    """
    return _launch(x, weight, weight.shape[0] // 2, cut, None, is_swiglu=True)


def _launch(
    x: Tensor,
    weight: Tensor,
    num_outputs: int,
    cut: Skinny,
    out: Tensor | None,
    *,
    is_swiglu: bool,
) -> Tensor:
    num_rows, size = x.shape
    assert num_rows <= SKINNY_ROWS, "few rows"
    assert cut.pieces == 1 or not is_swiglu, "SwiGLU holds gate and up in one piece"
    assert size % cut.pieces == 0, "pieces of one size"
    assert weight.shape[1] == size, "shapes differ"
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device) if out is None else out
    assert y.is_contiguous(), "the output must be contiguous"
    assert y.shape == (num_rows, num_outputs), "the output has another shape"
    _skinny_kernel[(triton.cdiv(num_outputs, cut.outputs),)](
        x,
        weight,
        y,
        num_rows,
        N=num_outputs,
        K=size,
        PIECE=size // cut.pieces,
        PIECES=cut.pieces,
        SLICES=cut.slices,
        ROWS=SKINNY_ROWS,
        OUTPUTS=cut.outputs,
        SWIGLU=is_swiglu,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **launch_options(x.device, num_warps=cut.warps),
    )
    return y
