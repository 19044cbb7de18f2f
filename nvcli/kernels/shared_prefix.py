"""Which keys of a step are read once for many decoding rows, because their sequences begin alike.

Sequences with equal prefixes hold the same blocks, so rows whose block tables begin with the same
ids attend to the same keys. Such rows form a group: `shared_attention` reads the group's keys once
for a tile of its rows, and what is a row's own stays with `decode_attention`.

    row 0   | 7 3 12 | 40 41        group (0, 2, 3): blocks 7 3 12
    row 1   | 9 8                   alone
    row 2   | 7 3 12 | 50
    row 3   | 7 3 12 | 61 62 63

Groups are found on the host, from the block tables of the step's own rows. They change only when
rows come or go, so most steps take the last one's. A block in two tables names the same prefix in
both (see `BlockManager`), so tables that agree at an index agree in all keys before it.

`NVCLI_SHARED_PREFIX=0` in the environment, or `set_sharing(False)`, turns it off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nvcli.kernels import switches
from nvcli.kernels.attention_plan import KEYS_PER_TILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    Array = NDArray[Any]

MIN_ROWS = 4  # of a group
MIN_KEYS = 128  # of a group
# One launch more in a layer, its start and its parts to merge take some 6 us (estimated). So many
# reads of a key of one KV head, 64 MB of a 16-bit cache, take 16.
MIN_SPARED = 1 << 17
MAX_LEVELS = 6  # of prefixes within prefixes; only the longest of a row is shared
QUERY_ROWS = 64  # rows times query heads of a program
PROGRAMS_PER_SM = 2  # so many are there at once
MIN_PIECE = 2 * KEYS_PER_TILE  # keys a program reads
MAX_PARTS = 16  # pieces of a row's shared keys; scratch is made for so many
RECORD = 8  # int32 numbers an item

_use_sharing = switches.is_on("NVCLI_SHARED_PREFIX")


def set_sharing(enabled: bool) -> None:
    """For tests and measurements; engines and their captured graphs keep what they have."""
    global _use_sharing
    _use_sharing = enabled


def uses_sharing() -> bool:
    return _use_sharing


class Group(NamedTuple):
    """Rows of a step that begin with the same keys."""

    rows: list[int]
    num_keys: int  # whole tiles


@dataclass(frozen=True, slots=True)
class SharedWork:
    """The lists that the kernels read, in one buffer at a fixed address.

    count    [8]     the first: items in use
    items    [I, 8]  row of a member, first key, end key, part, first member, members
    rows     [B, 2]  keys that are shared, and in how many parts; zeros for a row alone
    members  [B, 2]  row and its token, group by group
    """

    buffer: Tensor  # int32
    num_items: int  # I
    num_rows: int  # B
    capacity: int  # rows that the buffer was made for
    offset: int  # of `rows` in the buffer

    @classmethod
    def allocate(cls, num_items: int, num_rows: int, device: torch.device) -> SharedWork:
        capacity = -(-num_rows // 4) * 4  # so that every list begins at 16 bytes
        offset = RECORD * (1 + num_items)
        buffer = torch.zeros(offset + 4 * capacity, dtype=torch.int32, device=device)
        return cls(buffer, num_items, num_rows, capacity, offset)

    def cut(self, num_items: int, num_rows: int) -> SharedWork:
        """For a step of fewer rows, at the same address."""
        return replace(self, num_items=num_items, num_rows=num_rows)

    def send(self, array: Array) -> int:
        """Replace all of it, in stream order and without waiting. -> the items in use"""
        source = torch.from_numpy(array)
        if self.buffer.device.type == "cuda":
            source = source.pin_memory()  # which torch keeps until it is copied
        self.buffer.copy_(source, non_blocking=True)
        return int(array[0])

    @property
    def count(self) -> Tensor:
        return self.buffer[:RECORD]

    @property
    def items(self) -> Tensor:
        return self.buffer[RECORD : self.offset]

    @property
    def rows(self) -> Tensor:
        return self.buffer[self.offset : self.offset + 2 * self.capacity]

    @property
    def members(self) -> Tensor:
        return self.buffer[self.offset + 2 * self.capacity :]


class SharedPrefixes:
    """Finds groups among a step's rows and makes their work, for one shape of attention."""

    def __init__(self, *, num_heads: int, num_kv_heads: int, block_size: int, num_sms: int) -> None:
        self._block_size = block_size
        self._num_kv_heads = num_kv_heads
        self._num_sms = num_sms
        self._rows_per_tile = QUERY_ROWS // (num_heads // num_kv_heads)
        assert self._rows_per_tile > 0, "more query heads a KV head than a tile has rows"

    def find(self, tables: Sequence[Sequence[int]], num_keys: Sequence[int]) -> list[Group]:
        """Groups that together are worth it; mostly none.

        tables:    [B] block ids of each row of one token, at least of its keys; empty for others
        num_keys:  [B] keys a row sees
        """
        size = self._block_size
        depth = -(-MIN_KEYS // size)
        found: dict[int, list[int]] = {}
        for row, table in enumerate(tables):
            if table and num_keys[row] >= depth * size:
                found.setdefault(table[depth - 1], []).append(row)
        search = _Search(tables, num_keys, size, self._rows_per_tile)
        groups: list[Group] = []
        spared = 0
        for rows in found.values():
            if len(rows) >= MIN_ROWS:
                more, keys = search.split(rows, depth, MAX_LEVELS)
                groups += more
                spared += keys
        return groups if spared * self._num_kv_heads >= MIN_SPARED else []

    # --- the work --------------------------------------------------------------------------------

    def max_items(self, num_rows: int) -> int:
        """Bound on the items of any groups of so many rows: every group has one tile that is not
        full, every tile one piece that is not.
        """
        num_tiles = num_rows // self._rows_per_tile + num_rows // MIN_ROWS
        return -(-PROGRAMS_PER_SM * self._num_sms // self._num_kv_heads) + num_tiles

    def allocate(self, num_rows: int, device: torch.device) -> SharedWork:
        """Lists for any step of up to so many rows."""
        return SharedWork.allocate(self.max_items(num_rows), num_rows, device)

    def fill(self, work: SharedWork, groups: list[Group], query_lens: Sequence[int]) -> Array:
        """What `work.buffer` is to hold.  query_lens: [B] tokens of each row."""
        array = np.zeros(work.buffer.shape[0], np.int32)
        rows = array[work.offset :][: 2 * work.capacity].reshape(-1, 2)
        members = array[work.offset + 2 * work.capacity :].reshape(-1, 2)
        tokens = np.cumsum([0, *query_lens])
        step = self._rows_per_tile
        total = sum(-(-len(group.rows) // step) * group.num_keys for group in groups)
        usual = -(-total * self._num_kv_heads // (PROGRAMS_PER_SM * self._num_sms))
        records: list[tuple[int, ...]] = []
        first = 0
        for group in groups:
            num_members, num_keys = len(group.rows), group.num_keys
            piece = max(usual, MIN_PIECE, -(-num_keys // MAX_PARTS))
            piece = -(-piece // KEYS_PER_TILE) * KEYS_PER_TILE
            starts = range(0, num_keys, piece)
            rows[group.rows] = num_keys, len(starts)
            members[first : first + num_members, 0] = group.rows
            members[first : first + num_members, 1] = tokens[group.rows]
            # Tiles of one piece stand together: they read the same keys, at about the same time.
            for part, start in enumerate(starts):
                end = min(start + piece, num_keys)
                for begin in range(0, num_members, step):
                    count = min(step, num_members - begin)
                    records.append((group.rows[0], start, end, part, first + begin, count, 0, 0))
            first += num_members
        assert len(records) <= work.num_items, "more items than there can be"
        array[0] = len(records)
        array[RECORD : work.offset].reshape(-1, RECORD)[: len(records)] = records
        return array


@dataclass(frozen=True, slots=True)
class _Search:
    """For groups among the rows of a step; the first two are `SharedPrefixes.find`'s."""

    tables: Sequence[Sequence[int]]
    num_keys: Sequence[int]
    block_size: int
    rows_per_tile: int

    def split(self, rows: list[int], depth: int, levels: int) -> tuple[list[Group], int]:
        """Groups of rows that agree in `depth` blocks, and the reads of a key that they spare, with
        a tile of rows counted as one read: it takes as long for a key as a row alone. Rows that
        agree in more are a group of their own where that spares more than staying does.
        """
        depth = self._agreed(rows, depth)
        shared = depth * self.block_size // KEYS_PER_TILE * KEYS_PER_TILE
        groups: list[Group] = []
        spared = 0
        for branch in self._branches(rows, depth) if levels > 0 else ():
            deeper, more = self.split(branch, depth + 1, levels - 1)
            leaving = {row for group in deeper for row in group.rows}
            # Staying, each of them has a share of a full tile.
            if more * self.rows_per_tile > len(leaving) * shared * (self.rows_per_tile - 1):
                groups += deeper
                spared += more
                rows = [row for row in rows if row not in leaving]
        if len(rows) >= MIN_ROWS and shared > 0:
            groups.append(Group(rows, shared))
            spared += (len(rows) - -(-len(rows) // self.rows_per_tile)) * shared
        return groups, spared

    def _agreed(self, rows: list[int], low: int) -> int:
        """Blocks that all rows begin with, at least `low`, by bisection."""
        tables = [self.tables[row] for row in rows]
        high = min(self.num_keys[row] for row in rows) // self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            if len({table[middle - 1] for table in tables}) == 1:
                low = middle
            else:
                high = middle - 1
        return low

    def _branches(self, rows: list[int], depth: int) -> list[list[int]]:
        """Rows that agree in the block after `depth`, where they are enough for a group."""
        found: dict[int, list[int]] = {}
        for row in rows:
            if self.num_keys[row] >= (depth + 1) * self.block_size:
                found.setdefault(self.tables[row][depth], []).append(row)
        return [branch for branch in found.values() if len(branch) >= MIN_ROWS]
