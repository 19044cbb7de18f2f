"""Triton kernels: matrix products of two to sixteen rows, where the weights still decide.

Like `gemv` a program owns a few rows of W and has all of them in its registers before it waits for
the activations; unlike it, it multiplies on the tensor cores. The columns are cut into one slice a
warp: a chain of products over all columns would take longer than reading the weights. So x has to
be short enough to be held at once, in at most three pieces; longer ones are the library's.

    y = x W^T               linear
    silu(gate) * up of it   swiglu

`NVCLI_SKINNY_ROWS` says up to how many rows they are taken; 0 leaves them off.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROWS = 16  # of a tensor core's tile: more would be two
MAX_PIECE = 2048  # columns held as one tile
MAX_COLUMNS = 3072
MIN_SLICE = 16  # columns a tensor core takes
_enabled_rows = min(int(os.environ.get("NVCLI_SKINNY_ROWS") or MAX_ROWS), MAX_ROWS)


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


def _pieces(size: int) -> int:
    """In how many pieces so many columns are held; 0: in none that would do."""
    for pieces in (1, 2, 3) if size <= MAX_COLUMNS else ():
        piece = size // pieces
        is_even = piece * pieces == size and piece & (piece - 1) == 0
        if is_even and 4 * MIN_SLICE <= piece <= MAX_PIECE:
            return pieces
    return 0


def fits(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_swiglu: bool = False) -> bool:
    """Whether these kernels take the product: few rows and columns, 16 bits, no bias."""
    pieces = _pieces(x.shape[1])
    return (
        bias is None
        and 1 < x.shape[0] <= _enabled_rows
        and (pieces == 1 if is_swiglu else pieces > 0)
        and x.is_contiguous()
        and weight.is_contiguous()
        and x.dtype == weight.dtype
    )


def linear(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x W^T. Reference: `reference.linear`.

    x:       [T, K], T at most MAX_ROWS, K one to three times a power of two, at most MAX_COLUMNS
    weight:  [N, K]
    out:     [T, N], contiguous; made where it is not given

    Reads N K elements of weights once.
    """
    return _launch(x, weight, weight.shape[0], out, is_swiglu=False)


def swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up, both from x W^T. Reference: `reference.silu_and_mul` of `reference.linear`.

    x:        [T, K], K a power of two of at most MAX_PIECE
    weight:   [2F, K], gate above up
    returns   [T, F]
    """
    return _launch(x, weight, weight.shape[0] // 2, None, is_swiglu=True)


def _launch(
    x: Tensor, weight: Tensor, num_outputs: int, out: Tensor | None, *, is_swiglu: bool
) -> Tensor:
    num_rows, size = x.shape
    pieces = _pieces(size)
    assert num_rows <= MAX_ROWS, "few rows"
    assert pieces == 1 if is_swiglu else pieces > 0, "columns that can be held"
    assert weight.shape[1] == size, "shapes differ"
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device) if out is None else out
    assert y.is_contiguous(), "the output must be contiguous"
    assert y.shape == (num_rows, num_outputs), "the output has another shape"
    num_warps = 4 if size <= 1024 else 8
    outputs = 32 if num_outputs >= 4096 and size <= 1024 and not is_swiglu else 16
    _skinny_kernel[(triton.cdiv(num_outputs, outputs),)](
        x,
        weight,
        y,
        num_rows,
        N=num_outputs,
        K=size,
        PIECE=size // pieces,
        PIECES=pieces,
        SLICES=min(num_warps, size // pieces // MIN_SLICE),
        ROWS=MAX_ROWS,
        OUTPUTS=outputs,
        SWIGLU=is_swiglu,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **launch_options(x.device, num_warps=num_warps),
    )
    return y
