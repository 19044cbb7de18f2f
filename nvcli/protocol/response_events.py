"""The events of a response, and the response itself: one state machine over the engine's deltas.

    reasoning delta, text delta, call delta  ->  open the item it belongs to, end the one before
    end                                      ->  end what is open, then completed or incomplete

Whoever wants no stream drops the events and takes `response` at the end, so both are the same.
"""

from __future__ import annotations

import secrets
import time
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from nvcli.protocol.logprobs import TextLogprobs, chat_logprob
from nvcli.protocol.response_items import new_item_id
from nvcli.protocol.responses import ENCRYPTED
from nvcli.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nvcli.errors import NvcliError
    from nvcli.protocol.responses import ResponsesRequest
    from nvcli.text import Tokenizer
    from nvcli.types import RequestOutput, SamplingParams, ToolCall, Usage

Event = dict[str, Any]

_SUMMARY_CHARACTERS = 240
_OBFUSCATED = 16


class ResponseEvents:
    """Builds one response. Every method that yields gives events in order."""

    def __init__(
        self,
        request: ResponsesRequest,
        *,
        response_id: str,
        model: str,
        created: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        encrypt: Callable[[str], str],
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._encrypt = encrypt
        self._logprobs = TextLogprobs(tokenizer)
        self._sequence = 0
        self._item: dict[str, Any] | None = None  # the open one, always the last of the output
        self.response: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": created,
            "completed_at": None,
            "status": "queued" if request.background else "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "usage": None,
            **request.echo,
        }

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
        if self._item is not None:
            yield from self._close("incomplete")
        yield self._event("error", code=error.code, message=message, param=error.param)
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": message}
        yield self._event("response.failed", response=self._snapshot())

    def cancel(self) -> Iterator[Event]:
        """The client ended it."""
        if self._item is not None:
            yield from self._close("incomplete")
        self.response["status"] = "cancelled"
        self.response["completed_at"] = None

    def _finish(self, output: RequestOutput) -> Iterator[Event]:
        is_cut = output.finish_reason is FinishReason.LENGTH
        kinds = [item["type"] for item in self.response["output"]]
        if not is_cut and "message" not in kinds and "function_call" not in kinds:
            yield from self._open_message()
        if self._item is not None:
            yield from self._close("incomplete" if is_cut else "completed")
        response = self.response
        response["status"] = "incomplete" if is_cut else "completed"
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        response["usage"] = usage_body(output.usage)
        yield self._event(f"response.{response['status']}", response=self._snapshot())

    def _event(self, kind: str, **values: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence, **values}
        self._sequence += 1
        return event

    def _snapshot(self) -> dict[str, Any]:
        return deepcopy(self.response)

    # --- items ------------------------------------------------------------------------------------

    def _in_item(self, kind: str, **values: Any) -> Event:
        assert self._item is not None, "an item is open"
        index = len(self.response["output"]) - 1
        event = self._event(kind, item_id=self._item["id"], output_index=index, **values)
        if kind.endswith(".delta") and self._request.include_obfuscation:
            size = _OBFUSCATED - len(values["delta"]) % _OBFUSCATED
            event["obfuscation"] = secrets.token_urlsafe(_OBFUSCATED)[:size]
        return event

    def _open(self, kind: str, **values: Any) -> Iterator[Event]:
        if self._item is not None:
            yield from self._close("completed")
        self._item = {"id": new_item_id(kind), "type": kind, "status": "in_progress", **values}
        self.response["output"].append(self._item)
        yield self._added()

    def _added(self) -> Event:
        index = len(self.response["output"]) - 1
        item = deepcopy(self._item)
        return self._event("response.output_item.added", output_index=index, item=item)

    def _close(self, status: str) -> Iterator[Event]:
        item = self._item
        assert item is not None, "an item is open"
        if item["type"] == "message":
            part = item["content"][0]
            yield self._in_item(
                "response.output_text.done",
                content_index=0,
                text=part["text"],
                logprobs=part["logprobs"],
            )
            yield self._in_item("response.content_part.done", content_index=0, part=deepcopy(part))
        elif item["type"] == "reasoning":
            yield from self._close_reasoning(item)
        else:
            yield self._in_item(
                "response.function_call_arguments.done",
                arguments=item["arguments"],
                name=item["name"],
            )
        item["status"] = status
        index = len(self.response["output"]) - 1
        yield self._event("response.output_item.done", output_index=index, item=deepcopy(item))
        self._item = None

    def _is_open(self, kind: str) -> bool:
        return self._item is not None and self._item["type"] == kind

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
            "response.output_text.delta",
            content_index=0,
            delta=delta,
            logprobs=logprobs,
        )

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, call: ToolCall) -> Iterator[Event]:
        if call.name:
            yield from self._open("function_call", call_id=call.id, name=call.name, arguments="")
        if call.arguments:
            assert self._item is not None
            self._item["arguments"] += call.arguments
            yield self._in_item("response.function_call_arguments.delta", delta=call.arguments)


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
