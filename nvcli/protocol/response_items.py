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
    from collections.abc import Callable, Mapping, Sequence

MAX_ITEMS = 10_000
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
}
_KINDS = (
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "mcp_list_tools",
    "mcp_call",
    "mcp_approval_request",
    "mcp_approval_response",
)
DECLINED = "The user did not allow this call."


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
    if kind not in _KINDS:
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
            if item.get("content") is None and item.get("role") != "assistant":
                fields.fail("content", "is missing")
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
        case "mcp_list_tools":
            for i, tool in enumerate(fields.array("tools") or ()):
                _check_tool(Fields(tool, f"{place}.tools[{i}]"))
            _check_texts(fields, ("server_label",), ("error",))
        case "mcp_call":
            texts = ("output", "error", "approval_request_id")
            _check_texts(fields, ("server_label", "name", "arguments"), texts)
        case "mcp_approval_request":
            _check_texts(fields, ("server_label", "name", "arguments"))
        case "mcp_approval_response":
            _check_texts(fields, ("approval_request_id",), ("reason",))
            if fields.flag("approve") is None:
                fields.fail("approve", "is missing")


def check_outputs(items: Sequence[dict[str, Any]], num_before: int) -> None:
    """Raises `InvalidParameterError` for an output that answers no call before it. The first
    `num_before` items are those of earlier responses."""
    called: set[str] = set()
    for i, item in enumerate(items):
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in called:
            place = f"input[{max(0, i - num_before)}].call_id"
            raise InvalidParameterError(
                f"{place}: {item['call_id'][:80]!r} is the id of no earlier function_call",
                param=place,
            )


def _check_texts(fields: Fields, needed: Sequence[str], others: Sequence[str] = ()) -> None:
    for name in (*needed, *others):
        if fields.text(name) is None and name in needed:
            fields.fail(name, "is missing")


def _check_tool(tool: Fields) -> None:
    if not tool.text("name"):
        tool.fail("name", "is missing")
    tool.text("description")
    tool.object("input_schema")
    tool.object("annotations")


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
    names: Mapping[tuple[str, str], str] | None = None,
) -> tuple[Message, ...]:
    """The conversation; `decrypt` opens the reasoning that a client carried for us, `names` are
    those the model knows an MCP server's tools by, where they are others."""
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
        elif kind.startswith("mcp_"):
            _mcp(item, turn, messages, names or {})
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
        self.results: list[Message] = []  # of calls that servers ran

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
        messages += self.results
        self.reasoning, self.text, self.calls, self.results = None, None, [], []


def _mcp(
    item: dict[str, Any], turn: _Turn, messages: list[Message], names: Mapping[tuple[str, str], str]
) -> None:
    kind = item["type"]
    if kind == "mcp_approval_response":
        if not item["approve"]:
            turn.end(messages)
            text = " ".join(filter(None, (DECLINED, item.get("reason"))))
            call_id = str(item["approval_request_id"])
            messages.append(Message("tool", text, tool_call_id=call_id))
        return
    if kind == "mcp_list_tools":
        return
    asked = item.get("approval_request_id")
    if asked is None:
        name = names.get((item["server_label"], item["name"]), item["name"])
        turn.calls.append(ToolCall(len(turn.calls), str(item["id"]), name, item["arguments"]))
    if kind == "mcp_call":
        call_id = str(item["id"] if asked is None else asked)
        result = Message("tool", result_text(item), tool_call_id=call_id)
        if asked is None:
            turn.results.append(result)
        else:  # the call itself stands before, in the request for approval
            turn.end(messages)
            messages.append(result)


def result_text(item: dict[str, Any]) -> str:
    """What the model reads of a call."""
    error = item.get("error")
    return f"error: {error}" if error else item.get("output") or ""


def _reasoning(item: dict[str, Any], decrypt: Callable[[str], str]) -> str | None:
    parts = item.get("content") or []
    text = "".join(part.get("text") or "" for part in parts)
    if not text and item.get("encrypted_content"):
        text = decrypt(item["encrypted_content"])
    return text or None
