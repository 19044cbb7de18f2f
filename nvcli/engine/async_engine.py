"""The engine for asyncio: each request is an async iterator of outputs.

with LLM("Qwen/Qwen3-0.6B") as llm:
    engine = AsyncEngine(llm)
    async for output in engine.stream(llm.request("What is the capital of France?")):
        print(output.text, end="")
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from nvcli.engine.engine import Request
    from nvcli.engine.output_stream import Requests
    from nvcli.types import RequestOutput


class AsyncEngine:
    """Streams from an `LLM` inside an event loop, as many at once as there are tasks.

    The model runs in the thread of the `LLM`, so the loop never waits for a step. Closing the `LLM`
    ends all streams; there is nothing else to close.
    """

    def __init__(self, llm: Requests) -> None:
        self._llm = llm

    async def stream(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yield what is new of a request, which `LLM.request` makes, until each of its n outputs
        has finished. Leaving the iterator early, by `break`, cancellation or an error, aborts it.

        Raises what `LLM.submit` raises, before the first output.
        """
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[list[RequestOutput]] = asyncio.Queue()

        def sink(group: list[RequestOutput]) -> None:
            try:
                loop.call_soon_threadsafe(outputs.put_nowait, group)
            except RuntimeError:  # the loop is closed: nobody is left to read
                self._llm.abort(request.request_id)

        self._llm.submit(request, sink)
        num_open = request.params.n
        try:
            while num_open > 0:
                for output in await outputs.get():
                    num_open -= output.is_finished
                    yield output
        finally:
            if num_open > 0:
                self._llm.abort(request.request_id)
