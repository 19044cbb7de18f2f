"""Tools of a chat request: `tools` and `tool_choice`, and the deprecated `functions` spelling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nvcli.protocol.fields import Fields
from nvcli.protocol.mcp import McpRef, McpTools, read_mcp

if TYPE_CHECKING:
    from collections.abc import Sequence

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call")
MAX_TOOLS = 128

Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Tools:
    """`definitions` go to the template; with `none` they are left out and nothing is parsed.

    `allowed` narrows what may be called without changing what the model reads, so that the prompt
    stays in the prefix cache; None allows all.
    """

    definitions: tuple[dict[str, Any], ...] = ()
    choice: Choice = "none"
    allowed: frozenset[str] | None = None
    is_parallel: bool = True

    @property
    def is_active(self) -> bool:
        return bool(self.definitions) and self.choice != "none"

    @property
    def is_forced(self) -> bool:
        return self.is_active and self.choice == "required"

    @property
    def callable_definitions(self) -> tuple[dict[str, Any], ...]:
        if self.allowed is None:
            return self.definitions
        return tuple(d for d in self.definitions if d["function"]["name"] in self.allowed)


def read_tools(
    fields: Fields, *, allow_mcp: bool = False
) -> tuple[Tools, tuple[McpTools, ...], Allowed | None]:
    """Functions, MCP servers where they are allowed, and what `tool_choice` narrows both to.

    Raises `InvalidParameterError` and `UnsupportedFieldError` naming the field.
    """
    servers = _servers(fields) if allow_mcp else ()
    definitions = _definitions(fields, has_servers=bool(servers))
    labels = [server.label for server in servers]
    check_names(fields, "tools", labels)
    names = [d["function"]["name"] for d in definitions]
    choice, allowed = read_choice(fields, names, labels=labels)
    is_parallel = fields.flag("parallel_tool_calls") is not False
    return Tools(definitions, choice, function_names(allowed), is_parallel), servers, allowed


def _servers(fields: Fields) -> tuple[McpTools, ...]:
    servers = []
    for i, value in enumerate(fields.array("tools") or ()):
        if isinstance(value, dict) and value.get("type") == "mcp":
            place = f"tools[{i}]"
            tool = Fields(value, place)
            server, _ = read_mcp(tool, place)
            if not server.approves_all:
                tool.fail("require_approval", "must be never: only /v1/responses can ask")
            servers.append(server)
    return tuple(servers)


def _definitions(fields: Fields, *, has_servers: bool) -> tuple[dict[str, Any], ...]:
    tools = fields.array("tools")
    functions = fields.array("functions")
    if tools is not None and functions is not None:
        fields.fail("functions", "cannot be given beside tools")
    if tools is None:
        if functions is None:
            return ()
        tools = functions
    name = "tools" if functions is None else "functions"
    if not 1 <= len(tools) <= MAX_TOOLS:
        fields.fail(name, f"must hold from 1 to {MAX_TOOLS} tools, got {len(tools)}")
    read = _definition if functions is None else _bare_definition
    definitions = tuple(
        read(Fields(tool, fields.name(f"{name}[{i}]")))
        for i, tool in enumerate(tools)
        if not (has_servers and isinstance(tool, dict) and tool.get("type") == "mcp")
    )
    check_names(fields, name, [d["function"]["name"] for d in definitions])
    return definitions


def _bare_definition(function: Fields) -> dict[str, Any]:
    return {"type": "function", "function": read_function(function)}


def _definition(given: Fields) -> dict[str, Any]:
    kind = given.text("type") or "function"
    if kind != "function":
        given.refuse("type", f"tools of type {kind[:40]} are not supported; use function")
    function = given.object("function")
    if function is None:
        given.fail("function", "is missing")
    return {"type": "function", "function": read_function(function)}


def read_function(function: Fields) -> dict[str, Any]:
    """Name, description, parameters and strict of a function, checked; as they were given."""
    if not function.text("name"):
        function.fail("name", "is missing")
    function.text("description")
    function.object("parameters")
    function.flag("strict")
    return {key: value for key, value in function.raw.items() if value is not None}


def check_names(fields: Fields, field: str, names: Sequence[str]) -> None:
    for name in names:
        if len(name) > 256 or not name.isprintable():
            fields.fail(field, "has a name of more than 256 or of unprintable characters")
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        fields.fail(field, f"defines {twice[:80]} twice")


Allowed = frozenset[str | McpRef]


def function_names(allowed: Allowed | None) -> frozenset[str] | None:
    return None if allowed is None else frozenset(a for a in allowed if isinstance(a, str))


def read_choice(
    fields: Fields, names: Sequence[str], *, is_flat: bool = False, labels: Sequence[str]
) -> tuple[Choice, Allowed | None]:
    """`tool_choice`, or `function_call`, and what it narrows the tools to.

    `is_flat`: names stand beside the type, as in Responses, not in an object of their own.
    `labels`: those of MCP servers, whose tools are not known yet.
    """
    name = "tool_choice" if fields.has("tool_choice") else "function_call"
    choice = fields.get(name)
    fields.ignore(("tool_choice", "function_call"))
    if choice is None:
        return ("auto" if names or labels else "none"), None
    if choice == "none":
        return "none", None
    if not names and not labels:
        if choice == "auto" and is_flat:  # what a response repeats to a client without tools
            return "none", None
        fields.fail(name, "is set without tools")
    if choice in ("auto", "required"):
        return choice, None
    if not isinstance(choice, dict):
        fields.fail(name, "must be none, auto, required or an object that names a function")
    given = fields.inner(name)
    kind = given.text("type")
    if kind == "allowed_tools":
        return _allowed(given, names, is_flat=is_flat, labels=labels)
    if kind == "mcp" and labels:
        return "required", frozenset({_reference(given, labels)})
    if name == "tool_choice" and kind != "function":
        given.fail("type", "must be function or allowed_tools")
    holder = given if name == "function_call" or is_flat else given.object("function")
    if holder is None:
        given.fail("function", "is missing")
    return "required", frozenset({_known(holder, names)})


def _known(holder: Fields, names: Sequence[str]) -> str:
    wanted = holder.text("name")
    if not wanted:
        holder.fail("name", "is missing")
    if wanted not in names:
        holder.fail("name", f"is {wanted[:80]}, which is none of the tools")
    return wanted


def _reference(holder: Fields, labels: Sequence[str]) -> McpRef:
    label = holder.text("server_label")
    if label is None or label not in labels:
        holder.fail("server_label", "is none of the MCP servers in tools")
    return McpRef(label, holder.text("name"))


def _allowed(
    given: Fields, names: Sequence[str], *, is_flat: bool, labels: Sequence[str]
) -> tuple[Choice, Allowed]:
    inner = given if is_flat or given.has("tools") else given.object("allowed_tools")
    if inner is None:
        given.fail("allowed_tools", "is missing")
    mode = inner.choice("mode", ("auto", "required"))
    if mode is None:
        inner.fail("mode", "must be auto or required")
    tools = inner.array("tools")
    if not tools:
        inner.fail("tools", "must hold at least one tool")
    allowed: set[str | McpRef] = set()
    for i, tool in enumerate(tools):
        holder = Fields(tool, inner.name(f"tools[{i}]"))
        if labels and holder.text("type") == "mcp":
            allowed.add(_reference(holder, labels))
            continue
        if holder.has("function"):
            holder = holder.object("function") or holder
        allowed.add(_known(holder, names))
    return ("required" if mode == "required" else "auto"), frozenset(allowed)
