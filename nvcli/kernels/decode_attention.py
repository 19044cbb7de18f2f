"""Triton kernel: attention of rows of one token over the paged cache (split-KV, GQA-packed).

The bytes of K and V decide its time, so every program reads one KV head's keys once for all the
query heads that share it, and a long row is cut into splits that run side by side. The splits of a
row leave their partial softmax in scratch; the one that finishes last merges them, so there is no
second launch. The order of the merge is fixed: which program does it changes nothing. Parts that
`shared_attention` left for a row are merged first.

In captured steps of few rows (`attention_plan.RowPlan`) there is no list of work: every program
finds its own from the step's rows, and has the first keys and values of its chunk in registers
before it waits for the queries. The chunks are the same, and where tiles are as long, so are the
bits of the result but for the order in which a launch of other warps adds up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels import tuned
from nvcli.kernels.attention_parts import (
    LOG2_E,
    add_fp8_tile,
    add_tile,
    addresses,
    asked_for,
    merge,
)
from nvcli.kernels.attention_plan import (
    KEYS_PER_TILE,
    MAX_EARLY_ROWS,
    RowPlan,
    find_item,
    split_bounds,
)
from nvcli.kernels.launch import launch_options
from nvcli.kernels.prepare import BLOCK_SHIFT, READS_NEW
from nvcli.kernels.shared_prefix import MAX_PARTS

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.kernels.attention_parts import Parts
    from nvcli.kernels.attention_plan import AttentionPlan

MIN_DOT_ROWS, MIN_DOT_COLUMNS = 16, 8  # tensor cores take no fewer
MERGED_AT_ONCE = 32  # parts of one query head each: a tile of so many rows, of one warp half


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["first_shared", "num_rows", "even_items", "uneven_items"]
)
def _decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hq, D]
    scales_ptr,  # FP8: [2, Hk] float32
    k_cache_ptr,  # [N, P, Hk, D], strided
    v_cache_ptr,  # FP8: [N, P, Hk, D / 2] int16, two values each
    block_table_ptr,  # [S, M] int32
    work_ptr,  # [I, 8] int32, the items; EARLY: [B, 4] int32, the rows
    sizes_ptr,  # [2] int32; EARLY: not read
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [I, Hk, G, D] float32; SHARED: then [B, PARTS, Hk, G, D]
    lse_ptr,  # [I, Hk, G] float32, base 2; SHARED: then [B, PARTS, Hk, G]
    counters_ptr,  # [B, Hk] int32, zero before and after
    first_shared,  # SHARED: I, where the parts of row 0 stand
    num_rows,  # EARLY: B; even_items and uneven_items as in `cut_rows`
    even_items,
    uneven_items,
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
    TILE: tl.constexpr,  # EARLY: KEYS_PER_TILE, else any of its halves
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    MERGE: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    SHARED: tl.constexpr,
    EARLY: tl.constexpr,
    LANES: tl.constexpr,
    FLAG: tl.constexpr,
    BLOCK_SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    # 1. What to do. A list says it: one record, all of whose numbers are loaded at once, before it
    #    is known whether there is one: waiting for memory twice costs more than reading what stands
    #    there. EARLY: it follows from the rows, which were there before the step began.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    item = tl.program_id(1)
    if EARLY:
        row, split, chunk = find_item(
            work_ptr, num_rows, item, even_items, uneven_items, TILE, LANES
        )
        is_idle = row >= num_rows
    else:
        num_items = tl.load(sizes_ptr)
        record = work_ptr + item * 8
        row = tl.load(record)
        slot = tl.load(record + 1).to(tl.int64)
        first = tl.multiple_of(tl.load(record + 2), TILE)
        end = tl.load(record + 3)
        split = tl.load(record + 4)
        splits = tl.load(record + 5)
        token = tl.load(record + 6).to(tl.int64)
        if SHARED:
            num_shared = tl.load(record + 7)
        is_idle = item >= num_items
    if is_idle:
        return

    # 2. The G query heads of this KV head stand as the rows of one matrix, padded to ROWS.
    g = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    pair = tl.arange(0, D // 2)
    is_head = (g < G)[:, None]
    heads = (head * G + g)[:, None] * D + d[None, :]
    head_offset = head * HEAD_STRIDE
    value_scale = 1.0
    if FP8:
        scale_log2 *= tl.load(scales_ptr + head)
        value_scale = tl.load(scales_ptr + HK + head)
    if EARLY:
        slot = tl.load(work_ptr + row * 4).to(tl.int64)
        num_old = tl.load(work_ptr + row * 4 + 1)
        num_keys = num_old + tl.load(work_ptr + row * 4 + 2)
        flags = tl.load(work_ptr + row * 4 + 3)
        tiles = tl.maximum(tl.cdiv(num_keys, TILE), 1)
        splits = tl.cdiv(tiles, chunk)
        first, end = split_bounds(split, splits, tiles, num_keys, TILE)
        first = tl.multiple_of(first, TILE)
        token = row.to(tl.int64)
    table = block_table_ptr + slot * table_row_stride
    q_at = q_ptr + token * q_row_stride + heads
    if EARLY:
        # Keys and values that earlier steps left are asked for before the wait, the newest after.
        if PDL:  # noqa: SIM102 - one condition is the compiler's, the other the program's
            if (flags & FLAG) != 0:
                tl.extra.cuda.gdc_wait()
        key_0 = first + tl.arange(0, TILE)
        is_key_0 = key_0 < end
        is_old = key_0 < num_old
        is_new = is_key_0 & (key_0 >= num_old)
        # A block that the row brings is written to the table by this step: it is taken from here.
        brought = (flags >> BLOCK_SHIFT) - 1
        is_brought = (key_0 // P == num_old // P) & (brought >= 0)
        block_0 = tl.load(table + key_0 // P, mask=is_key_0 & (is_brought == 0), other=brought)
        at_0 = addresses(block_0, key_0, head_offset, P, BLOCK_STRIDE, OFFSET_STRIDE)
        k_at = k_cache_ptr + (at_0[:, None] + d[None, :])
        k_0 = tl.load(k_at, mask=is_old[:, None], other=0.0)
        if FP8:
            v_at = v_cache_ptr + ((at_0 // 2)[None, :] + pair[:, None])
            v_0 = tl.load(v_at, mask=is_old[None, :], other=0)
        else:
            v_at = v_cache_ptr + (at_0[:, None] + d[None, :])
            v_0 = tl.load(v_at, mask=is_old[:, None], other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
    q = tl.load(q_at, mask=is_head, other=0.0)
    if EARLY:
        is_new_v = is_new[None, :] if FP8 else is_new[:, None]
        v_0 = tl.load(v_at, mask=is_new_v, other=v_0, cache_modifier=".cg")
        k_0 = tl.load(k_at, mask=is_new[:, None], other=k_0, cache_modifier=".cg")
        q = asked_for(q)
    if FP8 and q.dtype == tl.bfloat16:
        # Float16 holds every value of the cache, and has the cheapest way to it.
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    best = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if FP8:
        even = tl.zeros((D // 2, ROWS), tl.float32)
        odd = tl.zeros((D // 2, ROWS), tl.float32)
    else:
        acc = tl.zeros((ROWS, D), tl.float32)
    if EARLY:
        if FP8:
            best, total, even, odd = add_fp8_tile(
                best, total, even, odd, q, k_0, v_0, is_key_0, scale_log2, PRECISION
            )
        else:
            best, total, acc = add_tile(
                best, total, acc, q, k_0, v_0, is_key_0, scale_log2, PRECISION
            )
        first += TILE
    for start in range(first, end, TILE):
        key = start + tl.arange(0, TILE)
        is_key = key < end
        block = tl.load(table + key // P, mask=is_key, other=0)
        at = addresses(block, key, head_offset, P, BLOCK_STRIDE, OFFSET_STRIDE)
        k = tl.load(k_cache_ptr + (at[:, None] + d[None, :]), mask=is_key[:, None], other=0.0)
        if FP8:
            v = v_cache_ptr + ((at // 2)[None, :] + pair[:, None])
            v = tl.load(v, mask=is_key[None, :], other=0)
            best, total, even, odd = add_fp8_tile(
                best, total, even, odd, q, k, v, is_key, scale_log2, PRECISION
            )
        else:
            v = tl.load(v_cache_ptr + (at[:, None] + d[None, :]), mask=is_key[:, None], other=0.0)
            best, total, acc = add_tile(best, total, acc, q, k, v, is_key, scale_log2, PRECISION)
    if FP8:
        acc = tl.interleave(tl.trans(even), tl.trans(odd))
    # Without keys (padding) all is zero, and so is the result.
    mixed = acc / tl.where(total > 0, total, 1.0)[:, None] * value_scale
    out = out_ptr + token * (HK * G * D) + heads
    num_parts = splits
    if SHARED:
        num_parts += num_shared
    if num_parts == 1:
        tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=is_head)
        return

    # 4. Leave the partial result. The barrier puts all its stores before the count, whose release
    #    makes them visible to whoever acquires it.
    at = (item * HK + head) * G + g
    tl.store(partial_ptr + at[:, None] * D + d[None, :], mixed, mask=is_head)
    tl.store(lse_ptr + at, best + tl.log2(tl.where(total > 0, total, 1.0)), mask=g < G)
    tl.debug_barrier()
    counter = counters_ptr + row * HK + head
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") < splits - 1:
        return

    # 5. The last one merges all parts of the row, in order, and clears the count.
    tl.store(counter, 0)
    to = out_ptr + token * (HK * G * D) + head * (G * D)
    first_part = (item - split).to(tl.int64)
    merge(
        to,
        partial_ptr,
        lse_ptr,
        row,
        head,
        first_part,
        num_parts,
        first_shared,
        num_shared if SHARED else 0,
        HK=HK,
        G=G,
        D=D,
        GROUP=GROUP,
        MERGE=MERGE,
        PARTS=PARTS,
        SHARED=SHARED,
    )


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    plan: AttentionPlan | RowPlan,
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
    assert k_cache.stride() == v_cache.stride(), "K and V caches differ in layout"
    assert k_cache.stride(3) == q.stride(2) == block_table.stride(1) == 1, "D must be contiguous"
    assert q.stride(1) == head_dim, "heads must be contiguous"
    assert out.is_contiguous(), "the output must be contiguous"
    assert head_dim & (head_dim - 1) == 0, "head_dim must be a power of two"
    assert block_size & (block_size - 1) == 0, "the block size must be a power of two"
    group = triton.next_power_of_2(group_size)
    cut = tuned.attention(q.device)
    # Steps that share keys leave few to read here: they make do with one launch.
    num_rows = plan.num_rows if plan.shared is None else 1
    launch = cut.decode(num_rows, is_fp8=kv_scales is not None)
    if isinstance(plan, RowPlan):
        # One row's chunk is often one tile: all of it is to be on its way before the wait.
        is_early, tile, num_warps = True, KEYS_PER_TILE, cut.early_warps
        work = sizes = plan.rows
        found_by = plan.num_rows, plan.even_items, plan.uneven_items
    else:
        is_early, tile, num_warps = False, launch.tile, launch.warps
        work, sizes = plan.items, plan.sizes
        found_by = 0, 0, 0
    limit = {"maxnreg": launch.registers} if launch.registers and not is_early else {}
    _decode_kernel[(num_kv_heads, plan.num_items)](
        q,
        parts.lse if kv_scales is None else kv_scales,
        k_cache,
        v_cache if kv_scales is None else v_cache.view(torch.int16),
        block_table,
        work,
        sizes,
        out,
        parts.partial,
        parts.lse,
        counters,
        plan.num_items,
        *found_by,
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
        TILE=tile,
        ROWS=max(MIN_DOT_ROWS if kv_scales is None else MIN_DOT_COLUMNS, group),
        GROUP=group,
        MERGE=max(1, min(MERGED_AT_ONCE, MERGED_AT_ONCE // 2 * num_warps) // group),
        PARTS=MAX_PARTS,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        FP8=kv_scales is not None,
        SHARED=plan.shared is not None,
        EARLY=is_early,
        LANES=MAX_EARLY_ROWS,
        FLAG=READS_NEW,
        BLOCK_SHIFT=BLOCK_SHIFT,
        **launch_options(q.device, num_warps=num_warps, num_stages=launch.stages, **limit),
    )
