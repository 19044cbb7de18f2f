"""Triton kernels: one row times a matrix, where reading the weights is all the time.

A GEMM library leaves most of the bandwidth unused here: each call is over before its pipeline is
full, and it waits for its predecessor to end before it starts. Here a program owns a few rows of W
and, under programmatic dependent launch, has them on their way before it waits for the activations,
which come last. The norm before a projection is computed by every program for itself (its input is
small and in the L2 cache), and SwiGLU is applied before anything is written, so a layer is six
kernels: qkv with norm, rotary store, attention, o, gate and up with norm and SwiGLU, down.

    y = norm(x + residual) W^T      norm_linear
    silu(gate) * up of the same     norm_swiglu
    y = x W^T                       linear

Sums are float32. The norm's result is rounded as the separate kernel rounds it. More rows are
`skinny`'s. With an fp8 weight a block's scale multiplies the activations, in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels.launch import launch_options
from nvcli.types import FP8_BLOCK

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.kernels.cuts import Gemv


@triton.jit
def _dot_rows(w, x):  # type: ignore[no-untyped-def]
    """[N, K], [K] -> [N] float32."""
    return tl.sum(w.to(tl.float32) * x[None, :], axis=1)


@triton.jit  # type: ignore[untyped-decorator]
def _load_scales(  # type: ignore[no-untyped-def]
    scales_ptr, row, start, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """The scales of one row of W, from column `start` on: [WIDTH] float32, 0 behind the last."""
    COUNT: tl.constexpr = WIDTH // BLOCK
    block = start // BLOCK + tl.arange(0, COUNT)
    of_row = scales_ptr + (row // BLOCK) * (K // BLOCK)
    scales = tl.load(of_row + block, mask=block < K // BLOCK, other=0.0)
    return tl.reshape(tl.broadcast_to(scales[:, None], (COUNT, BLOCK)), (WIDTH,))


@triton.jit  # type: ignore[untyped-decorator]
def _norm_gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [K]
    residual_ptr,  # [K]
    norm_ptr,  # [K]
    w_ptr,  # [N, K], or [2 N, K] with SwiGLU: gate, then up
    scales_ptr,  # [rows of W / BLOCK, K / BLOCK] float32
    y_ptr,  # [N]
    total_ptr,  # [K]
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    K_POW2: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    BLOCK: tl.constexpr,  # of an fp8 weight: rows and columns of a scale; 0: the weight has none
    PDL: tl.constexpr,
):
    # 1. Weights first: they depend on nothing that runs before.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, K_POW2)
    is_k = k < K
    at = n[:, None].to(tl.int64) * K + k[None, :]
    is_weight = (n < N)[:, None] & is_k[None, :]
    w = tl.load(w_ptr + at, mask=is_weight, other=0.0, eviction_policy="evict_first")
    up = w
    if SWIGLU:
        up = tl.load(w_ptr + N * K + at, mask=is_weight, other=0.0, eviction_policy="evict_first")
    norm = tl.load(norm_ptr + k, mask=is_k, other=0.0).to(tl.float32)
    scales, up_scales = norm, norm
    if BLOCK:
        first = tl.program_id(0) * OUTPUTS
        scales = _load_scales(scales_ptr, first, 0, K, K_POW2, BLOCK)
        if SWIGLU:
            up_scales = _load_scales(scales_ptr, N + first, 0, K, K_POW2, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()

    # 2. The sum, its norm, and the products. The first program keeps the sum.
    x = tl.load(x_ptr + k, mask=is_k, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + k, mask=is_k, other=0.0)
        total = (x + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(total_ptr + k, total, mask=is_k)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
    x = (x * scale * norm).to(x_ptr.dtype.element_ty).to(tl.float32)
    y = _dot_rows(w, x * scales if BLOCK else x)
    if SWIGLU:
        y = y * tl.sigmoid(y) * _dot_rows(up, x * up_scales if BLOCK else x)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit  # type: ignore[untyped-decorator]
def _gemv_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [K]
    w_ptr,  # [N, K], or [2 N, K] with SwiGLU: gate, then up
    scales_ptr,  # [rows of W / BLOCK, K / BLOCK] float32
    y_ptr,  # [N]
    N: tl.constexpr,
    K: tl.constexpr,
    PIECE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SWIGLU: tl.constexpr,
    BLOCK: tl.constexpr,  # as above
    PDL: tl.constexpr,
):
    # 1. The first piece of the weights, before anything is waited for.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, PIECE)
    is_n = (n < N)[:, None]
    at = n[:, None].to(tl.int64) * K + k[None, :]
    is_weight = is_n & (k < K)[None, :]
    w = tl.load(w_ptr + at, mask=is_weight, other=0.0, eviction_policy="evict_first")
    up = w
    if SWIGLU:
        up = tl.load(w_ptr + N * K + at, mask=is_weight, other=0.0, eviction_policy="evict_first")
    first = tl.program_id(0) * OUTPUTS
    scales = w
    if BLOCK:
        scales = _load_scales(scales_ptr, first, 0, K, PIECE, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()

    # 2. Piece by piece, x against it: by column until the end, as adding up across threads waits.
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    sums = w.to(tl.float32) * (x * scales if BLOCK else x)[None, :]
    up_sums = sums
    if SWIGLU:
        up_sums = up.to(tl.float32) * x[None, :]
    for start in range(PIECE, K, PIECE):
        is_k = start + k < K
        is_weight = is_n & is_k[None, :]
        w = tl.load(w_ptr + at + start, mask=is_weight, other=0.0, eviction_policy="evict_first")
        if SWIGLU:
            up = tl.load(
                w_ptr + N * K + at + start,
                mask=is_weight,
                other=0.0,
                eviction_policy="evict_first",
            )
        x = tl.load(x_ptr + start + k, mask=is_k, other=0.0).to(tl.float32)
        if SWIGLU:
            up_sums += up.to(tl.float32) * x[None, :]
        if BLOCK:
            x *= _load_scales(scales_ptr, first, start, K, PIECE, BLOCK)
        sums += w.to(tl.float32) * x[None, :]
    y = tl.sum(sums, axis=1)
    if SWIGLU:
        y = y * tl.sigmoid(y) * tl.sum(up_sums, axis=1)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    cut: Gemv,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) W^T, x + residual). Reference: `reference.norm_linear`.

    x, residual:  [1, K]; without residual the second result is x
    norm_weight:  [K]
    weight:       [N, K]
    scales:       of an fp8 weight, as in `kernels.linear`

    Reads N K elements of weights once.
    """
    num_outputs = weight.shape[0]
    return _launch_norm(
        x, residual, norm_weight, eps, weight, scales, num_outputs, cut, is_swiglu=False
    )


