"""`nvcli chat`: one answer when there is a prompt or a pipe, a conversation otherwise."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer  # noqa: TC002 - Typer reads the annotations of `chat`

from nvcli.cli import engine_options, options
from nvcli.cli.bundles import bundled
from nvcli.cli.command import Command, refuse_in_dry_run, settings_of, typed_names
from nvcli.cli.console import Spinner, is_terminal, tell_startup
from nvcli.cli.engine_options import EngineOptions  # noqa: TC001
from nvcli.cli.prompt_input import join_parts, read_files, read_stdin, repair_argument, text_or_file
from nvcli.cli.sampling_options import AnswerFormat, SamplingOptions
from nvcli.errors import NvcliError, UsageError
from nvcli.paths import why_not_writable
from nvcli.repl.command_view import read_schema
from nvcli.repl.render import ThinkingView
from nvcli.repl.session import ANY_OBJECT
from nvcli.repl.store import session_path
from nvcli.types import SamplingParams, check_answer_limit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from nvcli.client import ServerModel
    from nvcli.config import EngineConfig
    from nvcli.repl.model import ChatModel
    from nvcli.repl.screen import Screen

DEMO_NOTICE = "The small built-in demo model. For a real one: nvcli chat -m Qwen/Qwen3-0.6B"

EXAMPLES = """\
nvcli chat                                      a conversation; /help lists its commands
nvcli chat "Name three rivers"                  one answer
nvcli chat -f notes.txt "Summarize this"        a file, then the question
cat log.txt | nvcli chat "What went wrong?"     piped text, then the question
nvcli chat --no-think -t 0 "2+2" > answer.txt   only the answer is in the file
nvcli chat --json "Hi" | jq .usage              for scripts
nvcli chat -x "A Python one-liner" > a.py       only the code block
nvcli chat --schema s.json "Describe Paris"     JSON of a schema
nvcli chat --tools tools.py "What is 7 * 6?"    with functions of yours
nvcli chat -c "And then?"                       go on with the last conversation"""


# What is about an answer, its end or a conversation. Sampling values are checked as in a run.
NOT_IN_A_DRY_RUN = frozenset(
    {
        *("interactive", "no_save", "no_history", "show_thinking", "no_stream", "markdown"),
        *("extract", "stream_json", "stats", "stats_json", "fail_on_length"),
    }
)


class ChatCommand(Command):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_extract_numbers(args))


def with_extract_numbers(args: list[str]) -> list[str]:
    """`-x` takes a number or not; Typer's options always take one."""
    result: list[str] = []
    for i, arg in enumerate(args):
        if arg == "--":
            return [*result, *args[i:]]
        is_next_number = i + 1 < len(args) and args[i + 1].isdecimal()
        result.append("--extract=1" if arg in ("-x", "--extract") and not is_next_number else arg)
    return result


@dataclass(frozen=True)
class ChatOptions:
    """What the flags say, checked; the model is not loaded yet."""

    config: EngineConfig
    sampling: dict[str, Any] = field(default_factory=dict)
    think: bool | None = None
    system: str | None = None
    is_raw: bool = False
    show_thinking: options.ThinkingChoice = options.ThinkingChoice.AUTO
    is_streaming: bool = True
    as_json: bool = False
    show_stats: bool = False
    markdown: bool | None = None
    fail_on_length: bool = False
    keep_history: bool = True
    as_events: bool = False
    extract: int | None = None
    schema: Mapping[str, Any] | None = None
    stats_json: Path | None = None
    tools: tuple[Path, ...] = ()
    mcp: Path | None = None
    allowed_tools: frozenset[str] = frozenset()
    session: str | None = None
    is_continued: bool = False
    is_saved: bool = True
    attach: str = "never"
    is_model_given: bool = False

    @property
    def is_machine_read(self) -> bool:
        """Standard output is for a program."""
        return self.as_json or self.as_events

    def thinking_view(self, screen: Screen) -> ThinkingView:
        if self.show_thinking is options.ThinkingChoice.AUTO:
            shown = screen.err_is_terminal and not screen.is_quiet
            return ThinkingView.FULL if shown else ThinkingView.HIDE
        return ThinkingView(self.show_thinking.value)

    def use_markdown(self, screen: Screen) -> bool:
        if self.markdown is not None:
            return self.markdown
        return (screen.out_is_terminal and not screen.is_dumb) or (
            screen.out_color and not screen.out_is_terminal
        )


