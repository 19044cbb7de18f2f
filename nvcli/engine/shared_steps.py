"""Captured steps whose decoding rows begin alike: which they are, and what they read once.

Hot path: yes (`update`).

Such steps have graphs of their own, with one more kernel a layer. The host knows the rows' block
tables, so it decides which graph a step takes; a step that shares nothing replays the same as if
there were no sharing. What is shared changes only when rows come or go: the lists on the device
stay as they are until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvcli.kernels.shared_prefix import MIN_ROWS

if TYPE_CHECKING:
    import torch

    from nvcli.engine.step import StepPlan
    from nvcli.kernels.shared_prefix import SharedPrefixes, SharedWork

MIN_SHARED_TOKENS = 64  # of the smallest bucket of steps that are not all decode


def shared_decode_buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, rising: fewer than of usual steps, as padding costs little here."""
    sizes = [8, 16, *range(32, 257, 32), *range(320, max_num_seqs + 1, 64), max_num_seqs]
    return sorted({size for size in sizes if MIN_ROWS <= size <= max_num_seqs})


class SharedSteps:
    """The lists of the step at hand, at an address that captured steps know."""

    def __init__(self, prefixes: SharedPrefixes, max_num_seqs: int, device: torch.device) -> None:
        self.prefixes = prefixes
        self._work = prefixes.allocate(max_num_seqs, device)
        self._num_slots = max_num_seqs + 1
        self._known: tuple[int, list[int]] = (-1, [])  # version of the slots, their rows
        self._pays = False

    def work(self, num_rows: int) -> SharedWork:
        """The lists, for a step of so many rows."""
        return self._work.cut(self.prefixes.max_items(num_rows), num_rows)

    def update(self, plan: StepPlan, version: int) -> bool:
        """Whether enough is shared in this step; if so, its lists are on their way to the device.

        version: changes whenever a slot gets a new owner; until then leading blocks stay
        """
        rows = plan.rows
        if len(rows) < MIN_ROWS:
            return False
        known = version, [row.n * self._num_slots + row.slot for row in rows]
        if known != self._known:
            self._known = known
            tables = [row.seq.block_table if row.n == 1 else [] for row in rows]
            groups = self.prefixes.find(tables, [row.start + row.n for row in rows])
            self._pays = bool(groups)
            if groups:
                query_lens = [row.n for row in rows]
                self._work.send(self.prefixes.fill(self._work, groups, query_lens))
        return self._pays
