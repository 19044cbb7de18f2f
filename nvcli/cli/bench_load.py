"""`nvcli bench serve`, `sweep` and `plan`: load over HTTP, and what to expect of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nvcli.cli import bench as shared
from nvcli.cli import options
from nvcli.cli.app import Command, settings_of
from nvcli.cli.bench import LOAD
from nvcli.cli.console import print_text
from nvcli.cli.options import _FLOAT, INPUT, OUTPUT, _option, _parser
from nvcli.config import DEFAULT_MODEL
from nvcli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nvcli.bench.online import Options, Point, Target
    from nvcli.bench.summary import Summary
    from nvcli.repl.screen import Screen

DURATION_S = 60.0


class ServeCommand(Command):
    examples = """\
nvcli bench serve                                   nvcli's own server, 8 at once, 60 s
nvcli bench serve http://127.0.0.1:8000 --rate 12   any OpenAI endpoint, Poisson arrivals
nvcli bench serve -m Qwen/Qwen3-8B --rate 4 --slo ttft=300ms,tpot=25ms --out run.html
nvcli bench serve --trace conversation.jsonl --speed 2 --jitter
nvcli bench serve --self-test                       is the client itself to be trusted here?"""


class SweepCommand(Command):
    examples = """\
nvcli bench sweep                                   c = 1, 2, 4, ... of nvcli's own server
nvcli bench sweep URL --concurrencies 1,8,64,256 --duration 30s
nvcli bench sweep URL --rates 1,2,4,8 --slo ttft=300ms --out sweep.png"""


class PlanCommand(Command):
    examples = """\
