"""From raw samples to every number of the report, under stable names.

`summarize(run)` reads nothing but the stored run. Durations are milliseconds in names that end in
`_ms`, seconds in `_s`. What cannot be stated is None (null in JSON), what lies beyond the timeout
is +inf ("inf"); nothing is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from nvcli.bench import little, metrics, stats
from nvcli.bench.explain import amdahl_rows, breakdown, limits_json, model_rows
from nvcli.bench.metrics import METRICS, PERCENTILES, Latencies, latencies, pool
from nvcli.bench.record import ERROR, OK, TIMEOUT, UNFINISHED

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.bench.record import RequestRecord, Run, StepRecord

NUM_BINS = 60
LATE_FLOOR_S, LATE_SHARE = 0.005, 0.05  # a later client than this is not sound


@dataclass(slots=True)
class Summary:
    """`json` is what `bench report --json` prints; the rest is for charts."""

    json: dict[str, Any]
    pools: dict[str, list[float]] = field(default_factory=dict)  # seconds, ascending
    in_flight: list[float] = field(default_factory=list)  # L over the whole run, equal bins
    tokens_per_s: list[float] = field(default_factory=list)
    batches: dict[str, list[float]] = field(default_factory=dict)  # rates in equal parts, 1/s
    window: tuple[float, float] = (0.0, 0.0)  # as shares of the whole run
    unsound: list[str] = field(default_factory=list)  # reasons for exit code 6
    missed: list[str] = field(default_factory=list)  # reasons for exit code 5


@dataclass(slots=True)
class _Window:
    start_ns: int
    end_ns: int
    method: str
    is_overloaded: bool = False

    @property
    def width_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def summarize(run: Run) -> Summary:
    """Every number of one run."""
    header = run.header
    base: dict[str, Any] = {
        "schema": header.get("schema"),
        "id": run.id,
        "command": header.get("command"),
        "created": header.get("created"),
        "model": header.get("model"),
        "load": header.get("load"),
        "workload": header.get("workload"),
        "environment": header.get("environment"),
        "interrupted": bool(run.end.get("interrupted", True)),
    }
    if run.points:
        base["points"] = [_point(point) for point in run.points]
    sent = [r for r in run.requests if r.status in (OK, ERROR, TIMEOUT, UNFINISHED)]
    if not sent:
        base["model_rows"] = model_rows(run, None)
        return Summary(base)
    return _summarize_requests(run, sent, base)


def _point(point: dict[str, Any]) -> dict[str, Any]:
    """A micro-benchmark: its median with an interval, beside floor and prediction."""
    times = sorted(float(t) for t in point.get("t_s", []))
    median = metrics.percentile(times, 0.5) if times else None
    low, high = stats.order_interval(times, 0.5)
    floor, predicted = point.get("floor_s"), point.get("predicted_s")
    return {
        **{k: v for k, v in point.items() if k not in ("t_s", "floor_s", "predicted_s")},
        "repeats": len(times),
        "median_ms": _ms(median),
        "low_ms": _ms(low),
        "high_ms": _ms(high),
        "min_ms": _ms(times[0]) if times else None,
        "max_ms": _ms(times[-1]) if times else None,
        "floor_ms": _ms(floor),
        "predicted_ms": _ms(predicted),
        "efficiency": floor / median if floor and median else None,
        "ratio": predicted / median if predicted and median else None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _summarize_requests(run: Run, sent: list[RequestRecord], base: dict[str, Any]) -> Summary:
    header = run.header
    ordered = sorted(sent, key=lambda r: r.s_star_ns)
    values = {id(r): latencies(r) for r in ordered}
    spans = [(r.s_star_ns, max(r.end_ns, r.s_star_ns)) for r in ordered]
    first, last = spans[0][0], max(end for _, end in spans)
    flight = little.InFlight.of(spans)
    window = _find_window(run, ordered, values, flight, last)
    inside = [r for r in ordered if window.start_ns <= r.s_star_ns <= window.end_ns]
    pools = pool(values[id(r)] for r in inside)
    identity = little.identity([(r.s_star_ns, r.end_ns) for r in ordered])
    law = little.law(spans, window.start_ns, window.end_ns)
    counts = _counts(run, inside)
    slo = {k: float(v) for k, v in (header.get("slo") or {}).items()}
    good = [r for r in inside if metrics.meets(values[id(r)], slo)]
    rates = _rates(ordered, window)

    json: dict[str, Any] = dict(base)
    json["counts"] = counts
    json["window"] = {
        "start_s": (window.start_ns - first) / 1e9,
        "end_s": (window.end_ns - first) / 1e9,
        "total_s": (last - first) / 1e9,
        "method": window.method,
    }
    json["throughput"] = rates
    json["goodput"] = {
        "requests_per_s": len(good) / window.width_s if window.width_s > 0 else None,
        "share_of_sent": len(good) / len(inside) if inside else None,
        "slo_ms": {k: v * 1e3 for k, v in slo.items()},
        "token_attainment": metrics.attainment(inside, slo["ttft"], slo["tpot"])
        if "ttft" in slo and "tpot" in slo
        else None,
    }
    for name in METRICS:
        json[f"{name}_ms"] = _distribution(pools[name])
    json["concurrency"] = {
        "mean": law.L if window.width_s > 0 else None,
        "peak": flight.peak,
    }
    json["kv_tokens"] = _kv_tokens(run, inside, law, window, pools)
    json["little"] = {
        "L": law.L if law.num_ended else None,
        "lambda": law.rate if law.num_ended else None,
        "W": law.W,
        "residual": law.residual,
        "verdict": law.verdict,
        "identity_error": identity.relative_error,
        **_server_side(run, law, window, pools),
    }
    mean_out = _mean([r.num_tokens for r in inside if r.status == OK])
    json["tail"] = {
        "mean_output_tokens": mean_out,
        "chance_above_itl_p99": metrics.tail_chance(mean_out)
        if mean_out and len(pools["itl"]) >= metrics.min_samples(0.99)
        else None,
    }
    json["breakdown_ms"] = breakdown([r for r in inside if r.status == OK])
    json["limits"] = limits_json(run, law.L if law.num_ended else None, law.W)
    json["client"] = _client(run, counts)
    json["energy"] = _energy(run, rates, window)
    json["model_rows"] = model_rows(run, json)
    json["amdahl"] = amdahl_rows(run, json)
    json["warnings"] = _warnings(run, inside, law, window, counts)
    unsound = _unsound(run, json, identity, law, window, pools)
    json["verdict"] = {"sound": not unsound, "reasons": unsound}
    missed = [] if not slo or len(good) >= 0.99 * len(inside) else [
        f"{len(good)} of {len(inside)} requests met the limits"
    ]  # fmt: skip
    token_times = [(t, k) for r in ordered for t, k in r.chunks]
    span = max(last - first, 1)
    return Summary(
        json,
        pools,
        flight.series(first, last, NUM_BINS),
        stats.batch_means(
            [(t - first) / 1e9 for t, _ in token_times],
            [k for _, k in token_times],
            -1e-9,
            span / 1e9,
            NUM_BINS,
        ),
        _batches(ordered, window),
        ((window.start_ns - first) / span, (window.end_ns - first) / span),
        unsound,
        missed,
    )


# --- the steady window ---------------------------------------------------------------------------


def _find_window(
    run: Run,
    ordered: list[RequestRecord],
    values: dict[int, Latencies],
    flight: little.InFlight,
    last: int,
) -> _Window:
    """From the end of the warm-up to the last send. Requests that run on behind it are counted in
    the latencies (by their send) but not in rates."""
    first, end = ordered[0].s_star_ns, ordered[-1].s_star_ns
    if end <= first:  # one send, or all at once
        return _Window(first, last, "whole run")
    warmup = run.header.get("warmup", "auto")
    if warmup != "auto":
        return _Window(min(first + int(float(warmup) * 1e9), end), end, f"{float(warmup):g} s cut")
    middle = first + (end - first) // 2
    start = first
    done = sorted((r for r in ordered if r.status == OK), key=lambda r: r.end_ns)
    times = [v for r in done if (v := values[id(r)].e2e) is not None]
    cut = stats.mser5(times)
    if cut:
        start = max(start, min(done[cut - 1].end_ns, middle))
    num_bins = min(200, len(ordered))
    series = flight.series(first, end, num_bins)
    cut = stats.mser5(series)
    start = max(start, min(first + (end - first) * cut // max(num_bins, 1), middle))
    window = _Window(start, end, "MSER-5")
    ttfts = [(r.s_star_ns, v) for r in ordered if r.s_star_ns >= start
             and (v := values[id(r)].ttft) is not None and math.isfinite(v)]  # fmt: skip
    if run.header.get("load", {}).get("mode") == "open" and len(series) >= 20:
        grid = [float(i) for i in range(len(series) - cut)]
        window.is_overloaded = stats.slope_is_up(grid, series[cut:]) and stats.slope_is_up(
            [float(t - first) for t, _ in ttfts], [v for _, v in ttfts]
        )
    return window


# --- parts ---------------------------------------------------------------------------------------


def _counts(run: Run, inside: list[RequestRecord]) -> dict[str, Any]:
    by_status = {s: sum(r.status == s for r in inside) for s in (OK, ERROR, TIMEOUT, UNFINISHED)}
    return {
        "total": len(run.requests),
        "sent": len(inside),
        "ok": by_status[OK],
        "failed": by_status[ERROR],
        "timeout": by_status[TIMEOUT],
        "unfinished": by_status[UNFINISHED],
        "planned": run.end.get("planned"),
    }


def _rates(ordered: list[RequestRecord], window: _Window) -> dict[str, Any]:
    """Rates over (a, b]; ties at a excluded."""
    a, b, width = window.start_ns, window.end_ns, window.width_s
    if width <= 0:
        return dict.fromkeys(
            ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "output_interval")
        )
    done = [r for r in ordered if r.status == OK and a < r.end_ns <= b]
    tokens = [(t, k) for r in ordered for t, k in r.chunks if a < t <= b]
    out = sum(k for _, k in tokens) / width
    prompt = sum(r.n_in or 0 for r in ordered if r.chunks and a < r.chunks[0][0] <= b) / width
    interval = None
    if len(tokens) >= 100:
        interval = stats.mean_interval(_batches(ordered, window)["out_tok_s"])
    return {
        "requests_per_s": len(done) / width,
        "output_tokens_per_s": out,
        "total_tokens_per_s": out + prompt,
        "output_interval": list(interval) if interval else None,
    }


def _batches(ordered: list[RequestRecord], window: _Window) -> dict[str, list[float]]:
    """Rates in 20 equal parts of the window, nearly independent of one another."""
    a, b = 0.0, window.width_s
    if b <= 0:
        return {"out_tok_s": [], "req_s": []}
    done = [(r.end_ns - window.start_ns) / 1e9 for r in ordered if r.status == OK]
    tokens = [((t - window.start_ns) / 1e9, k) for r in ordered for t, k in r.chunks]
    return {
        "out_tok_s": stats.batch_means([t for t, _ in tokens], [k for _, k in tokens], a, b, 20),
        "req_s": stats.batch_means(done, [1] * len(done), a, b, 20),
    }


def _distribution(ordered: list[float]) -> dict[str, Any]:
    """Mean beside percentiles, never alone, in milliseconds."""
    result: dict[str, Any] = {"count": len(ordered), "mean": _ms(metrics.finite_mean(ordered))}
    result["failed"] = sum(math.isinf(v) for v in ordered)
    for name, p in PERCENTILES.items():
        result[name] = _ms(metrics.stated_percentile(ordered, p))
    result["max"] = _ms(ordered[-1]) if ordered else None
    result["interval"] = {
        name: [_ms(v) for v in stats.order_interval(ordered, p)]
        for name, p in PERCENTILES.items()
        if result[name] is not None
    }
    result["linear"] = {
        name: _ms(metrics.linear_percentile(ordered, p))
        for name, p in PERCENTILES.items()
        if result[name] is not None
    }
    return result


def _mean(values: list[float] | list[int]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def gauge_mean(samples: list[tuple[int, float]], start: int, end: int) -> float | None:
    """Time-weighted mean of a gauge that holds its value until the next sample."""
    inside = [(t, v) for t, v in samples if start <= t <= end]
    if len(inside) < 2:
        return None
    times = np.array([t for t, _ in inside], dtype=float)
    values = np.array([v for _, v in inside])
    span = times[-1] - times[0]
    return float((values[:-1] * np.diff(times)).sum() / span) if span > 0 else None


def step_mean(run: Run, window: _Window, value: Callable[[StepRecord], int]) -> float | None:
    """Mean over the window of what held during each step; idle time counts as 0."""
    inside = [s for s in run.steps if window.start_ns < s.t_ns <= window.end_ns]
    if not inside or window.width_s <= 0:
        return None
    return math.fsum(value(s) * s.dt_s for s in inside) / window.width_s


def _server_side(
    run: Run, law: little.Law, window: _Window, pools: dict[str, list[float]]
) -> dict[str, Any]:
    """The engine's own gauge against the client's L, and the law by stage."""
    if run.steps:
        server = step_mean(run, window, lambda s: s.running + s.waiting)
    else:
        server = gauge_mean(
            [
                (int(g["t_ns"]), float(g["running"] + g["waiting"]))
                for g in run.gauges
                if "running" in g
            ],
            window.start_ns,
            window.end_ns,
        )
    ttft, tpot = metrics.finite_mean(pools["ttft_service"]), metrics.finite_mean(pools["tpot"])
    outside = little.outside_s(law, server) if server is not None else None
    return {
        "server_L": server,
        "outside_ms": _ms(outside),
        "L_prefill": law.rate * ttft if ttft is not None and law.num_ended else None,
        "L_decode": law.L - law.rate * ttft if ttft is not None and law.num_ended else None,
        "mean_tpot_ms": _ms(tpot),
        "mean_batch": step_mean(run, window, lambda s: s.b),
    }


def _kv_tokens(
    run: Run,
    inside: list[RequestRecord],
    law: little.Law,
    window: _Window,
    pools: dict[str, list[float]],
) -> dict[str, float | None]:
    """Tokens in the KV cache, by Little and by the engine's own count of blocks."""
    done = [r for r in inside if r.status == OK]
    n_in, n_out = _mean([r.n_in or 0 for r in done]), _mean([r.num_tokens for r in done])
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


