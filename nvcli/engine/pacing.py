"""Which streams get a piece of text after a step, where there are many.

Few streams get each token as it is read. Many would get more pieces than their readers can take,
and making the pieces would delay the next step. So what is new of each goes out in fewer, larger
pieces, and the streams take turns: each step has about as many pieces to make as the one before.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

UNPACED_STREAMS = 16  # up to so many get every token at once
PIECES_PER_S = 16_000  # of all streams together beyond: half of what an HTTP process can write
MANY_STREAMS = 128  # and from here on fewer, as the engine has a piece's work with it too
MAX_INTERVAL_S = 0.05  # between two pieces of a stream


def piece_interval(num_streams: int) -> float:
    """Seconds between two pieces of each of so many streams: 4 ms of 64, 32 ms of 256."""
    interval = num_streams / PIECES_PER_S * max(1.0, num_streams / MANY_STREAMS)
    return min(interval, MAX_INTERVAL_S)


class Turns:
    """Streams that have given their first piece, known by the id of their sequence."""

    def __init__(self) -> None:
        self._streams: OrderedDict[int, None] = OrderedDict()  # whose piece is the oldest first
        self._num_due = 0.0  # pieces that the time until `_counted_at` was enough for
        self._counted_at = 0.0

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._streams

    def join(self, seq_id: int) -> None:
        self._streams[seq_id] = None

    def leave(self, seq_id: int) -> None:
        self._streams.pop(seq_id, None)

    def take(self, clock: Callable[[], float]) -> list[int]:
        """The streams whose turn it is now; they are the last to have another."""
        count = len(self._streams)
        if count > UNPACED_STREAMS:
            now = clock()
            pieces = (now - self._counted_at) / piece_interval(count) * count
            self._num_due, self._counted_at = min(self._num_due + pieces, count), now
            count = int(self._num_due)
            self._num_due -= count
        taken = [self._streams.popitem(last=False)[0] for _ in range(count)]
        self._streams.update(dict.fromkeys(taken))
        return taken
