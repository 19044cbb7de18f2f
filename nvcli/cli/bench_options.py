"""Every option of `nvcli bench`, once; `bench_bundles` holds what its verbs take together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from nvcli.cli.declare import ARGUMENTS, FLOAT, INPUT, INT, OUTPUT, option, parser

load = partial(option, group="Load")

_LENGTHS = parser(lambda text: _parse_lengths(text), "a length")
_SECONDS = parser(lambda text: _parse_seconds(text), "a time")
_SLO = parser(lambda text: _parse_slo(text), "a limit")


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
    if text not in ("cold", "warm", "keep"):
        raise ValueError
    return text


def _parse_share(text: str) -> float:
    value = float(text.removesuffix("%")) / 100
    if not text.endswith("%") or not 0 < value < 1:  # 0.05 may be meant as 5% or as it stands
        raise ValueError
    return value


def _parse_warmup(text: str) -> str | float:
    return text if text == "auto" else _parse_seconds(text)


def _parse_arrival(text: str) -> Any:
    from nvcli.bench.workload import Arrival

    return Arrival.parse(text)


def _parse_list(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 < v < 1e9 for v in values):
        raise ValueError
    return values


def _parse_numbers(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if not all(0 < v < 1e9 for v in values):
        raise ValueError
    return values


ModelArg = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", show_default=False, help="As -m: a folder or a Hugging Face id."
    ),
]
ConcurrencyOpt = Annotated[
    int | None,
    load(
        "-c",
        "--concurrency",
        parser=INT,
        metavar="N",
        help="Closed loop: so many requests at once.",
    ),
]
RequestsOpt = Annotated[
    int | None, load("--requests", parser=INT, metavar="N", help="End after N requests.")
]
DurationOpt = Annotated[
    float | None, load("--duration", parser=_SECONDS, metavar="T", help="Send for 60s, 2m.")
]
InLenOpt = Annotated[
    Any,
    load(
        "--in-len",
        parser=_LENGTHS,
        metavar="LEN",
        help="Prompt tokens: 1024, 128:2048, geometric:MEAN, lognormal:MEAN:CV. "
        "Default: 128 (card: 64:192).",
    ),
]
OutLenOpt = Annotated[
    Any,
    load(
        "--out-len",
        parser=_LENGTHS,
        metavar="LEN",
        help="Answer tokens, in the same ways. Default: 64 (card: 32:96).",
    ),
]
DataOpt = Annotated[
    str,
    load(
        "--data", metavar="SOURCE", help="random token ids (default), jsonl:PATH or sharegpt:PATH."
    ),
]
PrefixOpt = Annotated[
    str | None,
    load(
        "--prefix",
        metavar="LEN:GROUPS",
        help="Put one of GROUPS shared prefixes of LEN tokens before every prompt.",
    ),
]
CacheOpt = Annotated[
    str,
    load(
        "--cache",
        parser=parser(_parse_cache, "cold, warm or keep"),
        metavar="cold|warm|keep",
        help="cold: other prompts in every run (default); warm: prompts repeat and were sent "
        "before; keep: the same prompts in every run.",
    ),
]
TurnsOpt = Annotated[
    int,
    load(
        "--turns",
        parser=INT,
        metavar="K",
        help="Conversations of K requests, each behind the one before and its answer.",
    ),
]
UntilOpt = Annotated[
    float | None,
    load(
        "--until-ci",
        parser=parser(_parse_share, "a share as 5%"),
        metavar="X%",
        help="End when the 95 % intervals of tok/s and of the median e2e are within X %; "
        "at most --duration (default 10m). Exit 6 when they are not.",
    ),
]
WarmupOpt = Annotated[
    Any,
    load(
        "--warmup",
        parser=parser(_parse_warmup, "auto or a time"),
        metavar="auto|T",
        help="What the report cuts at the start; auto (default) finds it.",
    ),
]
SloOpt = Annotated[
    Any,
    load(
        "--slo",
        parser=_SLO,
        metavar="LIMITS",
        help="ttft=300ms,tpot=25ms,e2e=5s,stall=1s; exit 5 when more than 1 % miss them.",
    ),
]
BenchSeedOpt = Annotated[
    int, load("--seed", parser=INT, metavar="N", help="Same seed, same workload.")
]
RepeatOpt = Annotated[
    int, load("--repeat", parser=INT, metavar="N", help="Measure so often; default 5.")
]
OutOpt = Annotated[
    list[Path] | None,
    option(
        "--out",
        metavar="FILE",
        group=OUTPUT,
        help="Write .json .jsonl .csv .md .html .png or .hgrm, by its suffix; may be given again.",
    ),
]
JsonOpt = Annotated[
    bool, option("--json", group=OUTPUT, help="One object with every number, stable names.")
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
    bool, option("--define", group=OUTPUT, help="Print how every number is defined.")
]
AArg = Annotated[str, typer.Argument(metavar="A", help="The run to compare with.")]
BArg = Annotated[str, typer.Argument(metavar="B", help="The run in question.")]
GateOpt = Annotated[
    list[str] | None,
    option(
        "--gate",
        metavar="RULE",
        group=INPUT,
        help="e2e.p99<=+5%, out_tok_s>=-3%, ttft.p99<=300ms, goodput>=0.95; may be given again.",
    ),
]
LenientOpt = Annotated[
    bool, option("--lenient", group=INPUT, help="A gate that nothing can be said about passes.")
]
AnyWorkloadOpt = Annotated[
    bool, option("--any-workload", group=INPUT, help="Compare although the workloads differ.")
]
RunsOpt = Annotated[
    int,
    load(
        "--repeat",
        parser=INT,
        metavar="N",
        help="Run the load N times; from three on 'compare' resamples whole runs.",
    ),
]
UrlArg = Annotated[
    str | None,
    typer.Argument(
        metavar="URL",
        show_default=False,
        help="An OpenAI endpoint, without /v1; its key from NVCLI_API_KEY. Without it nvcli's own "
        "server is started.",
    ),
]
RateOpt = Annotated[
    float | None,
    load(
        "--rate",
        parser=FLOAT,
        metavar="R",
        help="Open loop: R requests a second, whatever the server does; -c then caps it.",
    ),
]
ArrivalOpt = Annotated[
    Any,
    load(
        "--arrival",
        parser=parser(_parse_arrival, "an arrival"),
        metavar="KIND",
        help="Gaps of an open loop: poisson (default), constant, gamma:CV.",
    ),
]
TraceOpt = Annotated[
    Path | None,
    load(
        "--trace",
        metavar="FILE",
        help="Replay recorded traffic: Mooncake, Qwen-Bailian, Azure or BurstGPT.",
    ),
]
SpeedOpt = Annotated[
    float | None, load("--speed", parser=FLOAT, metavar="X", help="Replay a trace X times as fast.")
]
JitterOpt = Annotated[
    bool, load("--jitter", help="Spread requests of one tick of a trace over the tick.")
]
TimeoutOpt = Annotated[
    float,
    load(
        "--timeout",
        parser=_SECONDS,
        metavar="T",
        help="A request that takes longer failed; default: 300s.",
    ),
]
GpuMetricsOpt = Annotated[
    bool, load("--gpu-metrics", help="Sample the power and use of the GPU (NVML).")
]
ServedModelOpt = Annotated[
    str | None,
    load(
        "--served-model-name",
        metavar="NAME",
        help="What requests to URL call the model; default: the first it lists.",
    ),
]
SelfTestOpt = Annotated[
    bool,
    option(
        "--self-test",
        group=INPUT,
        help="Measure a stub with a known timetable; exit 6 when the client is off.",
    ),
]
ConcurrenciesOpt = Annotated[
    Any,
    load(
        "--concurrencies",
        parser=parser(_parse_numbers, "a list of whole numbers"),
        metavar="N,N,...",
        help="The ladder of a closed loop; default: 1, 2, 4, ... to the server's slots.",
    ),
]
RatesOpt = Annotated[
    Any,
    load(
        "--rates",
        parser=parser(_parse_list, "a list of numbers"),
        metavar="R,R,...",
        help="The ladder of an open loop, requests a second.",
    ),
]
GpuOpt = Annotated[
    str | None,
    option("--gpu", metavar="NAME", group=INPUT, help="Plan for this GPU by its datasheet."),
]
PlanReplicasOpt = Annotated[
    int,
    option(
        "--replicas",
        parser=INT,
        metavar="N",
        group=INPUT,
        help="Plan for N engines that share the requests; default 1.",
    ),
]
ExplainOpt = Annotated[
    bool, option("--explain", group=OUTPUT, help="Say it in words, with these numbers.")
]
