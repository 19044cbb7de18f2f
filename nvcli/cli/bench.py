"""`nvcli bench`: the verbs, their options, and what they print."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nvcli.cli import options  # noqa: TC001 - Typer reads the annotations
from nvcli.cli.app import Command, Group, settings_of
from nvcli.cli.console import print_text
from nvcli.cli.options import _INT, ARGUMENTS, INPUT, OUTPUT, _option, _parser
from nvcli.config import DEFAULT_MODEL, EngineConfig
from nvcli.errors import InterruptedRunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nvcli.bench.engine_run import Bench
    from nvcli.bench.offline import Outcome
    from nvcli.bench.record import Run
    from nvcli.bench.summary import Summary
    from nvcli.bench.workload import Workload
    from nvcli.repl.screen import Screen


class BenchGroup(Group):
    examples = """\
nvcli bench                                        the card: a minute on the built-in model
nvcli bench latency                                single steps: prefill, decode
nvcli bench throughput Qwen/Qwen3-0.6B             every slot busy, no HTTP
nvcli bench serve --rate 4 --slo ttft=300ms        nvcli's own server, Poisson arrivals
nvcli bench sweep http://127.0.0.1:8000            a ladder of loads on any OpenAI endpoint
nvcli bench plan Qwen/Qwen3-8B --gpu H200          what to expect, without load
nvcli bench report last                            the last run again, from its samples
nvcli bench report last --out run.html             as a page, .png, .csv, .md, .json, .hgrm
nvcli bench compare A B --gate 'e2e.p99<=+5%'      two runs; exit 5 when the gate fails"""


class LatencyCommand(Command):
    examples = """\
nvcli bench latency                                the built-in model
nvcli bench latency Qwen/Qwen3-0.6B --repeat 10
nvcli bench latency Qwen/Qwen3-8B --load-format dummy --out steps.csv"""


class ThroughputCommand(Command):
    examples = """\
nvcli bench throughput                             the built-in model
nvcli bench throughput Qwen/Qwen3-8B --in-len 1024 --out-len 256
nvcli bench throughput -c 64 --duration 60s --json | jq .throughput"""


class ReportCommand(Command):
    examples = """\
nvcli bench report last                       the run that was stored last
nvcli bench report a1f3c2 --json | jq .ttft_ms
nvcli bench report run.jsonl --out run.html --out run.png
nvcli bench report --define                   every definition"""


class CompareCommand(Command):
    examples = """\