nvcli bench plan Qwen/Qwen3-8B --in-len 1024 --out-len 256 --rate 10
nvcli bench plan Qwen/Qwen3-8B --gpu H200           by its datasheet, without the GPU
nvcli bench plan --explain                          the same in words"""


def _parse_arrival(text: str) -> Any:
    from nvcli.bench.workload import Arrival

    return Arrival.parse(text)


def _parse_list(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not values or not all(0 < v < 1e9 for v in values):
        raise ValueError
    return values


RunsOpt = Annotated[
    int,
    _option(
        "--repeat",
        parser=shared._INT,
        metavar="N",
        group=LOAD,
        help="Run the load N times; from three on 'compare' resamples whole runs.",
    ),
]
UrlArg = Annotated[
    str | None,
    typer.Argument(
        metavar="URL",
        show_default=False,
        help="An OpenAI endpoint, without /v1. Without it nvcli's own server is started.",
    ),
]
RateOpt = Annotated[
    float | None,
    _option(
        "--rate",
        parser=_FLOAT,
        metavar="R",
        group=LOAD,
        help="Open loop: R requests a second, whatever the server does; -c then caps it.",
    ),
]
ArrivalOpt = Annotated[
    Any,
    _option(
        "--arrival",
        parser=_parser(_parse_arrival, "an arrival"),
        metavar="KIND",
        group=LOAD,
        help="Gaps of an open loop: poisson (default), constant, gamma:CV.",
    ),
]
TraceOpt = Annotated[
    Path | None,
    _option(
        "--trace",
        metavar="FILE",
        group=LOAD,
        help="Replay recorded traffic: Mooncake, Qwen-Bailian, Azure or BurstGPT.",
    ),
]
SpeedOpt = Annotated[
    float | None,
    _option(
        "--speed", parser=_FLOAT, metavar="X", group=LOAD, help="Replay a trace X times as fast."
    ),
]
JitterOpt = Annotated[
    bool,
    _option("--jitter", group=LOAD, help="Spread requests of one tick of a trace over the tick."),
]
TimeoutOpt = Annotated[
    float,
    _option(
        "--timeout",
        parser=shared._SECONDS,
        metavar="T",
        group=LOAD,
        help="A request that takes longer failed; default: 300s.",
    ),
]
GpuMetricsOpt = Annotated[
    bool,
    _option("--gpu-metrics", group=LOAD, help="Sample the power and use of the GPU (NVML)."),
]
ServedModelOpt = Annotated[
    str | None,
    _option(
        "--served-model-name",
        metavar="NAME",
        group=LOAD,
        help="What requests to URL call the model; default: the first it lists.",
    ),
]
SelfTestOpt = Annotated[
    bool,
    _option(
        "--self-test",
        group=INPUT,
        help="Measure a stub with a known timetable; exit 6 when the client is off.",
    ),
]
ConcurrenciesOpt = Annotated[
    Any,
    _option(
        "--concurrencies",
        parser=_parser(_parse_list, "a list of numbers"),
        metavar="N,N,...",
        group=LOAD,
        help="The ladder of a closed loop; default: 1, 2, 4, ... to the server's slots.",
    ),
]
RatesOpt = Annotated[
    Any,
    _option(
        "--rates",
        parser=_parser(_parse_list, "a list of numbers"),
        metavar="R,R,...",
        group=LOAD,
        help="The ladder of an open loop, requests a second.",
    ),
]
GpuOpt = Annotated[
    str | None,
    _option("--gpu", metavar="NAME", group=INPUT, help="Plan for this GPU by its datasheet."),
]
ExplainOpt = Annotated[
    bool, _option("--explain", group=OUTPUT, help="Say it in words, with these numbers.")
]


def serve(
    ctx: typer.Context,
    url: UrlArg = None,
    model: options.ModelOpt = None,
    device: options.DeviceOpt = None,
    dtype: options.DTypeOpt = None,
    max_model_len: options.MaxModelLenOpt = None,
    gpu_memory_utilization: options.MemoryOpt = None,
    kv_cache_dtype: options.KVCacheDTypeOpt = None,
    max_num_seqs: options.MaxNumSeqsOpt = None,
    load_format: options.LoadFormatOpt = None,
    concurrency: shared.ConcurrencyOpt = None,
    rate: RateOpt = None,
    arrival: ArrivalOpt = None,
    trace: TraceOpt = None,
    speed: SpeedOpt = None,
    jitter: JitterOpt = False,
    requests: shared.RequestsOpt = None,
    duration: shared.DurationOpt = None,
    in_len: shared.InLenOpt = None,
    out_len: shared.OutLenOpt = None,
    data: shared.DataOpt = "random",
    prefix: shared.PrefixOpt = None,
    cache: shared.CacheOpt = "cold",
    warmup: shared.WarmupOpt = "auto",
    slo: shared.SloOpt = None,
    timeout: TimeoutOpt = 300.0,
    repeat: RunsOpt = 1,
    seed: shared.BenchSeedOpt = 0,
    served_model_name: ServedModelOpt = None,
    gpu_metrics: GpuMetricsOpt = False,
    self_test: SelfTestOpt = False,
    out: shared.OutOpt = None,
    json: shared.JsonOpt = False,
) -> int:
    """Load an OpenAI endpoint: closed loop with -c (default 8), open loop with --rate.

    Latency counts from the moment a request was meant to be sent.
    """
    screen = settings_of(ctx).screen()
    if self_test:
        return _self_test(screen)
    shared._check_positive(
        concurrency=concurrency, requests=requests, duration=duration, rate=rate, timeout=timeout
    )
    shared._check_positive(repeat=repeat)
    if arrival is not None and rate is None:
        raise UsageError("--arrival is for an open loop; give --rate", param="arrival")
    if trace is None and (speed is not None or jitter):
        raise UsageError("--speed and --jitter are for a --trace", param="speed")
    if trace is not None and (rate is not None or in_len or out_len or data != "random" or prefix):
        raise UsageError("a --trace has its own times and lengths", param="trace")
    shared._check_positive(speed=speed)
    workload = shared.make_workload(in_len, out_len, data, prefix, cache, seed)
    shared.check_outs(out)
    from nvcli.bench.online import Options, Point

    if concurrency is None and rate is None and trace is None:
        concurrency = 8
    point = Point(concurrency=concurrency, rate=rate, num_requests=requests)
    point.duration_s = duration or (None if requests or trace else DURATION_S)
    if trace is not None:
        from nvcli.bench.traces import read_trace

        point.trace = read_trace(trace).paced(speed=speed or 1.0, jitter=jitter, seed=seed)
    if arrival is not None:
        point.arrival = arrival
    chosen = Options(workload, timeout, warmup, slo or {}, gpu_metrics)
    fields = _fields(
        model, device, dtype, max_model_len, gpu_memory_utilization, kv_cache_dtype,
        max_num_seqs, load_format,
    )  # fmt: skip
    with _target(url, model, served_model_name, fields, screen) as target:
        path, was_interrupted = _measure(target, chosen, [point] * repeat, "serve", screen)
    from nvcli.bench.offline import Outcome

    outcome = Outcome(path, was_interrupted)
    return shared.finish(screen, outcome, as_json=json, out=out or ())


def sweep(
    ctx: typer.Context,
    url: UrlArg = None,
    model: options.ModelOpt = None,
    device: options.DeviceOpt = None,
    dtype: options.DTypeOpt = None,
    max_model_len: options.MaxModelLenOpt = None,
    gpu_memory_utilization: options.MemoryOpt = None,
    kv_cache_dtype: options.KVCacheDTypeOpt = None,
    max_num_seqs: options.MaxNumSeqsOpt = None,
    load_format: options.LoadFormatOpt = None,
    concurrencies: ConcurrenciesOpt = None,
    rates: RatesOpt = None,
    arrival: ArrivalOpt = None,
    duration: shared.DurationOpt = None,
    in_len: shared.InLenOpt = None,
    out_len: shared.OutLenOpt = None,
    data: shared.DataOpt = "random",
    prefix: shared.PrefixOpt = None,
    cache: shared.CacheOpt = "cold",
    warmup: shared.WarmupOpt = "auto",
    slo: shared.SloOpt = None,
    timeout: TimeoutOpt = 300.0,
    seed: shared.BenchSeedOpt = 0,
    served_model_name: ServedModelOpt = None,
    gpu_metrics: GpuMetricsOpt = False,
    out: shared.OutOpt = None,
    json: shared.JsonOpt = False,
) -> int:
    """Climb a ladder of loads: throughput, latency, the knee, the most under the limits.

    Every rung takes --duration (default 20s); the ladder ends where it gives no more.
    """
    screen = settings_of(ctx).screen()
    shared._check_positive(duration=duration, timeout=timeout)
    if concurrencies and rates:
        raise UsageError("--concurrencies and --rates exclude each other", param="rates")
    if arrival is not None and not rates:
        raise UsageError("--arrival is for an open loop; give --rates", param="arrival")
    workload = shared.make_workload(in_len, out_len, data, prefix, cache, seed)
    shared.check_outs(out)
    from nvcli.bench.online import Options, Point
    from nvcli.bench.sweep import ladder

    chosen = Options(workload, timeout, warmup, slo or {}, gpu_metrics)
    fields = _fields(
        model, device, dtype, max_model_len, gpu_memory_utilization, kv_cache_dtype,
        max_num_seqs, load_format,
    )  # fmt: skip
    seconds = duration or 20.0
    with _target(url, model, served_model_name, fields, screen) as target:
        points = [Point(rate=r, duration_s=seconds) for r in rates or ()]
        for point in points:
            if arrival is not None:
                point.arrival = arrival
        if not rates:
            top = target.calibration.slots if target.calibration else max_num_seqs or 64
            steps = concurrencies or ladder(top)
            points = [Point(concurrency=int(n), duration_s=seconds) for n in steps]
        path, was_interrupted = _measure(
            target, chosen, points, "sweep", screen, stops_early=not (concurrencies or rates)
        )
    return _show_sweep(screen, path, was_interrupted, as_json=json, out=out or ())


def plan(
    ctx: typer.Context,
    model_argument: shared.ModelArg = None,
    model: options.ModelOpt = None,
    device: options.DeviceOpt = None,
    dtype: options.DTypeOpt = None,
    gpu_memory_utilization: options.MemoryOpt = None,
    max_num_seqs: options.MaxNumSeqsOpt = None,
    in_len: shared.InLenOpt = None,
    out_len: shared.OutLenOpt = None,
    rate: RateOpt = None,
    arrival: ArrivalOpt = None,
    gpu: GpuOpt = None,
    explain: ExplainOpt = False,
    json: shared.JsonOpt = False,
) -> int:
    """Predict without load: what fits, what binds, latency and throughput by concurrency or rate.

    Uses the calibration of 'nvcli bench latency' where there is one, else a datasheet.
    """
    shared._check_positive(rate=rate, max_num_seqs=max_num_seqs)
    from nvcli.bench import plan as planning
    from nvcli.bench.planner import make_plan
    from nvcli.bench.record import dump

    found = make_plan(
        model_argument or model or DEFAULT_MODEL,
        gpu=gpu,
        device=device,
        dtype=dtype,
        share=gpu_memory_utilization,
        slots=max_num_seqs,
        n_in=round(in_len.mean) if in_len else 128,
        n_out=round(out_len.mean) if out_len else 64,
    )
    found.rate = rate
    if arrival is not None:
        found.arrival_cv = arrival.cv
    if json:
        print_text(dump(planning.as_json(found)))
    else:
        shared.print_lines(settings_of(ctx).screen(), planning.lines(found, explain=explain))
    return 0


# --- parts ---------------------------------------------------------------------------------------


def _fields(*values: Any) -> dict[str, Any]:
    names = (
        "model", "device", "dtype", "max_model_len", "memory_utilization", "kv_cache_dtype",
        "max_num_seqs", "load_format",
    )  # fmt: skip
    return {k: v for k, v in zip(names, values, strict=True) if v is not None}


@contextlib.contextmanager
def _target(
    url: str | None, model: str | None, name: str | None, fields: dict[str, Any], screen: Screen
) -> Iterator[Target]:
    """The endpoint that was named, or nvcli's own server while the block runs."""
    from nvcli.bench.online import ANY_VOCABULARY, Target, own_target, own_vocabulary, server_flags

    if url is not None:
        engine = [f"--{k.replace('_', '-')}" for k in fields if k != "model"]
        if engine:
            raise UsageError(f"{', '.join(engine)}: the server behind URL has its own engine")
        vocab_size, max_len = own_vocabulary(model) if model else (ANY_VOCABULARY, None)
        url = url if url.startswith("unix:") else _clean_url(url)
        key = os.environ.get("NVCLI_API_KEY")
        yield Target(url, key, name, vocab_size, max_len)
        return
    if name is not None:
        raise UsageError("--served-model-name is for a URL", param="served_model_name")
    from nvcli.bench.children import own_server

    screen.note("starting nvcli serve")
    with own_server(server_flags(fields)) as own:
        yield own_target(own, model or DEFAULT_MODEL, fields.get("max_model_len"))