def open_model(config: EngineConfig, screen: Screen) -> ChatModel:
    """Load the model, with a spinner where somebody waits."""
    with Spinner(screen, f"loading {config.model}"):
        from nvcli.repl.chat_llm import ChatLLM  # torch comes with it

        llm = ChatLLM(config=config)
    tell_startup(screen, llm.startup)
    if llm.is_demo:
        screen.note(DEMO_NOTICE)
    return llm


def find_model(name: str) -> None:
    """Fetch it where it has to be fetched. Raises `ModelNotFoundError`."""
    from nvcli.models.resolve import resolve_model

    resolve_model(name)


def find_server(options: ChatOptions, screen: Screen) -> ServerModel | None:
    from nvcli.cli.attach import attach

    return attach(options.attach, options.config, screen, is_model_given=options.is_model_given)


def connect(options: ChatOptions, screen: Screen) -> ChatModel:
    """A running server where --attach finds one, or else the model in this process."""
    return find_server(options, screen) or open_model(options.config, screen)


@bundled
def chat(
    ctx: typer.Context,
    prompt: options.PromptArg = None,
    *,
    engine: EngineOptions,
    attach: engine_options.AttachOpt = None,
    drawn: SamplingOptions,
    system: options.SystemOpt = None,
    file: options.FileOpt = None,
    stdin_position: options.StdinPositionOpt = options.StdinPosition.BEFORE,
    no_stdin: options.NoStdinOpt = False,
    interactive: options.InteractiveOpt = False,
    raw: options.RawOpt = False,
    tools: options.ToolsOpt = None,
    mcp: options.McpOpt = None,
    allow_tool: options.AllowToolOpt = None,
    continue_: options.ContinueOpt = False,
    session: options.SessionOpt = None,
    no_save: options.NoSaveOpt = False,
    show_thinking: options.ShowThinkingOpt = options.ThinkingChoice.AUTO,
    no_stream: options.NoStreamOpt = False,
    extract: options.ExtractOpt = None,
    json: options.JsonOpt = False,
    stream_json: options.StreamJsonOpt = False,
    stats: options.StatsOpt = False,
    stats_json: options.StatsJsonOpt = None,
    dry_run: options.DryRunOpt = False,
    markdown: options.MarkdownOpt = None,
    fail_on_length: options.FailOnLengthOpt = False,
    no_history: options.NoHistoryOpt = False,
) -> None:
    """Chat with a model, or answer one prompt.

    With a PROMPT or piped text it answers once: the answer on standard output, thinking and
    statistics on standard error. Without, on a terminal, it opens a conversation.
    """
    screen = settings_of(ctx).screen()
    config = engine.config()
    sampling = check_sampling(drawn.given())
    _refuse(drawn.think is False and drawn.think_budget is not None, "--no-think", "--think-budget")
    _refuse(raw and system is not None, "--raw", "--system")
    _refuse(raw and drawn.think is not None, "--raw", "--think or --no-think")
    _refuse(raw and drawn.think_budget is not None, "--raw", "--think-budget")
    _refuse(raw and interactive, "--raw", "--interactive")
    _refuse(json and stream_json, "--json", "--stream-json")
    is_object = drawn.format is AnswerFormat.JSON
    _refuse(drawn.schema is not None and is_object, "--schema", "--format json")
    _refuse(continue_ and session is not None, "--continue", "--session")
    machine = "--json" if json else "--stream-json" if stream_json else "--extract"
    is_machine_read = json or stream_json or extract is not None
    _refuse(is_machine_read and interactive, machine, "--interactive")
    _refuse(extract is not None and (json or stream_json), "--extract", machine)
    if extract is not None and extract < 1:
        raise UsageError(f"--extract counts from 1, got {extract}")
    has_tools = bool(tools or mcp)
    for flag, is_given in (
        ("--tools", has_tools),
        ("--schema", drawn.schema is not None or is_object),
        ("--continue or --session", continue_ or session is not None),
    ):
        _refuse(raw and is_given, "--raw", flag)
        _refuse(dry_run and is_given and flag != "--schema", "--dry-run", flag)
    if dry_run:
        refuse_in_dry_run(ctx, NOT_IN_A_DRY_RUN)
        interactive = False
    _refuse_idle_flags(ctx, is_machine_read=is_machine_read, has_tools=has_tools)
    has_terminal = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    opens_conversation = interactive or (
        prompt is None and has_terminal and not (raw or is_machine_read or dry_run)
    )
    _refuse(opens_conversation and stats_json is not None, "--stats-json", "a conversation")
    if stats_json is not None and (reason := why_not_writable(stats_json)):
        raise NvcliError(f"cannot write {stats_json}: {reason}")
    if has_tools and not allow_tool and not (_find_keyboard() or is_terminal(sys.stderr)):
        raise UsageError(
            "tools need a terminal where each call is asked for",
            hint="Allow them by name: --allow-tool NAME.",
        )
    given_schema: Mapping[str, Any] | None = None
    if drawn.schema is not None:
        given_schema = read_schema(drawn.schema, screen.warn)
    elif is_object:
        given_schema = ANY_OBJECT
    if session is not None:
        session_path(session)  # a name that is none is refused before anything is loaded
    chosen = ChatOptions(
        config=config,
        sampling=sampling,
        think=drawn.think,
        system=text_or_file(system, screen.warn) if system is not None else None,
        is_raw=raw,
        show_thinking=show_thinking,
        is_streaming=not no_stream,
        as_json=json,
        show_stats=stats,
        markdown=markdown,
        fail_on_length=fail_on_length,
        keep_history=not no_history,
        as_events=stream_json,
        extract=extract,
        schema=given_schema,
        stats_json=stats_json,
        tools=tuple(tools or ()),
        mcp=mcp,
        allowed_tools=frozenset(allow_tool or ()),
        session=session,
        is_continued=continue_,
        is_saved=not no_save and (not no_history or continue_ or session is not None),
        attach=attach or "auto",
        is_model_given=engine.model is not None,
    )
    files = file or []
    if interactive and not _find_keyboard():
        raise UsageError("--interactive needs a terminal for keys and for the conversation")
    takes_stdin = not (no_stdin or is_terminal(sys.stdin) or any(str(f) == "-" for f in files))
    text = join_parts(
        repair_argument(prompt, "the prompt", screen.warn) if prompt is not None else None,
        read_stdin(screen.warn, screen.note) if takes_stdin else "",
        read_files(files, screen.warn),
        stdin_first=stdin_position is options.StdinPosition.BEFORE,
    )
    if opens_conversation:
        from nvcli.cli.conversation import converse

        is_question = prompt is not None or not is_terminal(sys.stdin)
        converse(chosen, screen, text, asks_now=is_question)
        return
    if not text:
        raise UsageError(
            "there is no prompt", hint='Give it as an argument, nvcli chat "...", or pipe it in.'
        )
    if dry_run:
        from nvcli.cli.oneshot import show_prompt

        show_prompt(chosen, screen, text)
        return
    from nvcli.cli.oneshot import answer_once

    answer_once(chosen, screen, text)


