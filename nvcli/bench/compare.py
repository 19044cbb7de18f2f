"""Two stored runs side by side: what changed, how sure that is, and gates for CI (`gates`).

A gate never passes on an unsound run.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from nvcli.bench import metrics, stats
from nvcli.bench.gates import RATES, Gate, GateResult, goodput_counts, judge, rate_samples
from nvcli.bench.metrics import PERCENTILES
from nvcli.bench.summary import summarize
from nvcli.bench.text import number, percent
from nvcli.bench.text import table as columns
from nvcli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from nvcli.bench.record import Run
    from nvcli.bench.summary import Summary

MARGIN = 0.03
_TABLE = (
    *("ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99", "itl.p99", "e2e.p50", "e2e.p99"),
    *("out_tok_s", "req_s", "goodput"),
)


@dataclass(slots=True)
class Row:
    name: str
    a: float | None
    b: float | None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    shift_ms: float | None = None  # Hodges-Lehmann
    verdict: str = "inconclusive"


@dataclass(slots=True)
class Comparison:
    load: str
    rows: list[Row] = field(default_factory=list)
    gates: list[GateResult] = field(default_factory=list)
    unsound: list[str] = field(default_factory=list)


def statistic(stat: str) -> Callable[[NDArray[np.float64]], float]:
    """A statistic of samples in any order."""
    if stat == "mean":
        return lambda x: float(np.mean(x))
    if stat == "max":
        return lambda x: float(np.max(x))
    p = PERCENTILES[stat]

    def nearest_rank(x: NDArray[np.float64]) -> float:
        place = metrics.rank(len(x), p) - 1
        return float(np.partition(x, place)[place])

    return nearest_rank


def workload_hash(run: Run) -> str:
    return str((run.header.get("workload") or {}).get("hash", ""))


def compare(
    runs_a: Sequence[Run],
    runs_b: Sequence[Run],
    gates: Sequence[Gate] = (),
    *,
    any_workload: bool = False,
) -> list[Comparison]:
    """One comparison for every load that both files have.

    Raises `UsageError` when they have none in common. Different workloads make it unsound.
    """
    groups_a, groups_b = _by_load(runs_a), _by_load(runs_b)
    common = [load for load in groups_a if load in groups_b]
    if not common and len(groups_a) == len(groups_b) == 1 and any_workload:
        (load_a,), (load_b,) = groups_a, groups_b
        groups_b = {load_a: groups_b[load_b]}
        common = [load_a]
    if not common:
        raise UsageError(
            f"the runs have no load in common ({', '.join(groups_a)} and {', '.join(groups_b)})",
            hint="--any-workload compares them all the same.",
        )
    return [
        _compare_load(load, groups_a[load], groups_b[load], gates, any_workload) for load in common
    ]


def _by_load(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.requests:
            groups.setdefault(str((run.header.get("load") or {}).get("text", "?")), []).append(run)
    if not groups:
        raise UsageError("the run has no requests to compare")
    return groups


def _compare_load(
    load: str, a: list[Run], b: list[Run], gates: Sequence[Gate], any_workload: bool
) -> Comparison:
    left, right = [summarize(r) for r in a], [summarize(r) for r in b]
    found = Comparison(load)
    if not any_workload and {workload_hash(r) for r in a} != {workload_hash(r) for r in b}:
        found.unsound.append("the workloads differ; --any-workload compares them all the same")
    for name, side in (("A", left), ("B", right)):
        found.unsound += [f"{name}: {reason}" for s in side for reason in s.unsound]
    has_slo = all(s.json["goodput"]["slo_ms"] for s in (*left, *right))
    names = [n for n in _TABLE if n != "goodput" or has_slo]
    names += [g.name for g in gates if g.name not in names]
    for name in names:
        row = _row(name, left, right)
        if row is not None:
            found.rows.append(row)
    for row, p in zip(found.rows, stats.holm([r.p for r in found.rows]), strict=True):
        row.p = p
        row.verdict = _verdict(row)
    found.gates = [judge(gate, right, found.rows) for gate in gates]
    return found


def _samples(name: str, side: Sequence[Summary]) -> list[NDArray[np.float64]]:
    return [np.array(s.pools[name]) for s in side if s.pools[name]]


def _row(name: str, left: Sequence[Summary], right: Sequence[Summary]) -> Row | None:
    metric, _, stat = name.partition(".")
    if metric in RATES:
        return _rate_row(name, left, right)
    if metric == "goodput":
        a, b = goodput_counts(left), goodput_counts(right)
        found = stats.bootstrap_ratio([_indicator(*a)], [_indicator(*b)], statistic("mean"))
        row = Row(name, a[0] / a[1] if a[1] else None, b[0] / b[1] if b[1] else None)
        if found is not None:
            row.change, row.low, row.high = found
        return row
    x, y = _samples(metric, left), _samples(metric, right)
    if not x or not y:
        return None
    few = min(sum(map(len, x)), sum(map(len, y)))
    if stat in PERCENTILES and few < metrics.min_samples(PERCENTILES[stat]):
        return None  # the sample allows no such percentile
    compute = statistic(stat)
    row = Row(name, compute(np.concatenate(x)) * 1e3, compute(np.concatenate(y)) * 1e3)
    boot = stats.bootstrap_ratio(x, y, compute, num_resamples=500 if metric == "itl" else 1000)
    if boot is not None:
        row.change, row.low, row.high = boot
    all_x, all_y = np.concatenate(x).tolist(), np.concatenate(y).tolist()
    row.p = stats.mann_whitney(all_x, all_y)
    row.shift_ms = metrics.ms(stats.hodges_lehmann(all_x, all_y, limit=1000))
    return row


def _rate_row(name: str, left: Sequence[Summary], right: Sequence[Summary]) -> Row | None:
    a, b = rate_samples(name, left), rate_samples(name, right)
    if not a or not b:
        return None
    row = Row(name, math.fsum(a) / len(a), math.fsum(b) / len(b))
    found = stats.welch(a, b)
    if found is not None:
        row.change, row.low, row.high, row.p = found
    return row


def _indicator(good: int, sent: int) -> NDArray[np.float64]:
    return np.concatenate([np.ones(good), np.zeros(sent - good)])


def _verdict(row: Row) -> str:
    if row.change is None or row.low is None or row.high is None:
        return "inconclusive"
    if row.low >= -MARGIN and row.high <= MARGIN:
        return "same within 3 %"
    is_more = row.low > 0
    if not is_more and not row.high < 0:
        return "inconclusive"
    if row.p is not None and row.p > 0.05:
        return "inconclusive"
    more_is_better = row.name in RATES or row.name == "goodput"
    return "better" if is_more == more_is_better else "worse"


# --- what comes out ------------------------------------------------------------------------------


def exit_code(found: Sequence[Comparison], *, is_lenient: bool = False) -> int:
    """0; 5 a gate failed; 6 unsound, or a gate that nothing can be said about."""
    if any(c.unsound for c in found):
        return 6
    outcomes = [g.outcome for c in found for g in c.gates]
    if "fail" in outcomes:
        return 5
    return 6 if "inconclusive" in outcomes and not is_lenient else 0


def as_json(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    return [asdict(c) for c in found]


def table(found: Sequence[Comparison]) -> list[str]:
    lines: list[str] = []
    for c in found:
        lines.append(f"{c.load}    A → B, 95 % intervals, p by Holm")
        header = f"{'metric':12}{'A':>11}{'B':>11}{'change':>10}  {'interval':20}{'p':>8}  verdict"
        rows = []
        for r in c.rows:
            interval = ""
            if r.low is not None and r.high is not None:
                interval = f"[{100 * r.low:+.1f} … {100 * r.high:+.1f} %]"
            change = "–" if r.change is None else f"{100 * r.change:+.1f} %"
            p = "–" if r.p is None else f"{r.p:.3f}" if r.p >= 0.001 else "<0.001"
            line = (
                f"{r.name:12}{number(r.a):>11}{number(r.b):>11}{change:>10}  {interval:20}{p:>8}  "
                f"{r.verdict}"
            )
            values = [("A", number(r.a)), ("B", number(r.b)), ("", f"{change} {interval}")]
            rows.append((line, r.name, [*values, ("p", p), ("", r.verdict)]))
        lines += columns(header, rows)
        for g in c.gates:
            lines.append(f"gate  {g.gate:28} {g.outcome}{_gate_text(g)}")
        lines += [f"UNSOUND   {reason}" for reason in c.unsound]
    return lines


def _gate_text(result: GateResult) -> str:
    if result.value is None or not math.isfinite(result.value):
        return ""
    if "%" in result.gate:
        text = percent(result.value)
    else:
        text = f"{number(result.value)} {result.unit}".rstrip()
    return f"  (measured {text})"
