"""Triton kernel: attention of rows of one token over the paged cache (split-KV, GQA-packed).

The bytes of K and V decide its time, so every program reads one KV head's keys once for all the
query heads that share it, and a long row is cut into splits that run side by side. The splits of a
row leave their partial softmax in scratch; the one that finishes last merges them, so there is no
second launch. The order of the merge is fixed: which program does it changes nothing. Parts that
`shared_attention` left for a row are merged first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels import tuned
from nvcli.kernels.attention_plan import KEYS_PER_TILE
from nvcli.kernels.launch import launch_options
from nvcli.kernels.shared_prefix import MAX_PARTS

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.kernels.attention_plan import AttentionPlan

LOG2_E = math.log2(math.e)
MIN_DOT_ROWS = 16  # tensor cores take no fewer
MERGED_AT_ONCE = 32  # parts of one query head each: a tile of so many rows


@triton.jit
def widen(x, dtype):  # type: ignore[no-untyped-def]
    """fp8 values as `dtype`, converted where they were loaded. Left to itself the compiler first
    moves them to where the product wants them, and as it wants them transposed, byte by byte.
    """
    if dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
            "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r",
            [x],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    return x.to(dtype)


@triton.jit(do_not_specialize=["first_shared"])  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hq, D]
    scales_ptr,  # FP8: [2, Hk] float32
    k_cache_ptr,  # [N, P, Hk, D], strided
    v_cache_ptr,
    block_table_ptr,  # [S, M] int32
    items_ptr,  # [I, 8] int32
    sizes_ptr,  # [2] int32
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [I, Hk, G, D] float32; SHARED: then [B, PARTS, Hk, G, D]
    lse_ptr,  # [I, Hk, G] float32, base 2; SHARED: then [B, PARTS, Hk, G]
    counters_ptr,  # [B, Hk] int32, zero before and after
    first_shared,  # SHARED: I, where the parts of row 0 stand
    q_row_stride,
    table_row_stride,
    scale_log2,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,  # of the cache: constants spare each key a 64-bit product
    OFFSET_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    MERGE: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    # 1. What to do: one record, all of whose numbers are loaded at once, before it is known whether
    #    there is one: waiting for memory twice costs more than reading what stands there.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    item = tl.program_id(1)
    num_items = tl.load(sizes_ptr)
    record = items_ptr + item * 8
    row = tl.load(record)
    slot = tl.load(record + 1).to(tl.int64)
    first = tl.multiple_of(tl.load(record + 2), TILE)
    end = tl.load(record + 3)
    split = tl.load(record + 4)
    splits = tl.load(record + 5)
    token = tl.load(record + 6).to(tl.int64)
    if SHARED:
        num_shared = tl.load(record + 7)
    if item >= num_items:
        return

    # 2. The G query heads of this KV head stand as the rows of one matrix, padded to ROWS.
    g = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    is_head = (g < G)[:, None]
    heads = (head * G + g)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + token * q_row_stride + heads, mask=is_head, other=0.0)
    value_scale = 1.0
    if FP8:
        # Float16 holds every value of the cache, and has the cheapest way to it.
        scale_log2 *= tl.load(scales_ptr + head)
        value_scale = tl.load(scales_ptr + HK + head)
        if q.dtype == tl.bfloat16:
            q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    table = block_table_ptr + slot * table_row_stride
    head_offset = head * HEAD_STRIDE
    best = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for start in range(first, end, TILE):
        key = start + tl.arange(0, TILE)
        is_key = key < end
        block = tl.load(table + key // P, mask=is_key, other=0).to(tl.int64)
        at = block * BLOCK_STRIDE + ((key % P) * OFFSET_STRIDE + head_offset)
        at = at[:, None] + d[None, :]
        k = tl.load(k_cache_ptr + at, mask=is_key[:, None], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        scores = tl.where(is_key[None, :], scores, -1e30)
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        v = tl.load(v_cache_ptr + at, mask=is_key[:, None], other=0.0)
        v = widen(v, q.dtype) if FP8 else v.to(q.dtype)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(q.dtype), v, input_precision=PRECISION)
        best = new_best
    # Without keys (padding) all is zero, and so is the result.
    mixed = acc / tl.where(total > 0, total, 1.0)[:, None] * value_scale
    out = out_ptr + token * (HK * G * D) + heads
    num_parts = splits
    if SHARED:
        num_parts += num_shared
    if num_parts == 1:
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

    # 4. The last one merges all parts of the row, in order, and clears the count.
    tl.store(counter, 0)
    first_part = (item - split).to(tl.int64)
    member = tl.arange(0, GROUP)
    is_member = member < G
    peak = tl.full((GROUP,), -1e30, tl.float32)
    weight_sum = tl.zeros((GROUP,), tl.float32)
    merged = tl.zeros((GROUP, D), tl.float32)
    for start in range(0, num_parts, MERGE):
        part = start + tl.arange(0, MERGE)
        is_part = (part < num_parts)[:, None] & is_member[None, :]
        place = first_part + part
        if SHARED:
            first_of_row = (first_shared + row * PARTS).to(tl.int64)
            place = part + tl.where(part < num_shared, first_of_row, first_part - num_shared)
        part_at = (place[:, None] * HK + head) * G + member[None, :]  # [MERGE, GROUP]
        values = tl.load(
            partial_ptr + part_at[:, :, None] * D + d[None, None, :],
            mask=is_part[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        lse = tl.load(lse_ptr + part_at, mask=is_part, other=-1e30, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(lse, axis=0))
        weights = tl.where(is_part, tl.exp2(lse - new_peak[None, :]), 0.0)
        shrink = tl.exp2(peak - new_peak)
        weight_sum = weight_sum * shrink + tl.sum(weights, axis=0)
        merged = merged * shrink[:, None] + tl.sum(values * weights[:, :, None], axis=0)
        peak = new_peak
    result = merged / tl.where(is_member, weight_sum, 1.0)[:, None]
    to = out_ptr + token * (HK * G * D) + (head * G + member)[:, None] * D + d[None, :]
    tl.store(to, result.to(out_ptr.dtype.element_ty), mask=is_member[:, None])


@dataclass(frozen=True, slots=True)
class Parts:
    """Scratch of one layer: partial results, of every item and then of what rows share."""

    partial: Tensor  # [I, Hk, G, D] float32; with shared keys [I + B * MAX_PARTS, ...]
    lse: Tensor  # [I, Hk, G] float32, base 2; the same

    @classmethod
    def allocate(cls, plan: AttentionPlan, q: Tensor, num_kv_heads: int) -> Parts:
        num_heads, head_dim = q.shape[1:]
        num_parts = plan.items.shape[0]
        if plan.shared is not None:
            num_parts += plan.shared.num_rows * MAX_PARTS
        shape = (num_parts, num_kv_heads, num_heads // num_kv_heads)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        return cls(partial, torch.empty(shape, dtype=torch.float32, device=q.device))


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    plan: AttentionPlan,
    parts: Parts,
    counters: Tensor,
    softmax_scale: float,
    out: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """Attention of the plan's rows of one token, into `out`. Reference:
    `reference.paged_attention`.

    q:                 [T, Hq, D]      any row stride
    out:               [T, Hq, D]      rows of more tokens stay as they are
    k_cache, v_cache:  [N, P, Hk, D]   equal strides, unit in D; P and D powers of two
    block_table:       [S, M] int32
    parts:             scratch for this plan; holds what `shared_attention` left where rows share
    kv_scales:         [2, Hk] float32, contiguous, with an fp8 cache
    counters:          [B, Hk] int32, or longer; zeros, and zeros again afterwards

    Reads 2 K Hk D elements of the cache for K keys of all rows together. Grid: KV heads by items.
    """
    num_heads, head_dim = out.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    group_size = num_heads // num_kv_heads
    num_items = plan.items.shape[0]
    assert k_cache.stride() == v_cache.stride(), "K and V caches differ in layout"
    assert k_cache.stride(3) == q.stride(2) == block_table.stride(1) == 1, "D must be contiguous"
    assert q.stride(1) == head_dim, "heads must be contiguous"
    assert out.is_contiguous(), "the output must be contiguous"
    assert head_dim & (head_dim - 1) == 0, "head_dim must be a power of two"
    assert block_size & (block_size - 1) == 0, "the block size must be a power of two"
    group = triton.next_power_of_2(group_size)
    cut = tuned.attention(q.device)
    _decode_kernel[(num_kv_heads, num_items)](
        q,
        parts.lse if kv_scales is None else kv_scales,
        k_cache,
        v_cache,
        block_table,
        plan.items,
        plan.sizes,
        out,
        parts.partial,
        parts.lse,
        counters,
        num_items,
        q.stride(0),
        block_table.stride(0),
        softmax_scale * LOG2_E,
        HK=num_kv_heads,
        G=group_size,
        D=head_dim,
        P=block_size,
        BLOCK_STRIDE=k_cache.stride(0),
        OFFSET_STRIDE=k_cache.stride(1),
        HEAD_STRIDE=k_cache.stride(2),
        TILE=KEYS_PER_TILE,
        ROWS=max(MIN_DOT_ROWS, group),
        GROUP=group,
        MERGE=max(1, MERGED_AT_ONCE // group),
        PARTS=MAX_PARTS,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        FP8=kv_scales is not None,
        SHARED=plan.shared is not None,
        **launch_options(q.device, num_warps=cut.decode_warps, num_stages=cut.decode_stages),
    )
