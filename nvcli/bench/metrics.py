"""Latencies of requests and their percentiles. Pure functions, seconds throughout.

Every number starts at s*, the moment a request was *meant* to be sent, so a client or server that
stalls cannot hide the requests that waited behind the stall (coordinated omission); `_service`
variants start when it was really sent. A failure is +inf: it is in the percentiles, never dropped.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvcli.bench.record import OK, UNFINISHED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nvcli.bench.record import RequestRecord

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}
REQUEST_METRICS = ("ttft", "ttft_service", "tpot", "stall", "e2e", "e2e_service", "late", "conn")
METRICS = (*REQUEST_METRICS[:3], "itl", *REQUEST_METRICS[3:])
_CONFIDENCE = 0.95

DEFINITIONS = """\
s*            the moment a request was meant to be sent; s: when it was sent
c_i, k_i, n   arrival of the i-th chunk with at least one token, its tokens, all output tokens
ttft          c_1 - s*            ttft_service   c_1 - s
e2e           c_last - s*         e2e_service    c_last - s   [DONE] and usage never move the end
tpot          (c_last - c_1) / (n - k_1), one a request; blank when that leaves no token
itl           (c_i - c_i-1) / k_i, k_i times: pooled over tokens
stall         the longest gap between two chunks of a request: what spreading hides
late          s - s*: the client's own delay; conn: connecting, where no connection was open
percentile    nearest rank: the smallest sample with at least p N samples at or below it; blank
              where p^N > 5 %: p50 needs 5 samples, p90 29, p95 59, p99 299, p99.9 2,995
[95 % CI]     order statistics of ranks q(2.5 %) and q(97.5 %) + 1 of Binomial(N, p)
failures      errors and timeouts count as +inf in ttft and e2e, and not in means
rate          completions in (a, b] over b - a; tokens by their own arrival in (a, b]
goodput       requests sent in (a, b] that meet every limit, over b - a; share: over all sent
              a request of one token meets a tpot limit
attainment    share of tokens i with c_i <= s* + ttft_slo + (i - 1) tpot_slo
L, lambda, W  mean in flight, completions a second, mean e2e of them, all over (a, b];
              residual (L - lambda W) / L: up to 3 % good, to 10 % edge effects, more: not steady
identity      integral of N(t) dt = sum of W_i over the whole run, exactly
window        starts after the warm-up (MSER-5 of e2e and of L(t), at most half), of a closed loop
              not before its last place was taken; ends with the last send that counts. By then
              the places stay taken until all of these have ended, save under --requests over HTTP
beyond        queue wait of the engine, else requests waiting over lambda; preemptions;
              refusals (HTTP 429, 503)
L_max         requests that the tightest resource allows; lambda_max: L_max / W, and no more than
              the model gives with every slot taken
repeats       Student's interval over the means of three or more runs of one load
efficiency    floor / measured, the floor being bytes / bandwidth or FLOPs / peak
ratio         predicted / measured
J/token       NVML's energy counter, else its power, over output tokens of the window"""


@dataclass(frozen=True, slots=True)
class Latencies:
    """What one request's client saw, in seconds; None where it does not exist."""

    ttft: float | None
    ttft_service: float | None
    tpot: float | None
    stall: float | None
    e2e: float | None
    e2e_service: float | None
    late: float
    conn: float | None
    itl: tuple[float, ...]


def latencies(record: RequestRecord) -> Latencies:
    """The values of section "definitions" for one request."""
    s_star, s = record.s_star_ns, record.s_ns
    late = (s - s_star) / 1e9
    conn = None if record.conn_ns is None else record.conn_ns / 1e9
    if record.status == UNFINISHED:
        return Latencies(None, None, None, None, None, None, late, conn, ())
    chunks = [(t, k) for t, k in record.chunks if k > 0]
    if record.status != OK or not chunks:
        inf = math.inf
        return Latencies(inf, inf, None, None, inf, inf, late, conn, ())
    first, last = chunks[0], chunks[-1]
    spread = record.num_tokens - first[1]
    gaps = [(b[0] - a[0], b[1]) for a, b in itertools.pairwise(chunks)]
    return Latencies(
        ttft=(first[0] - s_star) / 1e9,
        ttft_service=(first[0] - s) / 1e9,
        tpot=(last[0] - first[0]) / 1e9 / spread if spread > 0 else None,
        stall=max(gap for gap, _ in gaps) / 1e9 if gaps else None,
        e2e=(last[0] - s_star) / 1e9,
        e2e_service=(last[0] - s) / 1e9,
        late=late,
        conn=conn,
        itl=tuple(gap / k / 1e9 for gap, k in gaps for _ in range(k)),
    )


