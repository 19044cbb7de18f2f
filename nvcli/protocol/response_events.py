"""The events of a response, and the response itself: one state machine over the engine's deltas.

    reasoning delta, text delta, call delta  ->  open the item it belongs to, end the one before
    end                                      ->  end what is open, then completed or incomplete,
                                                 or another turn, when calls of MCP tools wait

Whoever wants no stream drops the events and takes `response` at the end, so both are the same.
"""

from __future__ import annotations

import time
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from nvcli.protocol.logprobs import TextLogprobs, chat_logprob
from nvcli.protocol.response_mcp import McpEvents
from nvcli.protocol.responses import ENCRYPTED
from nvcli.types import FinishReason, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nvcli.errors import NvcliError
    from nvcli.protocol.bodies import AnswerHead
    from nvcli.protocol.response_frame import Event
    from nvcli.protocol.responses import ResponsesRequest
    from nvcli.text import Tokenizer
    from nvcli.types import RequestOutput, SamplingParams, ToolCall

_SUMMARY_CHARACTERS = 240


class ResponseEvents(McpEvents):
    """Builds one response. Every method that yields gives events in order."""

    def __init__(
        self,
        request: ResponsesRequest,
        head: AnswerHead,
        *,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        encrypt: Callable[[str], str],
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._encrypt = encrypt
        self._logprobs = TextLogprobs(tokenizer)
        self._usage = Usage()  # of the turns that have ended
        self._turn = 0  # where in the output the running turn begins
        response: dict[str, Any] = {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "completed_at": None,
            "status": "queued" if request.background else "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": head.model,
            "output": [],
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "usage": None,
            **request.echo,
        }
        super().__init__(response, include_obfuscation=request.include_obfuscation)

    # --- the frame --------------------------------------------------------------------------------

    def start(self) -> Iterator[Event]:
        yield self._event("response.created", response=self._snapshot())
        if self.response["status"] == "queued":
            yield self._event("response.queued", response=self._snapshot())
        self.response["status"] = "in_progress"
        yield self._event("response.in_progress", response=self._snapshot())

    def feed(self, output: RequestOutput) -> Iterator[Event]:
        """One delta of the only output; with the last one the response ends."""
        if output.reasoning and self._request.chat.thinking.is_shown:
            yield from self._reasoning(output.reasoning)
        logprobs = []
        if self._request.chat.has_logprobs:
            entries = self._logprobs.feed(output)
            logprobs = [chat_logprob(entry, self._tokenizer) for entry in entries]
        if output.text:
            yield from self._text(output.text, logprobs)
        for call in output.tool_calls:
            yield from self._call(call)
        if output.is_finished:
            yield from self._finish(output)

    def fail(self, error: NvcliError) -> Iterator[Event]:
        """The engine or the server ended it: an error, then the failed response."""
        message = str(error)[:2000]
        yield from self._break_off(message)
        yield self._event("error", code=error.code, message=message, param=error.param)
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": message}
        yield self._event("response.failed", response=self._snapshot())

    def cancel(self) -> Iterator[Event]:
        """The client ended it."""
        yield from self._break_off("the response was cancelled")
        self.response["status"] = "cancelled"
        self.response["completed_at"] = None

    def _break_off(self, reason: str) -> Iterator[Event]:
        if self._item is not None:
            yield from self._close("incomplete")
        yield from self.give_up(reason)

    def _finish(self, output: RequestOutput) -> Iterator[Event]:
        """The model has ended its turn."""
        is_cut = output.finish_reason is FinishReason.LENGTH
        self._usage = _sum(self._usage, output.usage)
        answers = ("message", "function_call", "mcp_call", "mcp_approval_request")
        is_open = self._is_open("mcp_approval_request")  # not in the output yet
        has_answer = any(i["type"] in answers for i in self.response["output"][self._turn :])
        if not is_cut and not has_answer and not is_open:
            yield from self._open_message()
        if self._item is not None:
            yield from self._close("incomplete" if is_cut else "completed")
        if is_cut:
            yield from self.give_up("the response was cut before the call")
        if not self.pending:
            yield from self.complete(is_cut=is_cut)

    def complete(self, *, is_cut: bool) -> Iterator[Event]:
        """The response ends well, or at its limit of tokens."""
        response = self.response
        response["status"] = "incomplete" if is_cut else "completed"
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        response["usage"] = usage_body(self._usage)
        yield self._event(f"response.{response['status']}", response=self._snapshot())

    @property
    def usage(self) -> Usage:
        """Of all turns that have ended."""
        return self._usage

    @property
    def num_output_tokens(self) -> int:
        return self._usage.completion_tokens

    def begin_turn(self) -> None:
        """The model speaks again, with the results of its calls before it."""
        self._turn = len(self.response["output"])
        self._logprobs = TextLogprobs(self._tokenizer)

    def asks_client(self) -> bool:
        """Whether the turn holds something only the client can answer."""
        kinds = ("function_call", "mcp_approval_request")
        return any(item["type"] in kinds for item in self.response["output"][self._turn :])

    def _close(self, status: str) -> Iterator[Event]:
        item = self._item
        assert item is not None, "an item is open"
        kind = item["type"]
        if kind == "mcp_call":
            yield from self._close_call(item, status)
            return
        if kind == "mcp_approval_request":
            yield from self._close_approval(item, status)
            return
        if kind == "message":
            part = item["content"][0]
            yield self._in_item(
                "response.output_text.done",
                content_index=0,
                text=part["text"],
                logprobs=part["logprobs"],
            )
            yield self._in_item("response.content_part.done", content_index=0, part=deepcopy(part))
        elif kind == "reasoning":
            yield from self._close_reasoning(item)
        else:
            yield self._in_item(
                "response.function_call_arguments.done",
                arguments=item["arguments"],
                name=item["name"],
            )
        item["status"] = status
        yield self._done(item)
        self._item = None

    # --- reasoning --------------------------------------------------------------------------------

    def _reasoning(self, delta: str) -> Iterator[Event]:
        if not self._is_open("reasoning"):
            yield from self._open("reasoning", summary=[], content=[], encrypted_content=None)
            assert self._item is not None
            part = {"type": "reasoning_text", "text": ""}
            self._item["content"].append(part)
            yield self._in_item("response.content_part.added", content_index=0, part=deepcopy(part))
        assert self._item is not None
        self._item["content"][0]["text"] += delta
        yield self._in_item("response.reasoning_text.delta", content_index=0, delta=delta)

    def _close_reasoning(self, item: dict[str, Any]) -> Iterator[Event]:
        part = item["content"][0]
        text = part["text"]
        yield self._in_item("response.reasoning_text.done", content_index=0, text=text)
        yield self._in_item("response.content_part.done", content_index=0, part=deepcopy(part))
        if self._request.summarizes and text.strip():
            yield from self._summary(item, _extract(text))
        if ENCRYPTED in self._request.include:
            item["encrypted_content"] = self._encrypt(text)

    def _summary(self, item: dict[str, Any], text: str) -> Iterator[Event]:
        prefix = "response.reasoning_summary"
        empty = {"type": "summary_text", "text": ""}
        yield self._in_item(f"{prefix}_part.added", summary_index=0, part=empty)
        yield self._in_item(f"{prefix}_text.delta", summary_index=0, delta=text)
        yield self._in_item(f"{prefix}_text.done", summary_index=0, text=text)
        part = {"type": "summary_text", "text": text}
        item["summary"].append(part)
        yield self._in_item(f"{prefix}_part.done", summary_index=0, part=dict(part))

    # --- text -------------------------------------------------------------------------------------

    def _open_message(self) -> Iterator[Event]:
        yield from self._open("message", role="assistant", content=[])
        assert self._item is not None
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._item["content"].append(part)
        yield self._in_item("response.content_part.added", content_index=0, part=deepcopy(part))

    def _text(self, delta: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if not self._is_open("message"):
            yield from self._open_message()
        assert self._item is not None
        part = self._item["content"][0]
        part["text"] += delta
        part["logprobs"] += logprobs
        yield self._in_item(
            "response.output_text.delta", content_index=0, delta=delta, logprobs=logprobs
        )

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, call: ToolCall) -> Iterator[Event]:
        if call.name:
            function = self.functions.get(call.name)
            if function is not None:
                yield from self._open_call(function)
            else:
                named = {"call_id": call.id, "name": call.name}
                yield from self._open("function_call", **named, arguments="")
        if not call.arguments:
            return
        if self._is_open("function_call"):
            assert self._item is not None
            self._item["arguments"] += call.arguments
            yield self._in_item("response.function_call_arguments.delta", delta=call.arguments)
        else:
            yield from self._add_arguments(call.arguments)


def _sum(first: Usage, second: Usage) -> Usage:
    return Usage(
        first.prompt_tokens + second.prompt_tokens,
        first.completion_tokens + second.completion_tokens,
        first.cached_tokens + second.cached_tokens,
        first.reasoning_tokens + second.reasoning_tokens,
    )


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _extract(text: str) -> str:
    """The first sentences of the reasoning: a summary costs no second run of the model."""
    text = " ".join(text.split())
    if len(text) <= _SUMMARY_CHARACTERS:
        return text
    cut = text[:_SUMMARY_CHARACTERS]
    end = max(cut.rfind(mark) for mark in (". ", "! ", "? ", "。"))
    return cut[: end + 1] if end > 40 else cut.rsplit(" ", 1)[0] + " ..."
