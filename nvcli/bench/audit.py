"""Whether a run may be trusted: what is worth a warning, and what makes it unsound (exit 6)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from nvcli.bench import little, metrics
from nvcli.bench.record import OK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvcli.bench.little import Law
    from nvcli.bench.record import RequestRecord, Run
    from nvcli.bench.window import Window

LATE_FLOOR_S, LATE_SHARE = 0.005, 0.05  # a later client than this is not sound
LOST_SHARE = 0.01  # of the requests; below it a broken connection is a failure like others


def warnings(
    run: Run,
    inside: list[RequestRecord],
    law: Law,
    window: Window,
    counts: dict[str, Any],
    pools: dict[str, list[float]],
) -> list[str]:
    found = []
    wrong = sum(
        r.status == OK and r.n_out is not None and r.n_out != sum(k for _, k in r.chunks)
        for r in inside
    )
    if wrong:
        found.append(f"{wrong} requests: usage tells another number of tokens than the chunks")
    errors = Counter(r.error for r in inside if r.error)
    if errors:
        text, number = errors.most_common(1)[0]
        found.append(f"{errors.total()} requests failed; {number} of them: {text}")
    if law.verdict == "edge effects":
        found.append("edge effects: lengthen the run; a window of 20 W is wanted")
    longest = (run.header.get("model") or {}).get("max_model_len")
    cut = sum((r.n_in or 0) + r.num_tokens >= longest for r in inside) if longest else 0
    if cut > 0.01 * len(inside):
        found.append(f"{cut} of {len(inside)} requests fill the context of {longest:,}: cut to it")
    load = run.header.get("load", {})
    if load.get("mode") == "closed" and law.W is not None:
        ends = [r.end_ns for r in inside if r.status == OK]
        if little.is_cohort(ends, int(load.get("concurrency") or 0), law.W):
            found.append("lock-step: requests end in bunches; use random output lengths")
        alone = sum(r.status == OK and r.end_ns > window.end_ns for r in inside)
        if run.end.get("drained") and alone > 0.05 * len(inside):
            found.append(
                f"{alone} of {len(inside)} requests ended in a loop that emptied, faster than "
                "under load: --duration keeps it full"
            )
    late_s = too_late_s(pools)
    if late_s is not None and load.get("mode") == "closed":
        found.append(_late(late_s))
    if counts["unfinished"]:
        found.append(f"{counts['unfinished']} requests were still running at the end")
    has_power = any("power_w" in g or "energy_j" in g for g in run.gauges)
    if run.header.get("gpu_metrics") and not has_power:
        found.append("--gpu-metrics: NVML tells nothing here, so there is no energy")
    machine = run.header.get("environment") or {}
    busy, cpus = machine.get("load_average"), machine.get("cpus")
    if busy is not None and cpus and busy > 1.2 * cpus:
        found.append(
            f"busy machine: a load average of {busy:.1f} on {cpus} CPUs before the run began"
        )
    cached = sum(r.cached or 0 for r in inside)
    prompt = sum(r.n_in or 0 for r in inside)
    workload = run.header.get("workload") or {}
    is_fresh = workload.get("cache") == "cold" and not workload.get("prefix")
    if is_fresh and workload.get("turns", 1) == 1 and prompt and cached > 0.02 * prompt:
        found.append(f"prefix cache: {cached / prompt:.0%} of a cold run's prompt tokens were hits")
    return found


def _late(seconds: float) -> str:
    return f"the client was late: one send in a hundred by {seconds * 1e3:.1f} ms or more"


def _runs_backwards(record: RequestRecord) -> bool:
    """What one monotonic clock cannot give."""
    moments = [record.s_ns, *(t for t, _ in record.chunks)]
    return any(b < a for a, b in itertools.pairwise(moments))


def too_late_s(pools: dict[str, list[float]]) -> float | None:
    """The client's p99 lateness where it is beyond max(5 ms, 5 % of the median ttft)."""
    late, ttft = pools["late"], pools["ttft"]
    limit = LATE_FLOOR_S
    if ttft and math.isfinite(middle := metrics.percentile(ttft, 0.5)):
        limit = max(limit, LATE_SHARE * middle)
    worst = metrics.percentile(late, 0.99) if late else 0.0
    return worst if worst > limit else None


def server_was_gone(records: Sequence[RequestRecord]) -> str | None:
    """How many requests had no server, where that ends what the run can tell: more than one in a
    hundred, or the one that ended last."""
    lost = sum(r.lost for r in records)
    if not lost:
        return None
    if lost <= LOST_SHARE * len(records) and not max(records, key=lambda r: r.end_ns).lost:
        return None
    return f"the server was gone: {lost} of {len(records)} requests found none, or lost it"


def unsound(
    run: Run,
    json: dict[str, Any],
    identity_error: float,
    law: Law,
    pools: dict[str, list[float]],
    gone: str | None,
) -> list[str]:
    """Why the numbers must not be trusted; empty when they may. `gone`: of `server_was_gone`."""
    reasons = []
    if identity_error > little.EXACT:
        reasons.append(
            f"the run does not add up: integral of N(t) and sum of W differ by {identity_error:.2g}"
        )
    mixed = sum(_runs_backwards(r) for r in run.requests)
    if mixed:
        reasons.append(f"{mixed} requests have tokens out of order or before they were sent")
    planned = run.end.get("planned")
    if planned is not None and planned != len(run.requests) and not run.end.get("interrupted"):
        reasons.append(f"{planned} requests were planned, {len(run.requests)} are on record")
    load = run.header.get("load") or {}
    worst = too_late_s(pools)
    # Under a cap the wait for a place counts: s* is the schedule, and lateness is meant.
    if worst is not None and load.get("mode") == "open" and not load.get("cap"):
        reasons.append(_late(worst))
    if json["window"]["is_overloaded"]:
        reasons.append("overloaded: the queue grows, an open loop at this rate diverges")
    if law.verdict == "not steady" and len(run.requests) >= 20:
        reasons.append(f"not steady: Little's residual is {(law.residual or 0):.1%}")
    wanted = json["until_ci"]
    if wanted is not None and not wanted["reached"] and not run.end.get("interrupted"):
        reasons.append(f"the intervals asked for, within {wanted['asked']:.1%}, were not reached")
    if gone is not None:
        reasons.append(gone)
    if json["counts"]["ok"] == 0:
        reasons.append("no request was answered")
    return reasons
