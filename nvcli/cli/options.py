"""The options of every command, and of `chat` and whoever shares them: flags, help text, group.

An option is a type alias (`QuietOpt = Annotated[...]`), so that one help text serves all commands.
Defaults are None or False: what an option means when it is left out is settled below the command
line and told in the help text. Those of the engine are in `engine_options`, those of sampling in
`sampling_options`, those of one command beside it (`batch_options`, `bench_options`, ...).
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nvcli.cli.console import ColorMode
from nvcli.cli.declare import GLOBAL, INPUT, INT, OUTPUT, SESSION, TOOLS, choice, option


class StdinPosition(StrEnum):
    BEFORE = "before"
    AFTER = "after"


class ThinkingChoice(StrEnum):
    AUTO = "auto"
    FULL = "full"
    FOLD = "fold"
    HIDE = "hide"


# --- general -------------------------------------------------------------------------------------

VersionOpt = Annotated[
    bool, option("--version", help="Print the version and exit.", group=GLOBAL, is_eager=True)
]
QuietOpt = Annotated[
    bool, option("-q", "--quiet", help="No notes, only answers and errors.", group=GLOBAL)
]
VerboseOpt = Annotated[
    int,
    option(
        "-v",
        "--verbose",
        help="Tell more, also how the model was loaded; -vv: everything.",
        group=GLOBAL,
        count=True,
    ),
]
ColorOpt = Annotated[
    ColorMode,
    option(
        "--color",
        parser=choice(ColorMode),
        metavar="auto|always|never",
        group=GLOBAL,
        envvar="NVCLI_COLOR",
        help="Colour; auto follows the terminal, NO_COLOR and FORCE_COLOR.",
    ),
]
LogFileOpt = Annotated[
    Path | None,
    option(
        "--log-file",
        metavar="FILE",
        group=GLOBAL,
        envvar="NVCLI_LOG",
        help="Append the full log to this file.",
    ),
]
DebugOpt = Annotated[
    bool, option("--debug", help="Show Python tracebacks of errors.", group=GLOBAL)
]
ConfigOpt = Annotated[
    Path | None,
    option(
        "--config",
        metavar="FILE",
        group=GLOBAL,
        envvar="NVCLI_CONFIG",
        help="Read this file in place of ./nvcli.toml and your own.",
    ),
]
ProfileOpt = Annotated[
    str | None,
    option(
        "--profile",
        metavar="NAME",
        group=GLOBAL,
        envvar="NVCLI_PROFILE",
        help="Use the [profile.NAME] tables of the configuration.",
    ),
]
ShowConfigOpt = Annotated[
    bool,
    option(
        "--show-config",
        group=GLOBAL,
        help="After a command's name: print each value and where it came from.",
    ),
]

# --- chat: input ---------------------------------------------------------------------------------

PromptArg = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT",
        show_default=False,
        help="The question. Without it, and with a terminal, a conversation starts.",
    ),
]
SystemOpt = Annotated[
    str | None,
    option("-s", "--system", metavar="TEXT|@FILE", group=INPUT, help="System prompt."),
]
FileOpt = Annotated[
    list[Path] | None,
    option(
        "-f",
        "--file",
        metavar="PATH",
        group=INPUT,
        help="Put this file before the question; may be given again, - is standard input.",
    ),
]
StdinPositionOpt = Annotated[
    StdinPosition,
    option(
        "--stdin-position",
        parser=choice(StdinPosition),
        metavar="before|after",
        group=INPUT,
        help="Where piped text goes: before (default) or after the question.",
    ),
]
NoStdinOpt = Annotated[bool, option("--no-stdin", group=INPUT, help="Do not read standard input.")]
InteractiveOpt = Annotated[
    bool,
    option(
        "-i",
        "--interactive",
        group=INPUT,
        help="Answer PROMPT or the piped text, then go on as a conversation.",
    ),
]
RawOpt = Annotated[
    bool, option("--raw", group=INPUT, help="Continue the text as it is, no chat template.")
]

# --- chat: output --------------------------------------------------------------------------------

ShowThinkingOpt = Annotated[
    ThinkingChoice,
    option(
        "--show-thinking",
        parser=choice(ThinkingChoice),
        metavar="MODE",
        group=OUTPUT,
        help="full, fold (one line), hide, or auto: full on a terminal. On standard error.",
    ),
]
NoStreamOpt = Annotated[
    bool, option("--no-stream", group=OUTPUT, help="Print the answer when it is complete.")
]
JsonOpt = Annotated[
    bool,
    option(
        "--json",
        group=OUTPUT,
        help="One JSON object: model, text, thinking, tool_calls, finish_reason, usage, timings.",
    ),
]
DoctorJsonOpt = Annotated[
    bool, option("--json", group=OUTPUT, help="One JSON object: ok, model, checks.")
]
StatsOpt = Annotated[
    bool,
    option(
        "--stats",
        group=OUTPUT,
        help="Statistics line on standard error, also when that is no terminal.",
    ),
]
MarkdownOpt = Annotated[
    bool | None,
    option(
        "--markdown/--plain",
        group=OUTPUT,
        help="Render Markdown (default on a terminal) or print the text as it is.",
    ),
]
FailOnLengthOpt = Annotated[
    bool,
    option(
        "--fail-on-length",
        group=OUTPUT,
        help="Exit 1 when the answer was cut by a token limit.",
    ),
]
NoHistoryOpt = Annotated[
    bool,
    option(
        "--no-history",
        group=OUTPUT,
        envvar="NVCLI_NO_HISTORY",
        help="Keep no history of what is typed, and save no conversation.",
    ),
]

# --- chat: tools, conversations ----------------------------------------------------------------

ToolsOpt = Annotated[
    list[Path] | None,
    option(
        "--tools",
        metavar="FILE",
        group=TOOLS,
        help="Python file whose functions the model may call; may be given again.",
    ),
]
McpOpt = Annotated[
    Path | None,
    option(
        "--mcp",
        metavar="FILE",
        group=TOOLS,
        help="MCP servers whose tools the model may call: the usual mcpServers JSON.",
    ),
]
AllowToolOpt = Annotated[
    list[str] | None,
    option(
        "--allow-tool",
        metavar="NAME",
        group=TOOLS,
        help="Run this tool without asking; may be given again, * is all of them.",
    ),
]
ContinueOpt = Annotated[
    bool, option("-c", "--continue", group=SESSION, help="Go on with the last conversation.")
]
SessionOpt = Annotated[
    str | None,
    option(
        "--session",
        metavar="NAME",
        group=SESSION,
        help="Go on with this conversation, or begin it; it is saved under this name.",
    ),
]
NoSaveOpt = Annotated[
    bool, option("--no-save", group=SESSION, help="Do not save the conversation.")
]
ExtractOpt = Annotated[
    int | None,
    option(
        "-x",
        "--extract",
        parser=INT,
        metavar="[N]",
        group=OUTPUT,
        help="Print only the first, or the N-th, code block of the answer.",
    ),
]
StreamJsonOpt = Annotated[
    bool,
    option(
        "--stream-json",
        group=OUTPUT,
        help="A JSON object a line as it comes: thinking, text, tool_call, tool_result, done.",
    ),
]
StatsJsonOpt = Annotated[
    Path | None,
    option(
        "--stats-json",
        metavar="FILE",
        group=OUTPUT,
        help="Write statistics: command, model, usage, timings, engine.",
    ),
]
DryRunOpt = Annotated[
    bool,
    option(
        "--dry-run",
        group=OUTPUT,
        help="Print the prompt that the model would read, and its tokens to stderr.",
    ),
]
