"""Triton kernel: causal attention of rows of many tokens over the paged cache.

A program takes a tile of queries of one KV head: tokens times the query heads that share the head
are the rows of one matrix, so keys and values are read once for all of them. Keys that every query
of the tile sees are walked without a mask, the few around the diagonal with one. A row's tokens are
the last of its keys; what stands before them is prefix, from an earlier chunk or the prefix cache.

Uniform, for `--deterministic`, every row is such a tile, also one of a single token, and every key
is walked with a mask. Keys come in blocks that begin at multiples of KEYS, and a block that a token
does not see changes none of its bits: so no token's result depends on the others of its tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels import tuned
from nvcli.kernels.attention_parts import LOG2_E
from nvcli.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.kernels.attention_plan import AttentionPlan

UNIFORM_ROWS = 64  # of a tile where decoding rows have such tiles too
UNIFORM_WARPS = 4


def tokens_per_tile(group_size: int, device: torch.device, *, is_uniform: bool = False) -> int:
    return (UNIFORM_ROWS if is_uniform else tuned.attention(device).prefill_rows) // group_size


@triton.jit  # type: ignore[untyped-decorator]
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q_ptr,  # [T, Hq, D]
    k_cache_ptr,  # [N, P, Hk, D], strided
    v_cache_ptr,
    block_table_ptr,  # [S, M] int32
    tiles_ptr,  # [J, 8] int32
    sizes_ptr,  # [2] int32
    scales_ptr,  # FP8: [2, Hk] float32
    out_ptr,  # [T, Hq, D]
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
    KEYS: tl.constexpr,
    UNIFORM: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    if tile >= tl.load(sizes_ptr + 1):
        return
    head = tl.program_id(1)
    record = tiles_ptr + tile * 8
    first_token = tl.load(record).to(tl.int64)
    num_tokens = tl.load(record + 1)
    num_keys = tl.load(record + 2)
    slot = tl.load(record + 3).to(tl.int64)
    first = tl.load(record + 4)

    # 1. Matrix row r is query head r % G of token r // G of the tile.
    TOKENS: tl.constexpr = ROWS // G
    r = tl.arange(0, ROWS)
    d = tl.arange(0, D)
    token = first + r // G
    is_query = (token < num_tokens) & (r < TOKENS * G)
    heads = (head * G + r % G)[:, None] * D + d[None, :]
    q = q_ptr + (first_token + token)[:, None] * q_row_stride + heads
    q = tl.load(q, mask=is_query[:, None], other=0.0)
    value_scale = 1.0
    if FP8:  # as in the decode kernel
        scale_log2 *= tl.load(scales_ptr + head)
        value_scale = tl.load(scales_ptr + HK + head)
        if q.dtype == tl.bfloat16:
            q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    prefix = num_keys - num_tokens
    position = prefix + token
    seen_by_all = (prefix + first + 1) // KEYS * KEYS
    if UNIFORM:
        seen_by_all = 0
    seen_by_last = prefix + tl.minimum(first + TOKENS, num_tokens)

    best = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    table = block_table_ptr + slot * table_row_stride
    head_offset = head * HEAD_STRIDE

    # 2. Keys that every query sees.
    for start in range(0, seen_by_all, KEYS):
        key = start + tl.arange(0, KEYS)
        block = tl.load(table + key // P).to(tl.int64)
        at = block * BLOCK_STRIDE + ((key % P) * OFFSET_STRIDE + head_offset)
        at = at[:, None] + d[None, :]
        k = tl.load(k_cache_ptr + at).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        v = tl.load(v_cache_ptr + at).to(q.dtype)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision=PRECISION)
        best = new_best

    # 3. Keys around the diagonal, each seen by the queries at its position and later.
    for start in range(seen_by_all, seen_by_last, KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = key < seen_by_last
        block = tl.load(table + key // P, mask=is_key, other=0).to(tl.int64)
        at = block * BLOCK_STRIDE + ((key % P) * OFFSET_STRIDE + head_offset)
        at = at[:, None] + d[None, :]
        k = tl.load(k_cache_ptr + at, mask=is_key[:, None], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        scores = tl.where(key[None, :] <= position[:, None], scores, -1e30)
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        v = tl.load(v_cache_ptr + at, mask=is_key[:, None], other=0.0).to(q.dtype)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision=PRECISION)
        best = new_best

    out = out_ptr + (first_token + token)[:, None] * (HK * G * D) + heads
    mixed = acc / tl.where(total > 0, total, 1.0)[:, None] * value_scale
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=is_query[:, None])


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    plan: AttentionPlan,
    softmax_scale: float,
    out: Tensor,
    kv_scales: Tensor | None = None,
    *,
    is_uniform: bool = False,
) -> None:
    """Attention of the plan's rows of more tokens, into `out`. Reference:
    `reference.paged_attention`.

    q, out:            [T, Hq, D]      q with any row stride; other rows of out stay as they are
    k_cache, v_cache:  [N, P, Hk, D]   equal strides, unit in D; P and D powers of two
    block_table:       [S, M] int32
    kv_scales:         [2, Hk] float32, contiguous, with an fp8 cache
    is_uniform:        as the plan was made

    4 n k Hq D operations for n tokens that see k keys each. Grid: tiles by KV heads.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    assert k_cache.stride() == v_cache.stride(), "K and V caches differ in layout"
    assert k_cache.stride(3) == q.stride(2) == block_table.stride(1) == 1, "D must be contiguous"
    assert q.stride(1) == head_dim, "heads must be contiguous"
    assert out.is_contiguous(), "the output must be contiguous"
    assert head_dim & (head_dim - 1) == 0, "head_dim must be a power of two"
    assert block_size & (block_size - 1) == 0, "the block size must be a power of two"
    cut = tuned.attention(q.device)
    _prefill_kernel[(plan.tiles.shape[0], num_kv_heads)](
        q,
        k_cache,
        v_cache,
        block_table,
        plan.tiles,
        plan.sizes,
        plan.sizes if kv_scales is None else kv_scales,
        out,
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
        ROWS=UNIFORM_ROWS if is_uniform else cut.prefill_rows,
        KEYS=cut.prefill_keys,
        UNIFORM=is_uniform,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        FP8=kv_scales is not None,
        **launch_options(
            q.device,
            num_warps=UNIFORM_WARPS if is_uniform else cut.prefill_warps,
            num_stages=cut.prefill_stages,
        ),
    )
