"""The events of an Anthropic message, and the message itself: one state machine over the deltas.

Whoever wants no stream drops the events and takes `message` at the end, so both are the same.
"""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from nvcli.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nvcli.protocol.chat import ChatRequest
    from nvcli.types import RequestOutput, Usage

Event = dict[str, Any]


class MessageEvents:
    """Builds one message. `sign` gives the signature of a thinking block."""

    def __init__(
        self, request: ChatRequest, *, message_id: str, model: str, sign: Callable[[str], str]
    ) -> None:
        self._request = request
        self._sign = sign
        self._has_started = False
        self._block: dict[str, Any] | None = None  # the open one, always the last
        self._arguments = ""  # of an open tool_use block
        self.message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }

    def feed(self, output: RequestOutput) -> Iterator[Event]:
        """One delta of the only output; with the last one the message ends."""
        if not self._has_started:
            self._has_started = True
            self.message["usage"] = {**usage_body(output.usage), "output_tokens": 0}
            yield {"type": "message_start", "message": deepcopy(self.message)}
            yield {"type": "ping"}
        if output.reasoning and self._request.thinking.is_shown:
            yield from self._open_as("thinking", thinking="", signature="")
            yield from self._delta("thinking_delta", "thinking", output.reasoning)
        if output.text:
            yield from self._open_as("text", text="", citations=None)
            yield from self._delta("text_delta", "text", output.text)
        for call in output.tool_calls:
            if call.name:
                yield from self._open("tool_use", id=call.id, name=call.name, input={})
            if call.arguments:
                self._arguments += call.arguments
                delta = {"type": "input_json_delta", "partial_json": call.arguments}
                yield self._event("content_block_delta", delta=delta)
        if output.is_finished:
            yield from self._finish(output)

    def _finish(self, output: RequestOutput) -> Iterator[Event]:
        if self._block is not None:
            yield from self._close()
        message = self.message
        if output.finish_reason is FinishReason.LENGTH:
            message["stop_reason"] = "max_tokens"
        elif output.finish_reason is FinishReason.TOOL_CALLS:
            message["stop_reason"] = "tool_use"
        elif isinstance(output.stop_reason, str):
            message["stop_reason"] = "stop_sequence"
            message["stop_sequence"] = output.stop_reason
        else:
            message["stop_reason"] = "end_turn"
        message["usage"] = usage_body(output.usage)
        ending = {key: message[key] for key in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ending, "usage": message["usage"]}
        yield {"type": "message_stop"}

    # --- blocks -----------------------------------------------------------------------------------

    def _event(self, kind: str, **values: Any) -> Event:
        return {"type": kind, "index": len(self.message["content"]) - 1, **values}

    def _open_as(self, kind: str, **values: Any) -> Iterator[Event]:
        if self._block is None or self._block["type"] != kind:
            yield from self._open(kind, **values)

    def _open(self, kind: str, **values: Any) -> Iterator[Event]:
        if self._block is not None:
            yield from self._close()
        self._block = {"type": kind, **values}
        self._arguments = ""
        self.message["content"].append(self._block)
        yield self._event("content_block_start", content_block=deepcopy(self._block))

    def _delta(self, kind: str, field: str, text: str) -> Iterator[Event]:
        assert self._block is not None, "a block is open"
        self._block[field] += text
        yield self._event("content_block_delta", delta={"type": kind, field: text})

    def _close(self) -> Iterator[Event]:
        block = self._block
        assert block is not None, "a block is open"
        if block["type"] == "thinking":
            block["signature"] = self._sign(block["thinking"])
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield self._event("content_block_delta", delta=delta)
        elif block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        yield self._event("content_block_stop")
        self._block = None


def _object(text: str) -> dict[str, Any]:
    """The arguments; empty for a call that was cut."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def usage_body(usage: Usage) -> dict[str, Any]:
    """Anthropic counts prompt tokens that came from the cache apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
