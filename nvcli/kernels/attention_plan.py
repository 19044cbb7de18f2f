"""Triton kernel: the work lists of a step's attention, made on the device.

The attention kernels run on grids whose size the host knows from upper bounds alone; which program
does what is read from these lists. So a captured step serves any mix of lengths, and no host
integer is baked into it.

    items [I, 8]   rows of one token (decode): row, slot, first key, end key, split, splits, token,
                   parts of its softmax that stand elsewhere
    tiles [J, 8]   rows of more (prefill): first token, tokens, keys, slot, first token of the tile
    sizes [2]      items and tiles in use; programs beyond them exit

A decode row of many keys is split, so that one long sequence does not keep the device waiting: see
`_chunk_size`. Rows without keys (padding) get one empty item, which writes zeros. Where rows share
their first keys (`shared_prefix`) a row's items begin behind them. Tiles of a row stand last first,
because the last see the most keys.

A captured decode step of few rows has no lists: each program of the decode kernel works out its
item from the step's rows (`find_item`), which are there before the step begins, and so can ask for
keys that earlier steps left before it waits for its predecessor. `NVCLI_EARLY_KEYS=0` in the
environment, or `set_early_keys(False)`, turns it off.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels import tuned
from nvcli.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.kernels.cuts import Split
    from nvcli.kernels.shared_prefix import SharedWork

RECORD = 8  # int32 numbers a record
KEYS_PER_TILE = 64  # a chunk is a multiple of it
MIN_LANES = 256  # one variant serves every batch up to it
SORTED_FROM = 33  # rows: fewer all start at once, and sorting takes a step 1 or 2 us
MAX_EARLY_ROWS = 8  # lanes of `find_item`: every program works out what the plan would say

_use_early_keys = os.environ.get("NVCLI_EARLY_KEYS", "1") != "0"


def set_early_keys(enabled: bool) -> None:
    """For tests and measurements; graphs that were captured keep what they have."""
    global _use_early_keys
    _use_early_keys = enabled


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    items: Tensor  # [I, 8] int32
    tiles: Tensor  # [J, 8] int32
    sizes: Tensor  # [2] int32
    has_decode: bool  # whether a row of one token may be among them
    has_prefill: bool
    shared: SharedWork | None = None  # keys that many of the decode rows begin with

    @property
    def num_items(self) -> int:
        return self.items.shape[0]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The same for a captured decode step of few rows: what each program works it out from."""

    rows: Tensor  # [B, 4] int32: slot, start, n, flags; see `prepare`
    split: Split
    num_sms: int
    num_items: int
    has_decode: bool = True
    has_prefill: bool = False
    shared: None = None

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]


