"""The MCP servers of one response: what they offer, and the calls the model makes of them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nvcli.errors import InvalidParameterError
from nvcli.protocol.mcp import McpFunction, McpRef, McpTools
from nvcli.protocol.tools import MAX_TOOLS, Tools
from nvcli.server.mcp import Lease, McpHub, McpServerError
from nvcli.tools import ToolError, cut_result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nvcli.protocol.response_events import ResponseEvents
    from nvcli.protocol.responses import ResponsesRequest

MAX_CALLS = 64  # of one response that sets no max_tool_calls: a model may not go on for ever
_TOO_MANY = "the limit of tool calls of this response is reached"


def check_approvals(
    request: ResponsesRequest, items: Sequence[dict[str, Any]], num_before: int
) -> None:
    """Raises `InvalidParameterError` for an approval of what this request may not call.

    `num_before`: items of earlier responses, which stand before the input.
    """
    asked = {item["id"]: item for item in items if item["type"] == "mcp_approval_request"}
    servers = {tools.label: tools for tools in request.mcp}
    for i, item in enumerate(items[num_before:]):
        if item["type"] != "mcp_approval_response":
            continue
        place = f"input[{i}].approval_request_id"
        call = asked.get(item["approval_request_id"])
        if call is None:
            raise InvalidParameterError(f"{place} is no call that was asked for", param=place)
        tools = servers.get(call["server_label"])
        if item["approve"] and (tools is None or not _names(tools, call["name"])):
            raise InvalidParameterError(
                f"{place}: that tool is not among the tools of this request", param=place
            )


def _names(tools: McpTools, name: str) -> bool:
    return tools.allowed.names is None or name in tools.allowed.names


class McpSession:
    """Lives as long as the response. `add` takes the events."""

    def __init__(
        self,
        hub: McpHub,
        request: ResponsesRequest,
        items: Sequence[dict[str, Any]],
        events: ResponseEvents,
        add: Callable[[Any], None],
    ) -> None:
        self._hub = hub
        self._request = request
        self._items = items
        self._events = events
        self._add = add
        self._servers = {tools.label: tools for tools in request.mcp}
        self._leases: dict[str, Lease] = {}
        self._definitions: list[dict[str, Any]] = []
        self._functions: dict[str, McpFunction] = {}
        self._limit = request.max_tool_calls or MAX_CALLS
        self._num_calls = 0
        self._is_first = True  # no turn has been before
        self.names: dict[tuple[str, str], str] = {}  # what the model knows a server's tool by

    async def open(self) -> None:
        """Learn what the servers offer. Raises `McpServerError`."""
        known = {
            item["server_label"]: item.get("tools") or []
            for item in self._items
            if item["type"] == "mcp_list_tools" and not item.get("error")
        }
        for tools in self._request.mcp:
            listed = known.get(tools.label)
            if listed is None:
                listed = await self._list(tools)
            for tool in listed:
                self._offer(tools, tool)
        count = len(self._definitions) + len(self._request.chat.tools.definitions)
        if count > MAX_TOOLS:
            raise InvalidParameterError(
                f"the tools of all servers are {count}, at most {MAX_TOOLS} can be given",
                hint="Narrow them with allowed_tools.",
                param="tools",
            )
        self._events.functions = self._functions

    async def _list(self, tools: McpTools) -> list[dict[str, Any]]:
        self._add(self._events.list_began(tools.label))
        try:
            lease = await self._lease(tools)
            found = [_listed(tool) for tool in await lease.list_tools()]
        except (ToolError, McpServerError) as exc:
            self._add(self._events.list_ended([], str(exc)[:2000]))
            if isinstance(exc, McpServerError):
                raise
            raise McpServerError(
                f"the MCP server {tools.label} gives no tools: {exc}", param=tools.place
            ) from exc
        found = [t for t in found if tools.allowed.takes(t["name"], read_only=_is_read_only(t))]
        self._add(self._events.list_ended(found))
        return found

    def _offer(self, tools: McpTools, tool: dict[str, Any]) -> None:
        read_only = _is_read_only(tool)
        name = str(tool["name"])
        if not tools.allowed.takes(name, read_only=read_only):
            return
        taken = {d["function"]["name"] for d in self._request.chat.tools.definitions}
        shown = name if name not in taken | self._functions.keys() else f"{tools.label}_{name}"
        if shown in taken | self._functions.keys():
            return
        asks = tools.needs_approval(name, read_only=read_only)
        self._functions[shown] = McpFunction(tools.label, name, asks)
        self.names[tools.label, name] = shown
        function = {
            "name": shown,
            "description": tool.get("description") or "",
            "parameters": {"type": "object", **(tool.get("input_schema") or {})},
        }
        self._definitions.append({"type": "function", "function": function})

    async def _lease(self, tools: McpTools) -> Lease:
        lease = self._leases.get(tools.label)
        if lease is None or not lease.connection.is_open:
            lease = self._leases[tools.label] = await self._hub.lease(tools)
        return lease

    def next_tools(self) -> Tools:
        """What the model may call in the turn that begins now."""
        is_first, self._is_first = self._is_first, False
        given, choices = self._request.chat.tools, self._request.allowed
        definitions = (*given.definitions, *self._definitions)
        names = {d["function"]["name"] for d in definitions}
        if choices is not None:
            refs = [choice for choice in choices if isinstance(choice, McpRef)]
            names &= {choice for choice in choices if isinstance(choice, str)} | {
                shown
                for shown, function in self._functions.items()
                if any(ref.takes(function) for ref in refs)
            }
        choice = given.choice
        if is_first and choice == "required" and not names:
            raise InvalidParameterError(
                "tool_choice: the servers have no tool that it allows", param="tool_choice"
            )
        if not is_first and choice == "required":
            choice = "auto"  # it was called; now the model may answer
        if self._num_calls >= self._limit:
            names -= self._functions.keys()
        if not names:
            return replace(given, definitions=(), choice="none", allowed=None)
        is_all = len(names) == len(definitions)
        allowed = None if is_all else frozenset(names)
        return replace(given, definitions=definitions, choice=choice, allowed=allowed)

    # --- calls ------------------------------------------------------------------------------------

    async def run_approved(self) -> None:
        """The calls that the client has allowed since, and that have not been made."""
        asked = {i["id"]: i for i in self._items if i["type"] == "mcp_approval_request"}
        made = {i.get("approval_request_id") for i in self._items if i["type"] == "mcp_call"}
        for item in self._items:
            if item["type"] != "mcp_approval_response" or not item["approve"]:
                continue
            request_id = item["approval_request_id"]
            if request_id in asked and request_id not in made:
                made.add(request_id)
                self._add(self._events.call_approved(asked[request_id]))
        await self.run_pending()

    async def run_pending(self) -> None:
        """Make the calls that wait, at the same time; none of them can fail the response."""
        async with asyncio.TaskGroup() as group:
            for item in list(self._events.pending):
                group.create_task(self._run(item))

    async def _run(self, item: dict[str, Any]) -> None:
        output = error = None
        try:
            output = cut_result(await self._call(item))
        except (ToolError, McpServerError) as exc:
            error = cut_result(str(exc))
        self._add(self._events.call_ended(item, output, error))

    async def _call(self, item: dict[str, Any]) -> str:
        self._num_calls += 1
        if self._num_calls > self._limit:
            raise ToolError(_TOO_MANY)
        tools = self._servers.get(item["server_label"])
        if tools is None or not _names(tools, item["name"]):
            raise ToolError("that tool is not among the tools of this request")
        try:
            arguments = json.loads(item["arguments"] or "{}")
        except (ValueError, RecursionError):
            raise ToolError("the arguments are no JSON") from None
        if not isinstance(arguments, dict):
            raise ToolError("the arguments must be a JSON object")
        lease = await self._lease(tools)
        return await lease.call(item["name"], arguments)

    def close(self) -> None:
        for lease in self._leases.values():
            lease.release()


def _listed(tool: Any) -> dict[str, Any]:
    """A tool as OpenAI's item has it."""
    annotations = getattr(tool, "annotations", None)
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": dict(tool.input_schema),
        "annotations": None
        if annotations is None
        else annotations.model_dump(mode="json", by_alias=True, exclude_none=True),
    }


def _is_read_only(tool: dict[str, Any]) -> bool:
    annotations = tool.get("annotations")
    return isinstance(annotations, dict) and annotations.get("readOnlyHint") is True
