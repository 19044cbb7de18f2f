"""Which replica a request goes to: the one that knows its beginning, unless another has much less
to do.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvcli.engine.engine import EngineStats
    from nvcli.engine.engine_thread import Sink

PREFIX_TOKENS = 16  # a KV-cache block: nothing shorter is shared
MAX_PREFIXES = 4096


@dataclass(slots=True, eq=False)
class Call:
    """A request that has no answer yet."""

    request_id: str
    frame: bytes
    sink: Sink
    open_indices: set[int]
    prefix: tuple[int, ...]
    is_streaming: bool
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
        self._prefixes: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def choose(self, free: Sequence[Slot], prefix: tuple[int, ...]) -> Slot:
        """One of `free`, which is not empty."""
        least = min(free, key=lambda slot: (len(slot.calls), slot.index))
        known = self._prefixes.get(prefix)
        chosen = least
        for slot in free:
            if slot.index == known and len(slot.calls) <= len(least.calls) + self._slack:
                chosen = slot
        self._prefixes[prefix] = chosen.index
        self._prefixes.move_to_end(prefix)
        if len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)
        return chosen
