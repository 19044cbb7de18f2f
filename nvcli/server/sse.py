"""Server-sent events: frames, and a response that ends its work when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from nvcli.server.json_io import dumps

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def data_event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def data_events(values: Iterable[Any]) -> bytes:
    return b"".join(map(data_event, values))


def named_event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + dumps(value) + b"\n\n"


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An ASGI response of already framed events. The generator is closed when the client leaves,
    whatever it waits for, so that its `finally` can end the work behind it. One that was never
    begun has no `finally`: `close` is called in any case.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        ping_interval: float | None = None,
        close: Callable[[], object] | None = None,
    ) -> None:
        self._events = events
        self._close = close
        self._ping_interval = ping_interval
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(send))
        helpers = [asyncio.create_task(wait_for_disconnect(receive))]
        if self._ping_interval is not None:
            helpers.append(asyncio.create_task(self._ping(send, self._ping_interval)))
        try:
            await asyncio.wait([pump, helpers[0]], return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            for task in (pump, *helpers):
                task.cancel()
            await asyncio.gather(pump, *helpers, return_exceptions=True)
            await self._events.aclose()
            if self._close is not None:
                self._close()

    async def _pump(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
        await send(start)
        self._last_sent = time.monotonic()
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            self._last_sent = time.monotonic()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send, interval: float) -> None:
        while True:
            silent = time.monotonic() - self._last_sent
            if self._last_sent and silent >= interval:
                with contextlib.suppress(OSError):
                    await send({"type": "http.response.body", "body": PING, "more_body": True})
                self._last_sent, silent = time.monotonic(), 0.0
            await asyncio.sleep(max(interval - silent, 0.01))
