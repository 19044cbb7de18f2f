"""`POST /v1/responses`: the request, checked without a model, as the chat request it stands for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nvcli.protocol.chat import ChatRequest, read_metadata
from nvcli.protocol.fields import Fields
from nvcli.protocol.mcp import McpTools, UnsupportedToolError, read_mcp
from nvcli.protocol.sampling import check_sampling, read_limit, read_sampling, refuse_outputs
from nvcli.protocol.shared import read_shared
from nvcli.protocol.structured import read_format, read_structure
from nvcli.protocol.thinking import read_thinking
from nvcli.protocol.tools import (
    MAX_TOOLS,
    Allowed,
    Tools,
    check_names,
    function_names,
    read_choice,
    read_function,
)
from nvcli.types import MAX_LOGPROBS

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_INCLUDABLE = (
    LOGPROBS,
    ENCRYPTED,
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_ACCEPTED = ("prompt_cache_options", "prompt_cache_retention", "max_tool_calls")
_REFUSED = {
    "conversation": "conversations are not supported; use previous_response_id",
    "context_management": "is not supported; use truncation: auto",
    "prompt": "stored prompts are not supported",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """`chat` has everything but the messages: those depend on what was stored before."""

    chat: ChatRequest
    input: Any
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    truncates: bool = False
    include: frozenset[str] = frozenset()
    summarizes: bool = False
    mcp: tuple[McpTools, ...] = ()  # servers whose tools are not in `chat.tools` yet
    allowed: Allowed | None = None  # what `tool_choice` narrows all tools to
    max_tool_calls: int | None = None
    include_obfuscation: bool = False
    echo: dict[str, Any] = field(default_factory=dict)  # what the response repeats


def parse_responses(body: object, *, is_strict: bool = False) -> ResponsesRequest:
    """Read a request body. Raises `InvalidParameterError` and `UnsupportedFieldError`."""
    fields = Fields(body)
    fields.refuse_given(_REFUSED)
    fields.alone("input", "messages")
    given_input = fields.get("input")
    if given_input is None:
        fields.fail("input", "is missing")
    sampling = read_sampling(fields)
    refuse_outputs(fields, sampling)
    limit = read_limit(fields, "max_output_tokens")
    if limit is not None:
        sampling["max_tokens"] = limit
    include = frozenset(fields.texts("include") or ())
    for name in include:
        if name not in _INCLUDABLE:
            fields.fail("include", f"must hold some of {', '.join(_INCLUDABLE)}")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if LOGPROBS in include or top:
        sampling["logprobs"] = top or 0
    thinking, variables = read_thinking(fields)
    if thinking.budget is not None:
        sampling["thinking_budget"] = thinking.budget
    check_sampling(sampling)
    tools, servers, allowed, tool_echo = _tools(fields)
    structure = read_structure(fields)
    text = fields.inner("text")
    verbosity = text.choice("verbosity", ("low", "medium", "high")) or "medium"
    text_echo: dict[str, Any] = {"format": {"type": "text"}, "verbosity": verbosity}
    shape = text.object("format")
    if shape is not None:
        own = read_format(shape, "text.format")
        if own is not None and structure is not None:
            fields.fail(structure.param, "cannot be given beside text.format")
        structure = own or structure
        text_echo["format"] = _format_echo(shape)
    reasoning = fields.inner("reasoning")
    effort = reasoning.text("effort")
    summary = reasoning.choice("summary", ("auto", "concise", "detailed"))
    if summary is None:
        summary = reasoning.choice("generate_summary", ("auto", "concise", "detailed"))
    truncation = fields.choice("truncation", ("auto", "disabled")) or "disabled"
    store = fields.flag("store") is not False
    background = fields.flag("background") or False
    if background and not store:
        fields.fail("background", "needs store: true")
    max_tool_calls = fields.integer("max_tool_calls", 1)
    include_obfuscation = fields.inner("stream_options").flag("include_obfuscation") or False
    fields.choice("service_tier", ("auto", "default", "flex", "scale", "priority"))
    fields.ignore(_ACCEPTED)
    previous = fields.text("previous_response_id")
    instructions = fields.text("instructions")
    echo = {
        "instructions": instructions,
        "previous_response_id": previous,
        "store": store,
        "background": background,
        "max_output_tokens": limit,
        "max_tool_calls": max_tool_calls,
        "metadata": read_metadata(fields),
        "parallel_tool_calls": tools.is_parallel,
        "prompt_cache_key": fields.text("prompt_cache_key"),
        "safety_identifier": fields.text("safety_identifier"),
        "reasoning": {"effort": effort, "summary": summary},
        "service_tier": "default",
        "text": text_echo,
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": tool_echo,
        "top_logprobs": top or 0,
        "truncation": truncation,
    }
    user = fields.text("user")
    if user is not None:
        echo["user"] = user
    chat = ChatRequest(
        messages=(),
        sampling=sampling,
        thinking=thinking,
        template_variables=variables,
        tools=tools,
        structure=structure,
        has_logprobs=LOGPROBS in include,
        **read_shared(fields),
        ignored_fields=fields.unknown(is_strict=is_strict),
    )
    return ResponsesRequest(
        chat=chat,
        input=given_input,
        instructions=instructions,
        previous_response_id=previous,
        store=store,
        background=background,
        truncates=truncation == "auto",
        include=include,
        summarizes=summary is not None,
        mcp=servers,
        allowed=allowed,
        max_tool_calls=max_tool_calls,
        include_obfuscation=include_obfuscation,
        echo=echo,
    )


def _tools(
    fields: Fields,
) -> tuple[Tools, tuple[McpTools, ...], Allowed | None, list[dict[str, Any]]]:
    """The functions as chat has them, MCP servers, and the tools as the response repeats them."""
    given = fields.array("tools") or []
    if len(given) > MAX_TOOLS:
        fields.fail("tools", f"must hold at most {MAX_TOOLS} tools, got {len(given)}")
    definitions: list[dict[str, Any]] = []
    servers: list[McpTools] = []
    echo: list[dict[str, Any]] = []
    for i, value in enumerate(given):
        place = f"tools[{i}]"
        tool = Fields(value, place)
        kind = tool.text("type")
        if kind == "mcp":
            server, shown = read_mcp(tool, place)
            servers.append(server)
            echo.append(shown)
            continue
        if kind != "function":
            raise UnsupportedToolError(
                f"{place}.type: tools of type {str(kind)[:60]} are not supported; use function",
                param=f"{place}.type",
            )
        function = read_function(tool)
        function.pop("type", None)
        definitions.append({"type": "function", "function": function})
        filled = {"description": None, "parameters": None, "strict": None, **tool.raw}
        echo.append({**filled, "type": "function"})
    names = [definition["function"]["name"] for definition in definitions]
    check_names(fields, "tools", names)
    labels = [server.label for server in servers]
    check_names(fields, "tools", labels)
    choice, allowed = read_choice(fields, names, is_flat=True, labels=labels)
    is_parallel = fields.flag("parallel_tool_calls") is not False
    tools = Tools(tuple(definitions), choice, function_names(allowed), is_parallel)
    return tools, tuple(servers), allowed, echo


def _format_echo(shape: Fields) -> dict[str, Any]:
    if shape.get("type") != "json_schema":
        return {"type": shape.get("type")}
    inner = shape if shape.has("schema") else (shape.object("json_schema") or shape)
    return {
        "type": "json_schema",
        "name": inner.get("name"),
        "description": inner.get("description"),
        "schema": inner.get("schema"),
        "strict": inner.get("strict") or False,
    }
