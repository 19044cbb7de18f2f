"""uvicorn's HTTP protocol with bounds: how large a request's head may be, how long a request may
take to arrive, and how long its client may leave a reply lying there. Without them one client could
fill the memory or hold every connection.

    connected -> head -> body -> complete, and again
       |____________|______|__ too slow: 408; head too large: 431; not HTTP: 400; then closed

    written -> sent, and again
       |__ too slow: the connection is cut, as if the client had left, and its request ends with it

Requests that come before the reply to an earlier one (pipelining) wait in line. uvicorn tells only
the last of them that the client has left, and stops reading, so that it would not know; here all
are told, and reading goes on for a few of them.

What stands around the chunks of a body (their extensions, and trailers, which nobody asks for)
counts as a head does. Some clients offer another protocol beside a request with a body (Java's by
default, `curl --http2`); the offer is passed over, and the body is read as that of any request.

A target may be a whole URL (`GET http://name/path`, as to a proxy), and its name then counts before
`Host` (RFC 9112, 3.2.2). It comes as one more `host` header, and the rest as any other target.
"""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nvcli.errors import RequestError
from nvcli.server.errors import BadRequestError, error_body
from nvcli.server.json_io import dumps

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

MAX_HEAD_BYTES = 64 * 1024
ARRIVAL_S = 30.0  # for a head, and for each of the body's portions
PORTION_BYTES = 32 * 1024  # what has to come of a body within that time
MAX_FRAMING = 8  # bytes around each byte of a body in chunks, beside what a head may have
MAX_AHEAD = 8  # requests that may come before the reply to an earlier one, and be read
DEPARTURE_S = 60.0  # for each portion of what the client has still to take


class HeadTooLargeError(RequestError):
    http_status = 431
    code = "head_too_large"


class ArrivalTimeoutError(RequestError):
    http_status = 408
    code = "request_timeout"


def _in_kernel(sock: Any) -> int:
    """Bytes that the kernel keeps for a client, which may be megabytes: it takes more only when a
    third of them is gone, so that a slow reader would seem to take nothing. 0 where it does not
    count bytes: for Unix sockets, and on other systems than Linux.
    """
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return 0
    try:
        import fcntl
        import termios

        answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
    except (ImportError, AttributeError, OSError):
        return 0
    return int.from_bytes(answer, sys.byteorder)


