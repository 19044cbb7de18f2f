"""What the kernels of decode attention have in common: a running softmax, and parts of one.

A part is the softmax over some of a row's keys, of the G query heads of one KV head: the mix of
their values, and the base 2 logarithm of the sum of their weights. Parts are merged in a fixed
order, so that which program does it changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels.shared_prefix import MAX_PARTS

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.kernels.attention_plan import AttentionPlan, RowPlan

LOG2_E = math.log2(math.e)


@triton.jit
def asked_for(x):  # type: ignore[no-untyped-def]
    """x, not before all loads in front of this are under way."""
    if x.dtype != tl.float32:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
        )
    return x


@triton.jit  # type: ignore[untyped-decorator]
def addresses(  # type: ignore[no-untyped-def]
    block,
    key,
    head_offset,
    P: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    OFFSET_STRIDE: tl.constexpr,
):
    """[TILE]: where keys, or values, stand in the cache.  block, key: [TILE]"""
    return block.to(tl.int64) * BLOCK_STRIDE + ((key % P) * OFFSET_STRIDE + head_offset)


@triton.jit  # type: ignore[untyped-decorator]
def add_tile(  # type: ignore[no-untyped-def]
    best, total, acc, q, k, v, is_key, scale_log2, PRECISION: tl.constexpr
):
    """The running softmax with one tile of keys more.

    best, total: [ROWS]; acc: [ROWS, D]; q: [ROWS, D]; k, v: [TILE, D]; is_key: [TILE]
    """
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale_log2
    scores = tl.where(is_key[None, :], scores, -1e30)
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None]
    acc += tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
    return new_best, total, acc


@triton.jit
def halves(x, dtype):  # type: ignore[no-untyped-def]
    """(low, high) as `dtype` of numbers of 16 bits that are each two fp8 values."""
    if dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 sorted; .reg .b16 low, high; prmt.b32 sorted, $2, 0, 0x3120; "
            "mov.b32 {low, high}, sorted; "
            "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    low = (x & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    high = ((x >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return low.to(dtype), high.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def add_fp8_tile(  # type: ignore[no-untyped-def]
    best, total, even, odd, q, k, v, is_key, scale_log2, PRECISION: tl.constexpr
):
    """The same over an fp8 cache, transposed, so that a tensor core's narrow side are the heads.

    best, total: [ROWS]; even, odd: [D / 2, ROWS], elements of D; q: [ROWS, D]; k: [TILE, D] fp8
    v: [D / 2, TILE], pairs of fp8 values as int16: the product wants keys side by side in a
       register, and shared memory is read transposed by 16 bits, not by 8
    """
    scores = tl.dot(k.to(q.dtype), tl.trans(q), input_precision=PRECISION) * scale_log2
    scores = tl.where(is_key[:, None], scores, -1e30)
    new_best = tl.maximum(best, tl.max(scores, axis=0))
    weights = tl.exp2(scores - new_best[None, :])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weights, axis=0)
    weights = weights.to(q.dtype)
    v_even, v_odd = halves(v, q.dtype)
    even = tl.dot(v_even, weights, even * shrink[None, :], input_precision=PRECISION)
    odd = tl.dot(v_odd, weights, odd * shrink[None, :], input_precision=PRECISION)
    return new_best, total, even, odd


@triton.jit  # type: ignore[untyped-decorator]
def merge(  # type: ignore[no-untyped-def]
    to,
    partial_ptr,
    lse_ptr,
    row,
    head,
    first_part,  # of the row's own
    num_parts,
    first_shared,
    num_shared,
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    MERGE: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Write all parts of a row, those it shares first, as one result to its [G, D] at `to`."""
    d = tl.arange(0, D)
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
    to += member[:, None] * D + d[None, :]
    tl.store(to, result.to(to.dtype.element_ty), mask=is_member[:, None])


@dataclass(frozen=True, slots=True)
class Parts:
    """Scratch of one layer: partial results, of every item and then of what rows share."""

    partial: Tensor  # [I, Hk, G, D] float32; with shared keys [I + B * MAX_PARTS, ...]
    lse: Tensor  # [I, Hk, G] float32, base 2; the same

    @classmethod
    def allocate(cls, plan: AttentionPlan | RowPlan, q: Tensor, num_kv_heads: int) -> Parts:
        num_heads, head_dim = q.shape[1:]
        num_parts = plan.num_items
        if plan.shared is not None:
            num_parts += plan.shared.num_rows * MAX_PARTS
        shape = (num_parts, num_kv_heads, num_heads // num_kv_heads)
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        return cls(partial, torch.empty(shape, dtype=torch.float32, device=q.device))
