"""Charts with matplotlib: PNG files, and SVG for the page of `html`."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvcli.bench.summary import Summary

PERCEPTION_MS = ((100, "instant"), (1000, "flow of thought"), (10_000, "attention"))
_NINES = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * columns, 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def draw(summaries: Sequence[Summary]) -> Any:
    """One figure: distributions and time of the last run; for several runs the sweep as well."""
    summary = summaries[-1]
    curve = sweep_points(summaries)
    figure, axes = _figure(3 if len(curve) > 1 else 2, 2)
    if not summary.pools:
        _draw_points(axes[0][0], summary)
        for axis in axes.flat[1:]:
            axis.set_visible(False)
        return figure
    _draw_ttft(axes[0][0], summary.pools["ttft"])
    _draw_percentiles(axes[0][1], summary)
    _draw_ecdf(axes[1][0], summary)
    _draw_time(axes[1][1], summary)
    if len(curve) > 1:
        _draw_sweep(axes[2][0], curve)
        _draw_tradeoff(axes[2][1], curve, summary.json["goodput"]["slo_ms"])
    return figure


def png(summaries: Sequence[Summary]) -> bytes:
    buffer = io.BytesIO()
    draw(summaries).savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def svg(summaries: Sequence[Summary]) -> str:
    """Inline SVG, without the XML head; the same samples give the same text."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "nvcli", "svg.fonttype": "none"}):
        draw(summaries).savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def sweep_points(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """What a sweep plots of each point: N, X, e2e and ttft."""
    points = []
    for summary in summaries:
        json = summary.json
        if "counts" not in json or json["throughput"]["requests_per_s"] is None:
            continue
        mean = json["concurrency"]["mean"]
        if mean and json["throughput"]["requests_per_s"] > 0:
            points.append(
                {
                    "N": mean,
                    "X": json["throughput"]["requests_per_s"],
                    "e2e": json["e2e_ms"]["mean"],
                    "ttft": json["ttft_ms"]["p50"],
                }
            )
    return sorted(points, key=lambda p: float(p["N"]))


def _finite_ms(values: Sequence[float]) -> list[float]:
    return [v * 1e3 for v in values if math.isfinite(v)]


def _draw_points(axis: Any, summary: Summary) -> None:
    points = summary.json.get("points") or []
    names = [p["name"] for p in points]
    place = np.arange(len(points))
    axis.barh(place, [p["median_ms"] or 0 for p in points], 0.6, label="measured")
    axis.plot([p["floor_ms"] or 0 for p in points], place, "k|", ms=12, label="floor")
    axis.plot([p["predicted_ms"] or 0 for p in points], place, "rx", label="model")
    axis.set_yticks(place, names)
    axis.set_xlabel("ms")
    axis.legend()


def _draw_ttft(axis: Any, values: Sequence[float]) -> None:
    """A histogram, with what a person perceives."""
    finite = _finite_ms(values)
    if finite:
        axis.hist(finite, bins=40)
        high = max(finite)
        for limit, text in PERCEPTION_MS:
            if limit <= 1.2 * high:
                axis.axvline(limit, color="gray", ls=":")
                place = axis.get_xaxis_transform()  # to the top, whatever is drawn later
                axis.text(limit, 0.98, f" {text}", va="top", fontsize=7, transform=place)
    failed = len(values) - len(finite)
    axis.set_title(f"ttft: {len(finite)} requests" + (f", {failed} failed" if failed else ""))
    axis.set_xlabel("ms")


def _draw_percentiles(axis: Any, summary: Summary) -> None:
    """Latency over the number of nines, to the last percentile the sample allows."""
    from nvcli.bench.metrics import min_samples

    for name in ("ttft", "tpot", "itl", "e2e"):
        ordered = summary.pools[name]
        finite = _finite_ms(ordered)
        if len(finite) < 5 or finite[0] <= 0:
            continue
        shares = (np.arange(len(finite)) + 0.5) / len(ordered)
        nines = -np.log10(1 - shares)
        allowed = [p for p in _NINES if p == 0 or min_samples(p) <= len(ordered)]
        stated = nines <= -math.log10(1 - allowed[-1]) if allowed[-1] > 0 else nines >= 0
        axis.plot(nines[stated], np.array(finite)[stated], label=name)
    axis.set_xticks([-math.log10(1 - p) for p in _NINES[:5]], ["0", "p50", "p90", "p99", "p99.9"])
    axis.set_ylabel("ms")
    axis.set_title("percentiles")
    if axis.lines:
        axis.set_yscale("log")
        axis.legend(fontsize=7)


def _draw_ecdf(axis: Any, summary: Summary) -> None:
    for name in ("e2e", "e2e_service"):
        ordered = summary.pools[name]
        finite = _finite_ms(ordered)
        if finite:
            axis.step(
                finite, np.arange(1, len(finite) + 1) / len(ordered), where="post", label=name
            )
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("ms")
    axis.set_title("share of requests answered")
    if axis.lines:
        axis.legend(fontsize=7)


def _draw_time(axis: Any, summary: Summary) -> None:
    total = summary.json["window"]["total_s"]
    place = (np.arange(len(summary.in_flight)) + 0.5) / max(len(summary.in_flight), 1) * total
    if summary.in_flight:
        axis.step(place, summary.in_flight, where="mid", label="L(t)")
    axis.axvspan(*(share * total for share in summary.window), alpha=0.1)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("s")
    other = axis.twinx()
    if summary.tokens_per_s and summary.in_flight:
        other.step(place, summary.tokens_per_s, where="mid", color="C1")
    other.set_ylabel("tok/s", color="C1")
    other.set_ylim(bottom=0)
    axis.set_title("in flight, and tokens a second")


def _draw_sweep(axis: Any, points: Sequence[dict[str, Any]]) -> None:
    from nvcli.bench.fit import fit_scaling

    n, x = [p["N"] for p in points], [p["X"] for p in points]
    axis.plot(n, x, "o", label="measured")
    fitted = fit_scaling(list(zip(n, x, strict=True)))
    if fitted is not None:
        grid = np.geomspace(max(min(n), 0.5), max(n), 100)
        axis.plot(grid, [fitted(v) for v in grid], label="fit")
        axis.plot(grid, np.minimum(grid * fitted.x1, 1.2 * max(x)), ":", label="N / W_1")
        if fitted.ceiling is not None and fitted.ceiling < 3 * max(x):
            axis.axhline(fitted.ceiling, ls="--", color="gray", label="X_1 / sigma")
        if fitted.knee is not None and fitted.knee <= max(n):
            axis.axvline(fitted.knee, ls=":", color="gray", label="knee")
    axis.set_xscale("log")
    axis.set_xticks(n, [f"{v:.0f}" for v in n])
    axis.set_xticks([], minor=True)
    axis.set_ylim(0, 1.25 * max(x))
    axis.set_xlabel("in flight")
    axis.set_ylabel("req/s")
    axis.set_title("throughput")
    axis.legend(fontsize=7)


def _draw_tradeoff(axis: Any, points: Sequence[dict[str, Any]], limits: dict[str, float]) -> None:
    for name in ("e2e", "ttft"):
        known = [(p["X"], p[name]) for p in points if p[name] and math.isfinite(p[name])]
        if known:
            (line,) = axis.plot(*zip(*known, strict=True), "o-", label=name)
            if limits.get(name, math.inf) < 3 * max(y for _, y in known):
                axis.axhline(limits[name], ls="--", color=line.get_color(), label=f"{name} limit")
    axis.set_xlabel("req/s")
    axis.set_ylabel("ms")
    axis.set_title("latency against throughput")
    if axis.lines:
        axis.legend(fontsize=7)