@triton.jit  # type: ignore[untyped-decorator]
def _chunk_size(  # type: ignore[no-untyped-def]
    num_keys,  # of all decode rows
    per_sm,
    aim,
    small_tiles,
    HK: tl.constexpr,
    SMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Keys a program reads: aim programs an SM for small batches, between TILE and small_tiles
    TILE; per_sm programs an SM for large ones.
    """
    work = num_keys * HK
    small = tl.minimum(tl.maximum(tl.cdiv(work, aim * SMS), TILE), small_tiles * TILE)
    chunk = tl.maximum(small, tl.cdiv(work, per_sm * SMS))
    return tl.cdiv(chunk, TILE) * TILE


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_rows", "max_items", "max_tiles", "per_sm", "aim", "small_tiles"],
    do_not_specialize_on_alignment=["cu_seqlens_ptr", "seq_lens_ptr", "slots_ptr"],
)
def _plan_kernel(  # type: ignore[no-untyped-def]
    cu_seqlens_ptr,  # [B + 1] int32
    seq_lens_ptr,  # [B] int32
    slots_ptr,  # [B] int64
    shared_ptr,  # SHARED: [B, 2] int32, keys that other programs attend to, and in how many parts
    items_ptr,  # [I, 8] int32
    tiles_ptr,  # [J, 8] int32
    sizes_ptr,  # [2] int32
    num_rows,
    max_items,
    max_tiles,
    per_sm,
    aim,
    small_tiles,
    HK: tl.constexpr,
    SMS: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS_PER_TILE: tl.constexpr,
    ROWS_POW2: tl.constexpr,
    SORT: tl.constexpr,
    UNIFORM: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    # 1. One program, one lane a row.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.arange(0, ROWS_POW2)
    is_row = row < num_rows
    first = tl.load(cu_seqlens_ptr + row, mask=is_row, other=0)
    n = tl.load(cu_seqlens_ptr + row + 1, mask=is_row, other=0) - first
    keys = tl.load(seq_lens_ptr + row, mask=is_row, other=0)
    slot = tl.load(slots_ptr + row, mask=is_row, other=0).to(tl.int32)

    # 2. Prefill rows: consecutive tiles of queries, the last first.
    LEAST: tl.constexpr = 1 if UNIFORM else 2
    num_tiles = tl.where(is_row & (n >= LEAST), tl.cdiv(n, TOKENS_PER_TILE), 0)
    end = tl.cumsum(num_tiles, axis=0)
    for i in range(tl.max(num_tiles, axis=0)):
        tile = end - num_tiles + i
        to = tiles_ptr + tile * 8
        mask = (i < num_tiles) & (tile < max_tiles)
        tl.store(to, first, mask=mask)
        tl.store(to + 1, n, mask=mask)
        tl.store(to + 2, keys, mask=mask)
        tl.store(to + 3, slot, mask=mask)
        tl.store(to + 4, (num_tiles - 1 - i) * TOKENS_PER_TILE, mask=mask)
    tl.store(sizes_ptr + 1, tl.minimum(tl.max(end, axis=0), max_tiles))

    # 3. Decode rows: consecutive items, one a chunk of keys. Of many rows the longest come first,
    #    so that none of them is the last to start.
    is_decode = is_row & (n == 1) & (n < LEAST)
    decode_keys = tl.where(is_decode, keys, 0)
    if SHARED:
        decode_keys -= tl.load(shared_ptr + row * 2, mask=is_decode, other=0)
    if SORT:
        order = tl.sort(decode_keys.to(tl.int64) * ROWS_POW2 + row, descending=True)
        row = (order % ROWS_POW2).to(tl.int32)
        decode_keys = (order // ROWS_POW2).to(tl.int32)
        first = tl.load(cu_seqlens_ptr + row, mask=row < num_rows, other=0)
        n = tl.load(cu_seqlens_ptr + row + 1, mask=row < num_rows, other=0) - first
        slot = tl.load(slots_ptr + row, mask=row < num_rows, other=0).to(tl.int32)
        is_decode = (row < num_rows) & (n == 1)
    skipped = tl.zeros_like(row)
    if SHARED:
        skipped = tl.load(shared_ptr + row * 2, mask=is_decode, other=0)
        parts = tl.load(shared_ptr + row * 2 + 1, mask=is_decode, other=0)
    num_keys = tl.sum(decode_keys.to(tl.int64), axis=0)
    chunk = _chunk_size(num_keys, per_sm, aim, small_tiles, HK, SMS, TILE).to(tl.int32)
    splits = tl.where(is_decode, tl.maximum(tl.cdiv(decode_keys, chunk), 1), 0)
    end = tl.cumsum(splits, axis=0)
    for split in range(tl.max(splits, axis=0)):
        item = end - splits + split
        to = items_ptr + item * 8
        mask = (split < splits) & (item < max_items)
        tl.store(to, row, mask=mask)
        tl.store(to + 1, slot, mask=mask)
        tl.store(to + 2, skipped + tl.minimum(split * chunk, decode_keys), mask=mask)
        tl.store(to + 3, skipped + tl.minimum((split + 1) * chunk, decode_keys), mask=mask)
        tl.store(to + 4, tl.zeros_like(row) + split, mask=mask)
        tl.store(to + 5, splits, mask=mask)
        tl.store(to + 6, first, mask=mask)
        if SHARED:
            tl.store(to + 7, parts, mask=mask)
    tl.store(sizes_ptr, tl.minimum(tl.max(end, axis=0), max_items))


@triton.jit  # type: ignore[untyped-decorator]
def find_item(  # type: ignore[no-untyped-def]
    rows_ptr,  # [B, 4] int32
    num_rows,
    item,
    per_sm,
    aim,
    small_tiles,
    HK: tl.constexpr,
    SMS: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """(row, split, keys of a chunk) of an item: what `_plan_kernel` leaves for it where rows are
    neither sorted nor share keys. Row num_rows: there is no such item.
    """
    lane = tl.arange(0, LANES)
    is_row = lane < num_rows
    keys = tl.load(rows_ptr + lane * 4 + 1, mask=is_row, other=0)
    keys += tl.load(rows_ptr + lane * 4 + 2, mask=is_row, other=0)
    chunk = _chunk_size(tl.sum(keys, axis=0), per_sm, aim, small_tiles, HK, SMS, TILE)
    splits = tl.where(is_row, tl.maximum(tl.cdiv(keys, chunk), 1), 0)
    is_before = is_row & (tl.cumsum(splits, axis=0) <= item)
    row = tl.sum(is_before.to(tl.int32), axis=0)
    split = item - tl.sum(tl.where(is_before, splits, 0), axis=0)
    return row, split, chunk


def max_items(num_rows: int, num_kv_heads: int, num_sms: int, per_sm: int) -> int:
    """Bound on decode items: a chunk is at least the keys over per_sm * num_sms / Hk."""
    return num_rows + -(-per_sm * num_sms // num_kv_heads)


def max_tiles(num_rows: int, num_tokens: int, tokens_per_tile: int, least: int = 2) -> int:
    """Bound on prefill tiles: rows of `least` tokens and more have one each that is not full."""
    return num_tokens // tokens_per_tile + min(num_rows, num_tokens // least)


def make_plan(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
    *,
    num_tokens: int,
    num_kv_heads: int,
    num_sms: int,
    tokens_per_tile: int,
    has_decode: bool,
    has_prefill: bool,
    is_uniform: bool = False,
    shared: SharedWork | None = None,
) -> AttentionPlan:
    """The lists for one step; enqueued, nothing is read back.

    cu_seqlens_q: [B + 1] int32; seq_lens: [B] int32; slots: [B] int64
    is_uniform: rows of one token are tiles too
    shared: keys that the decode kernel leaves to another, for B rows or more
    """
    num_rows, device = seq_lens.shape[0], seq_lens.device
    split = tuned.attention(device).split(num_rows)
    num_items = max_items(num_rows, num_kv_heads, num_sms, split.per_sm) if has_decode else 0
    least = 1 if is_uniform else 2
    num_tiles = max_tiles(num_rows, num_tokens, tokens_per_tile, least) if has_prefill else 0
    items = torch.empty((num_items, RECORD), dtype=torch.int32, device=device)
    tiles = torch.empty((num_tiles, RECORD), dtype=torch.int32, device=device)
    sizes = torch.empty(2, dtype=torch.int32, device=device)
    _plan_kernel[(1,)](
        cu_seqlens_q,
        seq_lens,
        slots,
        sizes if shared is None else shared.rows,
        items,
        tiles,
        sizes,
        num_rows,
        num_items,
        num_tiles,
        split.per_sm,
        split.aim,
        split.small_tiles,
        HK=num_kv_heads,
        SMS=num_sms,
        TILE=KEYS_PER_TILE,
        TOKENS_PER_TILE=tokens_per_tile,
        ROWS_POW2=max(MIN_LANES, triton.next_power_of_2(num_rows)),
        SORT=(num_rows >= SORTED_FROM or shared is not None) and not is_uniform,
        UNIFORM=is_uniform,
        SHARED=shared is not None,
        **launch_options(device, num_warps=4),
    )
    return AttentionPlan(items, tiles, sizes, has_decode, has_prefill, shared)


def row_plan(rows: Tensor, *, max_keys: int, num_kv_heads: int, num_sms: int) -> RowPlan | None:
    """For a captured step of rows of one token; None where it must have lists, or is to.

    rows: [B, 4] int32, written before the step's graph is launched; max_keys: of one row
    """
    num_rows = rows.shape[0]
    if not _use_early_keys or num_rows > MAX_EARLY_ROWS:
        return None
    if num_rows * max_keys * num_kv_heads >= 1 << 31:  # `find_item` counts in 32 bits
        return None
    split = tuned.attention(rows.device).split(num_rows)
    num_items = max_items(num_rows, num_kv_heads, num_sms, split.per_sm)
    return RowPlan(rows, split, num_sms, num_items)
