"""What every request passes first: id, key, size, phase; and what every reply gets: headers, an
error object where something was raised, a count. Plain ASGI, so that streams cost nothing extra.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from nvcli.errors import ContextLengthError
from nvcli.server.errors import (
    AuthenticationError,
    BadRequestError,
    BodyTooLargeError,
    HostError,
    MediaTypeError,
    MethodNotAllowedError,
    NotFoundError,
    OriginError,
    anthropic_error_body,
    as_error,
    error_body,
    error_headers,
)
from nvcli.server.hosts import AllowedHosts
from nvcli.server.json_io import dumps
from nvcli.server.state import shutting_down

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from nvcli.errors import NvcliError
    from nvcli.server.state import ServerState

logger = logging.getLogger("nvcli")

OPEN_PATHS = frozenset({"/live", "/health"})
QUIET_PATHS = frozenset({"/live", "/health", "/ping", "/metrics", "/version"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Front:
    """The outermost layer of the app."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        config = state.config
        self._digests = [_digest(key.encode()) for key in config.api_keys]
        self._hosts = AllowedHosts(
            config.allowed_hosts, bound=config.host, is_loopback=config.is_loopback
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._state)
        path = scope["path"]
        is_work = path not in QUIET_PATHS
        if is_work:
            self._state.enter()
        try:
            if not self._is_open(path):
                self._check_key(exchange)
                self._check_host(exchange)
            self._check_origin(exchange)
            exchange.check_length()
            exchange.check_encoding()
            await self._app(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            exchange.status = 499
        except Exception as exc:  # noqa: BLE001 - the last resort; it is logged and answered
            await self._fail(exchange, exc)
        finally:
            if is_work:
                self._state.leave()
            exchange.forget_body()
            self._finish(exchange)

    def _is_open(self, path: str) -> bool:
        """Whether anybody may ask, under any name: those who watch over servers have no key."""
        is_metrics = path == "/metrics" and self._state.config.metrics == "open"
        return is_metrics or path in OPEN_PATHS

    def _check_key(self, exchange: _Exchange) -> None:
        if not self._digests:
            return
        if exchange.scope["method"] == "OPTIONS" and self._state.config.cors_origins:
            return  # a browser's preflight brings no key
        given = exchange.header(b"authorization")
        scheme, _, key = given.partition(b" ")
        key = key.strip() if scheme.lower() == b"bearer" else b""
        digest = _digest(key or exchange.header(b"x-api-key"))
        is_right = False
        for known in self._digests:  # all of them, so that time tells nothing
            is_right |= hmac.compare_digest(digest, known)
        if not is_right:
            hint = "Send the header 'Authorization: Bearer KEY'."
            raise AuthenticationError("the API key is missing or wrong", hint=hint)

    def _check_host(self, exchange: _Exchange) -> None:
        """No page has the key, and none can come under another name through a Unix socket."""
        if self._digests or "*" in self._state.config.cors_origins or exchange.is_unix:
            return
        for given in exchange.headers_named(b"host"):
            host = given.decode("latin-1")
            if not self._hosts.let_in(host):
                raise HostError(
                    f"without an API key this server does not answer to the name {host[:200]!r}",
                    hint="Start it with --allowed-host NAME, or with --api-key-file.",
                )

    def _check_origin(self, exchange: _Exchange) -> None:
        """Without a key any page in a browser on this machine could make the server work, and call
        the MCP servers it knows; a page of another origin is let in by --cors-origin only."""
        allowed = self._state.config.cors_origins
        if self._digests or exchange.scope["method"] in _SAFE_METHODS or "*" in allowed:
            return
        site = exchange.header(b"sec-fetch-site").decode("latin-1")
        origin = exchange.header(b"origin").decode("latin-1")
        if site in ("same-origin", "none") or origin in allowed:
            return
        host = exchange.header(b"host").decode("latin-1")
        if not site and (not origin or origin.partition("://")[2] == host):
            return
        raise OriginError(
            f"a web page of {origin[:200] or 'another site'} may not send requests here",
            hint="Start the server with --cors-origin ORIGIN.",
        )

    async def _fail(self, exchange: _Exchange, exc: Exception) -> None:
        if isinstance(exc, HTTPException):
            allowed = (exc.headers or {}).items()
            exchange.headers += [(k.lower().encode(), v.encode()) for k, v in allowed]
        error = _http_error(exc) if isinstance(exc, HTTPException) else as_error(exc)
        if isinstance(error, ContextLengthError) and error.param == "prompt":
            error.param = _PROMPTS.get(exchange.scope["path"], "prompt")
        if error.http_status >= 500 and not hasattr(exc, "message"):
            logger.error("request %s failed", exchange.request_id, exc_info=exc)
        if exchange.has_started:
            logger.debug("request %s broke off", exchange.request_id, exc_info=exc)
            return
        await send_error(exchange, error)

    def _finish(self, exchange: _Exchange) -> None:
        seconds = time.perf_counter() - exchange.started
        scope = exchange.scope
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._state.metrics.observe_http(
            scope.get("handler", "none"), method, exchange.status, seconds
        )
        if self._state.config.log_requests:
            logger.warning(
                "%s %s %s %d %.1f ms",
                exchange.request_id,
                method,
                scope["path"][:200].encode("unicode_escape").decode(),
                exchange.status,
                seconds * 1e3,
            )


_PROMPTS = {  # what clients call what the engine calls the prompt
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
    "/v1/responses/input_tokens": "input",
}
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # they change nothing
_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})


