"""Every option of the command line, once: flags, help text, group. Commands only name them.

An option is a type alias (`ModelOpt = Annotated[...]`), so that one help text serves all commands.
Defaults are None or False: what an option means when it is left out is settled below the command
line and told in the help text.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nvcli.cli.console import ColorMode
from nvcli.config import parse_length
from nvcli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = "Model"
SAMPLING = "Sampling"
INPUT = "Input"
TOOLS = "Tools"
SESSION = "Conversation"
OUTPUT = "Output"
GLOBAL = "General"
CLUSTER = "Cluster"
ARGUMENTS = "Arguments"


class StdinPosition(StrEnum):
    BEFORE = "before"
    AFTER = "after"


class AnswerFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class ThinkingChoice(StrEnum):
    AUTO = "auto"
    FULL = "full"
    FOLD = "fold"
    HIDE = "hide"


def _option(*flags: str, help: str, group: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(
        *flags,
        help=help,
        metavar=metavar,
        rich_help_panel=group,
        show_default=False,
        show_envvar=False,
        **more,
    )


def _parser(parse: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    """Our own words for a value that does not parse, whatever Typer's version says."""

    def parse_value(text: str) -> Any:
        try:
            return parse(text)
        except UsageError as exc:
            raise typer.BadParameter(str(exc)) from exc
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {what}") from None

    parse_value.__name__ = what
    return parse_value


def _choice(choices: type[StrEnum]) -> Callable[[str], Any]:
    return _parser(choices, f"one of {', '.join(choices)}")


_INT = _parser(int, "a whole number")
_FLOAT = _parser(float, "a number")
_LENGTH = _parser(parse_length, "a token count")


# --- general -------------------------------------------------------------------------------------

VersionOpt = Annotated[
    bool, _option("--version", help="Print the version and exit.", group=GLOBAL, is_eager=True)
]
QuietOpt = Annotated[
    bool, _option("-q", "--quiet", help="No notes, only answers and errors.", group=GLOBAL)
]
VerboseOpt = Annotated[
    int,
    _option(
        "-v",
        "--verbose",
        help="Tell more, also how the model was loaded; -vv: everything.",
        group=GLOBAL,
        count=True,
    ),
]
ColorOpt = Annotated[
    ColorMode,
    _option(
        "--color",
        parser=_choice(ColorMode),
        metavar="auto|always|never",
        group=GLOBAL,
        envvar="NVCLI_COLOR",
        help="Colour; auto follows the terminal, NO_COLOR and FORCE_COLOR.",
    ),
]
LogFileOpt = Annotated[
    Path | None,
    _option(
        "--log-file",
        metavar="FILE",
        group=GLOBAL,
        envvar="NVCLI_LOG",
        help="Append the full log to this file.",
    ),
]
DebugOpt = Annotated[
    bool, _option("--debug", help="Show Python tracebacks of errors.", group=GLOBAL)
]
ConfigOpt = Annotated[
    Path | None,
    _option(
        "--config",
        metavar="FILE",
        group=GLOBAL,
        envvar="NVCLI_CONFIG",
        help="Read this file in place of ./nvcli.toml and your own.",
    ),
]
ProfileOpt = Annotated[
    str | None,
    _option(
        "--profile",
        metavar="NAME",
        group=GLOBAL,
        envvar="NVCLI_PROFILE",
        help="Use the [profile.NAME] tables of the configuration.",
    ),
]
ShowConfigOpt = Annotated[
    bool,
    _option(
        "--show-config",
        group=GLOBAL,
        help="After a command's name: print each value and where it came from.",
    ),
]

# --- model ---------------------------------------------------------------------------------------

