"""Tools of a chat request: `tools` and `tool_choice`, and the deprecated `functions` spelling.

`auto` and `none` are implemented; choices that force a call need the grammar and are refused by
name until it is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from nvcli.protocol.fields import Fields

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call")
MAX_TOOLS = 128
_FORCED = "forcing a tool call is not supported yet; use auto or none"


@dataclass(frozen=True, slots=True)
class Tools:
    """`definitions` go to the template; with `none` they are left out and nothing is parsed."""

    definitions: tuple[dict[str, Any], ...] = ()
    choice: Literal["auto", "none"] = "none"

    @property
    def is_active(self) -> bool:
        return bool(self.definitions) and self.choice == "auto"


def read_tools(fields: Fields) -> Tools:
    """Raises `InvalidParameterError` and `UnsupportedFieldError` naming the field."""
    definitions = _definitions(fields)
    choice = _choice(fields, bool(definitions))
    if fields.flag("parallel_tool_calls") is False and definitions:
        fields.refuse("parallel_tool_calls", "false is not supported yet")
    return Tools(definitions, choice)


def _definitions(fields: Fields) -> tuple[dict[str, Any], ...]:
    tools = fields.array("tools")
    functions = fields.array("functions")
    if tools is not None and functions is not None:
        fields.fail("functions", "cannot be given beside tools")
    if tools is None:
        if functions is None:
            return ()
        tools = [{"type": "function", "function": function} for function in functions]
    name = "tools" if functions is None else "functions"
    if not 1 <= len(tools) <= MAX_TOOLS:
        fields.fail(name, f"must hold from 1 to {MAX_TOOLS} tools, got {len(tools)}")
    return tuple(_definition(fields, tool, f"{name}[{i}]") for i, tool in enumerate(tools))


def _definition(fields: Fields, tool: Any, place: str) -> dict[str, Any]:
    from nvcli.protocol.fields import Fields as Reader

    given = Reader(tool, fields.name(place))
    kind = given.text("type") or "function"
    if kind != "function":
        given.refuse("type", f"tools of type {kind[:40]} are not supported; use function")
    function = given.object("function")
    if function is None:
        given.fail("function", "is missing")
    if not function.text("name"):
        function.fail("name", "is missing")
    function.text("description")
    function.object("parameters")
    return {"type": "function", "function": dict(function.raw)}


def _choice(fields: Fields, has_tools: bool) -> Literal["auto", "none"]:
    name = "tool_choice" if fields.has("tool_choice") else "function_call"
    choice = fields.get(name)
    fields.ignore(("tool_choice", "function_call"))
    if choice is None:
        return "auto" if has_tools else "none"
    if choice == "none":
        return "none"
    if not has_tools:
        fields.fail(name, "is set without tools")
    if choice == "auto":
        return "auto"
    if choice == "required" or isinstance(choice, dict):
        fields.refuse(name, _FORCED)
    fields.fail(name, "must be one of none, auto, required or an object that names a function")