def _refuse_idle_flags(ctx: typer.Context, *, is_machine_read: bool, has_tools: bool) -> None:
    """Flags that would do nothing beside the others; the same values in a file may stand there."""
    typed = set(typed_names(ctx))
    _refuse(typed >= {"no_stdin", "stdin_position"}, "--no-stdin", "--stdin-position")
    _refuse(typed >= {"stream_json", "no_stream"}, "--stream-json", "--no-stream")
    if is_machine_read and "markdown" in typed and ctx.params["markdown"]:
        raise UsageError("--markdown is for people", hint="Leave it out.")
    if "allow_tool" in typed and not has_tools:
        raise UsageError("--allow-tool needs tools", hint="Give --tools FILE.py or --mcp FILE.")


def check_sampling(given: dict[str, Any]) -> dict[str, Any]:
    """The same values. Raises `InvalidParameterError` before anything is loaded."""
    SamplingParams(**given)
    if "max_tokens" in given:
        check_answer_limit(given["max_tokens"])
    return given


def _refuse(is_contradiction: bool, one: str, other: str) -> None:
    if is_contradiction:
        raise UsageError(f"{one} and {other} contradict each other", hint="Leave one out.")


def _find_keyboard() -> bool:
    """Whether keys can be read: standard input, or else the controlling terminal."""
    if not is_terminal(sys.stdout):
        return False
    if is_terminal(sys.stdin):
        return True
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True
