"""The engine for asyncio: each request is an async iterator of outputs.

    async with AsyncEngine(engine) as async_engine:
        async for output in async_engine.stream(request):
            ...

Leaving the iterator early, by `break`, cancellation or an error, aborts the request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from nvcli.engine.engine_thread import EngineThread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nvcli.engine.engine import Engine, Request
    from nvcli.types import RequestOutput


class AsyncEngine:
    """Raises what `EngineThread.submit` raises from `stream`, before the first output."""

    def __init__(self, engine: Engine | EngineThread) -> None:
        self._owns_thread = not isinstance(engine, EngineThread)
        self._thread = engine if isinstance(engine, EngineThread) else EngineThread(engine)

    async def stream(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Yield the request's outputs until each of its n has finished."""
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[list[RequestOutput]] = asyncio.Queue()

        def sink(group: list[RequestOutput]) -> None:
            try:
                loop.call_soon_threadsafe(outputs.put_nowait, group)
            except RuntimeError:  # the loop is closed: nobody is left to read
                self._thread.abort(request.request_id)

        self._thread.submit(request, sink)
        num_open = request.params.n
        try:
            while num_open > 0:
                for output in await outputs.get():
                    num_open -= output.is_finished
                    yield output
        finally:
            if num_open > 0:
                self._thread.abort(request.request_id)

    async def abort(self, request_id: str) -> None:
        self._thread.abort(request_id)

    async def close(self) -> None:
        if self._owns_thread:
            await asyncio.to_thread(self._thread.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
