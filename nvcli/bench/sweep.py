"""A ladder of loads: where throughput stops growing, the knee, and the most that meets the limits.

The fit is X(N) = X_1 N / (1 + sigma (N - 1) + kappa N (N - 1)) over measured mean L and throughput.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nvcli.bench.fit import Scaling, fit_scaling
from nvcli.bench.text import number, percent
from nvcli.bench.text import table as columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvcli.bench.summary import Summary

SATURATED = 1.03  # a step up the ladder that gives less than this is the last


def ladder(top: int) -> list[int]:
    """1, 2, 4, ... and the top itself."""
    steps = []
    value = 1
    while value < top:
        steps.append(value)
        value *= 2
    return [*steps, top]


def is_saturated(summaries: Sequence[Summary]) -> bool:
    """Whether the last point gave hardly more than the one before, or an open loop diverged."""
    last = summaries[-1]
    if "window" in last.json and last.json["window"]["is_overloaded"]:
        return True
    rates = [s.json["throughput"]["requests_per_s"] for s in summaries if "counts" in s.json]
    if len(rates) < 3 or not rates[-2] or rates[-1] is None:
        return False
    return bool(rates[-1] < SATURATED * rates[-2])


@dataclass(frozen=True, slots=True)
class SweepResult:
    rows: list[dict[str, Any]]
    fit: Scaling | None
    best_under_slo: dict[str, Any] | None
    left_out: list[str] = field(default_factory=list)  # of the fit: compute-bound, or diverged
    model_max: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        fit = self.fit
        return {
            "points": self.rows,
            "fit": None
            if fit is None
            else {**asdict(fit), "knee": fit.knee, "ceiling": fit.ceiling, "peak": fit.peak},
            "left_out_of_fit": self.left_out,
            "best_under_slo": self.best_under_slo,
            "model_max": self.model_max,
        }


def analyse(summaries: Sequence[Summary]) -> SweepResult:
    rows = [_row(s) for s in summaries if "counts" in s.json]
    usable = [r for r in rows if r["L"] and r["requests_per_s"]]
    # A diverged point is on no curve, nor is one that was not steady. Amdahl's holds while steps
    # are bound by memory: what bends it beyond is arithmetic, not contention, and must not become
    # the fit's kappa.
    steady = [r for r in usable if not r["overloaded"]]
    sound = [r for r in steady if r["sound"]]
    steady = sound if len(sound) >= 3 else steady
    bound_by_memory = [r for r in steady if not r["compute_bound"]]
    fitted = bound_by_memory if len(bound_by_memory) >= 3 else steady
    points = [(r["L"], r["requests_per_s"]) for r in fitted]
    fit = fit_scaling(points) if len(points) >= 3 else None
    left_out = [r["load"] for r in usable if r not in fitted] if fit is not None else []
    meeting = [r for r in rows if r["has_slo"] and (r["goodput_share"] or 0) >= 0.99 and r["sound"]]
    best = max(meeting, key=lambda r: float(r["requests_per_s"] or 0), default=None)
    model_max = next((m for s in summaries if (m := s.json.get("model_max"))), None)
    return SweepResult(rows, fit, best, left_out, model_max)


def _row(summary: Summary) -> dict[str, Any]:
    json = summary.json
    model = next((m for m in json["model_rows"] if m["name"] == "output_tokens_per_s"), None)
    return {
        "load": (json["load"] or {}).get("text", "?"),
        "L": json["concurrency"]["mean"],
        "requests_per_s": json["throughput"]["requests_per_s"],
        "output_tokens_per_s": json["throughput"]["output_tokens_per_s"],
        "ttft_p99_ms": json["ttft_ms"]["p99"],
        "ttft_p50_ms": json["ttft_ms"]["p50"],
        "tpot_p50_ms": json["tpot_ms"]["p50"],
        "e2e_p99_ms": json["e2e_ms"]["p99"],
        "e2e_mean_ms": json["e2e_ms"]["mean"],
        "goodput_share": json["goodput"]["share_of_sent"],
        "has_slo": bool(json["goodput"]["slo_ms"]),
        "little": json["little"]["verdict"],
        "model_ratio": model["ratio"] if model else None,
        "sound": not summary.unsound,
        "unsound": summary.unsound,
        "server_was_gone": json["verdict"]["server_was_gone"],
        # as --until-ci asked; a load that diverged was ended before
        "precise": json["window"]["is_overloaded"] or (json["until_ci"] or {}).get("reached", True),
        "overloaded": json["window"]["is_overloaded"],
        "compute_bound": bool((json["model_max"] or {}).get("is_compute_bound")),
    }


def table(result: SweepResult) -> list[str]:
    header = (
        f"{'load':24}{'L':>6}{'req/s':>8}{'tok/s':>8}{'ttft p50':>9}{'p99':>8}{'tpot p50':>9}"
        f"{'e2e p99':>9}{'goodput':>9}{'model':>7}  little"
    )
    rows = []
    for r in result.rows:
        mark = "✔" if r["little"] == "good" else "✘"
        good = percent(r["goodput_share"]) if r["has_slo"] else "–"
        sound = "" if r["sound"] else " unsound"
        line = (
            f"{r['load']:24}{number(r['L']):>6}{number(r['requests_per_s']):>8}"
            f"{number(r['output_tokens_per_s']):>8}{number(r['ttft_p50_ms']):>9}"
            f"{number(r['ttft_p99_ms']):>8}{number(r['tpot_p50_ms']):>9}"
            f"{number(r['e2e_p99_ms']):>9}{good:>9}{number(r['model_ratio']):>7}  {mark}{sound}"
        )
        values = [
            *(("L", number(r["L"])), ("req/s", number(r["requests_per_s"]))),
            ("tok/s", number(r["output_tokens_per_s"])),
            ("ttft", f"p50 {number(r['ttft_p50_ms'])}, p99 {number(r['ttft_p99_ms'])}"),
            *(("tpot p50", number(r["tpot_p50_ms"])), ("e2e p99", number(r["e2e_p99_ms"]))),
            *(("goodput", good), ("model", number(r["model_ratio"]))),
            ("little", f"{mark}{sound}"),
        ]
        rows.append((line, r["load"], values))
    lines = columns(header, rows)
    lines += [f"unsound   {r['load']}: {why}" for r in result.rows for why in r["unsound"]]
    lines += _fit_lines(result)
    if result.best_under_slo is not None:
        best = result.best_under_slo
        lines.append(f"most under the limits: {best['load']}, {number(best['requests_per_s'])}/s")
    elif any(r["has_slo"] for r in result.rows):
        lines.append("no point meets the limits")
    return lines


def _fit_lines(result: SweepResult) -> list[str]:
    fit = result.fit
    if fit is None:
        return ["fit       needs three points of different L"]
    kappa = "κ = 0"
    if fit.kappa > 0 or fit.kappa_interval is not None:
        kappa = f"κ = {fit.kappa:.2g}"
        if fit.kappa_interval is not None:
            low, high = fit.kappa_interval
            kappa += f" [{low:.1g} … {high:.1g}]"
    lines = [
        f"fit       X(N) = {number(fit.x1)} N / (1 + {number(fit.sigma)} (N - 1)), {kappa}, "
        f"R² = {fit.r2:.4f}"
    ]
    parts = []
    if fit.knee is not None:
        slower = fit.knee / fit(fit.knee) * fit.x1
        parts.append(
            f"knee N = {fit.knee:.0f} ({number(fit(fit.knee))} req/s, {number(slower)}x the "
            "latency of a lone request)"
        )
    if fit.ceiling is not None:
        parts.append(f"ceiling {number(fit.ceiling)} req/s")
    if fit.peak is not None and math.isfinite(fit.peak):
        parts.append(f"more than N = {fit.peak:.0f} gives less")
    if (best := result.model_max) is not None:
        parts.append(f"model max {number(best['requests_per_s'])} at c = {best['slots']}")
    lines += [f"          {part}" for part in parts]
    if result.left_out:
        names = "; ".join(result.left_out)
        lines.append(f"          left out, compute-bound, diverged or unsound: {names}")
    return lines
