"""Triton kernel: the work lists of a step's attention, made on the device.

The attention kernels run on grids whose size the host knows from upper bounds alone; which program
does what is read from these lists. So a captured step serves any mix of lengths, and no host
integer is baked into it.

    items [I, 8]   rows of one token (decode): row, slot, first key, end key, split, splits, token,
                   parts of its softmax that stand elsewhere
    tiles [J, 8]   rows of more (prefill): first token, tokens, keys, slot, first token of the tile
    sizes [2]      items and tiles in use; programs beyond them exit

A decode row of many keys is split, so that one long sequence does not keep the device waiting: see
`cut_rows`. Rows without keys (padding) get one empty item, which writes zeros. Where rows share
their first keys (`shared_prefix`) a row's items begin behind them. Tiles of a row stand last first,
because the last see the most keys.

A captured decode step of few rows has no lists: each program of the decode kernel works out its
item from the step's rows (`find_item`), which are there before the step begins, and so can ask for
keys that earlier steps left before it waits for its predecessor. `NVCLI_EARLY_KEYS=0` in the
environment, or `set_early_keys(False)`, turns it off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels import switches, tuned
from nvcli.kernels.cuts import TILES_OF_KEYS
from nvcli.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.kernels.shared_prefix import SharedWork

RECORD = 8  # int32 numbers a record
KEYS_PER_TILE = TILES_OF_KEYS[-1]  # a chunk is a multiple of it
MIN_LANES = 256  # one variant serves every batch up to it
MAX_EARLY_ROWS = 8  # lanes of `find_item`: every program works out what the plan would say
SORTED_FROM = 9  # rows: fewer start all at once, and sorting takes a step 1 or 2 us

_use_early_keys = switches.is_on("NVCLI_EARLY_KEYS")


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
    num_rows: int  # of the step
    shared: SharedWork | None = None  # keys that many of the decode rows begin with

    @property
    def num_items(self) -> int:
        return self.items.shape[0]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The same for a captured decode step of few rows: what each program works it out from."""

    rows: Tensor  # [B, 4] int32: slot, start, n, flags; see `prepare`
    even_items: int  # see `cut_rows`
    uneven_items: int
    has_decode: bool = True
    has_prefill: bool = False
    shared: None = None

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]

    @property
    def num_items(self) -> int:
        return max(self.even_items, self.uneven_items)


@triton.jit  # type: ignore[untyped-decorator]
def cut_rows(  # type: ignore[no-untyped-def]
    keys,  # [rows] int32, 0 where is_row is False
    is_row,  # [rows]
    even_items,
    uneven_items,
    TILE: tl.constexpr,
):
    """(tiles of each row [rows], tiles of a chunk at most).

    A chunk is as small as it may be for all rows together to have no more than even_items chunks,
    or uneven_items where a row has more than 5/4 of the keys of the average row. Both are at least
    the number of rows. A row without keys has one tile.
    """
    tiles = tl.where(is_row, tl.maximum(tl.cdiv(keys, TILE), 1), 0)
    num_rows = tl.sum(is_row.to(tl.int32), axis=0)
    num_tiles = tl.sum(tiles, axis=0)
    longest = tl.max(tiles, axis=0)
    num_padding = tl.sum((is_row & (keys == 0)).to(tl.int32), axis=0)
    is_even = longest * (num_rows - num_padding) * 4 <= (num_tiles - num_padding) * 5
    most = tl.where(is_even, even_items, uneven_items)
    # Chunks of c tiles: rows of t tiles have at least t / c and at most (t - 1) / c + 1 of them.
    low = tl.maximum(tl.cdiv(num_tiles, most), 1)
    high = tl.maximum(longest, 1)
    if most > num_rows:
        high = tl.minimum(high, tl.maximum(tl.cdiv(num_tiles - num_rows, most - num_rows), 1))
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum(tl.cdiv(tiles, middle), axis=0) <= most
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return tiles, high