def pool(values: Iterable[Latencies]) -> dict[str, list[float]]:
    """Sorted samples of every metric; what does not exist is left out."""
    pools: dict[str, list[float]] = {name: [] for name in METRICS}
    for value in values:
        for name in REQUEST_METRICS:
            sample = getattr(value, name)
            if sample is not None:
                pools[name].append(sample)
        pools["itl"].extend(value.itl)
    for samples in pools.values():
        samples.sort()
    return pools


# --- percentiles ---------------------------------------------------------------------------------


def rank(num_samples: int, p: float) -> int:
    """1-based nearest rank: the least r with r >= p N."""
    return min(max(math.ceil(p * num_samples - 1e-9), 1), num_samples)


def percentile(ordered: Sequence[float], p: float) -> float:
    """Nearest rank of samples in ascending order: a value that happened, +inf among them."""
    assert ordered, "no samples"
    return ordered[rank(len(ordered), p) - 1]


def linear_percentile(ordered: Sequence[float], p: float) -> float:
    """Interpolated between neighbours, as numpy and other tools do; +inf once it touches one."""
    place = p * (len(ordered) - 1)
    low = math.floor(place)
    share = place - low
    if share == 0:
        return ordered[low]
    below, above = ordered[low], ordered[low + 1]
    between: float = below + (above - below) * share
    return float(above) if math.isinf(above) else between


def min_samples(p: float) -> int:
    """Samples before a percentile may be stated: one lies above it with 95 % confidence."""
    return math.ceil(math.log(1 - _CONFIDENCE) / math.log(p))


def stated_percentile(ordered: Sequence[float], p: float) -> float | None:
    """The percentile, or None where the sample does not allow it."""
    return percentile(ordered, p) if len(ordered) >= min_samples(p) else None


def mean(values: Sequence[float] | Sequence[int]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def finite_mean(values: Sequence[float]) -> float | None:
    """Mean of what is finite; None when nothing is."""
    return mean([v for v in values if math.isfinite(v)])


def ms(seconds: float | None) -> float | None:
    """Milliseconds of what may not be there."""
    return None if seconds is None else seconds * 1e3


def tail_chance(num_tokens: float) -> float:
    """Chance that a reply of n tokens meets a gap of the slowest hundredth: 1 - 0.99^n."""
    return float(1 - 0.99**num_tokens)


# --- limits (SLO) --------------------------------------------------------------------------------


def parse_slo(text: str) -> dict[str, float]:
    """`ttft=300ms,tpot=25ms` -> seconds by metric. Raises `UsageError`."""
    from nvcli.errors import UsageError

    limits = {}
    for part in text.split(","):
        name, is_set, value = part.strip().partition("=")
        if name not in ("ttft", "tpot", "e2e", "stall") or not is_set:
            raise UsageError(
                f"{part.strip()!r} is no limit", hint="Write ttft=300ms,tpot=25ms,e2e=5s,stall=1s."
            )
        if name in limits:
            raise UsageError(f"two limits of {name}")
        limits[name] = parse_seconds(value)
    return limits


def parse_seconds(text: str) -> float:
    """`300ms`, `2.5s`, `1m`, `60` (seconds). Raises `UsageError`."""
    from nvcli.errors import UsageError

    text = text.strip()
    units = (("ms", 1e-3), ("us", 1e-6), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("", 1.0))
    unit, scale = next(pair for pair in units if text.endswith(pair[0]))
    try:
        value = float(text.removesuffix(unit)) * scale
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"{text!r} is no time", hint="Write 300ms, 2.5s, 1m.")
    return value


def meets(value: Latencies, slo: dict[str, float]) -> bool:
    """Whether a request meets every limit. What does not exist (tpot of one token) passes."""
    if value.e2e is None or math.isinf(value.e2e):
        return False
    return all((v := getattr(value, name)) is None or v <= limit for name, limit in slo.items())


def attainment(records: Iterable[RequestRecord], ttft: float, tpot: float) -> float | None:
    """Share of tokens that came by s* + ttft + (i - 1) tpot; a failure misses all it was to give.

    None when there are no tokens to judge.
    """
    met = total = 0
    for record in records:
        if record.status == UNFINISHED:
            continue
        index = 0
        for t_ns, k in record.chunks:
            for _ in range(k):
                deadline = record.s_star_ns + (ttft + index * tpot) * 1e9
                met += record.status == OK and t_ns <= deadline
                index += 1
        total += max(index, 1)
    return met / total if total else None
