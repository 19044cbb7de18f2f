"""The steady window of a run, and the rates in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvcli.bench import stats
from nvcli.bench.record import OK

if TYPE_CHECKING:
    from nvcli.bench.little import InFlight
    from nvcli.bench.metrics import Latencies
    from nvcli.bench.record import RequestRecord, Run


@dataclass(slots=True)
class Window:
    start_ns: int
    end_ns: int
    method: str
    is_overloaded: bool = False

    @property
    def width_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def find_window(
    run: Run,
    ordered: list[RequestRecord],
    values: dict[int, Latencies],
    flight: InFlight,
    last: int,
) -> Window:
    """From the end of the warm-up to the last send. Requests that run on behind it are counted in
    the latencies (by their send) but not in rates."""
    first, end = ordered[0].s_star_ns, ordered[-1].s_star_ns
    if end <= first:  # one send, or all at once
        return Window(first, last, "whole run")
    warmup = run.header.get("warmup", "auto")
    if warmup != "auto":
        return Window(min(first + int(float(warmup) * 1e9), end), end, f"{float(warmup):g} s cut")
    middle = first + (end - first) // 2
    start = first
    load = run.header.get("load", {})
    places = int(load.get("concurrency") or 0) if load.get("mode") == "closed" else 0
    if len(ordered) >= 2 * places > 0:  # before the last place was taken it was another load
        start = min(ordered[places - 1].s_star_ns, middle)
    done = sorted((r for r in ordered if r.status == OK and r.chunks), key=lambda r: r.end_ns)
    times = [v for r in done if (v := values[id(r)].e2e) is not None and math.isfinite(v)]
    cut = stats.mser5(times)
    if cut:
        start = max(start, min(done[cut - 1].end_ns, middle))
    num_bins = min(200, len(ordered))
    series = flight.series(first, end, num_bins)
    cut = stats.mser5(series)
    start = max(start, min(first + (end - first) * cut // max(num_bins, 1), middle))
    window = Window(start, end, "MSER-5")
    ttfts = [(r.s_star_ns, v) for r in ordered if r.s_star_ns >= start
             and (v := values[id(r)].ttft) is not None and math.isfinite(v)]  # fmt: skip
    if load.get("mode") == "open" and len(series) >= 20:
        grid = [float(i) for i in range(len(series) - cut)]
        window.is_overloaded = stats.slope_is_up(grid, series[cut:]) and stats.slope_is_up(
            [float(t - first) for t, _ in ttfts], [v for _, v in ttfts]
        )
    return window


def rates(ordered: list[RequestRecord], window: Window) -> dict[str, Any]:
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
        interval = stats.mean_interval(batches(ordered, window)["out_tok_s"])
    return {
        "requests_per_s": len(done) / width,
        "output_tokens_per_s": out,
        "total_tokens_per_s": out + prompt,
        "output_interval": list(interval) if interval else None,
    }


def batches(ordered: list[RequestRecord], window: Window) -> dict[str, list[float]]:
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
