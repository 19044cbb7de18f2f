"""Looks at a run that goes on, and whether it is to end: `--until-ci`, and an overloaded loop.

Watched are output tokens a second (batch means) and the median of e2e (order statistics). Looking
often would stop at the first lucky moment, so looks are rare: after five seconds, then each time
the run has become a third longer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvcli.bench.record import RequestRecord

FIRST_LOOK_S, GROWTH = 5.0, 4 / 3
MIN_REQUESTS = 30
LONGEST_S = 600.0  # where no --duration says otherwise


def widths(json: dict[str, Any]) -> dict[str, float | None]:
    """Half of each watched interval, as a share of its middle; None where there is no interval."""
    rate = json["throughput"]["output_interval"]
    e2e = json["e2e_ms"]["interval"].get("p50") or [None, None]
    return {"out_tok_s": _half(rate), "e2e.p50": _half(e2e)}


def _half(interval: Sequence[float | None] | None) -> float | None:
    if interval is None:
        return None
    low, high = interval
    if low is None or high is None or low + high <= 0 or high == float("inf"):
        return None
    return (high - low) / (high + low)


@dataclass(slots=True)
class Look:
    """A question that is asked now and then while a load runs; `header` says what it is a run of.

    Those that run are among the records, as unfinished until now.
    """

    header: dict[str, Any]
    _start: float = field(default_factory=time.monotonic)
    _next: float | None = None

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._start >= (self._next or FIRST_LOOK_S)

    def is_reached(self, records: Sequence[RequestRecord]) -> bool:
        from nvcli.bench.record import Run
        from nvcli.bench.summary import summarize

        self._next = (time.monotonic() - self._start) * GROWTH
        if len(records) < MIN_REQUESTS:
            return False
        return self._answer(summarize(Run(self.header, requests=list(records))).json)

    def _answer(self, json: dict[str, Any]) -> bool:
        raise NotImplementedError


@dataclass(slots=True)
class Precision(Look):
    """Whether the intervals are as narrow as was asked."""

    share: float = 0.05

    def _answer(self, json: dict[str, Any]) -> bool:
        return all(v is not None and v <= self.share for v in widths(json).values())


@dataclass(slots=True)
class Divergence(Look):
    """Whether an open loop grows without end: L(t) and ttft rise in two looks, one by one."""

    _before: bool = False

    def _answer(self, json: dict[str, Any]) -> bool:
        before, self._before = self._before, json["window"]["is_overloaded"]
        return before and self._before
