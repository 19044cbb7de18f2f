"""MCP servers that requests may use: those of `--mcp FILE` by label, and URLs under `--mcp-allow`.

A server of the file is connected when it is first asked for and shared from then on; it is opened
anew after it has ended. One that a request brings by URL may carry that request's secrets, so its
connection belongs to the request alone. Nothing else is ever opened.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from nvcli.errors import RequestError, UsageError
from nvcli.protocol.mcp import McpTools, UnsupportedToolError
from nvcli.tools import ToolError
from nvcli.tools.mcp import McpConnection, McpLoop, error_text, read_servers, require_sdk

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Sequence
    from pathlib import Path

T = TypeVar("T")


class McpServerError(RequestError):
    """A server that was allowed does not do its part; OpenAI's status for that."""

    http_status = 424
    code = "mcp_server_error"


class ServerNotAllowedError(UnsupportedToolError):
    code = "mcp_server_not_allowed"


@dataclass(slots=True)
class Lease:
    """A connection as one request holds it."""

    connection: McpConnection
    is_own: bool
    timeout_s: float

    async def list_tools(self) -> list[Any]:
        """Raises `ToolError`."""
        return await _wait(self.connection.list_tools(), self.timeout_s)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Raises `ToolError`, also when time is over. A call that is given up is cancelled."""
        return await _wait(self.connection.call(name, arguments), self.timeout_s)

    def release(self) -> None:
        if self.is_own:
            self.connection.end()


class McpHub:
    """Raises `UsageError` for a file that is none and a prefix that is no URL."""

    def __init__(self, file: Path | None, prefixes: Sequence[str], *, timeout_s: float) -> None:
        self._entries = {} if file is None else read_servers(file)
        self._prefixes = [_prefix(text) for text in prefixes]
        self._timeout_s = timeout_s
        self._shared: dict[str, McpConnection] = {}
        self._loop: McpLoop | None = None
        if self.is_on:
            require_sdk()

    @property
    def is_on(self) -> bool:
        return bool(self._entries or self._prefixes)

    def check(self, tools: McpTools) -> None:
        """Raises `UnsupportedToolError` for a server that the operator did not allow."""
        place = tools.place
        if not self.is_on:
            raise UnsupportedToolError(
                f"{place}.type: this server uses no MCP servers", param=f"{place}.type"
            )
        if self._entry(tools) is not None:
            if tools.headers:
                raise ServerNotAllowedError(
                    f"{place}.headers: the operator sets those of {tools.label}",
                    param=f"{place}.headers",
                )
            return
        if tools.url is None:
            known = ", ".join(sorted(self._entries)) or "none"
            raise ServerNotAllowedError(
                f"{place}.server_label: there is no MCP server {tools.label!r}",
                hint=f"Known without a server_url: {known[:300]}.",
                param=f"{place}.server_label",
            )
        if not any(_is_under(tools.url, prefix) for prefix in self._prefixes):
            raise ServerNotAllowedError(
                f"{place}.server_url: the operator of this server did not allow that URL",
                param=f"{place}.server_url",
            )

    def _entry(self, tools: McpTools) -> dict[str, Any] | None:
        """The server of the file that a request means; None where it brings its own."""
        entry = self._entries.get(tools.label)
        return entry if entry is not None and tools.url in (None, entry.get("url")) else None

    async def lease(self, tools: McpTools) -> Lease:
        """A connection that is open. Raises `McpServerError`."""
        self.check(tools)
        if self._loop is None:
            self._loop = McpLoop()
        entry = self._entry(tools)
        is_shared = entry is not None
        if entry is not None:
            connection = self._shared.get(tools.label)
            if connection is None or not connection.is_open:
                connection = McpConnection(tools.label, entry, self._loop)
                self._shared[tools.label] = connection
        else:
            given = {"url": tools.url, "headers": dict(tools.headers)}
            connection = McpConnection(tools.label, given, self._loop, expands=False)
        try:
            # Others may wait for it too, so it is not cancelled with one of them.
            await _wait(connection.ready, self._timeout_s, is_shared=True)
        except ToolError as exc:
            connection.end()
            raise McpServerError(
                f"the MCP server {tools.label} cannot be used: {exc}", param=tools.place
            ) from exc
        except asyncio.CancelledError:
            if not is_shared:
                connection.end()
            raise
        return Lease(connection, not is_shared, self._timeout_s)

    def close(self) -> None:
        """End every connection; waits a little for their processes."""
        for connection in self._shared.values():
            connection.end()
        for connection in self._shared.values():
            connection.close()


async def _wait(
    future: concurrent.futures.Future[T], timeout_s: float, *, is_shared: bool = False
) -> T:
    waiting: asyncio.Future[T] = asyncio.wrap_future(future)
    try:
        return await asyncio.wait_for(asyncio.shield(waiting) if is_shared else waiting, timeout_s)
    except TimeoutError:
        raise ToolError(f"it did not answer in {timeout_s:g} s") from None
    except ToolError:
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ToolError("its connection was closed") from None
    except BaseException as exc:  # whatever the SDK or the operating system raised
        raise ToolError(error_text(exc)) from exc
    finally:
        if is_shared:
            waiting.add_done_callback(_forget)


def _forget(future: asyncio.Future[Any]) -> None:
    """Its outcome has been told to whoever waited."""
    with contextlib.suppress(BaseException):
        future.exception()


# --- URLs ----------------------------------------------------------------------------------------


def _prefix(text: str) -> SplitResult:
    parts = _split(text)
    if parts is None:
        raise UsageError(
            f"mcp-allow must be the beginning of an http or https URL, got {text[:200]!r}",
            param="mcp_allow",
        )
    return parts


def _split(text: str) -> SplitResult | None:
    """The parts of a plain URL. None where two readers could see two different hosts or paths."""
    if len(text) > 2000 or not text.isascii() or not text.isprintable():
        return None
    if any(sign in text for sign in ' \\@#"<>^`{|}'):
        return None
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    path = parts.path.lower()
    if "%2e" in path or "%2f" in path or "%5c" in path or "//" in path:
        return None
    if any(segment in (".", "..") for segment in path.split("/")):
        return None
    return parts


def _is_under(url: str, prefix: SplitResult) -> bool:
    """Same scheme, host and port, and a path at or below the prefix's."""
    parts = _split(url)
    if parts is None:
        return False
    if (parts.scheme, parts.hostname) != (prefix.scheme, prefix.hostname):
        return False
    if _port(parts) != _port(prefix):
        return False
    base = prefix.path.rstrip("/")
    return parts.path.rstrip("/") == base or parts.path.startswith(f"{base}/")


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)
