"""Which record goes to the engine next: waves in which records with a common prefix stand together.

A wave is what is ready, at most `size` records; the next begins when it is through, so no record
waits longer than one wave. Within it, records whose first tokens agree follow one another, in
order of their first appearance: they meet in the prefix cache while its blocks are fresh. Where no
prefix is shared the order is that of the input.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvcli.batch.feed import Prepared

PREFIX_TOKENS = 16  # a KV-cache block: nothing shorter is shared


class Waves:
    """A queue of prepared records that gives them out grouped."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ready: deque[Prepared] = deque()
        self._wave: deque[Prepared] = deque()

    def __len__(self) -> int:
        return len(self._ready) + len(self._wave)

    def add(self, item: Prepared) -> None:
        self._ready.append(item)

    def take(self) -> Prepared:
        """The next record. Raises `IndexError` where there is none."""
        if not self._wave:
            count = min(self._size, len(self._ready))
            self._wave = deque(group_by_prefix([self._ready.popleft() for _ in range(count)]))
        return self._wave.popleft()

    def clear(self) -> None:
        self._wave.clear()
        self._ready.clear()


def group_by_prefix(items: list[Prepared]) -> list[Prepared]:
    groups: dict[tuple[int, ...], list[Prepared]] = {}
    for item in items:
        prefix = tuple(item.prompts[0].token_ids[:PREFIX_TOKENS]) if item.prompts else ()
        groups.setdefault(prefix, []).append(item)
    for group in groups.values():
        if len(group) > 2 and group[0].prompts:
            group.sort(key=lambda item: item.prompts[0].token_ids)
    return [item for group in groups.values() for item in group]
