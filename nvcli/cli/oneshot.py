"""One prompt, one answer: text, JSON, events or a code block on standard output, everything else on
standard error.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from nvcli.cli import chat as chat_command
from nvcli.cli.console import dump_json, figures_json, is_terminal, print_text
from nvcli.cli.sessions import open_session, open_tools
from nvcli.errors import ContextLengthError, InterruptedRunError, NvcliError, RequestError
from nvcli.repl.command_turns import code_blocks
from nvcli.repl.numbers import SEPARATOR, emptiness, statistics_line
from nvcli.repl.render import AnswerRenderer
from nvcli.repl.screen import visible
from nvcli.repl.shell import not_saved
from nvcli.repl.tool_calls import MAX_ROUNDS, StoppedError, ask_short, run_calls
from nvcli.text import call_json
from nvcli.text.words import counted
from nvcli.types import FinishReason, Message, RequestOutput, fold_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nvcli.cli.chat import ChatOptions
    from nvcli.config import EngineConfig
    from nvcli.repl.model import ChatModel
    from nvcli.repl.screen import Screen
    from nvcli.repl.session import Session


def answer_once(options: ChatOptions, screen: Screen, text: str) -> None:
    """Load, answer, print.

    Raises `InterruptedRunError` on Ctrl-C, after the partial answer is out, and `RequestError` when
    the request failed or, under --fail-on-length, was cut.
    """
    with contextlib.ExitStack() as stack:
        tools = open_tools(options, screen, stack)
        llm: ChatModel | None = chat_command.find_server(options, screen)
        if llm is None:
            _refuse_too_long(options, text)
            llm = chat_command.open_model(options.config, screen)
        stack.enter_context(contextlib.closing(llm))
        session = open_session(options, screen, llm, tools)
        printer = Printer(options, screen, llm)
        if options.is_raw:
            params = llm.sampling(enable_thinking=session.think, **options.sampling)
            _print_all(llm.stream(text, params, raw=True), printer)
        else:
            _answer(options, screen, session, text, printer)
        output = printer.output
        if options.stats_json is not None:
            _write_statistics(options, llm, output)
    if output.finish_reason is FinishReason.ERROR:
        raise RequestError(output.error or "the request failed")
    if options.fail_on_length and output.finish_reason is FinishReason.LENGTH:
        raise RequestError(
            f"the answer was cut after {counted(output.usage.completion_tokens, 'token')}",
            hint="Raise --max-tokens or --max-model-len.",
        )
    if options.extract is not None:
        _print_code(output.text, options.extract, screen)


def _answer(
    options: ChatOptions, screen: Screen, session: Session, text: str, printer: Printer
) -> None:
    """The turn, with the tools it calls."""
    allowed = set(options.allowed_tools)
    can_ask = is_terminal(sys.stdin) and screen.err_is_terminal
    deltas = session.turn(text)
    for round_number in range(MAX_ROUNDS + 1):
        calls_before = printer.num_calls
        _print_all(deltas, printer, is_last=lambda: not session.pending_calls())
        calls = session.pending_calls()
        if not calls or session.tools is None:
            break
        if round_number == MAX_ROUNDS:
            raise RequestError(f"the model called tools {MAX_ROUNDS} times and gave no answer")
        assert printer.num_calls > calls_before, "each round reports its calls"
        ask = partial(ask_short, screen, sys.stdin) if can_ask else None
        try:
            results = run_calls(calls, session.tools, screen, allowed, ask)
        except StoppedError:
            raise InterruptedRunError("interrupted") from None
        for call, result in zip(calls, results, strict=True):
            printer.event("tool_result", id=call.id, name=call.name, text=result)
        session.answer_calls(results)
        deltas = session.resume()
    try:
        session.save()
    except OSError as exc:
        screen.error(not_saved(session, exc))


def _print_all(
    deltas: Iterator[RequestOutput], printer: Printer, is_last: Any = lambda: True
) -> None:
    try:
        for delta in deltas:
            printer.feed(delta)
    except KeyboardInterrupt:
        printer.finish(is_interrupted=True)
        raise InterruptedRunError("interrupted") from None
    except NvcliError:
        printer.finish(is_interrupted=True, is_failed=True)
        raise
    except SystemExit:  # SIGTERM, or SIGHUP: then the terminal may be gone
        with contextlib.suppress(NvcliError):
            printer.finish(is_interrupted=True)
        raise
    finally:
        close = getattr(deltas, "close", None)
        if close is not None:
            close()
    if is_last():
        printer.finish()
    else:
        printer.end_round()


class Printer:
    """The answer as the flags want it, from deltas."""

    def __init__(self, options: ChatOptions, screen: Screen, llm: ChatModel) -> None:
        self._options = options
        self._screen = screen
        self._llm = llm
        self._deltas: list[RequestOutput] = []
        self.num_calls = 0
        self._renderer = self._new_renderer()

    def _new_renderer(self) -> AnswerRenderer:
        options = self._options
        is_shown = not options.is_machine_read and options.extract is None
        return AnswerRenderer(
            self._screen,
            thinking=options.thinking_view(self._screen),
            markdown=is_shown and options.use_markdown(self._screen),
        )

    @property
    def _is_streaming(self) -> bool:
        options = self._options
        return options.is_streaming and not options.is_machine_read and options.extract is None

    @property
    def output(self) -> RequestOutput:
        return fold_outputs(self._deltas) if self._deltas else RequestOutput(request_id="none")

    def event(self, kind: str, **values: Any) -> None:
        if self._options.as_events:
            self._screen.write(dump_json({"type": kind, **values}) + "\n")

    def feed(self, delta: RequestOutput) -> None:
        self._deltas.append(delta)
        if self._is_streaming:
            self._renderer.feed(delta)
        if delta.reasoning:
            self.event("thinking", text=delta.reasoning)
        if delta.text:
            self.event("text", text=delta.text)

    def _report_calls(self, output: RequestOutput) -> None:
        for call in output.tool_calls:
            self.num_calls += 1
            self.event("tool_call", id=call.id, name=call.name, arguments=call.arguments)

    def end_round(self) -> None:
        """The model waits for tool results; another answer follows."""
        self._report_calls(self.output)
        if self._is_streaming:
            self._renderer.finish()
            self._renderer = self._new_renderer()
        self._deltas.clear()

    def finish(self, *, is_interrupted: bool = False, is_failed: bool = False) -> None:
        options, output = self._options, self.output
        self._report_calls(output)
        is_error = is_failed or output.finish_reason is FinishReason.ERROR
        if options.as_json and not is_error:
            self._screen.write(dump_json(answer_json(self._llm.model_name, output)) + "\n")
        elif options.as_events:
            self._finish_events(output, is_error=is_error)
        elif not options.is_machine_read and options.extract is None:
            if not options.is_streaming:
                self._renderer.feed(output)
            self._renderer.finish()
        if is_interrupted or output.finish_reason is FinishReason.ERROR:
            return
        empty = emptiness(output)
        if empty is not None:
            self._screen.warn(empty)
        for call in output.tool_calls:
            self._screen.warn(f"the model asks for a tool: {call.name}({call.arguments})")
        if options.schema is not None and output.finish_reason is FinishReason.LENGTH:
            self._screen.warn("the answer was cut by the token limit, so its JSON is incomplete")
        shown = options.show_stats or (self._screen.err_is_terminal and not self._screen.is_quiet)
        line = statistics_line(output, self._llm.max_model_len)
        self._screen.line_err(line, dim=True, separator=SEPARATOR, is_shown=shown)

    def _finish_events(self, output: RequestOutput, *, is_error: bool) -> None:
        done = answer_json(self._llm.model_name, output)
        for key in ("text", "thinking", "tool_calls"):
            del done[key]
        self.event("done", **{**done, "finish_reason": "error"} if is_error else done)


def answer_json(model: str, output: RequestOutput) -> dict[str, Any]:
    """`chat --json`: model, text, thinking, tool_calls, finish_reason, usage, timings."""
    return {
        "model": model,
        "text": output.text,
        "thinking": output.reasoning,
        "tool_calls": [call_json(call) for call in output.tool_calls],
        "finish_reason": str(output.finish_reason or FinishReason.ABORT),
        **figures_json(output),
    }


def _print_code(text: str, number: int, screen: Screen) -> None:
    """The N-th code block, and nothing else, on standard output."""
    blocks = code_blocks(text)
    if number > len(blocks):
        have = f"only {counted(len(blocks), 'code block')}" if blocks else "no code block"
        raise RequestError(f"the answer has {have}", hint="Without -x it is printed whole.")
    screen.write(visible(blocks[number - 1]) + "\n")


def _write_statistics(options: ChatOptions, llm: ChatModel, output: RequestOutput) -> None:
    stats = llm.stats()
    is_plain = is_dataclass(stats) and not isinstance(stats, type)
    value = {
        "command": "chat",
        "model": llm.model_name,
        **figures_json(output),
        "engine": asdict(stats) if is_plain else None,
    }
    assert options.stats_json is not None, "the flag was given"
    try:
        options.stats_json.write_text(json.dumps(value) + "\n", encoding="utf-8")
    except OSError as exc:
        raise NvcliError(f"cannot write {options.stats_json}: {exc.strerror or exc}") from exc


def _messages(options: ChatOptions, text: str) -> list[Message]:
    system = [Message("system", options.system)] if options.system else []
    return [*system, Message("user", text)]


def _folder_and_limit(config: EngineConfig) -> tuple[Path, int]:
    """Where the model is, and how many tokens its context may hold."""
    from nvcli.models.config import ModelConfig
    from nvcli.models.resolve import resolve_model

    folder = resolve_model(config.model)
    return folder, ModelConfig.from_hf(folder).model_len(config.max_model_len)


def _prompt_here(options: ChatOptions, text: str, folder: Path) -> tuple[str, int]:
    """The exact prompt and its tokens, without tools and an earlier conversation, which add."""
    from nvcli.text import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    if options.is_raw:
        return text, len(tokenizer.encode(text))
    messages, thinking = _messages(options, text), options.think is not False
    prompt = tokenizer.render(messages, enable_thinking=thinking)
    return prompt, len(tokenizer.encode_chat(messages, enable_thinking=thinking))


def _refuse_too_long(options: ChatOptions, text: str) -> None:
    """Raises the `ContextLengthError` of a run before weights are loaded for it. The tokenizer
    takes a moment too, which text of so few bytes is spared: a token has at least one.
    """
    if options.config.load_format == "dummy":  # it may have no tokenizer
        return
    folder, limit = _folder_and_limit(options.config)
    if len(f"{options.system or ''}{text}".encode()) < limit:
        return
    _, count = _prompt_here(options, text, folder)
    if error := ContextLengthError.of_prompt(count, limit):
        raise error


def show_prompt(options: ChatOptions, screen: Screen, text: str) -> None:
    """`--dry-run`: the exact prompt, from the tokenizer alone, or from a server that was named.

    Raises `ContextLengthError`, behind the prompt, where a run would refuse it.
    """
    name = options.config.model
    server = (
        chat_command.find_server(options, screen)
        if options.attach not in ("auto", "never")
        else None
    )
    if server is not None:
        with contextlib.closing(server):
            name, limit = server.model_name, server.max_model_len
            prompt = text
            if not options.is_raw:
                messages, thinking = _messages(options, text), options.think is not False
                prompt = server.render(messages, enable_thinking=thinking)
            count = server.count_tokens(prompt)
    else:
        folder, limit = _folder_and_limit(options.config)
        prompt, count = _prompt_here(options, text, folder)
    if options.is_machine_read:
        print_text(dump_json({"model": name, "prompt": prompt, "prompt_tokens": count}))
    else:
        print_text(visible(prompt).removesuffix("\n"))
        screen.write_err(f"{counted(count, 'token')}\n", dim=True)
    if error := ContextLengthError.of_prompt(count, limit):
        raise error