def _client(run: Run, counts: dict[str, Any]) -> dict[str, Any]:
    end = run.end
    cpu, wall = end.get("client_cpu_s"), end.get("wall_s")
    return {
        "cpu_share": cpu / wall if cpu is not None and wall else None,
        "ceiling_requests_per_s": run.header.get("client", {}).get("ceiling_requests_per_s"),
        "clock": run.header.get("clock"),
    }


def _energy(run: Run, rates: dict[str, Any], window: _Window) -> dict[str, Any] | None:
    power = [(int(g["t_ns"]), float(g["power_w"])) for g in run.gauges if "power_w" in g]
    mean = gauge_mean(power, window.start_ns, window.end_ns)
    if mean is None:
        return None
    rate = rates["output_tokens_per_s"]
    return {"power_w": mean, "joule_per_token": mean / rate if rate else None}


def _warnings(
    run: Run,
    inside: list[RequestRecord],
    law: little.Law,
    window: _Window,
    counts: dict[str, Any],
) -> list[str]:
    found = []
    wrong = sum(
        r.status == OK and r.n_out is not None and r.n_out != sum(k for _, k in r.chunks)
        for r in inside
    )
    if wrong:
        found.append(f"{wrong} requests: usage tells another number of tokens than the chunks")
    if law.verdict == "edge effects":
        found.append("edge effects: lengthen the run; a window of 20 W is wanted")
    load = run.header.get("load", {})
    if load.get("mode") == "closed" and law.W is not None:
        ends = [r.end_ns for r in inside if r.status == OK]
        if little.is_cohort(ends, int(load.get("concurrency", 0)), law.W):
            found.append("lock-step: requests end in bunches; use random output lengths")
    if counts["unfinished"]:
        found.append(f"{counts['unfinished']} requests were still running at the end")
    machine = run.header.get("environment") or {}
    busy, cpus = machine.get("load_average"), machine.get("cpus")
    if busy is not None and cpus and busy > 1.2 * cpus:
        found.append(
            f"busy machine: a load average of {busy:.1f} on {cpus} CPUs before the run began"
        )
    cached = sum(r.cached or 0 for r in inside)
    prompt = sum(r.n_in or 0 for r in inside)
    if prompt and run.header.get("workload", {}).get("cache") == "cold" and cached > 0.02 * prompt:
        found.append(f"prefix cache: {cached / prompt:.0%} of a cold run's prompt tokens were hits")
    return found