ModelOpt = Annotated[
    str | None,
    _option(
        "-m",
        "--model",
        metavar="MODEL",
        group=MODEL,
        envvar="NVCLI_MODEL",
        help="A local folder or a Hugging Face id; without it the built-in demo model.",
    ),
]
DeviceOpt = Annotated[
    str | None,
    _option(
        "--device",
        metavar="auto|cuda|cpu",
        group=MODEL,
        help="Where to run; auto takes CUDA when a device is there.",
    ),
]
DTypeOpt = Annotated[
    str | None,
    _option(
        "--dtype",
        metavar="NAME",
        group=MODEL,
        help="auto, float32, float16 or bfloat16; auto: float32 on the CPU, 16 bits on CUDA.",
    ),
]
KVCacheDTypeOpt = Annotated[
    str | None,
    _option(
        "--kv-cache-dtype",
        metavar="NAME",
        group=MODEL,
        help="Type of cached keys and values, also fp8 (half of 16 bits); auto follows --dtype.",
    ),
]
LoadFormatOpt = Annotated[
    str | None,
    _option(
        "--load-format",
        metavar="auto|safetensors|dummy",
        group=MODEL,
        help="dummy fills random weights, for speed work without a download.",
    ),
]
EnforceEagerOpt = Annotated[
    bool,
    _option(
        "--enforce-eager",
        group=MODEL,
        help="Launch each kernel by itself, without CUDA graphs; to look for a fault.",
    ),
]
DeterministicOpt = Annotated[
    bool,
    _option(
        "--deterministic",
        group=MODEL,
        help="Exactly the same tokens, whatever shares the batch; slower.",
    ),
]
MaxModelLenOpt = Annotated[
    int | None,
    _option(
        "--max-model-len",
        metavar="N",
        group=MODEL,
        parser=_LENGTH,
        help="Prompt plus answer limit in tokens, also as 32k; default: what the model allows.",
    ),
]
MemoryOpt = Annotated[
    float | None,
    _option(
        "--gpu-memory-utilization",
        parser=_FLOAT,
        metavar="X",
        group=MODEL,
        help="Share of memory for weights and KV cache, over 0 to 1; default 0.9 (CPU: 0.5).",
    ),
]
MaxNumSeqsOpt = Annotated[
    int | None,
    _option(
        "--max-num-seqs",
        parser=_INT,
        metavar="N",
        group=MODEL,
        help="Sequences running at once; default 256 (CPU: 16).",
    ),
]
TensorParallelOpt = Annotated[
    int | None,
    _option(
        "--tensor-parallel-size",
        "--tp",
        parser=_INT,
        metavar="N",
        group=MODEL,
        help="GPUs that hold the model together (CPU: processes); default 1.",
    ),
]
ReplicasOpt = Annotated[
    int | None,
    _option(
        "--replicas",
        parser=_INT,
        metavar="N",
        group=CLUSTER,
        help="Engines that share the work, each in a Ray actor; pip install 'nvcli[ray]'.",
    ),
]
RayAddressOpt = Annotated[
    str | None,
    _option(
        "--ray-address",
        metavar="ADDRESS",
        group=CLUSTER,
        help="Of a running cluster; default: RAY_ADDRESS, or one on this machine.",
    ),
]

# --- sampling ------------------------------------------------------------------------------------

