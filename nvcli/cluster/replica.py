"""One engine in a Ray actor.

Ray makes the object, here or again on another node after a loss; the driver then asks it to load. A
request comes as one call and its answer is the call's result, so a lost actor is a failed call, and
the driver may make it again elsewhere: what a request says, its seed too, travels with it.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from nvcli.engine.engine_thread import error_outputs
from nvcli.errors import EngineClosedError, NvcliError
from nvcli.server.engine_worker import describe
from nvcli.server.wire import pack_output

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.config import EngineConfig
    from nvcli.types import RequestOutput


class Replica:
    """All methods run in the actor's event loop; the engine has a thread of its own."""

    def __init__(self, config: EngineConfig, load: Callable[[EngineConfig], Any]) -> None:
        self._config = config
        self._load = load
        self._llm: Any = None

    async def load(self) -> tuple[str, Any]:
        """(`loaded`, what was loaded) or (`failed`, the error). Loads once."""
        if self._llm is None:
            try:
                self._llm = await asyncio.to_thread(self._load, self._config)
            except NvcliError as error:
                return "failed", (type(error).__name__, error.message, error.hint)
        return "loaded", describe(self._llm)

    async def answer(self, frame: bytes) -> list[tuple[Any, ...]]:
        """A request, and its grammar where it has one -> its outputs, finished, packed."""
        request, spec = pickle.loads(frame)
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[list[tuple[Any, ...]]] = loop.create_future()
        packed: list[tuple[Any, ...]] = []

        def collect(outputs: list[RequestOutput]) -> None:
            packed.extend(pack_output(output) for output in outputs)
            num_done = sum(output.is_finished for output in outputs)
            remaining[0] -= num_done
            if any(output.error_code == EngineClosedError.code for output in outputs):
                os._exit(1)  # the engine is gone: Ray starts this actor again
            if remaining[0] <= 0 and not answered.done():
                answered.set_result(packed)

        def sink(outputs: list[RequestOutput]) -> None:
            loop.call_soon_threadsafe(collect, outputs)

        remaining = [request.params.n]
        try:
            if spec is not None:
                request.grammar = self._llm.compile_grammar(spec)
            self._llm.submit(request, sink)
        except NvcliError as error:
            collect(error_outputs(request.request_id, set(range(request.params.n)), error))
        return await answered

    async def abort(self, request_id: str) -> None:
        self._llm.abort(request_id)

    async def stats(self) -> tuple[Any, ...]:
        return astuple(self._llm.stats())