_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class CountingTransport:
    """A transport, and what was written to it. To one that closes nothing is written any more:
    uvicorn learns of it an iteration later, and uvloop raises meanwhile."""

    def __init__(self, transport: Any, on_write: Callable[[int], None]) -> None:
        self._transport = transport
        self._on_write = on_write

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)
            self._on_write(len(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class PlainParser(httptools.HttpRequestParser):
    """A parser for which an offer of another protocol ends no request. httptools ends it with its
    head and gives the rest back; so a head that says no more than how long the body is goes in
    before that rest."""

    def __init__(self, protocol: GuardedProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        rest = memoryview(data)
        while True:
            try:
                super().feed_data(rest)
            except httptools.HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
                if framing := self._protocol.framing():
                    self._protocol.is_between_heads = True
                    super().feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
                    self._protocol.is_between_heads = False
            else:
                return


class GuardedProtocol(HttpToolsProtocol):
    arrival_s = ARRIVAL_S
    departure_s = DEPARTURE_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = PlainParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        self.is_between_heads = False
        self._is_complete = False  # no request is on its way in
        self._is_in_head = True
        self._num_head = 0
        self._num_behind_head = 0  # bytes, of reads that began there
        self._num_body = 0  # of these, what the chunks hold
        self._num_body_before = 0  # when the clock was started
        self._clock: asyncio.TimerHandle | None = None
        self._cycles: list[Any] = []  # of requests whose reply is not over, in order
        self._num_written = 0
        self._num_due = 0  # of these, to be sent when the clock of what leaves comes round
        self._departure_clock: asyncio.TimerHandle | None = None

    # --- what arrives -----------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        counting: Any = CountingTransport(transport, self._on_write)
        super().connection_made(counting)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        if self._departure_clock is not None:
            self._departure_clock.cancel()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # it was refused; what still comes is nobody's
        if self._is_in_head:
            self._num_head += len(data)
            if self._num_head > MAX_HEAD_BYTES and not self._ends_soon(data):
                self._refuse(HeadTooLargeError("the request's head is too large"))
                return
        elif not self._is_complete:
            self._num_behind_head += len(data)
        super().data_received(data)
        if self._is_complete:
            self._stop_clock()
            return
        num_around = self._num_behind_head - self._num_body
        if num_around > MAX_HEAD_BYTES + MAX_FRAMING * self._num_body:
            self._refuse(HeadTooLargeError("what stands around the request's body is too large"))
        elif self._clock is None:
            self._start_clock()

    def _ends_soon(self, data: bytes) -> bool:
        """Whether the head ends within its bound, and it is a body that makes the data long."""
        room = MAX_HEAD_BYTES - (self._num_head - len(data))
        return b"\r\n\r\n" in data[: max(0, room)]

    def on_message_begin(self) -> None:
        if self.is_between_heads:
            return
        self._is_complete = False
        self._is_in_head = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self.is_between_heads:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # a trailer
        super().on_header(name, value.rstrip(b" \t"))  # the parser leaves it, and it is no value

    def _split_whole_url(self) -> None:
        target = httptools.parse_url(self.url)
        if not target.host:  # "*"
            return
        host = b"[%b]" % target.host if b":" in target.host else target.host
        if target.port is not None:
            host += b":%d" % target.port
        self.headers.append((b"host", host))
        query = b"?" + target.query if target.query else b""
        self.url = (target.path or b"/") + query

    def framing(self) -> bytes:
        """The headers that tell how long the body is, as lines; empty when there is no body."""
        lines = (
            b"%b: %b\r\n" % header
            for header in self.headers
            if header[0] in (b"content-length", b"transfer-encoding")
        )
        return b"".join(lines)

    def on_headers_complete(self) -> None:
        if self.is_between_heads:
            return
        self._is_in_head = False
        if not self.url.startswith(b"/"):
            self._split_whole_url()
        self._num_head = self._num_body = self._num_body_before = self._num_behind_head = 0
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        if 0 < len(self.pipeline) <= MAX_AHEAD:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._num_body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self.framing():
            return  # its body comes
        self._is_complete = True
        super().on_message_complete()

    # --- what leaves ------------------------------------------------------------------------------

    def _on_write(self, count: int) -> None:
        self._num_written += count
        if self._departure_clock is None:
            self._start_departure_clock()

    def _num_taken(self) -> int:
        """Bytes of what was written that have reached the client."""
        left = self.transport.get_write_buffer_size() + _in_kernel(
            self.transport.get_extra_info("socket")
        )
        return self._num_written - left

    def _start_departure_clock(self) -> None:
        taken = self._num_taken()
        self._num_due = taken + min(self._num_written - taken, PORTION_BYTES)
        self._departure_clock = self.loop.call_later(self.departure_s, self._on_departure_clock)

    def _on_departure_clock(self) -> None:
        """It runs while there is something to send, also after the connection was closed: what was
        written before goes out first, for as long as that takes."""
        self._departure_clock = None
        if not self.transport.get_write_buffer_size():
            return  # what the kernel still has costs us nothing
        if self._num_taken() < self._num_due:
            self.transport.abort()
        else:
            self._start_departure_clock()

    # --- refusing ---------------------------------------------------------------------------------

    def _start_clock(self) -> None:
        self._num_body_before = self._num_body
        self._clock = self.loop.call_later(self.arrival_s, self._on_clock)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _on_clock(self) -> None:
        self._clock = None
        if self.transport.is_closing() or self._is_complete:
            return
        arrived = self._num_body - self._num_body_before
        # Nothing arrives because we do not read, or earlier requests have still to be answered.
        earlier = self._cycles if self._is_in_head else self._cycles[:-1]
        is_ours = self.flow.read_paused or not all(cycle.response_complete for cycle in earlier)
        if is_ours or (not self._is_in_head and arrived >= PORTION_BYTES):
            self._start_clock()
            return
        self._refuse(ArrivalTimeoutError("the request took too long to arrive"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadRequestError("this is no HTTP request"))

    def _refuse(self, error: RequestError) -> None:
        """An error object, unless a reply has begun on this connection; then the end."""
        self._stop_clock()
        if not any(
            cycle.response_started and not cycle.response_complete for cycle in self._cycles
        ):
            body = dumps(error_body(error))
            status = error.http_status
            head = (
                f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
