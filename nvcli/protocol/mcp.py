"""Tools of type `mcp` in a request: which server, which of its tools, and who approves a call.

Whether a server may be reached at all is the operator's word (`nvcli.server.mcp`), not a client's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvcli.protocol.fields import UnsupportedFieldError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvcli.protocol.fields import Fields

_LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]{0,8192}")
_OWN_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade"})


class UnsupportedToolError(UnsupportedFieldError):
    """A tool that this server does not bring."""

    code = "unsupported_tool"


@dataclass(frozen=True, slots=True)
class ToolFilter:
    """Some tools of a server: by name, or by what they say of themselves."""

    names: frozenset[str] | None = None
    read_only: bool | None = None

    def takes(self, name: str, *, read_only: bool) -> bool:
        if self.names is not None and name not in self.names:
            return False
        return self.read_only is None or self.read_only == read_only


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTools:
    """One `mcp` entry of `tools`."""

    label: str
    place: str  # in the request, for errors
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # may hold secrets: never repeated
    allowed: ToolFilter = ToolFilter()
    always: ToolFilter | None = None
    never: ToolFilter | None = None
    approves_all: bool = False  # require_approval: never

    def needs_approval(self, name: str, *, read_only: bool) -> bool:
        """OpenAI's default: every call is asked for."""
        if self.always is not None and self.always.takes(name, read_only=read_only):
            return True
        if self.never is not None and self.never.takes(name, read_only=read_only):
            return False
        return not self.approves_all


@dataclass(frozen=True, slots=True)
class McpFunction:
    """A tool of a server as this request may call it."""

    label: str
    name: str  # the server's; the model may know it by another
    needs_approval: bool


def read_mcp(tool: Fields, place: str) -> tuple[McpTools, dict[str, Any]]:
    """An entry, and what a response repeats of it. Raises `InvalidParameterError`."""
    label = tool.text("server_label")
    if not label:
        tool.fail("server_label", "is missing")
    if _LABEL.fullmatch(label) is None:
        tool.fail("server_label", "must be 1 to 64 letters, digits, '_', '-' or '.'")
    if tool.get("connector_id") is not None:
        raise UnsupportedToolError(
            f"{place}.connector_id: connectors are not supported", param=f"{place}.connector_id"
        )
    approval = tool.get("require_approval")
    always = never = None
    if isinstance(approval, str):
        tool.choice("require_approval", ("always", "never"))
    else:
        given = tool.inner("require_approval")
        always, never = _filter(given, "always"), _filter(given, "never")
    description = tool.text("server_description")
    allowed = _filter(tool, "allowed_tools")
    tools = McpTools(
        label=label,
        place=place,
        url=tool.text("server_url"),
        headers=_headers(tool),
        allowed=allowed or ToolFilter(),
        always=always,
        never=never,
        approves_all=approval == "never",
    )
    echo = {
        "type": "mcp",
        "server_label": label,
        "server_url": tools.url,
        "server_description": description,
        "allowed_tools": tool.get("allowed_tools"),
        "require_approval": approval or "always",
        "headers": None,
    }
    return tools, {key: value for key, value in echo.items() if value is not None}


def _filter(fields: Fields, name: str) -> ToolFilter | None:
    """Names, or `{tool_names, read_only}`."""
    if isinstance(fields.get(name), list):
        return ToolFilter(frozenset(fields.texts(name) or ()))
    given = fields.object(name)
    if given is None:
        return None
    names = given.texts("tool_names")
    return ToolFilter(None if names is None else frozenset(names), given.flag("read_only"))


def _headers(tool: Fields) -> dict[str, str]:
    """Headers of the request's own; only whole, plain ones, so that none hides a second."""
    headers: dict[str, str] = {}
    given = tool.inner("headers")
    for name in given.raw:
        value = given.text(name) or ""
        is_good = _HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value)
        if not is_good or name.lower() in _OWN_HEADERS:
            tool.fail("headers", f"cannot hold {name[:40]!r}")
        headers[name] = value
    token = tool.text("authorization")
    if token is not None:
        if _HEADER_VALUE.fullmatch(token) is None:
            tool.fail("authorization", "must be printable ASCII")
        headers["Authorization"] = f"Bearer {token}"
    return headers


@dataclass(frozen=True, slots=True)
class McpRef:
    """What `tool_choice` says of a server: one of its tools, or any."""

    label: str
    name: str | None = None

    def takes(self, function: McpFunction) -> bool:
        return self.label == function.label and self.name in (None, function.name)
