"""The options of `nvcli batch` alone, once: flags, help text, group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nvcli.batch.options import (
    InputFormat,
    OnDuplicate,
    Order,
    OutputFormat,
    ProgressMode,
    Shard,
    parse_shard,
)
from nvcli.cli.declare import INPUT, INT, OUTPUT, argument, choice, option, parser

if TYPE_CHECKING:
    from enum import StrEnum

RESUMING = "Resuming"
RUNNING = "Running"

_SHARD = parser(parse_shard, "a shard")


def _enum(group: str, flag: str, kind: type[StrEnum], help: str) -> Any:
    return option(group, f"{flag} {'|'.join(kind)}", help, choice(kind))


InputArg = Annotated[str, argument("INPUT", "A file of records, or - for standard input.")]
OutOpt = Annotated[Path | None, option(OUTPUT, "-o, --output OUT", "Default: standard output.")]
InputFormatOpt = Annotated[
    InputFormat,
    _enum(INPUT, "--input-format", InputFormat, "auto goes by the name, .gz and .zst too."),
]
PromptFieldOpt = Annotated[
    str | None,
    option(
        INPUT,
        "--prompt-field, --column NAME",
        "Where the prompt is: key of a JSON record or column of a table; default: prompt.",
    ),
]
OnDuplicateOpt = Annotated[
    OnDuplicate,
    _enum(
        INPUT,
        "--on-duplicate",
        OnDuplicate,
        "An id that comes twice: error (default), suffix #2, or keep both.",
    ),
]
StrictOpt = Annotated[
    bool, option(INPUT, "--strict", "A bad record ends the run before it starts, exit 2.")
]
SkipOpt = Annotated[int, option(INPUT, "--skip N", "Leave out the first N records.", INT)]
LimitOpt = Annotated[int | None, option(INPUT, "--limit N", "Take at most N records.", INT)]
ShardOpt = Annotated[
    Shard | None, option(INPUT, "--shard i/n", "Take every n-th record, from 1/n to n/n.", _SHARD)
]
OutputFormatOpt = Annotated[
    OutputFormat,
    _enum(
        OUTPUT,
        "--output-format",
        OutputFormat,
        "auto: OpenAI's envelope for OpenAI's lines, simple for others.",
    ),
]
IncludeThinkingOpt = Annotated[
    bool, option(OUTPUT, "--include-thinking", "Thinking in its own field, `thinking`.")
]
EchoOpt = Annotated[
    str | None,
    option(
        OUTPUT,
        "--echo FIELDS",
        "Copy these input fields, with commas between, to `input` of the output.",
    ),
]
ProgressOpt = Annotated[
    ProgressMode,
    _enum(OUTPUT, "--progress", ProgressMode, "On standard error; auto: a bar on a terminal."),
]
StatsJsonOpt = Annotated[
    Path | None, option(OUTPUT, "--stats-json FILE", "Statistics of the run as JSON.")
]
ResumeOpt = Annotated[bool, option(RESUMING, "--resume", "Keep what OUT has, run what is missing.")]
RetryErrorsOpt = Annotated[
    bool, option(RESUMING, "--retry-errors", "Like --resume; run failed records again.")
]
ForceResumeOpt = Annotated[
    bool, option(RESUMING, "--force-resume", "Resume although model or options differ.")
]
ForceOpt = Annotated[bool, option(RESUMING, "--force", "Replace OUT.")]
AppendOpt = Annotated[bool, option(RESUMING, "--append", "Write behind OUT's lines.")]
OrderOpt = Annotated[
    Order, _enum(RUNNING, "--order", Order, "Of the output; completion: as they end.")
]
WindowOpt = Annotated[
    int | None,
    option(
        RUNNING,
        "--window N",
        "Records on their way at once; default 4 x the engine's sequences.",
        INT,
    ),
]
MaxErrorsOpt = Annotated[
    int | None,
    option(RUNNING, "--max-errors N", "Stop when more than N records have failed, exit 1.", INT),
]
DryRunOpt = Annotated[
    bool,
    option(RUNNING, "--dry-run", "Only count: records, bad lines, tokens, time. Needs no GPU."),
]
BatchJsonOpt = Annotated[bool, option(OUTPUT, "--json", "The report of --dry-run as JSON.")]