class _Exchange:
    """One request and its reply, watched on the way through."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, state: ServerState) -> None:
        self.scope = scope
        self.started = time.perf_counter()
        self.status = 0
        self.has_started = False
        self._is_whole = False  # the body is all here
        self._receive = receive
        self._send = send
        self._state = state
        self._max_body_bytes = state.config.max_body_bytes
        self._num_bytes = 0
        given = self.header(b"x-request-id").decode("latin-1")
        is_good = _REQUEST_ID.fullmatch(given) is not None
        self.request_id = given if is_good else f"req_{uuid.uuid4().hex}"
        scope["request_id"] = self.request_id
        self.headers: list[tuple[bytes, bytes]] = []
        scope["extra_headers"] = self.headers

    def header(self, name: bytes) -> bytes:
        return next(iter(self.headers_named(name)), b"")

    def headers_named(self, name: bytes) -> list[bytes]:
        return [bytes(value) for key, value in self.scope["headers"] if key == name]

    @property
    def is_unix(self) -> bool:
        """Whether it came through a Unix socket, which has a path and no port."""
        server = self.scope.get("server")
        return server is not None and server[1] is None

    def check_length(self) -> None:
        given = self.header(b"content-length")
        if given.isdigit() and int(given[:20]) > self._max_body_bytes:
            self._too_large()

    def check_encoding(self) -> None:
        encoding = self.header(b"content-encoding").strip().lower()
        if encoding not in (b"", b"identity"):
            shown = encoding[:40].decode("latin-1")
            raise MediaTypeError(
                f"a body in the encoding {shown} is not read", hint="Send it plain."
            )

    def _too_large(self) -> None:
        raise BodyTooLargeError(f"the body is larger than {self._max_body_bytes:,} bytes")

    async def receive(self) -> Message:
        message = await (self._receive() if self._is_whole else self._receive_unless_draining())
        if message["type"] == "http.request":
            self._is_whole = not message.get("more_body", False)
            size = len(message.get("body", b""))
            self._num_bytes += size
            self._state.count_body(size)
            if self._num_bytes > self._max_body_bytes:
                self._too_large()
        return message

    async def _receive_unless_draining(self) -> Message:
        """Raises `NotReadyError` where the server drains, and would have to wait for the body."""
        arriving = self._state.arriving
        try:
            async with asyncio.timeout(0 if self._state.is_draining else None) as limit:
                arriving.add(limit)
                try:
                    return await self._receive()
                finally:
                    arriving.discard(limit)
        except TimeoutError:
            if self.has_started:  # it is answered without its body
                return await self._receive()
            raise shutting_down() from None

    def forget_body(self) -> None:
        """It is answered, or given up."""
        self._state.num_body_bytes -= self._num_bytes
        self._num_bytes = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            self.status = message["status"]
            if self.scope["path"].startswith("/v1/messages"):  # Anthropic's name for it
                self.headers.append((b"request-id", self.request_id.encode()))
            if self._state.is_draining:  # the next request would be refused
                self.headers.append((b"connection", b"close"))
            elapsed = int((time.perf_counter() - self.started) * 1e3)
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", self.request_id.encode()),
                (b"openai-processing-ms", str(elapsed).encode()),
                *self.headers,
            ]
        await self._send(message)


async def send_error(exchange: Any, error: NvcliError) -> None:
    """A whole error reply, in the form the endpoint's clients expect."""
    if exchange.scope["path"].startswith("/v1/messages"):
        body = dumps(anthropic_error_body(error, exchange.request_id))
    else:
        body = dumps(error_body(error))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *error_headers(error),
    ]
    if isinstance(error, BodyTooLargeError):
        headers.append((b"connection", b"close"))
    start = {"type": "http.response.start", "status": error.http_status, "headers": headers}
    await exchange.send(start)
    is_head = exchange.scope["method"] == "HEAD"
    await exchange.send({"type": "http.response.body", "body": b"" if is_head else body})


def _http_error(exc: HTTPException) -> NvcliError:
    """Starlette's own refusals in our words."""
    if exc.status_code == 404:
        return NotFoundError("there is no such endpoint", hint="GET /v1/models works.")
    if exc.status_code == 405:
        return MethodNotAllowedError("this endpoint does not take that method")
    if exc.status_code == 413:
        return BodyTooLargeError("the body is too large")
    return BadRequestError(str(exc.detail))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def ignore_fields(scope: Scope, fields: tuple[str, ...]) -> None:
    """Name request fields that changed nothing in `x-nvcli-ignored-fields`, and in the log."""
    if not fields:
        return
    names = [name[:64].encode("ascii", "replace").decode() for name in fields[:32]]
    text = re.sub(r"[^\x20-\x7e]", "?", ",".join(names))[:1000]
    scope["extra_headers"].append((b"x-nvcli-ignored-fields", text.encode()))
    logger.info("%s ignored fields: %s", scope["request_id"], text)