def _unsound(
    run: Run,
    json: dict[str, Any],
    identity: little.Identity,
    law: little.Law,
    window: _Window,
    pools: dict[str, list[float]],
) -> list[str]:
    """Why the numbers must not be trusted; empty when they may."""
    reasons = []
    if not identity.holds:
        reasons.append(
            "the run does not add up: integral of N(t) and sum of W differ by "
            f"{identity.relative_error:.2g}"
        )
    planned = run.end.get("planned")
    if planned is not None and planned != len(run.requests) and not run.end.get("interrupted"):
        reasons.append(f"{planned} requests were planned, {len(run.requests)} are on record")
    late, ttft = pools["late"], pools["ttft"]
    limit = LATE_FLOOR_S
    if ttft and math.isfinite(middle := metrics.percentile(ttft, 0.5)):
        limit = max(limit, LATE_SHARE * middle)
    is_open = run.header.get("load", {}).get("mode") == "open"
    # Under a cap the wait for a place counts: s* is the schedule, and lateness is meant.
    if late and is_open and not run.header["load"].get("cap"):
        worst = metrics.percentile(late, 0.99)
        if worst > limit:
            reasons.append(f"the client was late: p99 {worst * 1e3:.1f} ms")
    if window.is_overloaded:
        reasons.append("overloaded: the queue grows, an open loop at this rate diverges")
    if law.verdict == "not steady" and len(run.requests) >= 20:
        reasons.append(f"not steady: Little's residual is {(law.residual or 0):.1%}")
    if json["counts"]["ok"] == 0:
        reasons.append("no request was answered")
    return reasons
