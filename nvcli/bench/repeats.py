"""Repeats of one load in a file: means over whole runs, with Student's interval.

Requests inside a run depend on one another, runs hardly do: from three runs on this is the honest
interval of a mean.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from nvcli.bench import metrics, stats
from nvcli.bench.text import Wide, constant, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvcli.bench.summary import Summary

_NUMBERS = {
    "out_tok_s": ("throughput", "output_tokens_per_s"),
    "req_s": ("throughput", "requests_per_s"),
    "ttft_ms.mean": ("ttft_ms", "mean"),
    "tpot_ms.mean": ("tpot_ms", "mean"),
    "e2e_ms.mean": ("e2e_ms", "mean"),
}


def repeats(summaries: Sequence[Summary]) -> dict[str, dict[str, Any]]:
    """By load: the number of runs, and mean and interval of each number. Empty without repeats."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for s in summaries:
        if "counts" in s.json:
            groups.setdefault(str((s.json["load"] or {}).get("text", "?")), []).append(s.json)
    found: dict[str, dict[str, Any]] = {}
    for load, runs in groups.items():
        if len(runs) < 2:
            continue
        found[load] = {"runs": len(runs)}
        for name, (part, key) in _NUMBERS.items():
            values = [run[part][key] for run in runs if run[part][key] is not None]
            interval = stats.mean_interval(values)
            found[load][name] = {
                "mean": metrics.mean(values),
                "interval": list(interval) if interval is not None else None,
            }
    return found


def lines(summaries: Sequence[Summary]) -> list[str]:
    text = []
    for load, found in repeats(summaries).items():
        text += ["", f"{found['runs']} runs of {load}: means over runs, 95 % intervals (Student)"]
        for name in _NUMBERS:
            interval, mean = found[name]["interval"], number(found[name]["mean"])
            bounds = "–" if interval is None else f"[{number(interval[0])}–{number(interval[1])}]"
            line = f"{name:14}{mean:>10}  {bounds}"
            text.append(Wide.of(line, len(line), partial(constant, f"{name}: {mean} · {bounds}")))
    return text
