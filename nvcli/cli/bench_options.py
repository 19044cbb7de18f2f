"""Every option of `nvcli bench`, once; `bench_bundles` holds what its verbs take together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from nvcli.cli.declare import FLOAT, INPUT, INT, OUTPUT, argument, option, parser

LOAD = "Load"

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


ConcurrencyOpt = Annotated[
    int | None, option(LOAD, "-c, --concurrency N", "Closed loop: so many requests at once.", INT)
]
RequestsOpt = Annotated[int | None, option(LOAD, "--requests N", "End after N requests.", INT)]
DurationOpt = Annotated[float | None, option(LOAD, "--duration T", "Send for 60s, 2m.", _SECONDS)]
InLenOpt = Annotated[
    Any,
    option(
        LOAD,
        "--in-len LEN",
        "Prompt tokens: 1024, 128:2048, geometric:MEAN, lognormal:MEAN:CV. "
        "Default: 128 (card: 64:192).",
        _LENGTHS,
    ),
]
OutLenOpt = Annotated[
    Any,
    option(
        LOAD,
        "--out-len LEN",
        "Answer tokens, in the same ways. Default: 64 (card: 32:96).",
        _LENGTHS,
    ),
]
DataOpt = Annotated[
    str, option(LOAD, "--data SOURCE", "random token ids (default), jsonl:PATH or sharegpt:PATH.")
]
PrefixOpt = Annotated[
    str | None,
    option(
        LOAD,
        "--prefix LEN:GROUPS",
        "Put one of GROUPS shared prefixes of LEN tokens before every prompt.",
    ),
]
CacheOpt = Annotated[
    str,
    option(
        LOAD,
        "--cache cold|warm|keep",
        "cold: other prompts in every run (default); warm: prompts repeat and were sent "
        "before; keep: the same prompts in every run.",
        parser(_parse_cache, "cold, warm or keep"),
    ),
]
TurnsOpt = Annotated[
    int,
    option(
        LOAD,
        "--turns K",
        "Conversations of K requests, each behind the one before and its answer.",
        INT,
    ),
]
UntilOpt = Annotated[
    float | None,
    option(
        LOAD,
        "--until-ci X%",
        "End when the 95 % intervals of tok/s and of the median e2e are within X %; "
        "at most --duration (default 10m). Exit 6 when they are not.",
        parser(_parse_share, "a share as 5%"),
    ),
]
WarmupOpt = Annotated[
    Any,
    option(
        LOAD,
        "--warmup auto|T",
        "What the report cuts at the start; auto (default) finds it.",
        parser(_parse_warmup, "auto or a time"),
    ),
]
SloOpt = Annotated[
    Any,
    option(
        LOAD,
        "--slo LIMITS",
        "ttft=300ms,tpot=25ms,e2e=5s,stall=1s; exit 5 when more than 1 % miss them.",
        _SLO,
    ),
]
BenchSeedOpt = Annotated[int, option(LOAD, "--seed N", "Same seed, same workload.", INT)]
RepeatOpt = Annotated[int, option(LOAD, "--repeat N", "Measure so often; default 5.", INT)]
OutOpt = Annotated[
    list[Path] | None,
    option(
        OUTPUT,
        "--out FILE",
        "Write .json .jsonl .csv .md .html .png or .hgrm, by its suffix; may be given again.",
    ),
]
JsonOpt = Annotated[bool, option(OUTPUT, "--json", "One object with every number, stable names.")]
RunArg = Annotated[str | None, argument("RUN", "A .jsonl file, the id of a stored run, or last.")]
DefineOpt = Annotated[bool, option(OUTPUT, "--define", "Print how every number is defined.")]
AArg = Annotated[str, argument("A", "The run to compare with.")]
BArg = Annotated[str, argument("B", "The run in question.")]
GateOpt = Annotated[
    list[str] | None,
    option(
        INPUT,
        "--gate RULE",
        "e2e.p99<=+5%, out_tok_s>=-3%, ttft.p99<=300ms, goodput>=0.95; may be given again.",
    ),
]
LenientOpt = Annotated[
    bool, option(INPUT, "--lenient", "A gate that nothing can be said about passes.")
]
AnyWorkloadOpt = Annotated[
    bool, option(INPUT, "--any-workload", "Compare although the workloads differ.")
]
RunsOpt = Annotated[
    int,
    option(
        LOAD,
        "--repeat N",
        "Run the load N times; from three on 'compare' resamples whole runs.",
        INT,
    ),
]
UrlArg = Annotated[
    str | None,
    argument(
        "URL",
        "An OpenAI endpoint, without /v1; its key from NVCLI_API_KEY. Without it nvcli's own "
        "server is started.",
    ),
]
RateOpt = Annotated[
    float | None,
    option(
        LOAD,
        "--rate R",
        "Open loop: R requests a second, whatever the server does; -c then caps it.",
        FLOAT,
    ),
]
ArrivalOpt = Annotated[
    Any,
    option(
        LOAD,
        "--arrival KIND",
        "Gaps of an open loop: poisson (default), constant, gamma:CV.",
        parser(_parse_arrival, "an arrival"),
    ),
]
TraceOpt = Annotated[
    Path | None,
    option(
        LOAD, "--trace FILE", "Replay recorded traffic: Mooncake, Qwen-Bailian, Azure or BurstGPT."
    ),
]
SpeedOpt = Annotated[
    float | None, option(LOAD, "--speed X", "Replay a trace X times as fast.", FLOAT)
]
JitterOpt = Annotated[
    bool, option(LOAD, "--jitter", "Spread requests of one tick of a trace over the tick.")
]
TimeoutOpt = Annotated[
    float,
    option(LOAD, "--timeout T", "A request that takes longer failed; default: 300s.", _SECONDS),
]
GpuMetricsOpt = Annotated[
    bool, option(LOAD, "--gpu-metrics", "Sample the power and use of the GPU (NVML).")
]
ServedModelOpt = Annotated[
    str | None,
    option(
        LOAD,
        "--served-model-name NAME",
        "What requests to URL call the model; default: the first it lists.",
    ),
]
SelfTestOpt = Annotated[
    bool,
    option(
        INPUT,
        "--self-test",
        "Measure a stub with a known timetable; exit 6 when the client is off.",
    ),
]
ConcurrenciesOpt = Annotated[
    Any,
    option(
        LOAD,
        "--concurrencies N,N,...",
        "The ladder of a closed loop; default: 1, 2, 4, ... to the server's slots.",
        parser(_parse_numbers, "a list of whole numbers"),
    ),
]
RatesOpt = Annotated[
    Any,
    option(
        LOAD,
        "--rates R,R,...",
        "The ladder of an open loop, requests a second.",
        parser(_parse_list, "a list of numbers"),
    ),
]
GpuOpt = Annotated[str | None, option(INPUT, "--gpu NAME", "Plan for this GPU by its datasheet.")]
PlanReplicasOpt = Annotated[
    int,
    option(INPUT, "--replicas N", "Plan for N engines that share the requests; default 1.", INT),
]
ExplainOpt = Annotated[bool, option(OUTPUT, "--explain", "Say it in words, with these numbers.")]
