"""Which replica a request goes to: the one that knows the most of its beginning, unless another has
much less to do.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvcli.engine.engine import EngineStats
    from nvcli.engine.engine_thread import Sink

PREFIX_TOKENS = 16  # a KV-cache block: nothing shorter is shared
GROWTH = 1.25
MAX_PREFIXES = 65_536


def prefix_keys(token_ids: Sequence[int], salt: str | None = None) -> tuple[int, ...]:
    """Names of beginnings of a prompt, the shortest first: of one block, and of always a quarter
    more. So what two prompts share is known to four fifths by the longest name that they share.

    salt: prompts with different ones share nothing.
    """
    keys: list[int] = []
    key, start, end = hash(salt), 0, PREFIX_TOKENS
    while end <= len(token_ids):
        key = hash((key, tuple(token_ids[start:end])))
        keys.append(key)
        blocks = end // PREFIX_TOKENS
        start, end = end, max(blocks + 1, int(blocks * GROWTH)) * PREFIX_TOKENS
    return tuple(keys)


@dataclass(slots=True, eq=False)
class Call:
    """A request that has no answer yet."""

    request_id: str
    frame: bytes
    sink: Sink
    open_indices: set[int]
    prefixes: tuple[int, ...]
    is_streaming: bool
    arrival: float = field(default_factory=time.monotonic)
    ticket: str = ""  # its id at the replica that has it: another one each time it is sent
    has_begun: bool = False  # something of it was handed out
    num_losses: int = 0


@dataclass(slots=True, eq=False)
class Slot:
    """A replica as this process sees it."""

    index: int
    actor: Any
    is_up: bool = False
    is_leaving: bool = False  # it gets no new requests, another takes its place
    is_ended: bool = False  # by us: what it still says is not heard
    is_gone: bool = False  # it could not be loaded again
    num_ends: int = 0  # of its process while it loaded, since it was up last
    stats: EngineStats | None = None
    calls: dict[str, Call] = field(default_factory=dict)  # by ticket
    suspect: Call | None = None  # it runs alone here, or waits until it can

    @property
    def takes_requests(self) -> bool:
        return self.is_up and not self.is_leaving


class Router:
    """Remembers where requests that begin alike went last."""

    def __init__(self, slack: int) -> None:
        """slack: how many requests more a replica may have that knows the beginning."""
        self._slack = slack
        self._replicas: OrderedDict[int, int] = OrderedDict()  # of a prefix, the oldest first

    def choose(self, free: Sequence[Slot], prefixes: tuple[int, ...]) -> Slot:
        """One of `free`, which is not empty."""
        least = min(free, key=lambda slot: (len(slot.calls), slot.index))
        within = {s.index: s for s in free if len(s.calls) <= len(least.calls) + self._slack}
        known = (self._replicas.get(key) for key in reversed(prefixes))
        chosen = next((within[index] for index in known if index in within), least)
        for key in prefixes:
            self._replicas[key] = chosen.index
            self._replicas.move_to_end(key)
        while len(self._replicas) > MAX_PREFIXES:
            self._replicas.popitem(last=False)
        return chosen
