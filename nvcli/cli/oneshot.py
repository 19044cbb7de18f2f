"""One prompt, one answer: text or JSON on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from nvcli.cli import chat as chat_command
from nvcli.cli.console import dump_json, timings_json, usage_json
from nvcli.errors import InterruptedRunError, NvcliError, RequestError
from nvcli.repl.render import AnswerRenderer
from nvcli.repl.session import statistics_line
from nvcli.types import FinishReason, Message, RequestOutput, fold_outputs

if TYPE_CHECKING:
    from nvcli.cli.chat import ChatOptions
    from nvcli.repl.screen import Screen
    from nvcli.repl.session import ChatModel


def answer_once(options: ChatOptions, screen: Screen, text: str) -> None:
    """Load, answer, print.

    Raises `InterruptedRunError` on Ctrl-C, after the partial answer is out, and `RequestError` when
    the request failed or, under --fail-on-length, was cut.
    """
    llm = chat_command.open_model(options.config, screen)
    with contextlib.closing(llm):
        if options.think and not llm.supports_thinking:
            screen.warn(f"{llm.model_name} has no thinking mode; --think changes nothing")
        thinking = options.think is not False
        params = llm.sampling(enable_thinking=thinking, **options.sampling)
        if options.is_raw:
            deltas = llm.stream(text, params, raw=True)
        else:
            messages = [Message("system", options.system)] if options.system else []
            messages.append(Message("user", text))
            deltas = llm.stream(messages, params, enable_thinking=thinking)
        printer = Printer(options, screen, llm)
        try:
            for delta in deltas:
                printer.feed(delta)
        except KeyboardInterrupt:
            printer.finish(is_interrupted=True)
            raise InterruptedRunError("interrupted") from None
        except NvcliError:
            printer.finish(is_interrupted=True, is_failed=True)
            raise
        except SystemExit:  # SIGTERM
            printer.finish(is_interrupted=True)
            raise
        finally:
            close = getattr(deltas, "close", None)
            if close is not None:
                close()
        printer.finish()
    output = printer.output
    if output.finish_reason is FinishReason.ERROR:
        raise RequestError(output.error or "the request failed")
    if options.fail_on_length and output.finish_reason is FinishReason.LENGTH:
        raise RequestError(
            f"the answer was cut after {output.usage.completion_tokens} tokens",
            hint="Raise --max-tokens or --max-model-len.",
        )


class Printer:
    """The answer as the flags want it, from deltas."""

    def __init__(self, options: ChatOptions, screen: Screen, llm: ChatModel) -> None:
        self._options = options
        self._screen = screen
        self._llm = llm
        self._deltas: list[RequestOutput] = []
        self._renderer = AnswerRenderer(
            screen,
            thinking=options.thinking_view(screen),
            markdown=options.use_markdown(screen) and not options.as_json,
        )

    @property
    def output(self) -> RequestOutput:
        return fold_outputs(self._deltas) if self._deltas else RequestOutput(request_id="none")

    def feed(self, delta: RequestOutput) -> None:
        self._deltas.append(delta)
        if self._options.is_streaming and not self._options.as_json:
            self._renderer.feed(delta)

    def finish(self, *, is_interrupted: bool = False, is_failed: bool = False) -> None:
        output = self.output
        if self._options.as_json:
            if not is_failed and output.finish_reason is not FinishReason.ERROR:
                self._screen.write(dump_json(answer_json(self._llm.model_name, output)) + "\n")
        else:
            if not self._options.is_streaming:
                self._renderer.feed(output)
            self._renderer.finish()
        if is_interrupted or output.finish_reason is FinishReason.ERROR:
            return
        if not output.text and output.reasoning:
            self._screen.warn("the answer is empty: the token limit came while the model thought")
        for call in output.tool_calls:
            self._screen.warn(f"the model asks for a tool: {call.name}({call.arguments})")
        shown = self._screen.err_is_terminal and not self._screen.is_quiet
        if self._options.show_stats or shown:
            line = statistics_line(output, self._llm.max_model_len)
            self._screen.write_err(f"{line}\n", dim=True)


def answer_json(model: str, output: RequestOutput) -> dict[str, Any]:
    """`chat --json`: model, text, thinking, tool_calls, finish_reason, usage, timings."""
    return {
        "model": model,
        "text": output.text,
        "thinking": output.reasoning,
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in output.tool_calls
        ],
        "finish_reason": str(output.finish_reason or FinishReason.ABORT),
        "usage": usage_json(output.usage),
        "timings": timings_json(output.times, output.usage.completion_tokens),
    }
