"""MCP servers as tools: the usual `mcpServers` JSON, over stdio or HTTP, through the `mcp` SDK.

The SDK is asynchronous and wants each connection opened and closed by one task, so a thread of its
own runs them all; a call waits for it with a time limit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nvcli.errors import NvcliError, UsageError
from nvcli.paths import read_whole
from nvcli.tools.toolbox import ToolError, ToolSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

START_TIMEOUT_S = 30.0
MAX_LISTED = 1000  # tools of one server; pages are read no further
_CLOSE_TIMEOUT_S = 5.0
_OUR_KEY = "NVCLI_API_KEY"  # no server's business, unless its entry names it
_PROBE_TIMEOUT_S = 3.0

T = TypeVar("T")


def open_servers(
    path: Path, warn: Callable[[str], None], taken: Iterable[str] = ()
) -> list[McpServer]:
    """Start or reach every server of the file; names that are `taken` get the server's before.

    Raises `UsageError` for a file that is none, `NvcliError` for a server that does not answer.
    """
    entries = read_servers(path)
    require_sdk()
    loop = McpLoop()
    servers: list[McpServer] = []
    names = set(taken)
    try:
        for name, entry in entries.items():
            server = McpServer(name, entry, loop, names)
            servers.append(server)
            if not server.specs:
                warn(f"the MCP server {name} has no tools")
    except BaseException:
        for server in servers:
            server.close()
        raise
    return servers


def require_sdk() -> None:
    """Raises `UsageError` where the SDK, an extra, is not installed."""
    if importlib.util.find_spec("mcp") is None:
        raise UsageError(
            "MCP servers need the mcp package", hint="pip install 'nvcli[mcp]'", param="mcp"
        )


def read_servers(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of `mcpServers`, checked. Raises `UsageError` naming the server."""
    try:
        content = json.loads(read_whole(path).decode("utf-8"))
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
        problem = _entry_problem(entry)
        if problem is not None:
            raise UsageError(f"{path}: server {name}: {problem}", param="mcp")
    return {n: e for n, e in entries.items() if not e.get("disabled")}


def _entry_problem(entry: dict[str, Any]) -> str | None:
    """What an entry holds that cannot be used; keys of other programs are left alone."""
    kind = entry.get("type") or entry.get("transport")
    kinds = ("stdio",) if "command" in entry else ("http", "streamable-http", "streamable_http")
    if kind is not None and kind not in kinds:
        return f"type {kind!r} is not supported here, only {kinds[0]}"
    for key in ("command", "url", "cwd"):
        if key in entry and not (isinstance(entry[key], str) and entry[key].strip()):
            return f"{key} must be a text, got {entry[key]!r}"
    args = entry.get("args")
    if args is not None and not (
        isinstance(args, list) and all(isinstance(a, str | int | float) for a in args)
    ):
        return "args must be a list of texts"
    for key in ("env", "headers"):
        values = entry.get(key)
        if values is not None and not (
            isinstance(values, dict) and all(isinstance(v, str | int) for v in values.values())
        ):
            return f"{key} must hold texts by name"
    return None


class McpLoop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="nvcli-mcp", daemon=True).start()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)


class McpConnection:
    """A connection that a task of its own keeps open; every future here is thread-safe.

    `ready` gives the tools once they were listed, or why the server cannot be used. A connection
    that has ended stays so; whoever wants it again opens a new one.
    """

    def __init__(
        self, name: str, entry: dict[str, Any], loop: McpLoop, *, expands: bool = True
    ) -> None:
        """`expands`: variables of the environment may stand in the entry."""
        self.name = name
        self.ready: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        self._loop = loop
        self._client: Any = None
        self._stop = asyncio.Event()
        self._task = loop.start(self._serve(entry, os.path.expandvars if expands else str))

    @property
    def is_open(self) -> bool:
        """Whether it may still answer; also while it is being opened."""
        if not self.ready.done():
            return not self._task.done()
        return self._client is not None

    async def _serve(self, entry: dict[str, Any], expand: Callable[[str], str]) -> None:
        """The connection's task: it opens, waits for the end, and closes."""
        from mcp import Client

        try:
            async with contextlib.AsyncExitStack() as stack:
                client = Client(await _transport(entry, stack, expand))
                self._client = await stack.enter_async_context(client)
                self.ready.set_result(await self._list())
                await self._stop.wait()
        except BaseException as exc:  # noqa: BLE001 - whatever it is, the opener raises it
            if not self.ready.done():
                self.ready.set_exception(exc)
        finally:
            self._client = None

    def list_tools(self) -> concurrent.futures.Future[list[Any]]:
        """The tools as they are now. The future raises `ToolError`."""
        return self._loop.start(self._asking(self._list()))

    async def _list(self) -> list[Any]:
        found: list[Any] = []
        cursor = None
        while len(found) < MAX_LISTED:
            page = await self._client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                break
        return found

    def call(self, name: str, arguments: dict[str, Any]) -> concurrent.futures.Future[str]:
        """The result as text. The future raises `ToolError`; cancelling it gives the call up."""
        return self._loop.start(self._asking(self._call(name, arguments)))

    async def _asking(self, work: Coroutine[Any, Any, T]) -> T:
        """`work`, which asks the server; a connection that is lost over it is ended."""
        if self._client is None:
            work.close()
            raise ToolError(f"the MCP server {self.name} has ended")
        try:
            return await work
        except ToolError:
            raise
        except Exception as exc:
            if _is_lost(exc):
                self._client = None
                self._stop.set()
            raise ToolError(error_text(exc)) from exc

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        result = await self._client.call_tool(name, arguments)
        text = "\n".join(_content_text(part) for part in result.content)
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise ToolError(text or "it failed")
        return text

    def end(self) -> None:
        """Begin to close; returns at once."""
        self._client = None
        self._loop.loop.call_soon_threadsafe(self._stop.set)
        if not self.ready.done():
            self._task.cancel()

    def close(self) -> None:
        self.end()
        with contextlib.suppress(Exception, concurrent.futures.CancelledError):
            self._task.result(_CLOSE_TIMEOUT_S)
        self._task.cancel()


