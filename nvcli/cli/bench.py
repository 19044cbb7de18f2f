"""`nvcli bench`: the card, and the verbs that measure in this process."""

from __future__ import annotations

import typer

from nvcli.cli import bench_load, bench_plan, bench_report, engine_options
from nvcli.cli import bench_options as opts
from nvcli.cli.bench_bundles import OutputOptions, WorkloadOptions  # noqa: TC001
from nvcli.cli.bench_shared import check_positive, check_warmup, finish, loaded, stored_run
from nvcli.cli.bundles import bundled
from nvcli.cli.command import Command, GroupThatRuns, settings_of, typed_names
from nvcli.cli.engine_options import EngineOptions, one_model
from nvcli.errors import UsageError

EXAMPLES = """\
nvcli bench                                        the card: a minute on the built-in model
nvcli bench latency                                single steps: prefill, decode
nvcli bench throughput Qwen/Qwen3-0.6B             every slot busy, no HTTP
nvcli bench serve --rate 4 --slo ttft=300ms        nvcli's own server, Poisson arrivals
nvcli bench sweep http://127.0.0.1:8000            a ladder of loads on any OpenAI endpoint
nvcli bench plan Qwen/Qwen3-8B --gpu H200          what to expect, without load
nvcli bench report last                            the last run again, from its samples
nvcli bench report last --out run.html             as a page, .png, .csv, .md, .json, .hgrm
nvcli bench compare A B --gate 'e2e.p99<=+5%'      two runs; exit 5 when the gate fails"""

LATENCY_EXAMPLES = """\
nvcli bench latency                                the built-in model
nvcli bench latency Qwen/Qwen3-0.6B --repeat 10
nvcli bench latency Qwen/Qwen3-8B --load-format dummy --out steps.csv"""

THROUGHPUT_EXAMPLES = """\
nvcli bench throughput                             the built-in model
nvcli bench throughput Qwen/Qwen3-8B --in-len 1024 --out-len 256
nvcli bench throughput -c 64 --duration 60s --json | jq .throughput"""


bench_app = typer.Typer(
    cls=GroupThatRuns, epilog=EXAMPLES, rich_markup_mode=None, add_completion=False
)


@bench_app.callback(invoke_without_command=True)
@bundled
def bench(
    ctx: typer.Context,
    *,
    engine: EngineOptions,
    in_len: opts.InLenOpt = None,
    out_len: opts.OutLenOpt = None,
    seed: opts.BenchSeedOpt = 0,
    output: OutputOptions,
) -> int | None:
    """Measure, explain and predict latency.

    Without a verb: a minute on the model, one card. Single steps, every slot busy, and what the
    physical model says of both.
    """
    if ctx.invoked_subcommand is not None:
        given = typed_names(ctx)
        if given:
            raise UsageError(
                f"--{given[0].replace('_', '-')} goes after {ctx.invoked_subcommand}",
                param=given[0],
            )
        return None
    from nvcli.bench.workload import Lengths, Workload

    # Equal lengths would run in lock-step.
    workload = Workload(
        in_len=in_len or Lengths.parse("64:192"),
        out_len=out_len or Lengths.parse("32:96"),
        seed=seed,
    )
    screen = settings_of(ctx).screen()
    output.check()
    from nvcli.bench.offline import run_card

    with stored_run() as path:
        with loaded(engine.config(), screen) as model:
            was_interrupted = run_card(model, workload, progress=screen.note, seed=seed, path=path)
        return finish(screen, path, output, was_interrupted=was_interrupted)


@bench_app.command(cls=Command, epilog=LATENCY_EXAMPLES)
@bundled
def latency(
    ctx: typer.Context,
    *,
    engine: EngineOptions,
    model_argument: engine_options.ModelArg = None,
    repeat: opts.RepeatOpt = 5,
    seed: opts.BenchSeedOpt = 0,
    output: OutputOptions,
) -> int:
    """Single steps in the process: prefill by length, decode by batch and context.

    Writes the calibration that the other verbs predict with.
    """
    check_positive(repeat=repeat)
    screen = settings_of(ctx).screen()
    output.check(has_requests=False)
    from nvcli.bench.offline import run_latency

    with stored_run() as path:
        with loaded(engine.config(one_model(ctx, model_argument, engine.model)), screen) as model:
            was_interrupted = run_latency(
                model, repeats=repeat, seed=seed, progress=screen.note, path=path
            )
        return finish(screen, path, output, was_interrupted=was_interrupted)


@bench_app.command(cls=Command, epilog=THROUGHPUT_EXAMPLES)
@bundled
def throughput(
    ctx: typer.Context,
    *,
    engine: EngineOptions,
    model_argument: engine_options.ModelArg = None,
    concurrency: opts.ConcurrencyOpt = None,
    requests: opts.RequestsOpt = None,
    duration: opts.DurationOpt = None,
    until_ci: opts.UntilOpt = None,
    repeat: opts.RunsOpt = 1,
    warmup: opts.WarmupOpt = "auto",
    slo: opts.SloOpt = None,
    gpu_metrics: opts.GpuMetricsOpt = False,
    workload: WorkloadOptions,
    output: OutputOptions,
) -> int:
    """Requests straight into the engine, without HTTP: every slot busy, every step logged.

    Without --requests or --duration: 512 requests, 64 on the CPU.
    """
    check_positive(concurrency=concurrency, requests=requests, duration=duration, repeat=repeat)
    check_warmup(warmup, duration)
    chosen = workload.workload()
    screen = settings_of(ctx).screen()
    output.check()
    from nvcli.bench.offline import run_throughput
    from nvcli.bench.precision import LONGEST_S

    with stored_run() as path:
        with loaded(engine.config(one_model(ctx, model_argument, engine.model)), screen) as model:
            if requests is None and duration is None:
                if until_ci is None:
                    requests = 64 if model.device == "cpu" else 512
                else:
                    duration = LONGEST_S
            for _ in range(repeat):
                was_interrupted = run_throughput(
                    model,
                    chosen,
                    concurrency=concurrency or model.llm.max_num_seqs,
                    num_requests=requests,
                    duration_s=duration,
                    until_ci=until_ci,
                    warmup=warmup,
                    slo=slo or {},
                    with_gpu=gpu_metrics,
                    path=path,
                )
                if was_interrupted:
                    break
        return finish(screen, path, output, was_interrupted=was_interrupted)


for verb, examples in (
    (bench_report.report, bench_report.REPORT_EXAMPLES),
    (bench_report.compare, bench_report.COMPARE_EXAMPLES),
    (bench_load.serve, bench_load.SERVE_EXAMPLES),
    (bench_load.sweep, bench_load.SWEEP_EXAMPLES),
    (bench_plan.plan, bench_plan.EXAMPLES),
):
    bench_app.command(cls=Command, epilog=examples)(verb)
