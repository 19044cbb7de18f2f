"""The options of `nvcli batch` alone, once: flags, help text, group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nvcli.batch.options import (
    InputFormat,
    OnDuplicate,
    Order,
    OutputFormat,
    ProgressMode,
    Shard,
    parse_shard,
)
from nvcli.cli.declare import INPUT, INT, OUTPUT, choice, option, parser

if TYPE_CHECKING:
    from enum import StrEnum

RESUMING = "Resuming"
RUNNING = "Running"

_SHARD = parser(parse_shard, "a shard")


def _enum(flag: str, kind: type[StrEnum], help: str, group: str) -> Any:
    return option(flag, parser=choice(kind), metavar="|".join(kind), group=group, help=help)


InputArg = Annotated[
    str, typer.Argument(metavar="INPUT", help="A file of records, or - for standard input.")
]
OutOpt = Annotated[
    Path | None,
    option("-o", "--output", metavar="OUT", group=OUTPUT, help="Default: standard output."),
]
InputFormatOpt = Annotated[
    InputFormat,
    _enum("--input-format", InputFormat, "auto goes by the name, .gz and .zst too.", INPUT),
]
PromptFieldOpt = Annotated[
    str | None,
    option(
        "--prompt-field",
        "--column",
        metavar="NAME",
        group=INPUT,
        help="Where the prompt is: key of a JSON record or column of a table; default: prompt.",
    ),
]
OnDuplicateOpt = Annotated[
    OnDuplicate,
    _enum(
        "--on-duplicate",
        OnDuplicate,
        "An id that comes twice: error (default), suffix #2, or keep both.",
        INPUT,
    ),
]
StrictOpt = Annotated[
    bool,
    option("--strict", group=INPUT, help="A bad record ends the run before it starts, exit 2."),
]
SkipOpt = Annotated[
    int,
    option("--skip", parser=INT, metavar="N", group=INPUT, help="Leave out the first N records."),
]
LimitOpt = Annotated[
    int | None,
    option("--limit", parser=INT, metavar="N", group=INPUT, help="Take at most N records."),
]
ShardOpt = Annotated[
    Shard | None,
    option(
        "--shard",
        parser=_SHARD,
        metavar="i/n",
        group=INPUT,
        help="Take every n-th record, from 1/n to n/n.",
    ),
]
OutputFormatOpt = Annotated[
    OutputFormat,
    _enum(
        "--output-format",
        OutputFormat,
        "auto: OpenAI's envelope for OpenAI's lines, simple for others.",
        OUTPUT,
    ),
]
IncludeThinkingOpt = Annotated[
    bool,
    option("--include-thinking", group=OUTPUT, help="Thinking in its own field, `thinking`."),
]
EchoOpt = Annotated[
    str | None,
    option(
        "--echo",
        metavar="FIELDS",
        group=OUTPUT,
        help="Copy these input fields, with commas between, to `input` of the output.",
    ),
]
ProgressOpt = Annotated[
    ProgressMode,
    _enum("--progress", ProgressMode, "On standard error; auto: a bar on a terminal.", OUTPUT),
]
StatsJsonOpt = Annotated[
    Path | None,
    option("--stats-json", metavar="FILE", group=OUTPUT, help="Statistics of the run as JSON."),
]
ResumeOpt = Annotated[
    bool,
    option("--resume", group=RESUMING, help="Keep what OUT has, run what is missing."),
]
RetryErrorsOpt = Annotated[
    bool,
    option("--retry-errors", group=RESUMING, help="Like --resume; run failed records again."),
]
ForceResumeOpt = Annotated[
    bool,
    option("--force-resume", group=RESUMING, help="Resume although model or options differ."),
]
ForceOpt = Annotated[bool, option("--force", group=RESUMING, help="Replace OUT.")]
AppendOpt = Annotated[bool, option("--append", group=RESUMING, help="Write behind OUT's lines.")]
OrderOpt = Annotated[
    Order,
    _enum("--order", Order, "Of the output; completion: as they end.", RUNNING),
]
WindowOpt = Annotated[
    int | None,
    option(
        "--window",
        parser=INT,
        metavar="N",
        group=RUNNING,
        help="Records on their way at once; default 4 x the engine's sequences.",
    ),
]
MaxErrorsOpt = Annotated[
    int | None,
    option(
        "--max-errors",
        parser=INT,
        metavar="N",
        group=RUNNING,
        help="Stop when more than N records have failed, exit 1.",
    ),
]
DryRunOpt = Annotated[
    bool,
    option(
        "--dry-run",
        group=RUNNING,
        help="Only count: records, bad lines, tokens, time. Needs no GPU.",
    ),
]
BatchJsonOpt = Annotated[
    bool, option("--json", group=OUTPUT, help="The report of --dry-run as JSON.")
]