def _clean_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is no URL", hint="Write http://127.0.0.1:8000.", param="url")
    return url.rstrip("/").removesuffix("/v1")


def _measure(
    target: Target,
    chosen: Options,
    points: Sequence[Point],
    command: str,
    screen: Screen,
    *,
    stops_early: bool = False,
) -> tuple[Path, bool]:
    """Run the points into one file; the file, and whether Ctrl-C ended it."""
    from nvcli.bench.online import Session, client_ceiling
    from nvcli.bench.record import new_id, read_runs, runs_folder
    from nvcli.bench.summary import summarize
    from nvcli.bench.sweep import is_saturated

    path = runs_folder() / f"{new_id()}.jsonl"
    screen.note("measuring what the client can do")
    chosen.ceiling = client_ceiling()

    async def run() -> bool:
        summaries: list[Summary] = []
        async with Session(target, chosen, path, command) as session:
            for point in points:
                screen.note(point.as_json()["text"])
                result = await session.measure(point)
                if result.was_interrupted:
                    return True
                if stops_early:
                    summaries.append(summarize(read_runs(path)[-1]))
                    if is_saturated(summaries):
                        break
        return False

    return path, asyncio.run(run())


def _show_sweep(
    screen: Screen, path: Path, was_interrupted: bool, *, as_json: bool, out: Sequence[Path]
) -> int:
    from nvcli.bench import export, sweep
    from nvcli.bench.record import dump, read_runs
    from nvcli.bench.summary import summarize
    from nvcli.errors import InterruptedRunError

    runs = read_runs(path)
    summaries = [summarize(run) for run in runs]
    result = sweep.analyse(summaries)
    for target in out:
        export.write(target, path, runs, summaries)
    if as_json:
        print_text(dump({"id": path.stem, **result.as_json()}))
    else:
        shared.print_lines(screen, sweep.table(result))
    screen.note(f"saved as {path.stem}; 'nvcli bench report {path.stem}' shows every point")
    if was_interrupted:
        raise InterruptedRunError("interrupted; what was measured is kept")
    if all(not row["sound"] for row in result.rows):
        return 6
    has_slo = any(row["has_slo"] for row in result.rows)
    return 5 if has_slo and result.best_under_slo is None else 0


def _self_test(screen: Screen) -> int:
    from nvcli.bench.selftest import run_self_test

    found = run_self_test()
    shared.print_lines(screen, found.lines())
    return 0 if found.passes else 6


def register(group: typer.Typer) -> None:
    """Add the commands to `nvcli bench`."""
    group.command(cls=ServeCommand)(serve)
    group.command(cls=SweepCommand)(sweep)
    group.command(cls=PlanCommand)(plan)
