"""Triton kernel: q/k norm, rotary embedding and the KV store of a step, in one pass over qkv.

Alone these are five small kernels a layer, each of which reads back what the one before wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels.kv_store import quantise
from nvcli.kernels.launch import launch_options
from nvcli.kernels.norm import inverse_rms, load_row

if TYPE_CHECKING:
    from torch import Tensor

HEADS_PER_PROGRAM = 8
LATE_HEADS_PER_PROGRAM = 16  # with a late norm, since every program reads a whole row for it


@triton.jit  # type: ignore[untyped-decorator]
def _rope_norm_store_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,  # [T, Hq + 2 Hk, D]
    weight_ptr,  # [Hq + Hk, D]
    cos_ptr,  # [T, D] float32, its halves equal
    sin_ptr,  # [T, D] float32, its first half the second's negative
    q_ptr,  # [T, Hq, D]
    k_cache_ptr,  # [N, P, Hk, D], strided
    v_cache_ptr,
    slot_mapping_ptr,  # [T] int64
    scales_ptr,  # FP8: [2, Hk] float32
    rms_of_ptr,  # IS_LATE: [T, E]
    qkv_row_stride,
    rotary_row_stride,
    cache_block_stride,
    cache_offset_stride,
    cache_head_stride,
    block_size,
    eps,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    FP8: tl.constexpr,
    IS_LATE: tl.constexpr,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    # 1. One program takes HEADS heads of one token. Those of a token are neighbours: they run at
    #    once, and what all of them read comes from memory once. A slot times a stride passes 2^31
    #    in a large pool, and so may a token times a row stride: both are 64-bit before they are
    #    multiplied. A slot itself does not, and dividing 32 bits is quicker.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    PROGRAMS: tl.constexpr = (HQ + 2 * HK + HEADS - 1) // HEADS  # of a token
    token = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    heads = tl.program_id(0) % PROGRAMS * HEADS + tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, D // 2)[None, :]
    is_head = heads < HQ + 2 * HK
    is_rotated = heads < HQ + HK

    # 2. All is asked for before the first sum, which waits for its part. A head is two halves
    #    [HEADS, D / 2], so that rotating pairs dimension i with i + D / 2; half of cos and of sin
    #    tells the other.
    slot = tl.load(slot_mapping_ptr + token).to(tl.int32)
    if IS_LATE:
        whole = load_row(rms_of_ptr + token * E, E, E_POW2)
    row = qkv_ptr + token * qkv_row_stride + heads * D + half
    low = tl.load(row, mask=is_head, other=0.0)
    high = tl.load(row + D // 2, mask=is_head, other=0.0)
    angle = token * rotary_row_stride + half
    cos = tl.load(cos_ptr + angle)
    sin = tl.load(sin_ptr + angle + D // 2)
    if HAS_NORM:
        weight = weight_ptr + heads * D + half
        weight_x = tl.load(weight, mask=is_rotated, other=0.0)
        weight_y = tl.load(weight + D // 2, mask=is_rotated, other=0.0)

    # 3. In float32: the late norm, which is the values' too, that of each head, and the rotation.
    x = low.to(tl.float32)
    y = high.to(tl.float32)
    if IS_LATE:
        late = inverse_rms(whole, eps, E)
        x *= late
        y *= late
        low = x.to(low.dtype)
        high = y.to(high.dtype)
    if HAS_NORM:
        square = tl.sum(x * x + y * y, axis=1)
        scale = tl.rsqrt(square / D + eps)[:, None]
        x = x * scale * weight_x.to(tl.float32)
        y = y * scale * weight_y.to(tl.float32)
    rotated_x = x * cos + y * -sin
    rotated_y = y * cos + x * sin

    # 4. Queries go on as a tensor; keys and values to the slot, unless it is -1 (padding, or a
    #    shared block that holds them already). The cache keeps heads apart by its own stride.
    dtype = q_ptr.dtype.element_ty
    out_x = rotated_x.to(dtype)
    out_y = rotated_y.to(dtype)
    q = q_ptr + (token * HQ + heads) * D + half
    tl.store(q, out_x, mask=heads < HQ)
    tl.store(q + D // 2, out_y, mask=heads < HQ)
    if slot >= 0:
        cache_dtype = k_cache_ptr.dtype.element_ty
        to = (slot // block_size).to(tl.int64) * cache_block_stride
        to += (slot % block_size).to(tl.int64) * cache_offset_stride
        is_key = is_rotated & (heads >= HQ)
        is_value = is_head & (heads >= HQ + HK)
        k_low, k_high, v_low, v_high = out_x, out_y, low, high
        if FP8:
            # Keys and values have their scales one after the other, as qkv has their heads.
            scale = tl.load(scales_ptr + heads - HQ, mask=is_key | is_value, other=1.0)
            k_low = quantise(k_low, scale)
            k_high = quantise(k_high, scale)
            v_low = quantise(v_low, scale)
            v_high = quantise(v_high, scale)
        k = k_cache_ptr + to + (heads - HQ) * cache_head_stride + half
        tl.store(k, k_low.to(cache_dtype), mask=is_key)
        tl.store(k + D // 2, k_high.to(cache_dtype), mask=is_key)
        v = v_cache_ptr + to + (heads - HQ - HK) * cache_head_stride + half
        tl.store(v, v_low.to(cache_dtype), mask=is_value)
        tl.store(v + D // 2, v_high.to(cache_dtype), mask=is_value)


def rope_norm_store(
    qkv: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
    rms_of: Tensor | None = None,
) -> Tensor:
    """q and k normed and rotated, k and v stored. Reference: `reference.rope_norm_store`.

    qkv:               [T, Hq + 2 Hk, D]   any row stride
    weight:            [Hq + Hk, D] or None
    cos, sin:          [T, D] float32      any row stride, the same for both. As in the table of
                                           `layers.rotary`, and only half of each is read: cos has
                                           two equal halves, sin's first is its second's negative
    k_cache, v_cache:  [N, P, Hk, D]       written in place; equal strides, unit in D
    slot_mapping:      [T] int64           block * P + offset; -1 skips the token
    kv_scales:         [2, Hk] float32     contiguous, with an fp8 cache
    rms_of:            [T, E]              contiguous: qkv is first divided by the root mean square
                                           of its rows
    returns q          [T, Hq, D]

    Moves 2 T (Hq + 2 Hk) D elements, T E of `rms_of`, and 4 T D bytes of cos and sin; everything is
    float32 between one rounding in and one out.
    """
    num_tokens, num_all, head_dim = qkv.shape
    num_kv_heads = k_cache.shape[2]
    num_heads = num_all - 2 * num_kv_heads
    assert head_dim & (head_dim - 1) == 0, "head_dim must be a power of two"
    assert qkv.stride()[1:] == (head_dim, 1), "heads must be contiguous"
    assert cos.stride() == sin.stride(), "cos and sin differ in layout"
    assert cos.shape == (num_tokens, head_dim), "one row of cos a token"
    assert cos.dtype == sin.dtype == torch.float32, "cos and sin are float32"
    assert cos.stride(1) == 1, "D must be contiguous"
    assert k_cache.shape == v_cache.shape, "K and V caches differ in shape"
    assert k_cache.stride() == v_cache.stride(), "K and V caches differ in layout"
    assert k_cache.shape[3] == head_dim, "the cache is for other heads"
    assert k_cache.stride(3) == 1, "D must be contiguous"
    assert k_cache.shape[0] * k_cache.shape[1] < 2**31, "a slot must fit into 32 bits"
    assert weight is None or weight.is_contiguous(), "the weight must be contiguous"
    assert slot_mapping.shape == (num_tokens,), "one slot a token"
    assert slot_mapping.is_contiguous(), "slots must be contiguous"
    assert kv_scales is None or kv_scales.is_contiguous(), "scales must be contiguous"
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return q
    num_each, hidden_size = HEADS_PER_PROGRAM, 1
    if rms_of is not None:
        assert rms_of.shape[0] == num_tokens, "a row a token"
        assert rms_of.is_contiguous(), "rows must be contiguous"
        num_each, hidden_size = LATE_HEADS_PER_PROGRAM, rms_of.shape[1]
    _rope_norm_store_kernel[(num_tokens * triton.cdiv(num_all, num_each),)](
        qkv,
        qkv if weight is None else weight,
        cos,
        sin,
        q,
        k_cache,
        v_cache,
        slot_mapping,
        slot_mapping if kv_scales is None else kv_scales,
        qkv if rms_of is None else rms_of,
        qkv.stride(0),
        cos.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        k_cache.shape[1],
        eps,
        HQ=num_heads,
        HK=num_kv_heads,
        D=head_dim,
        HAS_NORM=weight is not None,
        HEADS=num_each,
        FP8=kv_scales is not None,
        IS_LATE=rms_of is not None,
        E=hidden_size,
        E_POW2=triton.next_power_of_2(hidden_size),
        **launch_options(qkv.device, num_warps=4),
    )
    return q
