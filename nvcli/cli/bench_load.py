"""`nvcli bench serve` and `sweep`: load over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer  # noqa: TC002 - Typer reads the annotations

from nvcli.cli import bench_options as opts  # noqa: TC001 - Typer reads the annotations
from nvcli.cli.bench_bundles import ClientOptions, OutputOptions, WorkloadOptions  # noqa: TC001
from nvcli.cli.bench_shared import (
    KEPT,
    check_positive,
    check_schedule,
    check_warmup,
    finish,
    print_lines,
    stored_run,
)
from nvcli.cli.bench_target import client_options, measure, most_at_once, target_of
from nvcli.cli.bundles import bundled
from nvcli.cli.command import settings_of, typed_names
from nvcli.cli.console import print_text
from nvcli.cli.engine_options import EngineOptions  # noqa: TC001
from nvcli.errors import InterruptedRunError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from nvcli.repl.screen import Screen

SERVE_S, RUNG_S = 60.0, 20.0

SERVE_EXAMPLES = """\
nvcli bench serve                                   nvcli's own server, 8 at once, 60 s
nvcli bench serve http://127.0.0.1:8000 --rate 12   any OpenAI endpoint, Poisson arrivals
nvcli bench serve -m Qwen/Qwen3-8B --rate 4 --slo ttft=300ms,tpot=25ms --out run.html
nvcli bench serve --trace conversation.jsonl --speed 2 --jitter
nvcli bench serve --self-test                       is the client itself to be trusted here?"""

SWEEP_EXAMPLES = """\
nvcli bench sweep                                   c = 1, 2, 4, ... of nvcli's own server
nvcli bench sweep URL --concurrencies 1,8,64,256 --duration 30s
nvcli bench sweep URL --rates 1,2,4,8 --slo ttft=300ms --out sweep.png"""


@bundled
def serve(
    ctx: typer.Context,
    *,
    engine: EngineOptions,
    url: opts.UrlArg = None,
    concurrency: opts.ConcurrencyOpt = None,
    rate: opts.RateOpt = None,
    arrival: opts.ArrivalOpt = None,
    trace: opts.TraceOpt = None,
    speed: opts.SpeedOpt = None,
    jitter: opts.JitterOpt = False,
    requests: opts.RequestsOpt = None,
    duration: opts.DurationOpt = None,
    until_ci: opts.UntilOpt = None,
    repeat: opts.RunsOpt = 1,
    self_test: opts.SelfTestOpt = False,
    workload: WorkloadOptions,
    client: ClientOptions,
    output: OutputOptions,
) -> int:
    """Load an OpenAI endpoint: closed loop with -c (default 8), open loop with --rate.

    Latency counts from the moment a request was meant to be sent.
    """
    screen = settings_of(ctx).screen()
    if self_test:
        _check_alone(ctx)
        return _self_test(screen)
    check_positive(concurrency=concurrency, requests=requests, duration=duration, rate=rate)
    check_positive(timeout=client.timeout, repeat=repeat, speed=speed)
    if arrival is not None and rate is None:
        raise UsageError("--arrival is for an open loop; give --rate", param="arrival")
    if trace is None and (speed is not None or jitter):
        raise UsageError("--speed and --jitter are for a --trace", param="speed")
    if trace is not None and (
        rate is not None
        or workload.in_len
        or workload.out_len
        or workload.data != "random"
        or workload.prefix
        or workload.turns != 1
        or workload.cache == "warm"
    ):
        raise UsageError("a --trace has its own times and lengths", param="trace")
    chosen = client_options(client, workload.workload(), engine)
    output.check()
    from nvcli.bench.online import Point
    from nvcli.bench.precision import LONGEST_S

    if concurrency is None and rate is None and trace is None:
        concurrency = 8
    point = Point(concurrency=concurrency, rate=rate, num_requests=requests, until_ci=until_ci)
    usual = SERVE_S if until_ci is None else LONGEST_S
    point.duration_s = duration or (None if requests or trace else usual)
    check_warmup(client.warmup, point.duration_s)
    if rate is not None:
        check_schedule(rate, point.duration_s, requests)
    if trace is not None:
        from nvcli.bench.traces import read_trace

        point.trace = read_trace(trace).paced(speed=speed or 1.0, jitter=jitter, seed=workload.seed)
    if arrival is not None:
        point.arrival = arrival
    with stored_run() as path:
        with target_of(url, client.served_model_name, engine, screen) as target:
            was_interrupted = measure(target, chosen, [point] * repeat, "serve", path, screen)
        return finish(screen, path, output, was_interrupted=was_interrupted)


@bundled
def sweep(
    ctx: typer.Context,
    *,
    engine: EngineOptions,
    url: opts.UrlArg = None,
    concurrencies: opts.ConcurrenciesOpt = None,
    rates: opts.RatesOpt = None,
    arrival: opts.ArrivalOpt = None,
    duration: opts.DurationOpt = None,
    until_ci: opts.UntilOpt = None,
    workload: WorkloadOptions,
    client: ClientOptions,
    output: OutputOptions,
) -> int:
    """Climb a ladder of loads: throughput, latency, the knee, the most under the limits.

    Every rung takes --duration (default 20s), or as long as --until-ci asks; the ladder ends where
    it gives no more.
    """
    screen = settings_of(ctx).screen()
    check_positive(duration=duration, timeout=client.timeout)
    if concurrencies and rates:
        raise UsageError("--concurrencies and --rates exclude each other", param="rates")
    if arrival is not None and not rates:
        raise UsageError("--arrival is for an open loop; give --rates", param="arrival")
    chosen = client_options(client, workload.workload(), engine)
    output.check()
    from nvcli.bench.online import Point
    from nvcli.bench.precision import LONGEST_S
    from nvcli.bench.sweep import ladder

    seconds = duration or (RUNG_S if until_ci is None else LONGEST_S)
    check_warmup(client.warmup, seconds)
    for rung in rates or ():
        check_schedule(rung, seconds, None)
    check_positive(concurrency=max(concurrencies or [1]))
    with stored_run() as path:
        with target_of(url, client.served_model_name, engine, screen) as target:
            points = [Point(rate=r, duration_s=seconds, until_ci=until_ci) for r in rates or ()]
            for point in points:
                if arrival is not None:
                    point.arrival = arrival
            if not rates:
                top = most_at_once(target.calibration, chosen.workload) or engine.max_num_seqs or 64
                steps = concurrencies or ladder(top)
                points = [
                    Point(concurrency=int(n), duration_s=seconds, until_ci=until_ci) for n in steps
                ]
            was_interrupted = measure(
                target,
                chosen,
                points,
                "sweep",
                path,
                screen,
                stops_early=not (concurrencies or rates),
            )
        return _show_sweep(screen, path, output, was_interrupted=was_interrupted)


def _show_sweep(screen: Screen, path: Path, output: OutputOptions, *, was_interrupted: bool) -> int:
    from nvcli.bench import export, sweep
    from nvcli.bench.record import dump, read_runs
    from nvcli.bench.summary import summarize

    runs = read_runs(path)
    summaries = [summarize(run) for run in runs]
    result = sweep.analyse(summaries)
    if output.json:
        print_text(dump({"id": path.stem, **result.as_json()}))
    else:
        print_lines(screen, sweep.table(result))
    for target in output.out or ():
        export.write(target, path, runs, summaries)
    screen.note(f"saved as {path.stem}; 'nvcli bench report {path.stem}' shows every point")
    if was_interrupted:
        raise InterruptedRunError(KEPT)
    if all(not row["sound"] for row in result.rows) or any(
        row["server_was_gone"] or not row["precise"] for row in result.rows
    ):
        return 6
    has_slo = any(row["has_slo"] for row in result.rows)
    return 5 if has_slo and result.best_under_slo is None else 0


def _check_alone(ctx: typer.Context) -> None:
    """Raises `UsageError` where the self-test, which has its own load, is given one."""
    others = [name for name in typed_names(ctx) if name != "self_test"]
    if others:
        name = "URL" if others[0] == "url" else f"--{others[0].replace('_', '-')}"
        raise UsageError(
            f"{name} has no part in --self-test", hint="It has its own server and load."
        )


def _self_test(screen: Screen) -> int:
    from nvcli.bench.selftest import run_self_test

    found = run_self_test()
    print_lines(screen, found.lines())
    return 0 if found.passes else 6
