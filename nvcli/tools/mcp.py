"""MCP servers as tools: the usual `mcpServers` JSON, over stdio or HTTP, through the `mcp` SDK.

The SDK is asynchronous and wants each connection opened and closed by one task, so a thread of its
own runs them all; a call waits for it with a time limit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvcli.errors import NvcliError, UsageError
from nvcli.tools.toolbox import ToolError, ToolSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

START_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 5.0


def open_servers(path: Path, warn: Callable[[str], None]) -> list[McpServer]:
    """Start or reach every server of the file.

    Raises `UsageError` for a file that is none, `NvcliError` for a server that does not answer.
    """
    entries = read_servers(path)
    try:
        import mcp  # noqa: F401 - the SDK is an extra
    except ImportError as exc:
        raise UsageError(
            "MCP servers need the mcp package", hint="pip install 'nvcli[mcp]'", param="mcp"
        ) from exc
    loop = _Loop()
    servers: list[McpServer] = []
    taken: set[str] = set()
    try:
        for name, entry in entries.items():
            server = McpServer(name, entry, loop, taken)
            servers.append(server)
            if not server.specs:
                warn(f"the MCP server {name} has no tools")
    except BaseException:
        for server in servers:
            server.close()
        raise
    return servers


def read_servers(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of `mcpServers`, checked. Raises `UsageError` naming the server."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror or exc}", param="mcp") from exc
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{path} is no JSON: {exc}", param="mcp") from exc
    entries = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise UsageError(f"{path} has no mcpServers", param="mcp")
    for name, entry in entries.items():
        if not isinstance(entry, dict) or ("command" in entry) == ("url" in entry):
            raise UsageError(f"{path}: server {name} needs either a command or a url", param="mcp")
    return {n: e for n, e in entries.items() if not e.get("disabled")}


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="nvcli-mcp", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Raises `TimeoutError` after cancelling `work`, and what `work` raises."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as exc:
            future.cancel()
            raise TimeoutError from exc
        except BaseException:
            future.cancel()
            raise


class McpServer:
    """One connection and its tools; a name that is taken gets the server's name before it."""

    def __init__(self, name: str, entry: dict[str, Any], loop: _Loop, taken: set[str]) -> None:
        self.name = name
        self._loop = loop
        self._client: Any = None
        self._ready: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        self._stop = asyncio.Event()
        self._task = asyncio.run_coroutine_threadsafe(self._serve(entry), loop.loop)
        try:
            tools = self._ready.result(START_TIMEOUT_S)
        except concurrent.futures.TimeoutError as exc:
            self.close()
            raise NvcliError(
                f"the MCP server {name} did not answer in {START_TIMEOUT_S:g} s"
            ) from exc
        except Exception as exc:
            self.close()
            raise NvcliError(f"the MCP server {name} cannot be used: {_reason(exc)}") from exc
        self._names: dict[str, str] = {}
        self.specs: list[ToolSpec] = []
        for tool in tools:
            shown = f"{name}_{tool.name}" if tool.name in taken else tool.name
            taken.add(shown)
            self._names[shown] = tool.name
            schema = {"type": "object", **dict(tool.input_schema)}
            self.specs.append(ToolSpec(shown, tool.description or "", schema, f"MCP {name}"))

    async def _serve(self, entry: dict[str, Any]) -> None:
        """The connection's task: it opens, waits for the end, and closes."""
        from mcp import Client

        try:
            async with contextlib.AsyncExitStack() as stack:
                client = await stack.enter_async_context(Client(_transport(entry, stack)))
                found, cursor = [], None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    found += page.tools
                    cursor = page.next_cursor
                    if not cursor:
                        break
                self._client = client
                self._ready.set_result(found)
                await self._stop.wait()
        except BaseException as exc:  # noqa: BLE001 - whatever it is, the opener raises it
            if not self._ready.done():
                self._ready.set_exception(exc)
        finally:
            self._client = None

    def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        client = self._client
        if client is None:
            raise ToolError(f"the MCP server {self.name} has ended")
        try:
            result = self._loop.run(client.call_tool(self._names[name], arguments), timeout_s)
        except TimeoutError:
            raise ToolError(f"it did not answer in {timeout_s:g} s") from None
        except Exception as exc:
            raise ToolError(_reason(exc)) from exc
        text = "\n".join(_content_text(part) for part in result.content)
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text or "it failed")
        return text

    def close(self) -> None:
        self._loop.loop.call_soon_threadsafe(self._stop.set)
        with contextlib.suppress(Exception, concurrent.futures.CancelledError):
            self._task.result(_CLOSE_TIMEOUT_S)
        self._task.cancel()


def _transport(entry: dict[str, Any], stack: contextlib.AsyncExitStack) -> Any:
    if "url" in entry:
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        headers = {k: os.path.expandvars(v) for k, v in (entry.get("headers") or {}).items()}
        client = create_mcp_http_client(headers=headers)
        return streamable_http_client(os.path.expandvars(entry["url"]), http_client=client)
    from mcp.client.stdio import StdioServerParameters, stdio_client

    given = {k: os.path.expandvars(str(v)) for k, v in (entry.get("env") or {}).items()}
    parameters = StdioServerParameters(
        command=os.path.expandvars(entry["command"]),
        args=[os.path.expandvars(str(arg)) for arg in entry.get("args") or ()],
        env={**os.environ, **given},
        cwd=entry.get("cwd"),
    )
    quiet = stack.enter_context(Path(os.devnull).open("w"))  # noqa: SIM115 - the stack does
    return stdio_client(parameters, errlog=quiet)


def _content_text(part: Any) -> str:
    text = getattr(part, "text", None)
    if isinstance(text, str):
        return text
    return f"[{getattr(part, 'type', 'content')} that a text model cannot read]"


def _reason(exc: BaseException) -> str:
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    text = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__
