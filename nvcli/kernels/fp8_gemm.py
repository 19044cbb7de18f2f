"""Triton kernels: products of fp8 weights and two or more rows of activations.

Weights are read as they are stored, become the activations' type in registers, which is exact, and
are multiplied on the tensor cores in 16 bits; the sum over a block of columns is multiplied by the
block's scale, in float32. So a product of a few rows takes half the bytes of a dense one.

    y = x W^T + b             linear
    addends of x W^T          linear_addends
    silu(gate) * up of x W^T  swiglu

As in `gemm`, y^T = W x^T, and splits leave addends for the next norm. W is the left factor also
because the tensor cores take that one from registers, where the conversion leaves it.

With many rows the operations decide and not the bytes, and a library has them faster. There a
weight is written out in 16 bits first (`dequantise`). `tuned` says from how many rows on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels import gemv, tuned
from nvcli.kernels.cuts import Gemv
from nvcli.kernels.launch import launch_options
from nvcli.types import FP8_BLOCK

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.kernels.cuts import Fp8Tiles

DEQUANTISED_ROWS = 32  # of W, by one program


@triton.jit  # type: ignore[untyped-decorator]
def _widen(w, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp8 -> dtype, exact. By way of float32, as the instruction straight to bfloat16 is slow."""
    w = w.to(tl.float16)
    return w if dtype == tl.float16 else w.to(tl.float32).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _fp8_gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, K]
    w_ptr,  # [N, K], or [2 N, K] with SwiGLU: gate, then up
    scales_ptr,  # [rows of W / BLOCK, K / BLOCK] float32
    bias_ptr,  # [N]
    y_ptr,  # [T, N], or [splits, T, N] float32, a split a program of the last axis
    num_rows,
    x_row_stride,
    N,  # sizes are no constants here: a model has many, and rows come in several tiles
    K,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,  # at most BLOCK: a tile has one row of scales
    HAS_BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * OUTPUTS
    n = first + tl.arange(0, OUTPUTS)
    k = tl.arange(0, BLOCK)
    is_row = row < num_rows
    x_ptrs = x_ptr + row[:, None].to(tl.int64) * x_row_stride + k[None, :]
    w_ptrs = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    scales_ptr += (first // BLOCK) * (K // BLOCK)
    y = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = y
    share = tl.cdiv(K // BLOCK, tl.num_programs(2))
    start = tl.program_id(2) * share
    for block in range(start, tl.minimum(start + share, K // BLOCK)):
        x = tl.load(x_ptrs + block * BLOCK, mask=is_row[:, None], other=0.0)
        w = _widen(tl.load(w_ptrs + block * BLOCK), x.dtype)
        part = tl.dot(w, tl.trans(x), input_precision=PRECISION)
        y += part * tl.load(scales_ptr + block)
        if SWIGLU:
            w = _widen(tl.load(w_ptrs + N * K + block * BLOCK), x.dtype)
            part = tl.dot(w, tl.trans(x), input_precision=PRECISION)
            up += part * tl.load(scales_ptr + (N // BLOCK) * (K // BLOCK) + block)
    if SWIGLU:
        y = y * tl.sigmoid(y) * up
    if HAS_BIAS:
        y += tl.load(bias_ptr + n).to(tl.float32)[:, None]
    to = y_ptr + (tl.program_id(2).to(tl.int64) * num_rows + row[None, :]) * N + n[:, None]
    tl.store(to, y.to(y_ptr.dtype.element_ty), mask=is_row[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _dequantise_kernel(  # type: ignore[no-untyped-def]
    w_ptr,  # [N, K]
    scales_ptr,  # [N / BLOCK, K / BLOCK] float32
    y_ptr,  # [N, K]
    K,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * ROWS
    n = first + tl.arange(0, ROWS)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = n[:, None].to(tl.int64) * K + k[None, :]
    w = tl.load(w_ptr + at).to(tl.float32)
    scale = tl.load(scales_ptr + (first // BLOCK) * (K // BLOCK) + tl.program_id(1))
    if PDL:
        tl.extra.cuda.gdc_wait()
    tl.store(y_ptr + at, (w * scale).to(y_ptr.dtype.element_ty))


def product(
    op: str, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor | None
) -> Tensor | None:
    """x W^T + b, or SwiGLU of it, by the kernel that `tuned` names; None: none does it whole.

    op: `linear`, `addends` (where the result may be those), `deterministic`, `swiglu`; the rest as
    in `kernels.linear`
    """
    is_plain = bias is None and x.is_contiguous()
    if op == "swiglu" and not is_plain:
        return None
    op = "linear" if op == "addends" and not (is_plain and out is None) else op
    num_outputs = weight.shape[0] // 2 if op == "swiglu" else weight.shape[0]
    cut = tuned.choose_fp8(op, x.shape[0], x.shape[1], num_outputs, x.dtype, is_plain=is_plain)
    if isinstance(cut, Gemv):
        return gemv.linear(x, weight, cut, out, scales)
    if cut is None:
        return None
    if op == "swiglu":
        return swiglu(x, weight, scales, cut)
    if cut.splits > 1:
        return linear_addends(x, weight, scales, cut)
    return linear(x, weight, scales, bias, cut, out)


def linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    tiles: Fp8Tiles,
    out: Tensor | None = None,
) -> Tensor:
    """x W^T + b. Reference: `reference.linear`.

    x:       [T, K], any row stride
    weight:  [N, K] float8_e4m3fn, N and K multiples of FP8_BLOCK
    scales:  [N / FP8_BLOCK, K / FP8_BLOCK] float32
    bias:    [N] or None
    tiles:   one split
    out:     [T, N], contiguous; made where it is not given

    Reads N K bytes of weights, once for each tile of rows. 2 T N K operations.
    """
    num_rows, num_outputs = x.shape[0], weight.shape[0]
    assert tiles.splits == 1, "linear_addends takes splits"
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device) if out is None else out
    assert y.is_contiguous(), "the output must be contiguous"
    assert y.shape == (num_rows, num_outputs), "the output has another shape"
    _launch(x, weight, scales, bias, y, num_outputs, tiles)
    return y


def linear_addends(x: Tensor, weight: Tensor, scales: Tensor, tiles: Fp8Tiles) -> Tensor:
    """The addends of x W^T, one a split. Reference: `reference.linear` of each split's columns.

    x, weight, scales:  as in `linear`
    returns             [splits, T, N] float32
    """
    shape = (tiles.splits, x.shape[0], weight.shape[0])
    y = torch.empty(shape, dtype=torch.float32, device=x.device)
    _launch(x, weight, scales, None, y, weight.shape[0], tiles)
    return y


def swiglu(x: Tensor, weight: Tensor, scales: Tensor, tiles: Fp8Tiles) -> Tensor:
    """silu(gate) * up, both from x W^T. Reference: `reference.silu_and_mul` of `reference.linear`.

    x:        [T, K], any row stride
    weight:   [2F, K] float8_e4m3fn, gate above up; F and K multiples of FP8_BLOCK
    scales:   [2F / FP8_BLOCK, K / FP8_BLOCK] float32
    tiles:    one split
    returns   [T, F]
    """
    assert tiles.splits == 1, "what is not added up has no SwiGLU"
    num_outputs = weight.shape[0] // 2
    y = torch.empty((x.shape[0], num_outputs), dtype=x.dtype, device=x.device)
    _launch(x, weight, scales, None, y, num_outputs, tiles, is_swiglu=True)
    return y


def _launch(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    y: Tensor,
    num_outputs: int,
    tiles: Fp8Tiles,
    *,
    is_swiglu: bool = False,
) -> None:
    num_rows, size = x.shape
    _check(weight, scales)
    assert weight.shape[1] == size, "shapes differ"
    assert num_outputs % FP8_BLOCK == 0, "outputs of whole blocks"
    assert x.stride(1) == 1, "columns must be contiguous"
    if num_rows == 0:
        return
    grid = (triton.cdiv(num_rows, tiles.rows), num_outputs // tiles.outputs, tiles.splits)
    _fp8_gemm_kernel[grid](
        x,
        weight,
        scales,
        scales if bias is None else bias,
        y,
        num_rows,
        x.stride(0),
        num_outputs,
        size,
        BLOCK=FP8_BLOCK,
        ROWS=tiles.rows,
        OUTPUTS=tiles.outputs,
        HAS_BIAS=bias is not None,
        SWIGLU=is_swiglu,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **launch_options(x.device, num_warps=tiles.warps, num_stages=tiles.stages),
    )


def dequantise(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in 16 bits. Reference: `reference.dequantise_weight`.

    weight:   [N, K] float8_e4m3fn, N and K multiples of FP8_BLOCK
    scales:   [N / FP8_BLOCK, K / FP8_BLOCK] float32
    returns   [N, K] of `dtype`

    Reads N K bytes and writes two or four times as many.
    """
    _check(weight, scales)
    y = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    _dequantise_kernel[(weight.shape[0] // DEQUANTISED_ROWS, weight.shape[1] // FP8_BLOCK)](
        weight,
        scales,
        y,
        weight.shape[1],
        BLOCK=FP8_BLOCK,
        ROWS=DEQUANTISED_ROWS,
        **launch_options(weight.device, num_warps=4),
    )
    return y


def _check(weight: Tensor, scales: Tensor) -> None:
    assert weight.dtype == torch.float8_e4m3fn, "an fp8 weight"
    assert weight.shape == (FP8_BLOCK * scales.shape[0], FP8_BLOCK * scales.shape[1]), "no blocks"
    assert weight.is_contiguous(), "the weight must be contiguous"
    assert scales.is_contiguous(), "the scales must be contiguous"
