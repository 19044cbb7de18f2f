"""L = lambda W: what is in flight, exactly, and whether the measurement agrees with itself.

L counts requests in flight, never finished ones. Over a whole run that starts and ends empty the
integral of N(t) equals the sum of the times in the system exactly; anything else is a lost request
or a mixed clock, and the run is refused. Over a steady window the law holds up to edge effects.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

GOOD, EDGE = 0.03, 0.10
EXACT = 1e-9  # of `identity_error`: more is a lost request or a mixed clock
Span = tuple[int, int]  # from the intended send to the end, in nanoseconds


@dataclass(frozen=True, slots=True)
class InFlight:
    """N(t) as a step function: `counts[i]` from `times[i]` until `times[i + 1]`."""

    times: list[int]
    counts: list[int]

    @classmethod
    def of(cls, spans: Iterable[Span]) -> InFlight:
        """Sweep line over starts and ends; both at one moment fall together."""
        changes: dict[int, int] = {}
        for start, end in spans:
            changes[start] = changes.get(start, 0) + 1
            changes[end] = changes.get(end, 0) - 1
        times, counts, n = [], [], 0
        for time in sorted(changes):
            n += changes[time]
            times.append(time)
            counts.append(n)
        return cls(times, counts)

    @property
    def peak(self) -> int:
        return max(self.counts, default=0)

    def at(self, time: int) -> int:
        index = bisect_right(self.times, time) - 1
        return self.counts[index] if index >= 0 else 0

    def integral(self, start: int, end: int) -> int:
        """Of N dt over [start, end], in whole nanoseconds."""
        total = 0
        index = max(bisect_right(self.times, start) - 1, 0)
        while index < len(self.times) and self.times[index] < end:
            left = max(self.times[index], start)
            right = self.times[index + 1] if index + 1 < len(self.times) else end
            right = min(right, end)
            if right > left:
                total += self.counts[index] * (right - left)
            index += 1
        return total

    def series(self, start: int, end: int, num_bins: int) -> list[float]:
        """Mean of N in equal parts of [start, end]."""
        if end <= start:
            return []
        edges = np.linspace(start, end, num_bins + 1).round().astype(np.int64).tolist()
        return [
            self.integral(a, b) / (b - a) if b > a else float(self.at(a))
            for a, b in itertools.pairwise(edges)
        ]


def identity_error(spans: Sequence[Span]) -> float:
    """Integral of N dt against the sum of W over everything: by what share they differ."""
    flight = InFlight.of(spans)
    if not flight.times:
        return 0.0
    if any(end < start for start, end in spans):  # two clocks, or a record half written
        return math.inf
    integral = flight.integral(flight.times[0], flight.times[-1])
    total = sum(end - start for start, end in spans)
    return abs(integral - total) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Law:
    """L, lambda and W of a window; None where nothing ended in it."""

    L: float
    rate: float
    W: float | None
    residual: float | None
    num_ended: int

    @property
    def verdict(self) -> str:
        if self.residual is None:
            return "nothing ended in the window"
        size = abs(self.residual)
        if size <= GOOD:
            return "good"
        return "edge effects" if size <= EDGE else "not steady"


def law(spans: Sequence[Span], start: int, end: int) -> Law:
    """Over (start, end]: an end exactly at `start` belongs to the time before."""
    width = end - start
    if width <= 0:
        return Law(0.0, 0.0, None, None, 0)
    mean = InFlight.of(spans).integral(start, end) / width
    ended = [b - a for a, b in spans if start < b <= end]
    rate = len(ended) / (width / 1e9)
    if not ended:
        return Law(mean, rate, None, None, 0)
    wait = sum(ended) / len(ended) / 1e9
    residual = (mean - rate * wait) / mean if mean > 0 else None
    return Law(mean, rate, wait, residual, len(ended))


def outside_s(law: Law, server_mean: float) -> float | None:
    """Mean time a request spends outside the server: (L - L_server) / lambda."""
    return (law.L - server_mean) / law.rate if law.rate > 0 else None


def kv_tokens(rate: float, n_in: float, n_out: float, wait: float, tpot: float) -> float:
    """Tokens in the KV cache by Little: lambda (I W + TPOT O (O - 1) / 2)."""
    return rate * (n_in * wait + tpot * n_out * (n_out - 1) / 2)


def is_cohort(ends: Sequence[int], concurrency: int, wait_s: float) -> bool:
    """Whether a closed loop runs in lock-step: its completions come in bunches of about c.

    Completions are counted in bins of W / 8. A mixed loop gives a variance-to-mean ratio about 1, a
    lock-step of c gives 7 c / 8 (all c in one bin of eight).
    """
    if concurrency < 8 or wait_s <= 0 or len(ends) < 4 * concurrency:
        return False
    width = max(int(wait_s * 1e9 / 8), 1)
    first = min(ends)
    bins = np.bincount([(e - first) // width for e in ends])
    mean = float(bins.mean())
    return mean > 0 and float(bins.var()) / mean > max(4.0, concurrency / 4)
