"""Items of `/v1/responses`: input items to messages, with every fault named by its place.

A turn of the assistant may be spread over a reasoning item, a message and several function calls;
they become one message, as a chat template wants it.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from nvcli.errors import InvalidParameterError
from nvcli.protocol.fields import Fields, UnsupportedFieldError
from nvcli.text import content_text, parse_message
from nvcli.types import Message, ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_ITEMS = 10_000
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def new_item_id(kind: str) -> str:
    return f"{_PREFIXES.get(kind, 'item')}_{secrets.token_hex(16)}"


def read_items(value: Any, resolve: Callable[[str], dict[str, Any] | None]) -> list[dict[str, Any]]:
    """`input` as a list of items, each with an id; `resolve` finds the item of a reference.

    Raises `InvalidParameterError` and `UnsupportedFieldError` naming the item.
    """
    if isinstance(value, str):
        value = [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise InvalidParameterError("input must be text or a list of items", param="input")
    if not 1 <= len(value) <= MAX_ITEMS:
        raise InvalidParameterError(f"input must hold 1 to {MAX_ITEMS:,} items", param="input")
    return [_item(item, f"input[{i}]", resolve) for i, item in enumerate(value)]


def _item(
    value: Any, place: str, resolve: Callable[[str], dict[str, Any] | None]
) -> dict[str, Any]:
    fields = Fields(value, place)
    kind = fields.text("type") or ("message" if fields.has("role") else "item_reference")
    if kind == "item_reference":
        item_id = fields.text("id")
        if not item_id:
            fields.fail("id", "is missing")
        found = resolve(item_id)
        if found is None:
            fields.fail("id", f"{item_id[:80]} is no stored item")
        return found
    if kind not in ("message", "function_call", "function_call_output", "reasoning"):
        raise UnsupportedFieldError(
            f"{place}.type: items of type {kind[:60]} are not supported", param=f"{place}.type"
        )
    item = dict(fields.raw)
    item["type"] = kind
    item["id"] = fields.text("id") or new_item_id(kind)
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": part, "text": item["content"]}]
    item.setdefault("status", "completed")
    _check(item, place)
    return item


def _check(item: dict[str, Any], place: str) -> None:
    """Raises for an item that `to_messages` could not use."""
    fields = Fields(item, place)
    match item["type"]:
        case "message":
            content_text(parse_message(_chat_message(item), place), place)
        case "function_call":
            for name in ("call_id", "name"):
                if not fields.text(name):
                    fields.fail(name, "is missing")
            fields.text("arguments")
        case "function_call_output":
            if not fields.text("call_id"):
                fields.fail("call_id", "is missing")
            _output_text(item, place)
        case "reasoning":
            for name in ("summary", "content"):
                for i, part in enumerate(fields.array(name) or ()):
                    Fields(part, f"{place}.{name}[{i}]").text("text")
            fields.text("encrypted_content")


def _chat_message(item: dict[str, Any]) -> dict[str, Any]:
    return {key: item[key] for key in ("role", "content", "name") if key in item}


def _output_text(item: dict[str, Any], place: str) -> str:
    output = item.get("output")
    if isinstance(output, list):
        message = Message("tool", output)
        return content_text(message, f"{place}.output").replace("\0", "\ufffd")
    if not isinstance(output, str):
        raise InvalidParameterError(f"{place}.output must be text", param=f"{place}.output")
    return output


def to_messages(
    items: Sequence[dict[str, Any]],
    *,
    instructions: str | None,
    decrypt: Callable[[str], str],
) -> tuple[Message, ...]:
    """The conversation; `decrypt` opens the reasoning that a client carried for us."""
    messages: list[Message] = []
    if instructions:
        messages.append(Message("system", instructions))
    turn = _Turn()
    for i, item in enumerate(items):
        place = f"input[{i}]"
        kind = item["type"]
        if kind == "reasoning":
            turn.end(messages)
            turn.reasoning = _reasoning(item, decrypt)
        elif kind == "function_call":
            call_id, arguments = str(item["call_id"]), item.get("arguments") or ""
            turn.calls.append(ToolCall(len(turn.calls), call_id, str(item["name"]), arguments))
        elif kind == "function_call_output":
            turn.end(messages)
            text = _output_text(item, place)
            messages.append(Message("tool", text, tool_call_id=str(item["call_id"])))
        else:
            message = parse_message(_chat_message(item), place)
            if message.role == "assistant":
                if turn.text is not None or turn.calls:
                    turn.end(messages)
                turn.text = content_text(message, place)
            else:
                turn.end(messages)
                messages.append(message)
    turn.end(messages)
    return tuple(messages)


class _Turn:
    """The assistant's turn that is being put together."""

    def __init__(self) -> None:
        self.reasoning: str | None = None
        self.text: str | None = None
        self.calls: list[ToolCall] = []

    def end(self, messages: list[Message]) -> None:
        if self.text is not None or self.calls or self.reasoning:
            messages.append(
                Message(
                    "assistant",
                    self.text or "",
                    reasoning=self.reasoning,
                    tool_calls=tuple(self.calls),
                )
            )
        self.reasoning, self.text, self.calls = None, None, []


def _reasoning(item: dict[str, Any], decrypt: Callable[[str], str]) -> str | None:
    parts = item.get("content") or []
    text = "".join(part.get("text") or "" for part in parts)
    if not text and item.get("encrypted_content"):
        text = decrypt(item["encrypted_content"])
    return text or None
