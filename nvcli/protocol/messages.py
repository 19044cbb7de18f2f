"""`POST /v1/messages`, Anthropic's API: the request as the chat request it stands for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from nvcli.protocol.chat import ChatRequest, message_list
from nvcli.protocol.fields import Fields
from nvcli.protocol.sampling import check_sampling, read_limit, read_sampling, refuse_outputs
from nvcli.protocol.shared import read_shared
from nvcli.protocol.structured import Structure, json_structure, read_structure
from nvcli.protocol.thinking import BUDGETS, EFFORTS, read_thinking
from nvcli.protocol.tools import MAX_TOOLS, Choice, Tools, check_names
from nvcli.types import Message, ToolCall

_ACCEPTED = (
    "metadata",
    "service_tier",
    "cache_control",
    "container",
    "inference_geo",
    "anthropic_version",
    "anthropic_beta",
)
_REFUSED = {
    "context_management": "is not supported",
    "mcp_servers": "is not supported here; /v1/responses and chat completions take MCP tools",
}


def parse_messages_request(
    body: object, *, is_strict: bool = False, needs_limit: bool = True
) -> ChatRequest:
    """Read a request body. Raises `InvalidParameterError` and `UnsupportedFieldError`."""
    fields = Fields(body)
    fields.refuse_given(_REFUSED)
    fields.alone("messages", "prompt", "input")
    messages = _messages(fields)
    sampling = read_sampling(fields)
    refuse_outputs(fields, sampling)
    limit = read_limit(fields, "max_tokens")
    if limit is None and needs_limit:
        fields.fail("max_tokens", "is missing")
    if limit is not None:
        sampling["max_tokens"] = limit
    stops = fields.texts("stop_sequences")
    if stops is not None:
        if "stop" in sampling:
            fields.fail("stop", "cannot be given beside stop_sequences")
        sampling.update(read_sampling(Fields({"stop": list(stops)})))
    thinking, variables = read_thinking(fields)
    shape = fields.object("thinking") if isinstance(fields.get("thinking"), dict) else None
    if thinking.enabled is None:  # here a client asks for thinking, or does not get it
        thinking = replace(thinking, enabled=shape is not None)
    if shape is not None and shape.choice("display", ("summarized", "omitted")) == "omitted":
        thinking = replace(thinking, is_shown=False)
    structure, effort = _output(fields)
    budget = thinking.budget
    if budget is None and effort is not None and thinking.enabled:
        budget = BUDGETS.get(effort)
    if budget is not None:
        sampling["thinking_budget"] = budget
    check_sampling(sampling)
    tools = _tools(fields)
    last = messages[-1]
    fields.ignore(_ACCEPTED)
    return ChatRequest(
        messages=tuple(messages),
        sampling=sampling,
        thinking=thinking,
        template_variables=variables,
        # A conversation that ends with the assistant is one whose answer has begun.
        continue_final_message=last.role == "assistant" and not last.tool_calls,
        tools=tools,
        structure=structure,
        **read_shared(fields),
        ignored_fields=fields.unknown(is_strict=is_strict),
    )


def _output(fields: Fields) -> tuple[Structure | None, str | None]:
    """The structure and the effort that a request asks for; Anthropic's `output_config` has both,
    and `output_format` is what its `format` was called before."""
    config = fields.inner("output_config")
    effort, shape = config.choice("effort", EFFORTS), config.object("format")
    older = fields.object("output_format")
    if shape is not None and older is not None:
        fields.fail("output_format", "cannot be given beside output_config.format")
    shape = shape or older
    structure = read_structure(fields)
    if shape is None:
        return structure, effort
    if shape.choice("type", ("json_schema",)) is None:
        shape.fail("type", "must be json_schema")
    schema = shape.get("schema")
    if not isinstance(schema, dict):
        shape.fail("schema", "must be a JSON schema, an object")
    if structure is not None:
        fields.fail(structure.param, f"cannot be given beside {shape.name('schema')}")
    return json_structure(schema, shape.name("schema")), effort


# --- messages ------------------------------------------------------------------------------------


def _messages(fields: Fields) -> list[Message]:
    given = message_list(fields)
    messages: list[Message] = []
    called: set[str] = set()
    system = fields.get("system")
    if system is not None:
        messages.append(Message("system", _text(fields, "system")))
    for i, value in enumerate(given):
        message = Fields(value, f"messages[{i}]")
        role = message.choice("role", ("user", "assistant", "system"))
        if role is None:
            message.fail("role", "must be user or assistant")
        if role == "user":
            messages += _user(message, called)
        elif role == "assistant":
            messages.append(_assistant(message))
            called.update(call.id for call in messages[-1].tool_calls)
        else:
            messages.append(Message("system", _text(message, "content")))
    return messages


def _text(fields: Fields, name: str) -> str:
    """Text, or blocks of text joined."""
    value = fields.get(name)
    if isinstance(value, str):
        return value
    return "".join(
        _block_text(block) for block in _blocks(fields, name) if _is_text(block, ("text",))
    )


def _blocks(fields: Fields, name: str) -> list[Fields]:
    value = fields.get(name)
    if isinstance(value, str):
        value = [{"type": "text", "text": value}]
    if not isinstance(value, list):
        fields.fail(name, "must be text or a list of content blocks")
    return [Fields(block, fields.name(f"{name}[{i}]")) for i, block in enumerate(value)]


def _is_text(block: Fields, others: tuple[str, ...]) -> bool:
    """Whether it is a text block; raises for a kind that is neither that nor one of `others`."""
    kind = block.text("type")
    if kind not in ("text", *others):
        block.refuse("type", f"blocks of type {str(kind)[:60]} are not supported here")
    return kind == "text"


def _block_text(block: Fields, name: str = "text") -> str:
    text = block.text(name)
    if text is None:
        block.fail(name, "is missing")
    return text


def _user(message: Fields, called: set[str]) -> list[Message]:
    """Results of tools come first, as messages of their own. `called`: ids of the calls so far."""
    results: list[Message] = []
    texts: list[str] = []
    for block in _blocks(message, "content"):
        if _is_text(block, ("tool_result",)):
            texts.append(_block_text(block))
            continue
        call_id = _block_text(block, "tool_use_id")
        if call_id not in called:
            block.fail("tool_use_id", f"{call_id[:80]!r} is the id of no earlier tool_use block")
        content = _text(block, "content") if block.has("content") else ""
        if block.flag("is_error"):
            content = f"Error: {content}"
        results.append(Message("tool", content, tool_call_id=call_id))
    if texts or not results:
        results.append(Message("user", "".join(texts)))
    return results


def _assistant(message: Fields) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in _blocks(message, "content"):
        if _is_text(block, ("thinking", "redacted_thinking", "tool_use")):
            texts.append(_block_text(block))
        elif block.get("type") == "thinking":
            thoughts.append(_block_text(block, "thinking"))
        elif block.get("type") == "tool_use":
            arguments = json.dumps(dict(block.inner("input").raw), ensure_ascii=False)
            name, call_id = _block_text(block, "name"), _block_text(block, "id")
            calls.append(ToolCall(len(calls), call_id, name, arguments))
    return Message(
        "assistant",
        "".join(texts),
        reasoning="".join(thoughts) if thoughts else None,
        tool_calls=tuple(calls),
    )


# --- tools ---------------------------------------------------------------------------------------


def _tools(fields: Fields) -> Tools:
    given = fields.array("tools") or []
    if len(given) > MAX_TOOLS:
        fields.fail("tools", f"must hold at most {MAX_TOOLS} tools, got {len(given)}")
    definitions: list[dict[str, Any]] = []
    for i, value in enumerate(given):
        tool = Fields(value, f"tools[{i}]")
        kind = tool.text("type")
        if kind not in (None, "custom"):
            tool.refuse("type", f"tools of type {kind[:60]} are not supported")
        name = tool.text("name")
        if not name:
            tool.fail("name", "is missing")
        function: dict[str, Any] = {"name": name}
        if tool.text("description") is not None:
            function["description"] = tool.text("description")
        function["parameters"] = dict(tool.inner("input_schema").raw)
        if tool.flag("strict"):
            function["strict"] = True
        definitions.append({"type": "function", "function": function})
    names = [definition["function"]["name"] for definition in definitions]
    check_names(fields, "tools", names)
    choice, allowed, is_parallel = _choice(fields, names)
    return Tools(tuple(definitions), choice, allowed, is_parallel)


def _choice(fields: Fields, names: list[str]) -> tuple[Choice, frozenset[str] | None, bool]:
    given = fields.object("tool_choice")
    if given is None:
        return ("auto" if names else "none"), None, True
    kind = given.choice("type", ("auto", "any", "tool", "none"))
    if kind is None:
        given.fail("type", "is missing")
    is_parallel = not given.flag("disable_parallel_tool_use")
    if kind == "none":
        return "none", None, is_parallel
    if not names:
        fields.fail("tool_choice", "is set without tools")
    if kind == "tool":
        name = given.text("name")
        if name not in names:
            given.fail("name", "is none of the tools")
        return "required", frozenset({name}), False
    return ("required" if kind == "any" else "auto"), None, is_parallel
