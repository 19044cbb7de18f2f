"""The events of MCP tools in a response: what a server offers, calls of it, questions for approval.

A call stays unfinished when the model has ended it: it is in `pending` until the server of the MCP
tool has answered, or until the client is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvcli.protocol.response_frame import Event, EventFrame
from nvcli.protocol.response_items import new_item_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nvcli.protocol.mcp import McpFunction


class McpEvents(EventFrame):
    """`functions`: names, as the model knows them, of the tools that servers run."""

    def __init__(self, response: dict[str, Any], *, include_obfuscation: bool) -> None:
        super().__init__(response, include_obfuscation=include_obfuscation)
        self.functions: Mapping[str, McpFunction] = {}
        self.pending: list[dict[str, Any]] = []  # calls to be run, in order
        self._listing: dict[str, Any] | None = None

    # --- tools of a server ------------------------------------------------------------------------

    def list_began(self, label: str) -> Iterator[Event]:
        kind = "mcp_list_tools"
        item = {"id": new_item_id(kind), "type": kind, "server_label": label, "tools": []}
        self._listing = {**item, "error": None}
        yield self._add(self._listing)
        yield self._of_item("response.mcp_list_tools.in_progress", self._listing)

    def list_ended(self, tools: list[dict[str, Any]], error: str | None = None) -> Iterator[Event]:
        item, self._listing = self._listing, None
        assert item is not None, "a listing has begun"
        item["tools"], item["error"] = tools, error
        ending = "completed" if error is None else "failed"
        yield self._of_item(f"response.mcp_list_tools.{ending}", item)
        yield self._done(item)

    # --- calls ------------------------------------------------------------------------------------

    def _open_call(self, function: McpFunction) -> Iterator[Event]:
        named = {"server_label": function.label, "name": function.name, "arguments": ""}
        if not function.needs_approval:
            yield from self._begin_call(named, None)
            return
        if self._item is not None:
            yield from self._close("completed")
        # Shown once it is whole: nobody can approve half a call.
        kind = "mcp_approval_request"
        self._item = {"id": new_item_id(kind), "type": kind, **named}

    def _begin_call(self, named: dict[str, Any], approval: str | None) -> Iterator[Event]:
        outcome = {"output": None, "error": None, "approval_request_id": approval}
        yield from self._open("mcp_call", **named, **outcome)
        yield self._in_item("response.mcp_call.in_progress")

    def _add_arguments(self, delta: str) -> Iterator[Event]:
        assert self._item is not None, "a call is open"
        self._item["arguments"] += delta
        if self._is_open("mcp_call"):
            yield self._in_item("response.mcp_call_arguments.delta", delta=delta)

    def _close_approval(self, item: dict[str, Any], status: str) -> Iterator[Event]:
        self._item = None
        if status == "completed":  # a call that was cut is no question
            yield self._add(item)
            yield self._done(item)

    def _close_call(self, item: dict[str, Any], status: str) -> Iterator[Event]:
        arguments = item["arguments"]
        yield self._in_item("response.mcp_call_arguments.done", arguments=arguments)
        self._item = None
        self.pending.append(item)
        if status != "completed":
            yield from self.give_up("the call is not complete")

    def call_approved(self, request: dict[str, Any]) -> Iterator[Event]:
        """A whole call that the client has allowed; it is pending now."""
        named = {key: request[key] for key in ("server_label", "name", "arguments")}
        yield from self._begin_call(named, request["id"])
        yield self._in_item("response.mcp_call_arguments.delta", delta=named["arguments"])
        yield from self._close("completed")

    def call_ended(self, item: dict[str, Any], output: str | None, error: str | None) -> Any:
        self.pending = [other for other in self.pending if other is not item]
        item["output"], item["error"] = output, error
        item["status"] = "completed" if error is None else "failed"
        yield self._of_item(f"response.mcp_call.{item['status']}", item)
        yield self._done(item)

    def give_up(self, reason: str) -> Iterator[Event]:
        """End what is still open at servers; the response ends."""
        if self._listing is not None:
            yield from self.list_ended([], reason)
        for item in list(self.pending):
            yield from self.call_ended(item, None, reason)
