"""Triton kernel: attention of rows of one token over the paged cache (split-KV, GQA-packed).

The bytes of K and V decide its time, so every program reads one KV head's keys once for all the
query heads that share it, and a long row is cut into splits that run side by side. The splits of a
row leave their partial softmax in scratch; the one that finishes last merges them, so there is no
second launch. The order of the merge is fixed: which program does it changes nothing.

Given qkv instead of q, the same kernel norms and rotates its queries itself, takes the step's own
key and value from qkv, and the program of the last split stores them: what `rotary_store` does,
with one launch less a layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels.attention_plan import KEYS_PER_TILE
from nvcli.kernels.kv_store import quantise
from nvcli.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.kernels.attention_plan import AttentionPlan

LOG2_E = math.log2(math.e)
MIN_DOT_ROWS = 16  # tensor cores take no fewer
SPLITS_AT_ONCE = 16  # merged as one tile


@triton.jit  # type: ignore[untyped-decorator]
def _norm_and_rotate(  # type: ignore[no-untyped-def]
    x_ptrs, weight_ptrs, cos_ptr, sin_ptr, d, mask, eps, D: tl.constexpr, NORM: tl.constexpr
):
    """Heads [R, D], each normed with its weights where NORM, then rotated; float32.

    x_ptrs, weight_ptrs: [R, 1], where the heads begin; d: arange(D). sin is negative in its first
    half, so that the partner of dimension i, at i + D / 2 modulo D, is added.
    """
    partner = (d + D // 2) % D
    x = tl.load(x_ptrs + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(x_ptrs + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x = x * scale * tl.load(weight_ptrs + d[None, :], mask=mask, other=0.0).to(tl.float32)
        y = y * scale * tl.load(weight_ptrs + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    return x * tl.load(cos_ptr + d)[None, :] + y * tl.load(sin_ptr + d)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hq, D]; FUSED: [T, Hq + 2 Hk, D]
    weight_ptr,  # FUSED: [Hq + Hk, D]
    cos_ptr,  # FUSED: [T, D] float32
    sin_ptr,
    slot_mapping_ptr,  # FUSED: [T] int64
    scales_ptr,  # FP8: [2, Hk] float32
    k_cache_ptr,  # [N, P, Hk, D], strided
    v_cache_ptr,
    block_table_ptr,  # [S, M] int32
    items_ptr,  # [I, 8] int32
    sizes_ptr,  # [2] int32
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [I, Hk, G, D] float32
    lse_ptr,  # [I, Hk, G] float32, base 2
    counters_ptr,  # [B, Hk] int32, zero before and after
    q_row_stride,
    rotary_row_stride,
    table_row_stride,
    cache_block_stride,
    cache_offset_stride,
    cache_head_stride,
    scale_log2,
    eps,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    MERGE: tl.constexpr,
    PRECISION: tl.constexpr,
    FUSED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    # 1. What to do: one record, all of whose numbers are loaded at once.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    item = tl.program_id(0)
    if item >= tl.load(sizes_ptr):
        return
    head = tl.program_id(1)
    record = items_ptr + item * 8
    row = tl.load(record)
    slot = tl.load(record + 1).to(tl.int64)
    first = tl.load(record + 2)
    end = tl.load(record + 3)
    split = tl.load(record + 4)
    splits = tl.load(record + 5)
    token = tl.load(record + 6).to(tl.int64)

    # 2. The G query heads of this KV head stand as the rows of one matrix, padded to ROWS.
    g = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    is_head = (g < G)[:, None]
    heads = (head * G + g)[:, None] * D + d[None, :]
    dtype = out_ptr.dtype.element_ty
    row_ptr = q_ptr + token * q_row_stride
    cos = cos_ptr + token * rotary_row_stride
    sin = sin_ptr + token * rotary_row_stride
    last_key = end
    if FUSED:
        mine = (head * G + g)[:, None] * D
        q = _norm_and_rotate(
            row_ptr + mine, weight_ptr + mine, cos, sin, d, is_head, eps, D, HAS_NORM
        ).to(dtype)
        # The last key of the row is this step's own: it is taken from qkv after the loop.
        last_key = tl.where(split == splits - 1, end - 1, end)
    else:
        q = tl.load(row_ptr + heads, mask=is_head, other=0.0)
    value_scale = 1.0
    if FP8:
        # Float16 holds every value of the cache, and has the cheapest way to it.
        scale_log2 *= tl.load(scales_ptr + head)
        value_scale = tl.load(scales_ptr + HK + head)
        if q.dtype == tl.bfloat16:
            q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    best = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    table = block_table_ptr + slot * table_row_stride
    head_offset = head.to(tl.int64) * cache_head_stride
    for start in range(first, last_key, TILE):
        key = start + tl.arange(0, TILE)
        is_key = key < last_key
        block = tl.load(table + key // P, mask=is_key, other=0).to(tl.int64)
        at = block * cache_block_stride + (key % P) * cache_offset_stride + head_offset
        at = at[:, None] + d[None, :]
        k = tl.load(k_cache_ptr + at, mask=is_key[:, None], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        scores = tl.where(is_key[None, :], scores, -1e30)
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        v = tl.load(v_cache_ptr + at, mask=is_key[:, None], other=0.0).to(q.dtype)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(q.dtype), v, input_precision=PRECISION)
        best = new_best
    if FUSED:  # noqa: SIM102 - one is decided when it is compiled, the other when it runs
        if (split == splits - 1) & (end > first):
            one = tl.arange(0, 1)[:, None]
            own = (G * HK + head + one) * D
            own_k = _norm_and_rotate(
                row_ptr + own, weight_ptr + own, cos, sin, d, one < 1, eps, D, HAS_NORM
            )
            own_v = tl.load(row_ptr + own + HK * D + d[None, :])
            if FP8:
                # rounded as the separate kernel rounds it: first as the activations are
                own_k = quantise(own_k.to(dtype), tl.load(scales_ptr + head))
                own_v = quantise(own_v, value_scale)
            own_k = own_k.to(k_cache_ptr.dtype.element_ty)
            own_v = own_v.to(v_cache_ptr.dtype.element_ty)
            own_slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
            if own_slot >= 0:
                to = own_slot // P * cache_block_stride + own_slot % P * cache_offset_stride
                to_dims = to + head_offset + one * D + d[None, :]
                tl.store(k_cache_ptr + to_dims, own_k)
                tl.store(v_cache_ptr + to_dims, own_v)
            score = tl.sum(q.to(tl.float32) * own_k.to(tl.float32), axis=1) * scale_log2
            top = tl.maximum(best, score)
            own_weight = tl.exp2(score - top)
            fade = tl.exp2(best - top)
            total = total * fade + own_weight
            acc = acc * fade[:, None] + own_weight[:, None] * own_v.to(tl.float32)
            best = top
    # Without keys (padding) all is zero, and so is the result.
    mixed = acc / tl.where(total > 0, total, 1.0)[:, None] * value_scale
    out = out_ptr + token * (HK * G * D) + heads
    if splits == 1:
        tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=is_head)
        return

    # 3. Leave the partial result. The barrier puts all its stores before the count, whose release
    #    makes them visible to whoever acquires it.
    at = (item * HK + head) * G + g
    tl.store(partial_ptr + at[:, None] * D + d[None, :], mixed, mask=is_head)
    tl.store(lse_ptr + at, best + tl.log2(tl.where(total > 0, total, 1.0)), mask=g < G)
    tl.debug_barrier()
    counter = counters_ptr + row * HK + head
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") < splits - 1:
        return

    # 4. The last one merges all splits of the row, in order, and clears the count.
    tl.store(counter, 0)
    base = item - split
    for member in tl.static_range(G):
        peak = tl.full((), -1e30, tl.float32)
        weight_sum = tl.full((), 0.0, tl.float32)
        merged = tl.zeros((D,), tl.float32)
        for start in range(0, splits, MERGE):
            part = start + tl.arange(0, MERGE)
            is_part = part < splits
            at = ((base + part) * HK + head) * G + member
            lse = tl.load(lse_ptr + at, mask=is_part, other=-1e30, cache_modifier=".cg")
            new_peak = tl.maximum(peak, tl.max(lse, axis=0))
            weight = tl.where(is_part, tl.exp2(lse - new_peak), 0.0)
            values = tl.load(
                partial_ptr + at[:, None] * D + d[None, :],
                mask=is_part[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            shrink = tl.exp2(peak - new_peak)
            weight_sum = weight_sum * shrink + tl.sum(weight, axis=0)
            merged = merged * shrink + tl.sum(values * weight[:, None], axis=0)
            peak = new_peak
        result = merged / weight_sum
        to = out_ptr + token * (HK * G * D) + (head * G + member) * D + d
        tl.store(to, result.to(out_ptr.dtype.element_ty))


@dataclass(frozen=True, slots=True)
class Rotary:
    """What a decode step needs to norm, rotate and store from qkv, as `rope_norm_store` has it."""

    weight: Tensor | None  # [Hq + Hk, D]
    cos: Tensor  # [T, D] float32
    sin: Tensor  # [T, D] float32
    eps: float
    slot_mapping: Tensor  # [T] int64


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    plan: AttentionPlan,
    counters: Tensor,
    softmax_scale: float,
    out: Tensor,
    rotary: Rotary | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """Attention of the plan's rows of one token, into `out`. Reference:
    `reference.paged_attention`, with rotary after `reference.rope_norm_store`.

    q:                 [T, Hq, D], or qkv [T, Hq + 2 Hk, D] with rotary; any row stride
    out:               [T, Hq, D]      rows of more tokens stay as they are
    k_cache, v_cache:  [N, P, Hk, D]   equal strides, unit in D; P and D powers of two; written
                                       where rotary is given
    block_table:       [S, M] int32
    kv_scales:         [2, Hk] float32, contiguous, with an fp8 cache
    counters:          [B, Hk] int32, or longer; zeros, and zeros again afterwards

    Reads 2 K Hk D elements of the cache for K keys of all rows together. Grid: items by KV heads.
    """
    num_heads, head_dim = out.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    group_size = num_heads // num_kv_heads
    num_items = plan.items.shape[0]
    is_fused = rotary is not None
    assert q.shape[1] == num_heads + 2 * num_kv_heads * is_fused, "queries alone, or all of qkv"
    assert k_cache.stride() == v_cache.stride(), "K and V caches differ in layout"
    assert k_cache.stride(3) == q.stride(2) == block_table.stride(1) == 1, "D must be contiguous"
    assert q.stride(1) == head_dim, "heads must be contiguous"
    assert out.is_contiguous(), "the output must be contiguous"
    assert head_dim & (head_dim - 1) == 0, "head_dim must be a power of two"
    assert block_size & (block_size - 1) == 0, "the block size must be a power of two"
    if rotary is not None:
        assert rotary.cos.stride() == rotary.sin.stride(), "cos and sin differ in layout"
        assert rotary.cos.stride(1) == 1, "D must be contiguous"
        assert rotary.weight is None or rotary.weight.is_contiguous(), "weights must be contiguous"
    partial = torch.empty(
        (num_items, num_kv_heads, group_size, head_dim), dtype=torch.float32, device=q.device
    )
    lse = torch.empty(partial.shape[:3], dtype=torch.float32, device=q.device)
    has_norm = rotary is not None and rotary.weight is not None
    is_large = q.shape[0] >= 32
    _decode_kernel[(num_items, num_kv_heads)](
        q,
        rotary.weight if rotary is not None and rotary.weight is not None else q,
        lse if rotary is None else rotary.cos,
        lse if rotary is None else rotary.sin,
        plan.items if rotary is None else rotary.slot_mapping,
        lse if kv_scales is None else kv_scales,
        k_cache,
        v_cache,
        block_table,
        plan.items,
        plan.sizes,
        out,
        partial,
        lse,
        counters,
        q.stride(0),
        0 if rotary is None else rotary.cos.stride(0),
        block_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        softmax_scale * LOG2_E,
        0.0 if rotary is None else rotary.eps,
        HK=num_kv_heads,
        G=group_size,
        D=head_dim,
        P=block_size,
        TILE=KEYS_PER_TILE,
        ROWS=max(MIN_DOT_ROWS, triton.next_power_of_2(group_size)),
        MERGE=SPLITS_AT_ONCE,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        FUSED=is_fused,
        HAS_NORM=has_norm,
        FP8=kv_scales is not None,
        **launch_options(q.device, num_warps=2 if is_large else 4, num_stages=3),
    )
