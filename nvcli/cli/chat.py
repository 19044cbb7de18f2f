"""`nvcli chat`: one answer when there is a prompt or a pipe, a conversation otherwise."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer  # noqa: TC002 - Typer reads the annotations of `chat`

from nvcli.cli import options
from nvcli.cli.app import Command, settings_of
from nvcli.cli.console import Spinner, is_terminal
from nvcli.cli.prompt_input import (
    join_parts,
    read_files,
    read_stdin,
    repair_argument,
    text_or_file,
)
from nvcli.config import DEFAULT_MODEL, EngineConfig
from nvcli.errors import UsageError
from nvcli.repl.render import ThinkingView
from nvcli.repl.screen import visible
from nvcli.repl.session import startup_lines
from nvcli.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvcli.repl.screen import Screen
    from nvcli.repl.session import ChatModel

DEMO_NOTICE = "This is the small built-in demo model. For a real one: nvcli chat -m Qwen/Qwen3-0.6B"

_FLAGS = {"memory_utilization": "--gpu-memory-utilization", "thinking_budget": "--think-budget"}


class ChatCommand(Command):
    examples = """\
nvcli chat                                      a conversation; /help lists its commands
nvcli chat "Name three rivers"                  one answer
nvcli chat -f notes.txt "Summarize this"        a file, then the question
cat log.txt | nvcli chat "What went wrong?"     piped text, then the question
nvcli chat --no-think -t 0 "2+2" > answer.txt   only the answer is in the file
nvcli chat --json "Hi" | jq .usage              for scripts"""


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
        from nvcli.llm import LLM  # torch comes with it

        llm = LLM(config=config)
    if screen.is_verbose:
        for line in startup_lines(llm.startup):
            screen.write_err(f"{visible(line)}\n", dim=True)
    if llm.is_demo:
        screen.note(DEMO_NOTICE)
    return llm


def chat(
    ctx: typer.Context,
    prompt: options.PromptArg = None,
    model: options.ModelOpt = None,
    device: options.DeviceOpt = None,
    dtype: options.DTypeOpt = None,
    max_model_len: options.MaxModelLenOpt = None,
    gpu_memory_utilization: options.MemoryOpt = None,
    kv_cache_dtype: options.KVCacheDTypeOpt = None,
    max_num_seqs: options.MaxNumSeqsOpt = None,
    load_format: options.LoadFormatOpt = None,
    temperature: options.TemperatureOpt = None,
    top_p: options.TopPOpt = None,
    top_k: options.TopKOpt = None,
    min_p: options.MinPOpt = None,
    presence_penalty: options.PresencePenaltyOpt = None,
    repetition_penalty: options.RepetitionPenaltyOpt = None,
    max_tokens: options.MaxTokensOpt = None,
    stop: options.StopOpt = None,
    seed: options.SeedOpt = None,
    think: options.ThinkOpt = None,
    think_budget: options.ThinkBudgetOpt = None,
    system: options.SystemOpt = None,
    file: options.FileOpt = None,
    stdin_position: options.StdinPositionOpt = options.StdinPosition.BEFORE,
    no_stdin: options.NoStdinOpt = False,
    interactive: options.InteractiveOpt = False,
    raw: options.RawOpt = False,
    show_thinking: options.ShowThinkingOpt = options.ThinkingChoice.AUTO,
    no_stream: options.NoStreamOpt = False,
    json: options.JsonOpt = False,
    stats: options.StatsOpt = False,
    markdown: options.MarkdownOpt = None,
    fail_on_length: options.FailOnLengthOpt = False,
    no_history: options.NoHistoryOpt = False,
) -> None:
    """Chat with a model, or answer one prompt.

    With a PROMPT or piped text it answers once: the answer on standard output, thinking and
    statistics on standard error. Without, on a terminal, it opens a conversation.
    """
    screen = settings_of(ctx).screen()
    with _naming_flags():
        config = EngineConfig.from_options(
            model=model or DEFAULT_MODEL,
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            memory_utilization=gpu_memory_utilization,
            kv_cache_dtype=kv_cache_dtype,
            max_num_seqs=max_num_seqs,
            load_format=load_format,
        )
    sampling = check_sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
        stop=tuple(stop) if stop else None,
        seed=seed,
        thinking_budget=think_budget,
    )
    _refuse(think is False and think_budget is not None, "--no-think", "--think-budget")
    _refuse(raw and system is not None, "--raw", "--system")
    _refuse(raw and think is not None, "--raw", "--think or --no-think")
    _refuse(raw and interactive, "--raw", "--interactive")
    _refuse(json and interactive, "--json", "--interactive")
    chosen = ChatOptions(
        config=config,
        sampling=sampling,
        think=think,
        system=text_or_file(system, screen.warn) if system is not None else None,
        is_raw=raw,
        show_thinking=show_thinking,
        is_streaming=not no_stream,
        as_json=json,
        show_stats=stats,
        markdown=markdown,
        fail_on_length=fail_on_length,
        keep_history=not no_history,
    )
    files = file or []
    has_terminal = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    opens_conversation = interactive or (prompt is None and has_terminal and not (raw or json))
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
            "there is no prompt",
            hint='Give it as an argument, nvcli chat "...", or pipe it in.',
        )
    from nvcli.cli.oneshot import answer_once

    answer_once(chosen, screen, text)


def check_sampling(**values: Any) -> dict[str, Any]:
    """The values that were given. Raises `InvalidParameterError` before anything is loaded."""
    given = {name: value for name, value in values.items() if value is not None}
    with _naming_flags():
        SamplingParams(**given)
    return given


@contextlib.contextmanager
def _naming_flags() -> Iterator[None]:
    """Errors about a field of the engine's types name the flag that set it."""
    try:
        yield
    except UsageError as exc:
        field_name = exc.param or ""
        flag = _FLAGS.get(field_name) or "--" + field_name.replace("_", "-")
        if exc.message.startswith(f"{field_name} "):
            exc.message = flag + exc.message[len(field_name) :]
        raise


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


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command(cls=ChatCommand)(chat)