nvcli bench compare before.jsonl after.jsonl
nvcli bench compare A B --gate 'e2e.p99<=+5%' --gate 'out_tok_s>=-3%' --gate 'goodput>=0.95'"""


bench_app = typer.Typer(cls=BenchGroup, rich_markup_mode=None, add_completion=False)

LOAD = "Load"

_LENGTHS = _parser(lambda text: _parse_lengths(text), "a length")
_SECONDS = _parser(lambda text: _parse_seconds(text), "a time")
_SLO = _parser(lambda text: _parse_slo(text), "a limit")


def _parse_lengths(text: str) -> Any:
    from nvcli.bench.workload import Lengths

    return Lengths.parse(text)


def _parse_seconds(text: str) -> float:
    from nvcli.bench.metrics import parse_seconds

    return parse_seconds(str(text))  # a default comes as the number it is


def _parse_slo(text: str) -> dict[str, float]:
    from nvcli.bench.metrics import parse_slo

    return parse_slo(text)


def _parse_cache(text: str) -> str:
    if text not in ("cold", "keep"):
        raise ValueError
    return text


def _parse_warmup(text: str) -> str | float:
    return text if text == "auto" else _parse_seconds(text)


ModelArg = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", show_default=False, help="As -m: a folder or a Hugging Face id."
    ),
]
ConcurrencyOpt = Annotated[
    int | None,
    _option(
        "-c",
        "--concurrency",
        parser=_INT,
        metavar="N",
        group=LOAD,
        help="Closed loop: so many requests at once.",
    ),
]
RequestsOpt = Annotated[
    int | None,
    _option("--requests", parser=_INT, metavar="N", group=LOAD, help="End after N requests."),
]
DurationOpt = Annotated[
    float | None,
    _option("--duration", parser=_SECONDS, metavar="T", group=LOAD, help="Send for 60s, 2m."),
]
InLenOpt = Annotated[
    Any,
    _option(
        "--in-len",
        parser=_LENGTHS,
        metavar="LEN",
        group=LOAD,
        help="Prompt tokens: 1024, 128:2048, geometric:MEAN, lognormal:MEAN:CV. "
        "Default: 128 (card: 64:192).",
    ),
]
OutLenOpt = Annotated[
    Any,
    _option(
        "--out-len",
        parser=_LENGTHS,
        metavar="LEN",
        group=LOAD,
        help="Answer tokens, in the same ways. Default: 64 (card: 32:96).",
    ),
]
DataOpt = Annotated[
    str,
    _option(
        "--data",
        metavar="SOURCE",
        group=LOAD,
        help="random token ids (default), jsonl:PATH or sharegpt:PATH.",
    ),
]
PrefixOpt = Annotated[
    str | None,
    _option(
        "--prefix",
        metavar="LEN:GROUPS",
        group=LOAD,
        help="Put one of GROUPS shared prefixes of LEN tokens before every prompt.",
    ),
]
CacheOpt = Annotated[
    str,
    _option(
        "--cache",
        parser=_parser(_parse_cache, "cold or keep"),
        metavar="cold|keep",
        group=LOAD,
        help="cold: other prompts in every run (default); keep: the same, so the cache may help.",
    ),
]
WarmupOpt = Annotated[
    Any,
    _option(
        "--warmup",
        parser=_parser(_parse_warmup, "auto or a time"),
        metavar="auto|T",
        group=LOAD,
        help="What the report cuts at the start; auto (default) finds it.",
    ),
]
SloOpt = Annotated[
    Any,
    _option(
        "--slo",
        parser=_SLO,
        metavar="LIMITS",
        group=LOAD,
        help="ttft=300ms,tpot=25ms,e2e=5s,stall=1s; exit 5 when more than 1 % miss them.",
    ),
]
BenchSeedOpt = Annotated[
    int,
    _option("--seed", parser=_INT, metavar="N", group=LOAD, help="Same seed, same workload."),
]
RepeatOpt = Annotated[
    int,
    _option("--repeat", parser=_INT, metavar="N", group=LOAD, help="Measure so often; default 5."),
]
OutOpt = Annotated[
    list[Path] | None,
    _option(
        "--out",
        metavar="FILE",
        group=OUTPUT,
        help="Write .json .jsonl .csv .md .html .png or .hgrm, by its suffix; may be given again.",
    ),
]
JsonOpt = Annotated[
    bool, _option("--json", group=OUTPUT, help="One object with every number, stable names.")
]
RunArg = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        show_default=False,
        rich_help_panel=ARGUMENTS,
        help="A .jsonl file, the id of a stored run, or last.",
    ),
]
DefineOpt = Annotated[
    bool, _option("--define", group=OUTPUT, help="Print how every number is defined.")
]
AArg = Annotated[str, typer.Argument(metavar="A", help="The run to compare with.")]
BArg = Annotated[str, typer.Argument(metavar="B", help="The run in question.")]
GateOpt = Annotated[
    list[str] | None,
    _option(
        "--gate",
        metavar="RULE",
        group=INPUT,
        help="e2e.p99<=+5%, out_tok_s>=-3%, ttft.p99<=300ms, goodput>=0.95; may be given again.",
    ),
]
LenientOpt = Annotated[
    bool,
    _option("--lenient", group=INPUT, help="A gate that nothing can be said about passes."),
]
AnyWorkloadOpt = Annotated[
    bool, _option("--any-workload", group=INPUT, help="Compare although the workloads differ.")
]


@bench_app.callback(invoke_without_command=True)
def bench(
    ctx: typer.Context,
    model: options.ModelOpt = None,
    device: options.DeviceOpt = None,
    dtype: options.DTypeOpt = None,
    max_model_len: options.MaxModelLenOpt = None,
    gpu_memory_utilization: options.MemoryOpt = None,
    kv_cache_dtype: options.KVCacheDTypeOpt = None,
    max_num_seqs: options.MaxNumSeqsOpt = None,
    load_format: options.LoadFormatOpt = None,
    in_len: InLenOpt = None,
    out_len: OutLenOpt = None,
    seed: BenchSeedOpt = 0,
    out: OutOpt = None,
    json: JsonOpt = False,
) -> int | None:
    """Measure, explain and predict latency.

    Without a verb: a minute on the model, one card. Single steps, every slot busy, and what the
    physical model says of both.
    """
    if ctx.invoked_subcommand is not None:
        sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
        given = [n for n, s in sources.items() if s is not None and s.name == "COMMANDLINE"]
        if given:
            raise UsageError(
                f"--{given[0].replace('_', '-')} goes after {ctx.invoked_subcommand}",
                param=given[0],
            )
        return None
    from nvcli.bench.workload import Lengths

    # Equal lengths would run in lock-step.
    workload = make_workload(
        in_len or Lengths.parse("64:192"),
        out_len or Lengths.parse("32:96"),
        "random",
        None,
        "cold",
        seed,
    )
    config = engine_config(
        model,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        memory_utilization=gpu_memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max_num_seqs,
        load_format=load_format,
    )
    screen = settings_of(ctx).screen()
    check_outs(out)
    from nvcli.bench.offline import run_card

    with loaded(config, screen) as engine:
        outcome = run_card(engine, workload, progress=screen.note, seed=seed)
    return finish(screen, outcome, as_json=json, out=out or ())


@bench_app.command(cls=LatencyCommand)
def latency(
    ctx: typer.Context,
    model_argument: ModelArg = None,
    model: options.ModelOpt = None,
    device: options.DeviceOpt = None,
    dtype: options.DTypeOpt = None,
    max_model_len: options.MaxModelLenOpt = None,
    gpu_memory_utilization: options.MemoryOpt = None,
    kv_cache_dtype: options.KVCacheDTypeOpt = None,
    max_num_seqs: options.MaxNumSeqsOpt = None,
    load_format: options.LoadFormatOpt = None,
    repeat: RepeatOpt = 5,
    seed: BenchSeedOpt = 0,
    out: OutOpt = None,
    json: JsonOpt = False,
) -> int:
    """Single steps in the process: prefill by length, decode by batch and context.

    Writes the calibration that the other verbs predict with.
    """
    _check_positive(repeat=repeat)
    config = engine_config(
        model_argument or model,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        memory_utilization=gpu_memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max_num_seqs,
        load_format=load_format,
    )
    screen = settings_of(ctx).screen()
    check_outs(out)
    from nvcli.bench.offline import run_latency

    with loaded(config, screen) as bench:
        outcome = run_latency(bench, repeats=repeat, seed=seed, progress=screen.note, path=None)
    return finish(screen, outcome, as_json=json, out=out or ())


@bench_app.command(cls=ThroughputCommand)
def throughput(
    ctx: typer.Context,
    model_argument: ModelArg = None,
    model: options.ModelOpt = None,
    device: options.DeviceOpt = None,
    dtype: options.DTypeOpt = None,
    max_model_len: options.MaxModelLenOpt = None,
    gpu_memory_utilization: options.MemoryOpt = None,
    kv_cache_dtype: options.KVCacheDTypeOpt = None,
    max_num_seqs: options.MaxNumSeqsOpt = None,
    load_format: options.LoadFormatOpt = None,
    concurrency: ConcurrencyOpt = None,
    requests: RequestsOpt = None,
    duration: DurationOpt = None,
    in_len: InLenOpt = None,
    out_len: OutLenOpt = None,
    data: DataOpt = "random",
    prefix: PrefixOpt = None,
    cache: CacheOpt = "cold",
    warmup: WarmupOpt = "auto",
    slo: SloOpt = None,
    seed: BenchSeedOpt = 0,
    out: OutOpt = None,
    json: JsonOpt = False,
) -> int:
    """Requests straight into the engine, without HTTP: every slot busy, every step logged.

    Without --requests or --duration: 512 requests, 64 on the CPU.
    """
    _check_positive(concurrency=concurrency, requests=requests, duration=duration)
    workload = make_workload(in_len, out_len, data, prefix, cache, seed)
    config = engine_config(
        model_argument or model,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        memory_utilization=gpu_memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max_num_seqs,
        load_format=load_format,
    )
    screen = settings_of(ctx).screen()
    check_outs(out)
    from nvcli.bench.offline import run_throughput

    with loaded(config, screen) as bench:
        if requests is None and duration is None:
            requests = 64 if bench.device == "cpu" else 512
        outcome = run_throughput(
            bench,
            workload,
            concurrency=concurrency or bench.llm.max_num_seqs,
            num_requests=requests,
            duration_s=duration,
            warmup=warmup,
            slo=slo or {},
            path=None,
        )
    return finish(screen, outcome, as_json=json, out=out or ())


@bench_app.command(cls=ReportCommand)
def report(
    ctx: typer.Context,
    run: RunArg = None,
    define: DefineOpt = False,
    out: OutOpt = None,
    json: JsonOpt = False,
) -> int:
    """Compute every number of a stored run again, and show it.

    Exit 5: a limit was missed. Exit 6: the measurement is not sound.
    """
    if define:
        from nvcli.bench.metrics import DEFINITIONS

        print_text(DEFINITIONS)
        return 0
    if run is None:
        raise UsageError("name a run", hint="'nvcli bench report last' shows the last one.")
    from nvcli.bench.record import find_run

    return show(settings_of(ctx).screen(), find_run(run), as_json=json, out=out or ())


@bench_app.command(cls=CompareCommand)
def compare(
    ctx: typer.Context,
    a: AArg,
    b: BArg,
    gate: GateOpt = None,
    lenient: LenientOpt = False,
    any_workload: AnyWorkloadOpt = False,
    json: JsonOpt = False,
) -> int:
    """Whether B differs from A, with confidence; gates decide the exit code.

    Exit 5: a gate failed. Exit 6: not sound, workloads differ, or a gate stays open.
    """
    from nvcli.bench import compare as comparing
    from nvcli.bench.record import dump, find_run, read_runs

    gates = [comparing.parse_gate(text) for text in gate or ()]
    found = comparing.compare(
        read_runs(find_run(a)), read_runs(find_run(b)), gates, any_workload=any_workload
    )
    if json:
        print_text(dump({"comparisons": comparing.as_json(found)}))
    else:
        print_lines(settings_of(ctx).screen(), comparing.table(found))
    return comparing.exit_code(found, is_lenient=lenient)


# --- what the verbs share ------------------------------------------------------------------------


def engine_config(model: str | None, **fields: Any) -> EngineConfig:
    return EngineConfig.from_options(model=model or DEFAULT_MODEL, **fields)


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be over 0", param=name)


def check_outs(out: Sequence[Path] | None) -> None:
    if out:
        from nvcli.bench.export import check_suffix

        for target in out:
            check_suffix(target)


def make_workload(
    in_len: Any, out_len: Any, data: str, prefix: str | None, cache: str, seed: int
) -> Workload:
    from nvcli.bench.workload import Lengths, Workload, read_prompts

    if data != "random" and in_len is not None:
        raise UsageError("--in-len is for --data random; a file has its own prompts")
    workload = Workload(
        in_len=in_len or Lengths.parse("128"),
        out_len=out_len or Lengths.parse("64"),
        data=data,
        prefix=prefix,
        seed=seed,
        cache=cache,
    )
    if data != "random":
        if prefix is not None:
            raise UsageError("--prefix is for --data random")
        read_prompts(data)  # a bad file is told before the model loads
    return workload


@contextlib.contextmanager
def loaded(config: EngineConfig, screen: Screen) -> Iterator[Bench]:
    """The model in this process, closed at the end."""
    from nvcli.cli.console import Spinner

    with Spinner(screen, f"loading {config.model}"):
        from nvcli.bench.engine_run import Bench
        from nvcli.llm import LLM  # torch comes with it

        llm = LLM(config=config)
    with llm:
        yield Bench.of(llm)


def finish(screen: Screen, outcome: Outcome, *, as_json: bool, out: Sequence[Path]) -> int:
    """Show what was stored; Ctrl-C shows what there is, then ends as an interrupted run."""
    code = show(screen, outcome.path, as_json=as_json, out=out)
    screen.note(f"saved as {outcome.path.stem}; 'nvcli bench report {outcome.path.stem}'")
    if outcome.was_interrupted:
        raise InterruptedRunError("interrupted; what was measured is kept")
    return code


def show(screen: Screen, path: Path, *, as_json: bool, out: Sequence[Path]) -> int:
    """Print a stored file's report, write what was asked for; the exit code."""
    from nvcli.bench import export
    from nvcli.bench.record import read_runs
    from nvcli.bench.summary import summarize

    for target in out:
        export.check_suffix(target)
    runs: list[Run] = read_runs(path)
    summaries: list[Summary] = [summarize(run) for run in runs]
    for target in out:
        export.write(target, path, runs, summaries)
    if as_json:
        print_text(export.report_json(summaries))
    elif not screen.is_quiet:
        from nvcli.bench.card import card

        for index, summary in enumerate(summaries):
            print_lines(screen, [*([""] if index else []), *card(summary)])
    if any(s.unsound for s in summaries):
        return 6
    return 5 if any(s.missed for s in summaries) else 0


def print_lines(screen: Screen, lines: Sequence[str]) -> None:
    """Text on standard output; plain ASCII where its encoding holds no more."""
    from nvcli.bench.card import to_ascii
    from nvcli.repl.screen import visible

    text = visible("\n".join(lines))
    encoding = getattr(screen.out, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = to_ascii(text)
    screen.write(text + "\n")


@functools.cache
def _with_load_verbs() -> typer.Typer:
    from nvcli.cli import bench_load  # it builds on this module

    bench_load.register(bench_app)
    return bench_app


def register(app: typer.Typer) -> None:
    """Add the commands to the root."""
    _with_load_verbs()
    app.add_typer(bench_app, name="bench")