TemperatureOpt = Annotated[
    float | None,
    _option(
        "-t",
        "--temperature",
        parser=_FLOAT,
        metavar="X",
        group=SAMPLING,
        help="0 to 2; 0 is greedy. Default: the model's, for Qwen3 0.6 thinking, 0.7 without.",
    ),
]
TopPOpt = Annotated[
    float | None,
    _option(
        "--top-p",
        parser=_FLOAT,
        metavar="X",
        group=SAMPLING,
        help="Keep the likeliest tokens of mass X.",
    ),
]
TopKOpt = Annotated[
    int | None,
    _option(
        "--top-k",
        parser=_INT,
        metavar="N",
        group=SAMPLING,
        help="Keep the N likeliest tokens; 0: all.",
    ),
]
MinPOpt = Annotated[
    float | None,
    _option(
        "--min-p",
        parser=_FLOAT,
        metavar="X",
        group=SAMPLING,
        help="Drop tokens less likely than X times the likeliest.",
    ),
]
PresencePenaltyOpt = Annotated[
    float | None,
    _option(
        "--presence-penalty",
        parser=_FLOAT,
        metavar="X",
        group=SAMPLING,
        help="-2 to 2; over 0 makes tokens already in the answer less likely.",
    ),
]
RepetitionPenaltyOpt = Annotated[
    float | None,
    _option(
        "--repetition-penalty",
        parser=_FLOAT,
        metavar="X",
        group=SAMPLING,
        help="Over 0 to 2; over 1 makes tokens of prompt and answer less likely.",
    ),
]
MaxTokensOpt = Annotated[
    int | None,
    _option(
        "-n",
        "--max-tokens",
        parser=_INT,
        metavar="N",
        group=SAMPLING,
        help="At most N tokens, thinking included; default: the room left in the context.",
    ),
]
StopOpt = Annotated[
    list[str] | None,
    _option(
        "--stop",
        metavar="TEXT",
        group=SAMPLING,
        help="End the answer before this text; may be given again.",
    ),
]
SeedOpt = Annotated[
    int | None,
    _option("--seed", parser=_INT, metavar="N", group=SAMPLING, help="Same seed, same answer."),
]
ThinkOpt = Annotated[
    bool | None,
    _option(
        "--think/--no-think",
        group=SAMPLING,
        help="Let the model think before it answers; default: yes, where it can.",
    ),
]
ThinkBudgetOpt = Annotated[
    int | None,
    _option(
        "--think-budget",
        parser=_INT,
        metavar="N",
        group=SAMPLING,
        help="Close the thinking after N tokens and go on with the answer.",
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
    _option("-s", "--system", metavar="TEXT|@FILE", group=INPUT, help="System prompt."),
]
FileOpt = Annotated[
    list[Path] | None,
    _option(
        "-f",
        "--file",
        metavar="PATH",
        group=INPUT,
        help="Put this file before the question; may be given again, - is standard input.",
    ),
]
StdinPositionOpt = Annotated[
    StdinPosition,
    _option(
        "--stdin-position",
        parser=_choice(StdinPosition),
        metavar="before|after",
        group=INPUT,
        help="Where piped text goes: before (default) or after the question.",
    ),
]
NoStdinOpt = Annotated[bool, _option("--no-stdin", group=INPUT, help="Do not read standard input.")]
InteractiveOpt = Annotated[
    bool,
    _option(
        "-i",
        "--interactive",
        group=INPUT,
        help="Answer PROMPT or the piped text, then go on as a conversation.",
    ),
]
RawOpt = Annotated[
    bool, _option("--raw", group=INPUT, help="Continue the text as it is, no chat template.")
]

# --- chat: output --------------------------------------------------------------------------------

ShowThinkingOpt = Annotated[
    ThinkingChoice,
    _option(
        "--show-thinking",
        parser=_choice(ThinkingChoice),
        metavar="MODE",
        group=OUTPUT,
        help="full, fold (one line), hide, or auto: full on a terminal. On standard error.",
    ),
]
NoStreamOpt = Annotated[
    bool, _option("--no-stream", group=OUTPUT, help="Print the answer when it is complete.")
]
JsonOpt = Annotated[
    bool,
    _option(
        "--json",
        group=OUTPUT,
        help="One JSON object: model, text, thinking, tool_calls, finish_reason, usage, timings.",
    ),
]
DoctorJsonOpt = Annotated[
    bool, _option("--json", group=OUTPUT, help="One JSON object: ok, model, checks.")
]
StatsOpt = Annotated[
    bool,
    _option(
        "--stats",
        group=OUTPUT,
        help="Statistics line on standard error, also when that is no terminal.",
    ),
]
MarkdownOpt = Annotated[
    bool | None,
    _option(
        "--markdown/--plain",
        group=OUTPUT,
        help="Render Markdown (default on a terminal) or print the text as it is.",
    ),
]
FailOnLengthOpt = Annotated[
    bool,
    _option(
        "--fail-on-length",
        group=OUTPUT,
        help="Exit 1 when the answer was cut by a token limit.",
    ),
]
NoHistoryOpt = Annotated[
    bool,
    _option(
        "--no-history",
        group=OUTPUT,
        envvar="NVCLI_NO_HISTORY",
        help="Keep no history of what is typed, and save no conversation.",
    ),
]

# --- chat: structure, tools, sessions ------------------------------------------------------------

SchemaOpt = Annotated[
    str | None,
    _option(
        "--schema", metavar="FILE|JSON", group=SAMPLING, help="The answer is JSON of this schema."
    ),
]
FormatOpt = Annotated[
    AnswerFormat,
    _option(
        "--format",
        parser=_choice(AnswerFormat),
        metavar="text|json",
        group=SAMPLING,
        help="json: the answer is a JSON object.",
    ),
]
ToolsOpt = Annotated[
    list[Path] | None,
    _option(
        "--tools",
        metavar="FILE",
        group=TOOLS,
        help="Python file whose functions the model may call; may be given again.",
    ),
]
McpOpt = Annotated[
    Path | None,
    _option(
        "--mcp",
        metavar="FILE",
        group=TOOLS,
        help="MCP servers whose tools the model may call: the usual mcpServers JSON.",
    ),
]
AllowToolOpt = Annotated[
    list[str] | None,
    _option(
        "--allow-tool",
        metavar="NAME",
        group=TOOLS,
        help="Run this tool without asking; may be given again, * is all of them.",
    ),
]
ContinueOpt = Annotated[
    bool, _option("-c", "--continue", group=SESSION, help="Go on with the last conversation.")
]
SessionOpt = Annotated[
    str | None,
    _option(
        "--session",
        metavar="NAME",
        group=SESSION,
        help="Go on with this conversation, or begin it; it is saved under this name.",
    ),
]
NoSaveOpt = Annotated[
    bool, _option("--no-save", group=SESSION, help="Do not save the conversation.")
]
ExtractOpt = Annotated[
    int | None,
    _option(
        "-x",
        "--extract",
        parser=_INT,
        metavar="[N]",
        group=OUTPUT,
        help="Print only the first, or the N-th, code block of the answer.",
    ),
]
StreamJsonOpt = Annotated[
    bool,
    _option(
        "--stream-json",
        group=OUTPUT,
        help="A JSON object a line as it comes: thinking, text, tool_call, tool_result, done.",
    ),
]
StatsJsonOpt = Annotated[
    Path | None,
    _option(
        "--stats-json",
        metavar="FILE",
        group=OUTPUT,
        help="Write statistics: command, model, usage, timings, engine.",
    ),
]
DryRunOpt = Annotated[
    bool,
    _option(
        "--dry-run",
        group=OUTPUT,
        help="Print the prompt that the model would read, and its tokens to stderr.",
    ),
]
AttachOpt = Annotated[
    str | None,
    _option(
        "--attach",
        metavar="auto|never|URL|uds",
        group=MODEL,
        envvar="NVCLI_ATTACH",
        help="Use a running nvcli serve: at this URL or socket; auto: your own, if one runs.",
    ),
]


def check_replicas(replicas: int | None, ray_address: str | None) -> None:
    """Raises `UsageError`."""
    if replicas is None and ray_address is not None:
        raise UsageError("--ray-address is for --replicas N")
    if replicas is not None and replicas < 1:
        raise UsageError(f"--replicas must be at least 1, got {replicas}", param="replicas")