class McpServer:
    """One connection and its tools; a name that is taken gets the server's name before it."""

    def __init__(self, name: str, entry: dict[str, Any], loop: McpLoop, taken: set[str]) -> None:
        self.name = name
        self._entry = entry
        self._loop = loop
        tools = self._open()
        self._names: dict[str, str] = {}
        self.specs: list[ToolSpec] = []
        for tool in tools:
            shown = f"{name}_{tool.name}" if tool.name in taken else tool.name
            taken.add(shown)
            self._names[shown] = tool.name
            schema = {"type": "object", **dict(tool.input_schema)}
            self.specs.append(ToolSpec(shown, tool.description or "", schema, f"MCP {name}"))

    def _open(self) -> list[Any]:
        """Connect; returns the server's tools. Raises `NvcliError`."""
        self._connection = McpConnection(self.name, self._entry, self._loop)
        try:
            return self._connection.ready.result(START_TIMEOUT_S)
        except concurrent.futures.TimeoutError as exc:
            self.close()
            reason = f"the MCP server {self.name} did not answer in {START_TIMEOUT_S:g} s"
            raise NvcliError(reason) from exc
        except Exception as exc:
            self.close()
            reason = f"the MCP server {self.name} cannot be used: {error_text(exc)}"
            raise NvcliError(reason) from exc

    def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """A server that has crashed, or was ended, is started again."""
        if not self._connection.is_open:
            try:
                self._open()
            except NvcliError as exc:
                raise ToolError(exc.message) from exc
        future = self._connection.call(self._names[name], arguments)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            ended = "" if self._answers() else " and was ended"
            raise ToolError(f"it did not answer in {timeout_s:g} s{ended}") from None
        finally:
            future.cancel()

    def _answers(self) -> bool:
        """Whether it is only the call that takes long. A server that hangs or floods is ended."""
        try:
            self._connection.list_tools().result(_PROBE_TIMEOUT_S)
        except Exception:  # noqa: BLE001 - whatever it is, it is no answer
            self._connection.end()
            return False
        return True

    def close(self) -> None:
        self._connection.close()


async def _transport(
    entry: dict[str, Any], stack: contextlib.AsyncExitStack, expand: Callable[[str], str]
) -> Any:
    if "url" in entry:
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        headers = {k: expand(str(v)) for k, v in (entry.get("headers") or {}).items()}
        client = await stack.enter_async_context(create_mcp_http_client(headers=headers))
        return streamable_http_client(expand(entry["url"]), http_client=client)
    from mcp.client.stdio import StdioServerParameters, stdio_client

    given = {k: expand(str(v)) for k, v in (entry.get("env") or {}).items()}
    parameters = StdioServerParameters(
        command=expand(entry["command"]),
        args=[expand(str(arg)) for arg in entry.get("args") or ()],
        env={**{k: v for k, v in os.environ.items() if k != _OUR_KEY}, **given},
        cwd=entry.get("cwd"),
    )
    quiet = stack.enter_context(Path(os.devnull).open("w"))  # noqa: SIM115 - the stack does
    return stdio_client(parameters, errlog=quiet)


def _content_text(part: Any) -> str:
    text = getattr(part, "text", None)
    if isinstance(text, str):
        return text
    return f"[{getattr(part, 'type', 'content')} that a text model cannot read]"


def _is_lost(exc: BaseException) -> bool:
    """Whether the connection is gone, rather than a call refused."""
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED

    return not isinstance(exc, MCPError) or exc.error.code == CONNECTION_CLOSED


def error_text(exc: BaseException) -> str:
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    text = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__