def norm_swiglu(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    cut: Gemv,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(silu(gate) * up, x + residual), gate and up being norm(x + residual) W^T. Reference:
    `reference.norm_swiglu`.

    weight: [2F, K], gate above up; the rest as in `norm_linear`; the first result is [1, F]
    """
    num_outputs = weight.shape[0] // 2
    return _launch_norm(
        x, residual, norm_weight, eps, weight, scales, num_outputs, cut, is_swiglu=True
    )


def _launch_norm(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    scales: Tensor | None,
    num_outputs: int,
    cut: Gemv,
    *,
    is_swiglu: bool,
) -> tuple[Tensor, Tensor]:
    num_rows, size = x.shape
    assert num_rows == 1, "one row"
    assert weight.shape[1] == norm_weight.shape[0] == size, "shapes differ"
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(x)
    assert cut.columns >= size, "a row is held whole"
    _norm_gemv_kernel[(triton.cdiv(num_outputs, cut.outputs),)](
        x,
        x if residual is None else residual,
        norm_weight,
        weight,
        norm_weight if scales is None else scales,
        y,
        total,
        eps,
        N=num_outputs,
        K=size,
        K_POW2=cut.columns,
        OUTPUTS=cut.outputs,
        HAS_RESIDUAL=residual is not None,
        SWIGLU=is_swiglu,
        BLOCK=0 if scales is None else FP8_BLOCK,
        **launch_options(x.device, num_warps=cut.warps),
    )
    return y, total


def linear(
    x: Tensor,
    weight: Tensor,
    cut: Gemv,
    out: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """x W^T. Reference: `reference.linear`.

    x:       [1, K]
    weight:  [N, K]
    out:     [1, N], contiguous; made where it is not given
    scales:  of an fp8 weight, as in `kernels.linear`

    Reads N K elements of weights once.
    """
    return _launch(x, weight, cut, out, scales, weight.shape[0], is_swiglu=False)


def swiglu(x: Tensor, weight: Tensor, cut: Gemv) -> Tensor:
    """silu(gate) * up, both from x W^T. Reference: `reference.silu_and_mul` of `reference.linear`.

    x:        [1, K]
    weight:   [2F, K], gate above up
    returns   [1, F]
    """
    return _launch(x, weight, cut, None, None, weight.shape[0] // 2, is_swiglu=True)


def _launch(
    x: Tensor,
    weight: Tensor,
    cut: Gemv,
    out: Tensor | None,
    scales: Tensor | None,
    num_outputs: int,
    *,
    is_swiglu: bool,
) -> Tensor:
    num_rows, size = x.shape
    assert num_rows == 1, "one row"
    assert weight.shape[1] == size, "shapes differ"
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device) if out is None else out
    assert y.is_contiguous(), "the output must be contiguous"
    assert y.shape == (num_rows, num_outputs), "the output has another shape"
    _gemv_kernel[(triton.cdiv(num_outputs, cut.outputs),)](
        x,
        weight,
        y if scales is None else scales,
        y,
        N=num_outputs,
        K=size,
        PIECE=cut.columns,
        OUTPUTS=cut.outputs,
        SWIGLU=is_swiglu,
        BLOCK=0 if scales is None else FP8_BLOCK,
        **launch_options(x.device, num_warps=cut.warps),
    )
    return y
