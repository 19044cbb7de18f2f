"""Stored runs as files: the suffix of `--out FILE` says which kind.

.json the report's numbers · .jsonl the raw samples · .csv a row a request · .md a table for an
issue · .html one page with charts and numbers · .png the charts · .hgrm HdrHistogram's percentile
table of e2e, in milliseconds.
"""

from __future__ import annotations

import csv
import html
import io
import math
import re
from typing import TYPE_CHECKING, Any

from nvcli.bench import repeats
from nvcli.bench.card import card
from nvcli.bench.charts import png, svg
from nvcli.bench.metrics import DEFINITIONS, METRICS, latencies
from nvcli.bench.record import dump
from nvcli.bench.text import number
from nvcli.errors import NvcliError, UsageError
from nvcli.paths import why_not_writable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from nvcli.bench.record import Run
    from nvcli.bench.summary import Summary

_DEVIATION = re.compile(rb"StdDeviation += +[\d.]+\]")
SUFFIXES = (".json", ".jsonl", ".csv", ".md", ".html", ".png", ".hgrm")


def check_target(path: Path, *, has_requests: bool = True) -> None:
    """Before anything is measured. Raises `UsageError` for a name of no known kind, a folder, a
    place in no folder or where nothing may be written, and for a .hgrm of a run without requests.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--out {path}: the name must end in {', '.join(SUFFIXES)}", param="out")
    if path.suffix == ".hgrm":
        if not has_requests:
            raise UsageError(f"--out {path}: single steps have no requests to write", param="out")
        _histogram_class()
    if reason := why_not_writable(path):
        raise UsageError(f"--out {path}: {reason}", param="out")


def write(path: Path, source: Path, runs: Sequence[Run], summaries: Sequence[Summary]) -> None:
    """Write one file. Raises `NvcliError` when the disk refuses."""
    check_target(path)
    makers: dict[str, Callable[[], str | bytes]] = {
        ".json": lambda: report_json(summaries) + "\n",
        ".jsonl": source.read_bytes,
        ".csv": lambda: to_csv(runs),
        ".md": lambda: to_markdown(summaries),
        ".html": lambda: to_html(summaries),
        ".png": lambda: png(summaries),
        ".hgrm": lambda: to_hgrm(summaries[-1]),
    }
    content = makers[path.suffix]()
    try:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    except OSError as exc:
        raise NvcliError(f"cannot write {path}: {exc.strerror or exc}") from exc


def report_json(summaries: Sequence[Summary]) -> str:
    """One object: the run's numbers, and those of the other runs of the file under `runs`."""
    last = dict(summaries[-1].json)
    if len(summaries) > 1:
        last["runs"] = [s.json for s in summaries]
        last["repeats"] = repeats.repeats(summaries)
    return dump(last)


def to_csv(runs: Sequence[Run]) -> str:
    """A row a request; times in milliseconds, `inf` for a failure, blank for what is not there."""
    names = [m for m in METRICS if m != "itl"]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        ["run", "id", "status", "s_star_ns", "s_ns", "end_ns", "n_in", "n_out", "cached"]
        + [f"{m}_ms" for m in names]
    )
    for run in runs:
        for r in run.requests:
            value = latencies(r)
            row: list[Any] = [run.id, r.id, r.status, r.s_star_ns, r.s_ns, r.end_ns]
            row += [r.n_in, r.num_tokens, r.cached]
            for name in names:
                sample = getattr(value, name)
                row.append("" if sample is None else f"{sample * 1e3:.6g}")
            writer.writerow(row)
    return buffer.getvalue()


def to_markdown(summaries: Sequence[Summary]) -> str:
    parts = []
    for summary in summaries:
        json = summary.json
        parts.append(f"### Run {json['id']}\n\n```\n" + "\n".join(card(summary)) + "\n```\n")
        if "counts" not in json:
            continue
        rows = ["| ms | mean | p50 | p90 | p99 | p99.9 | max |", "|---|--:|--:|--:|--:|--:|--:|"]
        for name in METRICS:
            row = json[f"{name}_ms"]
            if row["count"]:
                cells = [number(row[k]) for k in ("mean", "p50", "p90", "p99", "p999", "max")]
                rows.append(f"| {name} | {' | '.join(cells)} |")
        parts.append("\n".join(rows) + "\n")
    if over_runs := repeats.lines(summaries):
        parts.append("```\n" + "\n".join(over_runs).strip("\n") + "\n```\n")
    return "\n".join(parts)


def to_html(summaries: Sequence[Summary]) -> str:
    """One page without links to anything outside."""
    blocks = [card(summary) for summary in summaries]
    if over_runs := repeats.lines(summaries):
        blocks.append(over_runs)
    cards = "\n".join(f"<pre>{html.escape(chr(10).join(block))}</pre>" for block in blocks)
    data = report_json(summaries).replace("<", "\\u003c")
    title = html.escape(f"nvcli bench {summaries[-1].json['id']}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font-family:sans-serif;max-width:70em;margin:1em auto;padding:0 1em}"
        "pre{overflow-x:auto;line-height:1.25}svg{max-width:100%;height:auto}</style></head><body>"
        f"<h1>{title}</h1>\n{svg(summaries)}\n{cards}\n<h2>Definitions</h2>"
        f"<pre>{html.escape(DEFINITIONS)}</pre>\n"
        f'<script type="application/json" id="report">{data}</script>\n</body></html>\n'
    )


def _histogram_class() -> Any:
    try:
        from hdrh.histogram import HdrHistogram
    except ImportError as exc:
        raise UsageError(
            ".hgrm files need the hdrhistogram package", hint="pip install 'nvcli[bench]'."
        ) from exc
    return HdrHistogram


def to_hgrm(summary: Summary) -> bytes:
    """HdrHistogram's percentile distribution of e2e. Failures count at the largest value it can
    hold, an hour. Raises `UsageError` where there is nothing to show.
    """
    values = summary.pools.get("e2e", [])
    if not values:
        raise UsageError("the run has no request to write as .hgrm")
    hour_us = 3_600_000_000
    histogram = _histogram_class()(1, hour_us, 3)
    for value in values:
        us = hour_us if math.isinf(value) else min(max(round(value * 1e6), 1), hour_us)
        histogram.record_value(us)
    buffer = io.BytesIO()
    histogram.output_percentile_distribution(buffer, 1000.0)  # to milliseconds
    # The library scales the mean and leaves the deviation beside it in the unit of the counts.
    return _DEVIATION.sub(
        b"StdDeviation = %12.3f]" % (histogram.get_stddev() / 1000.0), buffer.getvalue()
    )
