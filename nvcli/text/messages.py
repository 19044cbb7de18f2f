"""From what a client sends to what a chat template can take.

`parse_messages` reads OpenAI message objects into `Message`s; `normalize_messages` turns those into
the dictionaries that templates expect: text only, one system block at the front, reasoning apart
from content, tool arguments as mappings. Every fault names its place, as `messages[2].content[0]`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast, get_args

from nvcli.errors import TemplateError
from nvcli.types import Message, Role, ToolCall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROLES: tuple[str, ...] = get_args(Role)
_TEXT_PARTS = {  # part type -> the key of its text
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
THINK_START = "<think>"
THINK_END = "</think>"


def _fail(place: str, problem: str) -> TemplateError:
    return TemplateError(f"{place}: {problem}", param=place)


# --- parsing -------------------------------------------------------------------------------------


def parse_messages(raw: object) -> list[Message]:
    """Reads a list of OpenAI message objects. Raises `TemplateError` naming the field at fault."""
    if not isinstance(raw, list | tuple):
        raise _fail("messages", "must be a list")
    return [parse_message(item, f"messages[{i}]") for i, item in enumerate(raw)]


def parse_message(raw: object, place: str = "message") -> Message:
    """Reads one message object; `reasoning_content` and `reasoning` are both known, as is the
    deprecated `function_call`. Keys that no template uses are ignored."""
    if not isinstance(raw, dict):
        raise _fail(place, "must be an object")
    role = raw.get("role")
    if role not in ROLES:
        raise _fail(f"{place}.role", f"must be one of {', '.join(ROLES)}, got {role!r:.80}")
    content = raw.get("content")
    if content is not None and not isinstance(content, str | list | tuple):
        raise _fail(f"{place}.content", "must be text, a list of parts or null")
    if content is None and raw.get("refusal") is not None:
        content = _text_field(raw, "refusal", place)
    reasoning = _text_field(raw, "reasoning_content", place)
    if reasoning is None:
        reasoning = _text_field(raw, "reasoning", place)
    return Message(
        role=cast(Role, role),
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(_parse_calls(raw, place)),
        tool_call_id=_text_field(raw, "tool_call_id", place),
        name=_text_field(raw, "name", place),
    )


def _text_field(raw: Mapping[str, Any], key: str, place: str) -> str | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, str):
        raise _fail(f"{place}.{key}", "must be text or null")
    return value


def _parse_calls(raw: Mapping[str, Any], place: str) -> list[ToolCall]:
    calls = raw.get("tool_calls")
    if calls is None:
        function = raw.get("function_call")
        return [] if function is None else [_parse_call(0, "", function, f"{place}.function_call")]
    if not isinstance(calls, list | tuple):
        raise _fail(f"{place}.tool_calls", "must be a list")
    parsed = []
    for i, call in enumerate(calls):
        where = f"{place}.tool_calls[{i}]"
        if not isinstance(call, dict):
            raise _fail(where, "must be an object")
        if call.get("type", "function") != "function":
            raise _fail(f"{where}.type", "only function calls are supported")
        call_id = _text_field(call, "id", where) or ""
        parsed.append(_parse_call(i, call_id, call.get("function"), f"{where}.function"))
    return parsed


def _parse_call(index: int, call_id: str, function: object, place: str) -> ToolCall:
    if not isinstance(function, dict):
        raise _fail(place, "must be an object with name and arguments")
    name = _text_field(function, "name", place)
    if not name:
        raise _fail(f"{place}.name", "is missing")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = ""
    elif isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not isinstance(arguments, str):
        raise _fail(f"{place}.arguments", "must be JSON text")
    return ToolCall(index, call_id, name, arguments)


# --- and back ------------------------------------------------------------------------------------


def message_json(message: Message) -> dict[str, Any]:
    """A message object of OpenAI's, which `parse_message` reads."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [call_json(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def call_json(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


# --- normalising ---------------------------------------------------------------------------------


def normalize_messages(
    messages: Sequence[Message], *, continue_final_message: bool = False
) -> list[dict[str, Any]]:
    """The messages as a chat template takes them.

    `system` and `developer` messages become one system message at the front, `function` becomes
    `tool`. With `continue_final_message` the last message's text is left exactly as it is.
    """
    if not messages:
        raise _fail("messages", "is empty; at least one message is needed")
    system: list[str] = []
    turns: list[dict[str, Any]] = []
    called: dict[str, str] = {}  # id -> name, of the calls so far
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        text = content_text(message, place)
        if message.role in ("system", "developer"):
            system.append(text)
        elif message.role == "assistant":
            is_continued = continue_final_message and i == len(messages) - 1
            turns.append(_assistant(message, text, keep_text=is_continued))
            called.update({call.id: call.name for call in message.tool_calls})
        elif message.role in ("tool", "function"):
            turns.append(_tool(message, text, called, place))
        elif message.role == "user":
            turns.append({"role": "user", "content": text})
        else:
            raise _fail(f"{place}.role", f"must be one of {', '.join(ROLES)}")
    if system:
        turns.insert(0, {"role": "system", "content": "\n\n".join(system)})
    return turns


def content_text(message: Message, place: str) -> str:
    """The text of a message's content; parts are joined with nothing between them."""
    content = message.content
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{place}.content[{j}]") for j, part in enumerate(content))


def _part_text(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _fail(place, "must be a content part, an object with a type")
    kind = part.get("type")
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise _fail(place, f"part type {kind!r:.80} is not supported; this model reads text only")
    text = part.get(key)
    if not isinstance(text, str):
        raise _fail(place, f"{key} must be text")
    return text


def _assistant(message: Message, text: str, *, keep_text: bool) -> dict[str, Any]:
    reasoning = message.reasoning
    if not keep_text:
        block, text = split_think_block(text)
        reasoning = block if reasoning is None else reasoning
    turn: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning is not None:
        turn["reasoning_content"] = reasoning
    if message.tool_calls:
        turn["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return turn


def split_think_block(text: str) -> tuple[str | None, str]:
    """A think block at the start of the text, without its tags and outer newlines, and the rest.

    An unclosed block, as a cut answer has, is all reasoning. Without a block: None and the text.
    """
    start = text.lstrip()
    if not start.startswith(THINK_START):
        return None, text
    reasoning, _, rest = start[len(THINK_START) :].partition(THINK_END)
    return reasoning.strip("\n"), rest.lstrip("\n")


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _arguments(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> dict[str, Any] | str:
    """A mapping where the text is a JSON object, {} where it is blank, else the text itself."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _tool(message: Message, text: str, called: Mapping[str, str], place: str) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "tool", "content": text}
    if message.role == "function" and message.tool_call_id is None:
        if message.name not in called.values():
            raise _fail(f"{place}.name", f"no earlier call of function {message.name!r:.80}")
    elif message.tool_call_id is None:
        raise _fail(f"{place}.tool_call_id", "is missing")
    elif message.tool_call_id not in called:
        raise _fail(
            f"{place}.tool_call_id",
            f"{message.tool_call_id!r:.80} is not the id of an earlier assistant tool call",
        )
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        turn["name"] = message.name
    return turn
