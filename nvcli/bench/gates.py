"""Gates of a comparison: `e2e.p99<=+5%` against A, or `goodput>=0.95` for B alone.

A gate passes when the whole confidence interval lies inside its margin, fails when the whole
interval lies beyond it, and is inconclusive otherwise.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvcli.bench import metrics, stats
from nvcli.bench.metrics import METRICS, PERCENTILES
from nvcli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvcli.bench.compare import Row
    from nvcli.bench.summary import Summary

RATES = {"out_tok_s": "output_tokens_per_s", "req_s": "requests_per_s"}
_GATE = re.compile(r"\s*([a-z0-9_]+)(?:\.([a-z0-9]+))?\s*(<=|>=)\s*([+-]?[0-9.]+)\s*(%|ms|s)?\s*")


@dataclass(frozen=True, slots=True)
class Gate:
    """`e2e.p99<=+5%` against A, or `goodput>=0.95`, `ttft.p99<=300ms` for B alone."""

    text: str
    metric: str
    stat: str
    is_upper: bool
    limit: float  # a share for a relative gate, else seconds, tokens/s or a share
    is_relative: bool

    @property
    def name(self) -> str:
        return f"{self.metric}.{self.stat}" if self.stat else self.metric


@dataclass(slots=True)
class GateResult:
    """What was measured, with its interval: a share where the gate is a change or goodput."""

    gate: str
    value: float | None
    low: float | None
    high: float | None
    outcome: str  # pass, fail, inconclusive
    unit: str = ""  # ms of times


def parse_gate(text: str) -> Gate:
    """Raises `UsageError`."""
    match = _GATE.fullmatch(text)
    hint = "Write e2e.p99<=+5%, out_tok_s>=-3%, ttft.p99<=300ms or goodput>=0.95."
    if match is None:
        raise UsageError(f"{text!r} is no gate", hint=hint, param="gate")
    name, stat, sign, value, unit = match.groups()
    if name in METRICS:
        stat = stat or "mean"
        if stat not in (*PERCENTILES, "mean", "max"):
            raise UsageError(f"{text!r}: there is no statistic {stat!r}", hint=hint, param="gate")
        if unit is None:
            raise UsageError(f"{text!r} has no unit", hint=hint, param="gate")
    elif name not in (*RATES, "goodput") or stat or unit in ("ms", "s"):
        raise UsageError(f"{text!r} is no gate", hint=hint, param="gate")
    try:
        limit = float(value)
    except ValueError:
        raise UsageError(f"{text!r} is no gate", hint=hint, param="gate") from None
    is_relative = unit == "%"
    scale = {"%": 0.01, "ms": 1e-3}.get(unit or "", 1.0)
    return Gate(text.strip(), name, stat or "", sign == "<=", limit * scale, is_relative)


def judge(gate: Gate, right: Sequence[Summary], rows: Sequence[Row]) -> GateResult:
    if gate.is_relative:
        row = next((r for r in rows if r.name == gate.name), None)
        value, low, high = (row.change, row.low, row.high) if row else (None, None, None)
    else:
        value, low, high = _absolute(gate, right)
    outcome = "inconclusive"
    if gate.is_upper:
        if high is not None and high <= gate.limit:
            outcome = "pass"
        elif low is not None and low > gate.limit:
            outcome = "fail"
    elif low is not None and low >= gate.limit:
        outcome = "pass"
    elif high is not None and high < gate.limit:
        outcome = "fail"
    if gate.is_relative or gate.metric not in METRICS:
        return GateResult(gate.text, value, low, high, outcome)
    value, low, high = (None if v is None else 1000 * v for v in (value, low, high))
    return GateResult(gate.text, value, low, high, outcome, "ms")


def _absolute(
    gate: Gate, side: Sequence[Summary]
) -> tuple[float | None, float | None, float | None]:
    """(value, low, high) of B alone."""
    if gate.metric == "goodput":
        from scipy.stats import binomtest

        good, sent = goodput_counts(side)
        if not sent:
            return None, None, None
        interval = binomtest(good, sent).proportion_ci(stats.CONFIDENCE)
        return good / sent, float(interval.low), float(interval.high)
    if gate.metric in RATES:
        values = rate_samples(gate.metric, side)
    else:
        values = sorted(v for s in side for v in s.pools[gate.metric])
        if gate.stat in PERCENTILES:
            p = PERCENTILES[gate.stat]
            value = metrics.stated_percentile(values, p)
            if value is None:
                return None, None, None
            return (value, *stats.order_interval(values, p))
        if gate.stat == "max":
            top = values[-1] if values else None
            return top, top, top
        values = [v for v in values if math.isfinite(v)]
    interval_of = stats.mean_interval(values)
    if interval_of is None:
        return metrics.finite_mean(values), None, None
    return metrics.finite_mean(values), interval_of[0], interval_of[1]


# --- what both rows and gates are computed from ---


def rate_samples(name: str, side: Sequence[Summary]) -> list[float]:
    """The rate of each run with repeats; of one run the means of its batches."""
    if len(side) > 1:
        rates = [s.json["throughput"][RATES[name]] for s in side]
        return [r for r in rates if r is not None]
    return side[0].batches[name]


def goodput_counts(side: Sequence[Summary]) -> tuple[int, int]:
    sent = sum(s.json["counts"]["sent"] for s in side)
    good = sum(
        round((s.json["goodput"]["share_of_sent"] or 0) * s.json["counts"]["sent"]) for s in side
    )
    return good, sent
