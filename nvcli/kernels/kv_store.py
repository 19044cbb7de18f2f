"""Triton kernels: scatter keys and values into the paged cache, and gather them from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def quantise(x, scale):  # type: ignore[no-untyped-def]
    """x / scale on the grid of float8_e4m3fn, still float32: the conversion that follows is exact
    everywhere, also in the interpreter, whose own rounds half up. Reference: `reference.quantise`.

    scale: a power of two, so that dividing is exact
    """
    y = tl.minimum(tl.maximum(x.to(tl.float32) / scale, -448.0), 448.0)
    # Three bits of mantissa, ties to even; below 2**-6, steps of 2**-9.
    bits = y.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    normal = bits.to(tl.float32, bitcast=True)
    return tl.where(tl.abs(y) < 0.015625, (y + 24576.0) - 24576.0, normal)


@triton.jit  # type: ignore[untyped-decorator]
def _store_kv_kernel(  # type: ignore[no-untyped-def]
    k_ptr,  # [T, Hk, D]
    v_ptr,  # [T, Hk, D]
    k_cache_ptr,  # [N, P, Hk, D], strided
    v_cache_ptr,
    slot_mapping_ptr,  # [T] int64
    scales_ptr,  # FP8: [2, Hk] float32
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    cache_block_stride,
    cache_offset_stride,
    cache_head_stride,
    block_size,
    num_kv_heads,
    D: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    D_POW2: tl.constexpr,
    FP8: tl.constexpr,
):
    # 1. One program per token. A slot times a stride passes 2^31 in a large pool, and so may a
    #    token times a row stride: both are 64-bit before they are multiplied.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    block = slot // block_size
    offset = slot % block_size

    # 2. All heads of the token as one tile [HEADS_POW2, D_POW2]; what sticks out is masked.
    heads = tl.arange(0, HEADS_POW2)[:, None]
    dims = tl.arange(0, D_POW2)[None, :]
    mask = (heads < num_kv_heads) & (dims < D)
    k = tl.load(k_ptr + token * k_row_stride + heads * k_head_stride + dims, mask=mask)
    v = tl.load(v_ptr + token * v_row_stride + heads * v_head_stride + dims, mask=mask)

    if FP8:
        is_head = heads < num_kv_heads
        k = quantise(k, tl.load(scales_ptr + heads, mask=is_head, other=1.0))
        v = quantise(v, tl.load(scales_ptr + num_kv_heads + heads, mask=is_head, other=1.0))

    # 3. The cache keeps heads apart by its own stride: any physical layout, unit stride in D.
    to = block * cache_block_stride + offset * cache_offset_stride
    to += heads * cache_head_stride + dims
    tl.store(k_cache_ptr + to, k.to(k_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(v_cache_ptr + to, v.to(v_cache_ptr.dtype.element_ty), mask=mask)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """Scatter this step's keys and values into the paged cache. Reference: `reference.store_kv`.

    k, v:              [T, Hk, D]          any row and head stride, unit stride in D
    k_cache, v_cache:  [N, P, Hk, D]       written in place; equal strides, unit in D
    slot_mapping:      [T] int64           block * P + offset; -1 skips the row (graph padding)
    kv_scales:         [2, Hk] float32     contiguous, with an fp8 cache

    Moves 4*T*Hk*D elements (read and write K and V); one program per token.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    assert v.shape == k.shape, "K and V differ in shape"
    assert k_cache.shape == v_cache.shape, "K and V caches differ in shape"
    assert k_cache.stride() == v_cache.stride(), "K and V caches differ in layout"
    assert k_cache.shape[2:] == (num_kv_heads, head_dim), "cache is for other heads"
    assert k.stride(2) == v.stride(2) == k_cache.stride(3) == 1, "D must be contiguous"
    assert slot_mapping.shape == (num_tokens,), "one slot a token"
    assert slot_mapping.is_contiguous(), "slots must be contiguous"
    assert kv_scales is None or kv_scales.is_contiguous(), "scales must be contiguous"
    if num_tokens == 0:
        return
    _store_kv_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        slot_mapping if kv_scales is None else kv_scales,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        k_cache.shape[1],
        num_kv_heads,
        D=head_dim,
        HEADS_POW2=triton.next_power_of_2(num_kv_heads),
        D_POW2=triton.next_power_of_2(head_dim),
        FP8=kv_scales is not None,
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _gather_kv_kernel(  # type: ignore[no-untyped-def]
    k_cache_ptr,  # [N, P, Hk, D], strided
    v_cache_ptr,
    block_ids_ptr,  # [J] int32
    k_ptr,  # [Hk, J * P, D]
    v_ptr,
    num_keys,
    cache_block_stride,
    cache_offset_stride,
    cache_head_stride,
    P: tl.constexpr,
    D: tl.constexpr,
    P_POW2: tl.constexpr,
    D_POW2: tl.constexpr,
):
    # One program a block and head.
    index = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    block = tl.load(block_ids_ptr + index).to(tl.int64)
    keys = tl.arange(0, P_POW2)[:, None]
    dims = tl.arange(0, D_POW2)[None, :]
    mask = (keys < P) & (dims < D)
    at = block * cache_block_stride + head * cache_head_stride + keys * cache_offset_stride + dims
    to = (head * num_keys + index * P + keys) * D + dims
    tl.store(k_ptr + to, tl.load(k_cache_ptr + at, mask=mask), mask=mask)
    tl.store(v_ptr + to, tl.load(v_cache_ptr + at, mask=mask), mask=mask)


def gather_kv(k_cache: Tensor, v_cache: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of some blocks, one behind the other. Reference: `reference.gather_kv`.

    k_cache, v_cache:  [N, P, Hk, D]   equal strides, unit in D
    block_ids:         [J] int32
    returns            [J P, Hk, D] twice, each head contiguous

    Moves 4 J P Hk D elements (reads and writes K and V).
    """
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    assert k_cache.stride() == v_cache.stride(), "K and V caches differ in layout"
    assert k_cache.stride(3) == 1, "D must be contiguous"
    assert block_ids.is_contiguous(), "block ids must be contiguous"
    num_keys = len(block_ids) * block_size
    k, v = (
        torch.empty((num_kv_heads, num_keys, head_dim), dtype=k_cache.dtype, device=k_cache.device)
        for _ in range(2)
    )
    _gather_kv_kernel[(len(block_ids), num_kv_heads)](
        k_cache,
        v_cache,
        block_ids,
        k,
        v,
        num_keys,
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        P=block_size,
        D=head_dim,
        P_POW2=triton.next_power_of_2(block_size),
        D_POW2=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
    return k.transpose(0, 1), v.transpose(0, 1)
