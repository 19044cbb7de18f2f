"""Where the time went, what binds, and what physics predicts: the rows beside the measurements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nvcli.bench.limits import binding, limit_rows
from nvcli.bench.metrics import mean
from nvcli.bench.perf_model import PerfModel
from nvcli.bench.stats import equal_parts
from nvcli.bench.workload import parse_prefix

if TYPE_CHECKING:
    from nvcli.bench.perf_model import Hardware
    from nvcli.bench.record import RequestRecord, Run
    from nvcli.bench.under_load import Traffic


def model_of(header: dict[str, Any]) -> tuple[PerfModel, Hardware] | None:
    """The model that was stored with a run; None for a foreign endpoint."""
    stored = header.get("perf_model")
    return PerfModel.from_json(stored) if stored else None


def breakdown(done: list[RequestRecord]) -> dict[str, float | None]:
    """Mean milliseconds of a request by source: they add up to its mean e2e."""
    rows: dict[str, list[float]] = {}

    def add(name: str, ns: int) -> None:
        rows.setdefault(name, []).append(ns / 1e6)

    for r in done:
        if not r.chunks:
            continue
        add("client_late", r.s_ns - r.s_star_ns)
        first, last = r.chunks[0][0], r.chunks[-1][0]
        server = r.server
        if all(k in server for k in ("arrive", "sched", "first")):
            add("queue", server["sched"] - server["arrive"])
            add("prefill", server["first"] - server["sched"])
            add("hand_over", (first - r.s_ns) - (server["first"] - server["arrive"]))
        else:
            add("queue_and_prefill", first - r.s_ns)
        add("decode", last - first)
    return {name: math.fsum(v) / len(v) for name, v in rows.items()}


def limits_json(
    run: Run, done: list[RequestRecord], load: float | None, wait: float | None, tpot: float | None
) -> dict[str, Any] | None:
    """The L_max table for the lengths that were measured, with what is in use now."""
    stored = run.header.get("resources")
    n_in, n_out = mean([r.n_in or 0 for r in done]), mean([r.num_tokens for r in done])
    if not stored or not n_in or not n_out:
        return None
    prefix, groups = parse_prefix((run.header.get("workload") or {}).get("prefix"))
    rows = limit_rows(
        **stored,
        n_in=n_in,
        n_out=n_out,
        prefix=min(prefix, n_in),
        groups=groups,
        cpu_s_per_token=(run.header.get("client") or {}).get("cpu_s_per_token"),
        tokens_per_s=1 / tpot if tpot else None,
    )
    least = binding(rows)
    l_max = least["allows"]
    return {
        "rows": rows,
        "l_max": l_max,
        "binds": least["resource"],
        "in_use": load / l_max if load is not None and l_max else None,
        "lambda_max": l_max / wait if wait else None,
    }


def model_rows(run: Run, done: list[RequestRecord], json: dict[str, Any]) -> list[dict[str, Any]]:
    """Measured beside predicted beside floor, for ttft, tpot and tokens a second; the prediction is
    for the lengths of the requests that count."""
    found = model_of(run.header)
    load = run.header.get("load") or {}
    if found is None or not done:
        return []
    model, hardware = found
    traffic = _traffic(model, done)
    slots = int(run.header.get("slots") or 1)
    if load.get("mode") == "open":
        if load.get("rate") is None:  # all at once is no rate
            return []
        cv = float(1.0 if load.get("arrival_cv") is None else load["arrival_cv"])
        predicted = traffic.open(float(load["rate"]), slots, cv)
    else:
        predicted = traffic.closed(int(load.get("concurrency") or 1), slots)
    if predicted is None:
        return []
    running = min(max(json["concurrency"]["mean"] or 1.0, 1.0), slots)
    prefill_floor = model.prefill_floor(hardware, traffic.n_in - traffic.cached)
    rows = [
        ("ttft_ms", predicted.ttft_s * 1e3, prefill_floor * 1e3),
        ("e2e_ms", predicted.e2e_s * 1e3, None),
    ]
    if predicted.tpot_s is not None:
        floor = model.decode_floor(hardware, running, traffic.context) * 1e3
        rows.insert(1, ("tpot_ms", predicted.tpot_s * 1e3, floor))
    result = [_row(name, json[name]["mean"], value, floor) for name, value, floor in rows]
    rate = json["throughput"]["output_tokens_per_s"]
    if rate is not None:
        result.append(_row("output_tokens_per_s", rate, predicted.output_tokens_per_s, None))
    for row in result:
        row["source"] = model.cost.source
    return result


def model_max(run: Run, done: list[RequestRecord], json: dict[str, Any]) -> dict[str, Any] | None:
    """The most that the model gives, with every slot taken; and what binds at the measured L."""
    found = model_of(run.header)
    if found is None or not done:
        return None
    slots = int(run.header.get("slots") or 1)
    running = min(max(json["concurrency"]["mean"] or 1.0, 1.0), slots)
    return {
        "slots": slots,
        "requests_per_s": _traffic(found[0], done).throughput(slots),
        "is_compute_bound": found[0].is_compute_bound(running),
    }


def _traffic(model: PerfModel, done: list[RequestRecord]) -> Traffic:
    """The requests in the mean. What the prefix cache held of a prompt needs no prefill."""
    n_in = max(round(math.fsum(r.n_in or 0 for r in done) / len(done)), 1)
    n_out = math.fsum(r.num_tokens for r in done) / len(done)
    cached = min(round(math.fsum(r.cached or 0 for r in done) / len(done)), n_in - 1)
    return model.under(n_in, n_out, cached, equal_parts([r.n_in or 0 for r in done]))


def _row(
    name: str, measured: float | None, predicted: float, floor: float | None
) -> dict[str, Any]:
    return {
        "name": name,
        "measured": measured,
        "predicted": predicted,
        "ratio": predicted / measured if measured else None,
        "floor": floor,
        "efficiency": floor / measured if floor is not None and measured else None,
    }


def amdahl_rows(run: Run, done: list[RequestRecord], json: dict[str, Any]) -> dict[str, Any] | None:
    """ "If stage k were free": speed-up of the mean request, and the ceiling of batching."""
    parts = {k: v for k, v in json["breakdown_ms"].items() if v is not None and v > 0}
    whole = math.fsum(parts.values())
    if whole <= 0:
        return None
    result: dict[str, Any] = {
        "if_free": {k: whole / (whole - v) if whole > v else None for k, v in parts.items()}
    }
    decode = parts.get("decode")
    if decode:
        result["decode_twice_as_fast"] = whole / (whole - decode / 2)
    found = model_of(run.header)
    if found is not None and done:
        traffic = _traffic(found[0], done)
        n_in, n_out = traffic.n_in, traffic.n_out
        launch = found[0].cost.fixed * max(n_out - 1, 0) * 1e3
        if 0 < launch < whole:  # CPU, kernel launches, scheduling: what no byte or FLOP explains
            result["if_free"]["launch_and_scheduling"] = whole / (whole - launch)
        sigma = found[0].serial_share(n_in, n_out)
        result["sigma"] = sigma
        result["batching_ceiling"] = 1 / sigma if sigma > 0 else None
    return result
