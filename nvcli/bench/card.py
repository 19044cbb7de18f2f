"""The report on a terminal: one card of at most 100 columns, plain text without escapes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from nvcli.bench.text import Wide, ecdf, number, percent, spark, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nvcli.bench.summary import Summary

WIDTH = 100
STRIP, PLOT = 60, 40  # columns of what is drawn
_STRIP_MARGIN, _PLOT_MARGIN = 25, 11  # its name or scale before it, and what stands behind
_ROWS = ("ttft", "tpot", "itl", "stall", "e2e")


def card(summary: Summary) -> list[str]:
    """The report of one run."""
    return [part for line in _lines(summary) for part in _wrap(line)]


def _wrap(line: str) -> list[str]:
    """Break a line of parts between them; what is one part stays whole."""
    if isinstance(line, Wide):
        return [line]
    parts = []
    while len(line) > WIDTH:
        cut = max(line.rfind(" · ", 12, WIDTH), line.rfind(" │ ", 12, WIDTH))
        if cut < 0:
            break
        parts.append(line[:cut])
        line = " " * 10 + line[cut + 3 :]
    return [*parts, line]


def _lines(summary: Summary) -> list[str]:
    json = summary.json
    lines = [_title(json), *_machine(json)]
    if json.get("points"):
        lines += ["", *points_table(json["points"])]
    if "counts" not in json:
        return [*lines, *_interrupted(json)]
    lines += [_load(json), _window(json), *_rate(json), "", *_table(json)]
    if (tail := json["tail"]).get("chance_above_itl_p99") is not None:
        lines.append(
            f"tail      a {tail['mean_output_tokens']:.0f}-token reply meets a gap above itl p99 "
            f"with probability {100 * tail['chance_above_itl_p99']:.0f} %"
        )
    lines += ["", *_turns(json), *_time(json), *_amdahl(json), *_little(json), *_limits(json)]
    lines += [*_beyond(json), *_model(json), *_client(json), *_energy(json)]
    lines += _plot(summary.pools.get("e2e", []))
    lines += _strips(summary)
    lines += [f"warning   {text}" for text in json["warnings"]]
    lines += [f"UNSOUND   {text}" for text in summary.unsound]
    lines += [f"MISSED    {text}" for text in summary.missed]
    return [*lines, *_interrupted(json)]


def _interrupted(json: dict[str, Any]) -> list[str]:
    return ["interrupted: these are the samples until then"] if json["interrupted"] else []


def _title(json: dict[str, Any]) -> str:
    model = json.get("model") or {}
    dtype, weights = model.get("dtype"), model.get("weights_dtype")
    stored = f"weights in {weights}" if weights not in (None, dtype) else None
    environment = json.get("environment") or {}
    workload = json.get("workload") or {}
    parts = [
        " ".join(p for p in (model.get("name"), dtype, stored) if p),
        environment.get("device"),
        f"nvcli {environment['nvcli']}" if environment.get("nvcli") else None,
        f"run {json['id']}",
        f"seed {workload['seed']}" if workload.get("seed") is not None else None,
        f"workload {workload['hash']} ({workload.get('text', '?')})"
        if workload.get("hash")
        else None,
    ]
    return " · ".join(p for p in parts if p)


def _machine(json: dict[str, Any]) -> list[str]:
    """What can change a number without a change of code."""
    e = json.get("environment") or {}
    gpu = e.get("gpu") or {}
    parts = []
    if e.get("cpus"):
        parts.append(f"{e['cpus']} CPUs, load {number(e.get('load_average'))}")
    if e.get("virtualised"):
        parts.append("virtualised")
    if e.get("governor"):
        parts.append(f"governor {e['governor']}")
    if gpu.get("driver"):
        parts.append(f"driver {gpu['driver']}")
    if gpu.get("power_cap_w"):
        parts.append(f"power cap {gpu['power_cap_w']:.0f} W")
    if gpu.get("sm_clock_mhz"):
        parts.append(f"SM clock {gpu['sm_clock_mhz']} of {gpu.get('max_sm_clock_mhz')} MHz")
    if gpu.get("mig"):
        parts.append("MIG")
    parts += [f"{name} {version}" for name, version in (e.get("versions") or {}).items()]
    return [f"machine   {' · '.join(parts)}"] if parts else []


def _load(json: dict[str, Any]) -> str:
    load, late = json.get("load") or {}, json["late_ms"]
    return (
        f"load      {load.get('text', '?')} · peak {json['concurrency']['peak']} · "
        f"late p99 {number(late['p99'])} ms, max {number(late['max'])} ms"
    )


def _window(json: dict[str, Any]) -> str:
    window, counts = json["window"], json["counts"]
    text = (
        f"window    steady {window['end_s'] - window['start_s']:.1f} s of "
        f"{window['total_s']:.1f} s (first {window['start_s']:.1f} s cut, {window['method']}) · "
        f"{counts['sent']:,} sent · {counts['ok']:,} ok"
    )
    for name in ("failed", "timeout", "unfinished"):
        if counts[name]:
            text += f" · {counts[name]:,} {name}"
    return text


def _rate(json: dict[str, Any]) -> list[str]:
    rate, good = json["throughput"], json["goodput"]
    text = (
        f"rate      {number(rate['requests_per_s'])} req/s · "
        f"{number(rate['output_tokens_per_s'])} tok/s out"
    )
    if rate["output_interval"]:
        low, high = rate["output_interval"]
        text += f" [{number(low)}–{number(high)}]"
    text += f" · {number(rate['total_tokens_per_s'])} tok/s in and out"
    if json["cache"]["hit_share"] is not None:
        text += f" · prefix cache {percent(json['cache']['hit_share'])} of prompt tokens"
    lines = [text]
    if good["slo_ms"]:
        limits = " ".join(f"{k}≤{v:g}" for k, v in good["slo_ms"].items())
        text = (
            f"goodput   {number(good['requests_per_s'])} req/s · {percent(good['share_of_sent'])} "
            f"of sent ({limits} ms)"
        )
        if good["token_attainment"] is not None:
            text += f" · {percent(good['token_attainment'])} of tokens by their deadline"
        lines.append(text)
    return lines


def _table(json: dict[str, Any]) -> list[str]:
    header = (
        f"{'ms':9}{'mean':>9}{'p50':>9}{'p90':>9}{'p99':>10}  {'[95 % CI of p99]':18}"
        f"{'p99.9':>9}{'max':>10}"
    )
    rows = []
    for name in _ROWS:
        row = json[f"{name}_ms"]
        if not row["count"]:
            continue
        interval = _interval(row["interval"].get("p99"))
        line = (
            f"{name:9}{number(row['mean']):>9}{number(row['p50']):>9}{number(row['p90']):>9}"
            f"{number(row['p99']):>10}  {interval:18}{number(row['p999']):>9}"
            f"{number(row['max']):>10}"
        )
        values = [
            *(("mean", number(row["mean"])), ("p50", number(row["p50"]))),
            *(("p90", number(row["p90"])), ("p99", number(row["p99"]))),
            ("95 % CI of p99", interval),
            *(("p99.9", number(row["p999"])), ("max", number(row["max"]))),
        ]
        rows.append((line, f"{name} ms", values))
    return table(header, rows)


def _interval(pair: list[float | None] | None) -> str:
    if pair is None:
        return ""
    low, high = pair
    if high is None:
        return f"[≥ {number(low)}]"
    return f"[{number(low)}–{number(high)}]"


def _time(json: dict[str, Any]) -> list[str]:
    parts = json["breakdown_ms"]
    if not parts:
        return []
    text = " │ ".join(f"{k.replace('_', ' ')} {number(v)}" for k, v in parts.items())
    return [f"time      {text}   ms, mean per request (p99s do not add, means do)"]


def _turns(json: dict[str, Any]) -> list[str]:
    parts = [
        f"{t['turn']}: ttft {number(t['ttft_ms'])} ms of {number(t['n_in'])} tokens, "
        f"{percent(t['hit_share'])} cached"
        for t in json["turns"] or ()
    ]
    return [f"turns     {' │ '.join(parts)}"] if parts else []


def _amdahl(json: dict[str, Any]) -> list[str]:
    found = json.get("amdahl")
    if not found:
        return []
    free = {k: v for k, v in found["if_free"].items() if v is None or v > 1.005}
    parts = [f"{k.replace('_', ' ')} free → ×{number(v)}" for k, v in list(free.items())[:3] if v]
    if found.get("decode_twice_as_fast"):
        parts.append(f"decode 2x faster → ×{number(found['decode_twice_as_fast'])}")
    if found.get("batching_ceiling"):
        parts.append(f"batching ceiling 1/σ = {number(found['batching_ceiling'])}")
    return [f"amdahl    {' · '.join(parts)}"] if parts else []


def _little(json: dict[str, Any]) -> list[str]:
    law = json["little"]
    if law["W"] is None:
        return [f"little    {law['verdict']}"]
    mark = "✔" if law["verdict"] == "good" else "✘"
    text = (
        f"little    L {number(law['L'])} · λW {number(law['lambda'])}×{number(law['W'])} s = "
        f"{number(law['lambda'] * law['W'])} · residual {percent(law['residual'])} {mark} "
        f"{law['verdict']}"
    )
    lines = [text]
    if law["server_L"] is not None and law["outside_ms"] is not None:
        lines.append(
            f"          server gauge {number(law['server_L'])} → "
            f"{number(law['outside_ms'])} ms per request outside it"
        )
    return lines


def _limits(json: dict[str, Any]) -> list[str]:
    limits, kv = json.get("limits"), json.get("kv_tokens") or {}
    lines = []
    if kv.get("held") is not None:
        lines.append(
            f"kv        {number(kv['by_little'])} tokens by Little · {number(kv['held'])} held"
        )
    if not limits:
        return lines
    rows = " · ".join(
        f"{row['resource']} {row['allows']:,.0f}"
        for row in limits["rows"]
        if row.get("allows") is not None
    )
    text = f"l_max     {limits['l_max']:,.0f} by {limits['binds']} · {rows}"
    if limits["in_use"] is not None:
        text += f" · in use {percent(limits['in_use'])}"
    if limits["lambda_max"] is not None:
        text += f" · λ_max {number(limits['lambda_max'])}/s"
    return [*lines, text]


def _beyond(json: dict[str, Any]) -> list[str]:
    """What a server does with more than it holds: each its own number."""
    found = json["beyond"]
    parts = []
    if found["queue_ms"] is not None:
        parts.append(f"queue wait, mean {number(found['queue_ms'])} ms")
    if found["queue_p99_ms"] is not None:
        parts.append(f"p99 {number(found['queue_p99_ms'])} ms")
    if found["preemptions"] is not None:
        parts.append(f"{found['preemptions']:,.0f} preemptions")
    parts.append(f"{found['rejected']:,} rejected")
    return [f"beyond    {' · '.join(parts)}"]


def _model(json: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for row in json.get("model_rows") or []:
        name = row["name"].removesuffix("_ms").replace("output_tokens_per_s", "tok/s")
        text = f"{name:6} predicted {number(row['predicted'])} (×{number(row['ratio'])})"
        if row["floor"] is not None:
            text += f" · floor {number(row['floor'])}, efficiency {percent(row['efficiency'])}"
        lead = f"model     {row['source']}: " if not lines else " " * (12 + len(row["source"]))
        lines.append(lead + text)
    return lines


def _client(json: dict[str, Any]) -> list[str]:
    client = json["client"]
    parts = []
    if client["cpu_share"] is not None:
        parts.append(f"client CPU {percent(client['cpu_share'])}")
    if client["ceiling_requests_per_s"] is not None:
        parts.append(f"client ceiling {number(client['ceiling_requests_per_s'])} req/s")
    if client["gc_ms"] is not None:
        parts.append(
            f"garbage collector {number(client['gc_ms'])} ms in all, longest "
            f"{number(client['gc_longest_ms'])}"
        )
    if client["clock"]:
        parts.append(f"clock {client['clock']['name']}, {client['clock']['resolution_ns']:g} ns")
    return [f"client    {' · '.join(parts)}"] if parts else []


def _energy(json: dict[str, Any]) -> list[str]:
    energy = json.get("energy")
    if not energy:
        return []
    text = f"energy    {number(energy['power_w'])} W · {number(energy['joule_per_token'])} J/token"
    if energy["busy"] is not None:
        text += f" · GPU busy {number(energy['busy'])} % of the time"
    return [f"{text} (NVML's {energy['source']})"]


def _strips(summary: Summary) -> list[str]:
    lines: list[str] = []
    width = len(summary.in_flight)
    for name, values in (("L(t)", summary.in_flight), ("tok/s", summary.tokens_per_s)):
        if values:
            lines.append(_picture(partial(_strip, name, values)))
    if width:
        lines.append(_picture(partial(_steady, summary.window)))
    return lines


def _plot(ordered: Sequence[float]) -> list[str]:
    lines = ["", "e2e, share of requests"]
    for index, line in enumerate(ecdf(ordered)):
        narrow = partial(_plot_line, ordered, index)
        lines.append(Wide.of(line, PLOT + _PLOT_MARGIN, narrow))
    return lines if len(lines) > 2 else []


def _plot_line(ordered: Sequence[float], index: int, width: int) -> str:
    return ecdf(ordered, max(width - _PLOT_MARGIN, 4))[index]


def _picture(draw: Callable[[int], str]) -> Wide:
    """A line of `STRIP` columns and its margins, of fewer where there is no room for them."""
    return Wide.of(
        draw(STRIP), STRIP + _STRIP_MARGIN, lambda width: draw(max(width - _STRIP_MARGIN, 4))
    )


def _strip(name: str, values: Sequence[float], columns: int) -> str:
    return f"{name:9} {spark(values, columns)}  max {number(max(values))}"


def _steady(window: tuple[float, float], columns: int) -> str:
    a, b = (round(share * columns) for share in window)
    return f"{'':10}{' ' * a}│{'─' * max(b - a - 2, 0)}│ steady window"


def points_table(points: Sequence[dict[str, Any]]) -> list[str]:
    """Micro-benchmarks: measured, floor, prediction."""
    header = (
        f"{'step':24}{'median ms':>11}  {'[95 % CI]':16}{'tok/s':>9}{'floor':>9}{'eff.':>8}"
        f"{'model':>9}{'ratio':>7}"
    )
    rows = []
    for point in points:
        low, high = point["low_ms"], point["high_ms"]
        interval = f"[{number(low)}–{number(high)}]" if None not in (low, high) else ""
        tokens, median = point.get("tokens"), point["median_ms"]
        speed = tokens / median * 1e3 if tokens and median else None
        line = (
            f"{point['name']:24}{number(median):>11}  {interval:16}{number(speed):>9}"
            f"{number(point['floor_ms']):>9}{percent(point['efficiency']):>8}"
            f"{number(point['predicted_ms']):>9}{number(point['ratio']):>7}"
        )
        values = [
            *(("", f"{number(median)} ms"), ("95 % CI", interval), ("tok/s", number(speed))),
            *(("floor", number(point["floor_ms"])), ("eff.", percent(point["efficiency"]))),
            *(("model", number(point["predicted_ms"])), ("ratio", number(point["ratio"]))),
        ]
        rows.append((line, point["name"], values))
    return table(header, rows)
