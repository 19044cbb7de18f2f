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

from nvcli.cli.console import ColorMode
from nvcli.cli.declare import GLOBAL, INPUT, INT, OUTPUT, SESSION, TOOLS, argument, choice, option


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
    bool, option(GLOBAL, "--version", "Print the version and exit.", is_eager=True)
]
QuietOpt = Annotated[bool, option(GLOBAL, "-q, --quiet", "No notes, only answers and errors.")]
VerboseOpt = Annotated[
    int,
    option(
        GLOBAL,
        "-v, --verbose",
        "Tell more, also how the model was loaded; -vv: everything.",
        count=True,
    ),
]
ColorOpt = Annotated[
    ColorMode,
    option(
        GLOBAL,
        "--color auto|always|never",
        "Colour; auto follows the terminal, NO_COLOR and FORCE_COLOR.",
        choice(ColorMode),
        envvar="NVCLI_COLOR",
    ),
]
LogFileOpt = Annotated[
    Path | None,
    option(
        GLOBAL,
        "--log-file FILE",
        "Append all messages, also those of -vv, with time and level.",
        envvar="NVCLI_LOG",
    ),
]
DebugOpt = Annotated[bool, option(GLOBAL, "--debug", "Show Python tracebacks of errors.")]
ConfigOpt = Annotated[
    Path | None,
    option(
        GLOBAL,
        "--config FILE",
        "Read this file in place of ./nvcli.toml and your own.",
        envvar="NVCLI_CONFIG",
    ),
]
ProfileOpt = Annotated[
    str | None,
    option(
        GLOBAL,
        "--profile NAME",
        "Use the [profile.NAME] tables of the configuration.",
        envvar="NVCLI_PROFILE",
    ),
]
ShowConfigOpt = Annotated[
    bool,
    option(
        GLOBAL, "--show-config", "After a command's name: print each value and where it came from."
    ),
]

# --- chat: input ---------------------------------------------------------------------------------

PromptArg = Annotated[
    str | None,
    argument("PROMPT", "The question. Without it, and with a terminal, a conversation starts."),
]
SystemOpt = Annotated[str | None, option(INPUT, "-s, --system TEXT|@FILE", "System prompt.")]
FileOpt = Annotated[
    list[Path] | None,
    option(
        INPUT,
        "-f, --file PATH",
        "Put this file before the question; may be given again, - is standard input.",
    ),
]
StdinPositionOpt = Annotated[
    StdinPosition,
    option(
        INPUT,
        "--stdin-position before|after",
        "Where piped text goes: before (default) or after the question.",
        choice(StdinPosition),
    ),
]
NoStdinOpt = Annotated[bool, option(INPUT, "--no-stdin", "Do not read standard input.")]
InteractiveOpt = Annotated[
    bool,
    option(
        INPUT, "-i, --interactive", "Answer PROMPT or the piped text, then go on as a conversation."
    ),
]
RawOpt = Annotated[bool, option(INPUT, "--raw", "Continue the text as it is, no chat template.")]

# --- chat: output --------------------------------------------------------------------------------

ShowThinkingOpt = Annotated[
    ThinkingChoice,
    option(
        OUTPUT,
        "--show-thinking MODE",
        "full, fold (one line), hide, or auto: full on a terminal. On standard error.",
        choice(ThinkingChoice),
    ),
]
NoStreamOpt = Annotated[
    bool, option(OUTPUT, "--no-stream", "Print the answer when it is complete.")
]
JsonOpt = Annotated[
    bool,
    option(
        OUTPUT,
        "--json",
        "One JSON object: model, text, thinking, tool_calls, finish_reason, usage, timings.",
    ),
]
DoctorJsonOpt = Annotated[bool, option(OUTPUT, "--json", "One JSON object: ok, model, checks.")]
StatsOpt = Annotated[
    bool,
    option(OUTPUT, "--stats", "Statistics line on standard error, also when that is no terminal."),
]
MarkdownOpt = Annotated[
    bool | None,
    option(
        OUTPUT,
        "--markdown/--plain",
        "Render Markdown (default on a terminal) or print the text as it is.",
    ),
]
FailOnLengthOpt = Annotated[
    bool, option(OUTPUT, "--fail-on-length", "Exit 1 when the answer was cut by a token limit.")
]
NoHistoryOpt = Annotated[
    bool,
    option(
        OUTPUT,
        "--no-history",
        "Keep no history of what is typed, and save no conversation.",
        envvar="NVCLI_NO_HISTORY",
    ),
]

# --- chat: tools, conversations ----------------------------------------------------------------

ToolsOpt = Annotated[
    list[Path] | None,
    option(
        TOOLS, "--tools FILE", "Python file whose functions the model may call; may be given again."
    ),
]
McpOpt = Annotated[
    Path | None,
    option(
        TOOLS,
        "--mcp FILE",
        "MCP servers whose tools the model may call: the usual mcpServers JSON.",
    ),
]
AllowToolOpt = Annotated[
    list[str] | None,
    option(
        TOOLS,
        "--allow-tool NAME",
        "Run this tool without asking; may be given again, * is all of them.",
    ),
]
ContinueOpt = Annotated[
    bool, option(SESSION, "-c, --continue", "Go on with the last conversation.")
]
SessionOpt = Annotated[
    str | None,
    option(
        SESSION,
        "--session NAME",
        "Go on with this conversation, or begin it; it is saved under this name.",
    ),
]
NoSaveOpt = Annotated[bool, option(SESSION, "--no-save", "Do not save the conversation.")]
ExtractOpt = Annotated[
    int | None,
    option(
        OUTPUT,
        "-x, --extract [N]",
        "Print only the first, or the N-th, code block of the answer.",
        INT,
    ),
]
StreamJsonOpt = Annotated[
    bool,
    option(
        OUTPUT,
        "--stream-json",
        "A JSON object a line as it comes: thinking, text, tool_call, tool_result, done.",
    ),
]
StatsJsonOpt = Annotated[
    Path | None,
    option(
        OUTPUT, "--stats-json FILE", "Write statistics: command, model, usage, timings, engine."
    ),
]
DryRunOpt = Annotated[
    bool,
    option(
        OUTPUT, "--dry-run", "Print the prompt that the model would read, and its tokens to stderr."
    ),
]
