"""Triton kernel: attention of many decoding rows over the keys that they share.

Rows whose sequences begin with the same blocks would each read the same keys. Here a program takes
a tile of such rows, all query heads of one KV head, and reads a piece of the shared keys once for
all of them. It leaves one partial softmax a row and head, in the form that the splits of decode
attention have; that kernel runs next, does what a row does not share, and merges all of it.
`shared_prefix` says which rows those are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels.attention_parts import LOG2_E
from nvcli.kernels.attention_plan import KEYS_PER_TILE
from nvcli.kernels.launch import launch_options
from nvcli.kernels.shared_prefix import MAX_PARTS, QUERY_ROWS

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.kernels.attention_parts import Parts
    from nvcli.kernels.attention_plan import AttentionPlan

NUM_WARPS, NUM_STAGES = 4, 3


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


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["first_part"], do_not_specialize_on_alignment=["slots_ptr"]
)
def _shared_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hq, D]
    scales_ptr,  # FP8: [2, Hk] float32
    k_cache_ptr,  # [N, P, Hk, D], strided
    v_cache_ptr,
    block_table_ptr,  # [S, M] int32
    slots_ptr,  # [B] int64
    count_ptr,  # [1] int32
    items_ptr,  # [I, 8] int32
    members_ptr,  # [B, 2] int32
    partial_ptr,  # [parts, Hk, G, D] float32
    lse_ptr,  # [parts, Hk, G] float32, base 2
    first_part,  # of row 0
    q_row_stride,
    table_row_stride,
    scale_log2,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,  # of the cache, as in the decode kernel
    OFFSET_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    item = tl.program_id(1)
    if item >= tl.load(count_ptr):
        return
    record = items_ptr + item * 8
    slot = tl.load(slots_ptr + tl.load(record))
    first = tl.multiple_of(tl.load(record + 1), TILE)
    end = tl.multiple_of(tl.load(record + 2), TILE)
    part = tl.load(record + 3)
    first_member = tl.load(record + 4)
    num_members = tl.load(record + 5)

    # 1. Matrix row r is query head r % G of member r // G of the tile.
    r = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    is_query = (r // G < num_members) & (r < ROWS // G * G)
    member = members_ptr + (first_member + r // G) * 2
    row = tl.load(member, mask=is_query, other=0)
    token = tl.load(member + 1, mask=is_query, other=0).to(tl.int64)
    q = q_ptr + token[:, None] * q_row_stride + (head * G + r % G)[:, None] * D + d[None, :]
    q = tl.load(q, mask=is_query[:, None], other=0.0)
    value_scale = 1.0
    if FP8:  # as in the decode kernel
        scale_log2 *= tl.load(scales_ptr + head)
        value_scale = tl.load(scales_ptr + HK + head)
        if q.dtype == tl.bfloat16:
            q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)

    # 2. Every member sees every one of these keys, and they fill whole tiles: there is no mask.
    table = block_table_ptr + slot * table_row_stride
    head_offset = head * HEAD_STRIDE
    best = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for start in range(first, end, TILE):
        key = start + tl.arange(0, TILE)
        block = tl.load(table + key // P).to(tl.int64)
        at = block * BLOCK_STRIDE + ((key % P) * OFFSET_STRIDE + head_offset)
        at = at[:, None] + d[None, :]
        k = tl.load(k_cache_ptr + at).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        v = tl.load(v_cache_ptr + at)
        v = widen(v, q.dtype) if FP8 else v.to(q.dtype)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision=PRECISION)
        best = new_best

    # 3. One part a row.
    mixed = acc / total[:, None] * value_scale
    part_of_row = (first_part + row * PARTS + part).to(tl.int64)
    at = (part_of_row * HK + head) * G + r % G
    tl.store(partial_ptr + at[:, None] * D + d[None, :], mixed, mask=is_query[:, None])
    tl.store(lse_ptr + at, best + tl.log2(total), mask=is_query)


def shared_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slots: Tensor,
    plan: AttentionPlan,
    parts: Parts,
    softmax_scale: float,
    kv_scales: Tensor | None = None,
) -> None:
    """Attention of the plan's groups over their shared keys, into `parts`. Reference: with
    `decode_attention` after it, `reference.paged_attention`.

    q:                 [T, Hq, D]      any row stride
    k_cache, v_cache:  [N, P, Hk, D]   equal strides, unit in D; P and D powers of two
    block_table:       [S, M] int32
    slots:             [B] int64
    parts:             scratch for this plan
    kv_scales:         [2, Hk] float32, contiguous, with an fp8 cache

    4 n k Hq D operations for n rows that share k keys; a group's keys are read once for every
    QUERY_ROWS / G of its rows. Grid: KV heads by items.
    """
    work = plan.shared
    assert work is not None, "nothing is shared"
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    assert k_cache.stride() == v_cache.stride(), "K and V caches differ in layout"
    assert k_cache.stride(3) == q.stride(2) == block_table.stride(1) == 1, "D must be contiguous"
    assert q.stride(1) == head_dim, "heads must be contiguous"
    assert head_dim & (head_dim - 1) == 0, "head_dim must be a power of two"
    assert block_size & (block_size - 1) == 0, "the block size must be a power of two"
    _shared_kernel[(num_kv_heads, work.num_items)](
        q,
        parts.lse if kv_scales is None else kv_scales,
        k_cache,
        v_cache,
        block_table,
        slots,
        work.count,
        work.items,
        work.members,
        parts.partial,
        parts.lse,
        plan.items.shape[0],
        q.stride(0),
        block_table.stride(0),
        softmax_scale * LOG2_E,
        HK=num_kv_heads,
        G=num_heads // num_kv_heads,
        D=head_dim,
        P=block_size,
        BLOCK_STRIDE=k_cache.stride(0),
        OFFSET_STRIDE=k_cache.stride(1),
        HEAD_STRIDE=k_cache.stride(2),
        ROWS=QUERY_ROWS,
        TILE=KEYS_PER_TILE,
        PARTS=MAX_PARTS,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        FP8=kv_scales is not None,
        **launch_options(q.device, num_warps=NUM_WARPS, num_stages=NUM_STAGES),
    )