@triton.jit  # type: ignore[untyped-decorator]
def split_bounds(split, splits, tiles, keys, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(first key, end) of a split of a row: as many tiles as any other, the first ones one more."""
    least = tiles // splits
    more = tiles - least * splits
    first = split * least + tl.minimum(split, more)
    end = first + least + (split < more).to(tl.int32)
    return first * TILE, tl.minimum(end * TILE, keys)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_rows", "even_items", "uneven_items", "max_tiles"],
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
    even_items,
    uneven_items,
    max_tiles,
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

    # 3. Decode rows: consecutive items, one a chunk of keys. Of many rows those of the largest
    #    chunks come first, so that none of them is the last to start.
    is_decode = is_row & (n == 1) & (n < LEAST)
    skipped = tl.zeros_like(row)
    if SHARED:
        skipped = tl.load(shared_ptr + row * 2, mask=is_decode, other=0)
    own = tl.where(is_decode, keys - skipped, 0)
    tiles, chunk = cut_rows(own, is_decode, even_items, uneven_items, TILE)
    splits = tl.cdiv(tiles, chunk)
    if SORT:
        size = tl.cdiv(tiles, tl.maximum(splits, 1))
        row = tl.sort(size * ROWS_POW2 + row, descending=True) % ROWS_POW2
        is_row = row < num_rows
        first = tl.load(cu_seqlens_ptr + row, mask=is_row, other=0)
        is_decode = is_row & (tl.load(cu_seqlens_ptr + row + 1, mask=is_row, other=0) - first == 1)
        slot = tl.load(slots_ptr + row, mask=is_row, other=0).to(tl.int32)
        own = tl.load(seq_lens_ptr + row, mask=is_decode, other=0)
        if SHARED:
            skipped = tl.load(shared_ptr + row * 2, mask=is_decode, other=0)
            own -= skipped
        tiles = tl.where(is_decode, tl.maximum(tl.cdiv(own, TILE), 1), 0)
        splits = tl.cdiv(tiles, chunk)
    if SHARED:
        parts = tl.load(shared_ptr + row * 2 + 1, mask=is_decode, other=0)
    end = tl.cumsum(splits, axis=0)
    for split in range(tl.max(splits, axis=0)):
        to = items_ptr + (end - splits + split) * 8
        mask = split < splits
        first_key, end_key = split_bounds(split, tl.maximum(splits, 1), tiles, own, TILE)
        tl.store(to, row, mask=mask)
        tl.store(to + 1, slot, mask=mask)
        tl.store(to + 2, skipped + first_key, mask=mask)
        tl.store(to + 3, skipped + end_key, mask=mask)
        tl.store(to + 4, tl.zeros_like(row) + split, mask=mask)
        tl.store(to + 5, splits, mask=mask)
        tl.store(to + 6, first, mask=mask)
        if SHARED:
            tl.store(to + 7, parts, mask=mask)
    tl.store(sizes_ptr, tl.max(end, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def find_item(  # type: ignore[no-untyped-def]
    rows_ptr,  # [B, 4] int32
    num_rows,
    item,
    even_items,
    uneven_items,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """(row, split, tiles of a chunk) of an item: what `_plan_kernel` leaves for it where rows are
    neither sorted nor share keys. Row num_rows: there is no such item.
    """
    lane = tl.arange(0, LANES)
    is_row = lane < num_rows
    keys = tl.load(rows_ptr + lane * 4 + 1, mask=is_row, other=0)
    keys += tl.load(rows_ptr + lane * 4 + 2, mask=is_row, other=0)
    tiles, chunk = cut_rows(keys, is_row, even_items, uneven_items, TILE)
    splits = tl.cdiv(tiles, chunk)
    is_before = is_row & (tl.cumsum(splits, axis=0) <= item)
    row = tl.sum(is_before.to(tl.int32), axis=0)
    split = item - tl.sum(tl.where(is_before, splits, 0), axis=0)
    return row, split, chunk


def item_limits(
    num_rows: int,
    num_kv_heads: int,
    num_sms: int,
    device: torch.device,
    *,
    group_size: int = 1,
    is_fp8: bool = False,
) -> tuple[int, int]:
    """(even_items, uneven_items) of `cut_rows`: as many programs an SM as the table says."""
    split = tuned.attention(device).split(num_rows, is_fp8=is_fp8)
    even, uneven = (
        num_sms * programs // num_kv_heads for programs in (split.even, split.uneven_of(group_size))
    )
    return max(num_rows, even), max(num_rows, uneven)


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
    group_size: int = 1,
    is_fp8: bool = False,
    shared: SharedWork | None = None,
) -> AttentionPlan:
    """The lists for one step; enqueued, nothing is read back.

    cu_seqlens_q: [B + 1] int32; seq_lens: [B] int32; slots: [B] int64
    is_uniform: rows of one token are tiles too
    group_size: query heads a KV head
    is_fp8: keys and values are
    shared: keys that the decode kernel leaves to another, for B rows or more
    """
    num_rows, device = seq_lens.shape[0], seq_lens.device
    limits = item_limits(
        num_rows, num_kv_heads, num_sms, device, group_size=group_size, is_fp8=is_fp8
    )
    num_items = max(limits) if has_decode else 0
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
        *limits,
        num_tiles,
        TILE=KEYS_PER_TILE,
        TOKENS_PER_TILE=tokens_per_tile,
        ROWS_POW2=max(MIN_LANES, triton.next_power_of_2(num_rows)),
        SORT=(num_rows >= SORTED_FROM or shared is not None) and not is_uniform,
        UNIFORM=is_uniform,
        SHARED=shared is not None,
        **launch_options(device, num_warps=4),
    )
    return AttentionPlan(items, tiles, sizes, has_decode, has_prefill, num_rows, shared)


def row_plan(
    rows: Tensor, *, num_kv_heads: int, num_sms: int, group_size: int = 1, is_fp8: bool = False
) -> RowPlan | None:
    """For a captured step of rows of one token; None where it must have lists, or is to.

    rows: [B, 4] int32, written before the step's graph is launched
    group_size: query heads a KV head
    """
    if not _use_early_keys or rows.shape[0] > MAX_EARLY_ROWS:
        return None
    limits = item_limits(
        *(rows.shape[0], num_kv_heads, num_sms, rows.device), group_size=group_size, is_fp8=is_fp8
    )
    return RowPlan(rows, *limits)
