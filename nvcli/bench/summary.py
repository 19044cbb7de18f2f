"""From raw samples to every number of the report, under stable names.

`summarize(run)` reads nothing but the stored run. Durations are milliseconds in names that end in
`_ms`, seconds in `_s`. What cannot be stated is None (null in JSON), what lies beyond the timeout
is +inf ("inf"); nothing is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvcli.bench import little, metrics, precision, stats
from nvcli.bench.audit import server_was_gone, unsound, warnings
from nvcli.bench.explain import amdahl_rows, breakdown, limits_json, model_max, model_rows
from nvcli.bench.metrics import METRICS, PERCENTILES, latencies, ms, pool
from nvcli.bench.record import ERROR, OK, TIMEOUT, UNFINISHED
from nvcli.bench.server_side import (
    beyond_limits,
    counter_rate,
    gauge_mean,
    kv_tokens,
    samples_of,
    server_side,
)
from nvcli.bench.window import Window, batches, find_window, rates

if TYPE_CHECKING:
    from nvcli.bench.metrics import Latencies
    from nvcli.bench.record import RequestRecord, Run

NUM_BINS = 60


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
    if not run.requests:
        base["model_rows"] = []
        return Summary(base)
    return _summarize_requests(run, base)


def _point(point: dict[str, Any]) -> dict[str, Any]:
    """A micro-benchmark: its median with an interval, beside floor and prediction."""
    times = sorted(float(t) for t in point.get("t_s", []))
    median = metrics.percentile(times, 0.5) if times else None
    low, high = stats.order_interval(times, 0.5)
    floor, predicted = point.get("floor_s"), point.get("predicted_s")
    return {
        **{k: v for k, v in point.items() if k not in ("t_s", "floor_s", "predicted_s")},
        "repeats": len(times),
        "median_ms": ms(median),
        "low_ms": ms(low),
        "high_ms": ms(high),
        "min_ms": ms(times[0]) if times else None,
        "max_ms": ms(times[-1]) if times else None,
        "floor_ms": ms(floor),
        "predicted_ms": ms(predicted),
        "efficiency": floor / median if floor and median else None,
        "ratio": predicted / median if predicted and median else None,
    }


def _summarize_requests(run: Run, base: dict[str, Any]) -> Summary:
    header = run.header
    ordered = sorted(run.requests, key=lambda r: r.s_star_ns)
    values = {id(r): latencies(r) for r in ordered}
    spans = [(r.s_star_ns, max(r.end_ns, r.s_star_ns)) for r in ordered]
    first, last = spans[0][0], max(end for _, end in spans)
    flight = little.InFlight.of(spans)
    window = find_window(run, ordered, values, flight, last)
    inside = [r for r in ordered if window.start_ns <= r.s_star_ns <= window.end_ns]
    done = [r for r in inside if r.status == OK]
    known = [r for r in done if r.n_in]
    pools = pool(values[id(r)] for r in inside)
    identity_error = little.identity_error([(r.s_star_ns, r.end_ns) for r in ordered])
    law = little.law(spans, window.start_ns, window.end_ns)
    counts = _counts(run, inside)
    slo = {k: float(v) for k, v in (header.get("slo") or {}).items()}
    good = [r for r in inside if metrics.meets(values[id(r)], slo)]
    found = rates(ordered, window)

    json: dict[str, Any] = dict(base)
    json["counts"] = counts
    is_overloaded = window.is_overloaded or bool(run.end.get("overloaded"))
    json["window"] = {
        "start_s": (window.start_ns - first) / 1e9,
        "end_s": (window.end_ns - first) / 1e9,
        "total_s": (last - first) / 1e9,
        "method": window.method,
        "is_overloaded": is_overloaded,
    }
    json["throughput"] = found
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
    json["concurrency"] = {"mean": law.L if window.width_s > 0 else None, "peak": flight.peak}
    json["kv_tokens"] = kv_tokens(run, inside, law, window, pools)
    json["little"] = {
        "L": law.L if law.num_ended else None,
        "lambda": law.rate if law.num_ended else None,
        "W": law.W,
        "residual": law.residual,
        "verdict": law.verdict,
        "identity_error": identity_error,
        **server_side(run, law, window, pools),
    }
    mean_out = metrics.mean([r.num_tokens for r in done])
    json["tail"] = {
        "mean_output_tokens": mean_out,
        "chance_above_itl_p99": metrics.tail_chance(mean_out)
        if mean_out and len(pools["itl"]) >= metrics.min_samples(0.99)
        else None,
    }
    json["breakdown_ms"] = breakdown(done)
    json["beyond"] = beyond_limits(run, inside, law, window)
    json["limits"] = limits_json(
        run, done, law.L if law.num_ended else None, law.W, metrics.finite_mean(pools["tpot"])
    )
    json["client"] = _client(run)
    json["cache"] = _cache(inside)
    json["turns"] = _turns(inside, values)
    json["until_ci"] = _until_ci(run, json)
    json["energy"] = _energy(run, found, window)
    json["model_rows"] = model_rows(run, known, json)
    json["model_max"] = model_max(run, known, json)
    _bound_rate(json)
    json["amdahl"] = amdahl_rows(run, known, json)
    json["warnings"] = warnings(run, inside, law, window, counts, pools)
    gone = server_was_gone(run.requests)
    reasons = unsound(run, json, identity_error, law, pools, gone)
    json["verdict"] = {
        "sound": not reasons,
        "reasons": reasons,
        "server_was_gone": gone is not None,
    }
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
        batches(ordered, window),
        ((window.start_ns - first) / span, (window.end_ns - first) / span),
        reasons,
        missed,
    )


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


def _distribution(ordered: list[float]) -> dict[str, Any]:
    """Mean beside percentiles, never alone, in milliseconds."""
    result: dict[str, Any] = {"count": len(ordered), "mean": ms(metrics.finite_mean(ordered))}
    result["failed"] = sum(math.isinf(v) for v in ordered)
    for name, p in PERCENTILES.items():
        result[name] = ms(metrics.stated_percentile(ordered, p))
    result["max"] = ms(ordered[-1]) if ordered else None
    result["interval"] = {
        name: [ms(v) for v in stats.order_interval(ordered, p)]
        for name, p in PERCENTILES.items()
        if result[name] is not None
    }
    result["linear"] = {
        name: ms(metrics.linear_percentile(ordered, p))
        for name, p in PERCENTILES.items()
        if result[name] is not None
    }
    return result


def _bound_rate(json: dict[str, Any]) -> None:
    """lambda_max is L_max / W with the W of now; a full server is slower, as the model knows."""
    limits, most = json["limits"], json["model_max"]
    if limits and most and limits["lambda_max"] is not None:
        limits["lambda_max"] = min(limits["lambda_max"], most["requests_per_s"])


def _cache(inside: list[RequestRecord]) -> dict[str, Any]:
    """Prompt tokens that were found in the prefix cache; None where the server does not say."""
    known = [r for r in inside if r.cached is not None and r.n_in]
    prompt = sum(r.n_in or 0 for r in known)
    return {"hit_share": sum(r.cached or 0 for r in known) / prompt if prompt else None}


def _turns(
    inside: list[RequestRecord], values: dict[int, Latencies]
) -> list[dict[str, Any]] | None:
    """A row a turn, where conversations have more than one."""
    if max((r.turn for r in inside), default=1) == 1:
        return None
    rows = []
    for turn in sorted({r.turn for r in inside}):
        mine = [r for r in inside if r.turn == turn]
        ttfts = [v for r in mine if (v := values[id(r)].ttft) is not None]
        rows.append(
            {
                "turn": turn,
                "sent": len(mine),
                "n_in": metrics.mean([r.n_in or 0 for r in mine]),
                "ttft_ms": ms(metrics.finite_mean(ttfts)),
                **_cache(mine),
            }
        )
    return rows


def _until_ci(run: Run, json: dict[str, Any]) -> dict[str, Any] | None:
    """How narrow the intervals became, where a share was asked for."""
    asked = run.header.get("until_ci")
    if asked is None:
        return None
    found = precision.widths(json)
    return {
        "asked": asked,
        **found,
        "reached": all(v is not None and v <= asked for v in found.values()),
    }


def _client(run: Run) -> dict[str, Any]:
    end = run.end
    cpu, wall = end.get("client_cpu_s"), end.get("wall_s")
    return {
        "cpu_share": cpu / wall if cpu is not None and wall else None,
        "ceiling_requests_per_s": run.header.get("client", {}).get("ceiling_requests_per_s"),
        "clock": run.header.get("clock"),
        "gc_ms": ms(end.get("gc_s")),
        "gc_longest_ms": ms(end.get("gc_longest_s")),
    }


def _energy(run: Run, rates: dict[str, Any], window: Window) -> dict[str, Any] | None:
    """Of the GPUs over the window: by NVML's energy counter where there is one, else by power."""
    mean = counter_rate(samples_of(run, "energy_j"), window.start_ns, window.end_ns)
    source = "energy counter"
    if mean is None:
        mean = gauge_mean(samples_of(run, "power_w"), window.start_ns, window.end_ns)
        source = "power samples"
    if mean is None:
        return None
    rate = rates["output_tokens_per_s"]
    return {
        "power_w": mean,
        "joule_per_token": mean / rate if rate else None,
        "busy": gauge_mean(samples_of(run, "gpu_busy"), window.start_ns, window.end_ns),
        "source": source,
    }
