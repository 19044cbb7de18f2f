"""What the server says of itself, beside what the client saw: gauges, steps, blocks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from nvcli.bench import little, metrics
from nvcli.bench.record import OK

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.bench.little import Law
    from nvcli.bench.record import RequestRecord, Run, StepRecord
    from nvcli.bench.window import Window


def gauge_mean(samples: list[tuple[int, float]], start: int, end: int) -> float | None:
    """Time-weighted mean of a gauge that holds its value until the next sample."""
    inside = [(t, v) for t, v in samples if start <= t <= end]
    if len(inside) < 2:
        return None
    times = np.array([t for t, _ in inside], dtype=float)
    values = np.array([v for _, v in inside])
    span = times[-1] - times[0]
    return float((values[:-1] * np.diff(times)).sum() / span) if span > 0 else None


def samples_of(run: Run, name: str) -> list[tuple[int, float]]:
    return [(int(g["t_ns"]), float(g[name])) for g in run.gauges if name in g]


def counter_rate(samples: list[tuple[int, float]], start: int, end: int) -> float | None:
    """What a counter grew by, a second, between its first and last sample in the window. None
    where it did not grow: such a counter counts nothing."""
    inside = [(t, v) for t, v in samples if start <= t <= end]
    if len(inside) < 2 or inside[-1][1] <= inside[0][1]:
        return None
    return (inside[-1][1] - inside[0][1]) / ((inside[-1][0] - inside[0][0]) / 1e9)


def step_mean(run: Run, window: Window, value: Callable[[StepRecord], int]) -> float | None:
    """Mean over the window of what held during each step; idle time counts as 0. Of a step across
    an edge only the part inside counts."""
    parts = [
        value(s) * inside
        for s in run.steps
        if (inside := min(s.t_ns, window.end_ns) / 1e9 - _begin_s(s, window)) > 0
    ]
    return math.fsum(parts) / window.width_s if parts and window.width_s > 0 else None


def _begin_s(step: StepRecord, window: Window) -> float:
    return max(step.t_ns / 1e9 - step.dt_s, window.start_ns / 1e9)


def server_side(
    run: Run, law: Law, window: Window, pools: dict[str, list[float]]
) -> dict[str, Any]:
    """The engine's own gauge against the client's L, and the law by stage."""
    if run.steps:
        server = step_mean(run, window, lambda s: s.running + s.waiting)
    else:
        server = gauge_mean(
            [
                (int(g["t_ns"]), float(g["running"] + g["waiting"]))
                for g in run.gauges
                if {"running", "waiting"} <= set(g)
            ],
            window.start_ns,
            window.end_ns,
        )
    ttft, tpot = metrics.finite_mean(pools["ttft_service"]), metrics.finite_mean(pools["tpot"])
    outside = little.outside_s(law, server) if server is not None else None
    return {
        "server_L": server,
        "outside_ms": metrics.ms(outside),
        "L_prefill": law.rate * ttft if ttft is not None and law.num_ended else None,
        "L_decode": law.L - law.rate * ttft if ttft is not None and law.num_ended else None,
        "mean_tpot_ms": metrics.ms(tpot),
        "mean_batch": step_mean(run, window, lambda s: s.b),
    }


def beyond_limits(
    run: Run, inside: list[RequestRecord], law: Law, window: Window
) -> dict[str, float | int | None]:
    """Queue wait, preemptions and refusals as separate numbers.

    The wait is the engine's own where it tells it, else Little's: requests waiting by the gauge,
    over completions a second.
    """
    waits = sorted(
        (r.server["sched"] - r.server["arrive"]) / 1e6
        for r in inside
        if {"sched", "arrive"} <= set(r.server)
    )
    mean = metrics.mean(waits)
    if mean is None and law.rate > 0:
        held = gauge_mean(samples_of(run, "waiting"), window.start_ns, window.end_ns)
        mean = None if held is None else held / law.rate * 1e3
    counts = [float(g["preemptions"]) for g in run.gauges if "preemptions" in g]
    counts += [float(s.preemptions) for s in run.steps]
    refused = ("HTTP 429", "HTTP 503", "HTTP 529")
    return {
        "queue_ms": mean,
        "queue_p99_ms": metrics.stated_percentile(waits, 0.99),
        "preemptions": max(counts) - min(counts) if counts else None,
        "rejected": sum((r.error or "").startswith(refused) for r in inside),
    }


def kv_tokens(
    run: Run, inside: list[RequestRecord], law: Law, window: Window, pools: dict[str, list[float]]
) -> dict[str, float | None]:
    """Tokens in the KV cache, by Little and by the engine's own count of blocks."""
    done = [r for r in inside if r.status == OK]
    n_in = metrics.mean([r.n_in or 0 for r in done])
    n_out = metrics.mean([r.num_tokens for r in done])
    tpot = metrics.finite_mean(pools["tpot"])
    expected = None
    if n_in and n_out and law.W is not None:
        expected = little.kv_tokens(law.rate, n_in, n_out, law.W, tpot or 0.0)
    model = run.header.get("model") or {}
    num_blocks, size = model.get("num_blocks"), model.get("block_size")
    held = None
    if run.steps and num_blocks and size:
        blocks = step_mean(run, window, lambda s: num_blocks - s.free_blocks)
        held = blocks * size if blocks is not None else None
    return {"by_little": expected, "held": held}
