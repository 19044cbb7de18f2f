"""One engine in a Ray actor.

Ray makes the object, here or again on another node after a loss; the driver then asks it to load.
Requests come as calls without an answer; what the engine gives goes back with `poll`, of which the
driver has one on its way at any time. So a lost actor is one failed call, at once, and the driver
knows which requests it had: what a request says, its seed too, can be said again elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nvcli import __version__
from nvcli.engine.engine_thread import error_outputs
from nvcli.errors import EngineClosedError, EngineError, NvcliError, TokenizerError
from nvcli.server.engine_worker import describe
from nvcli.server.wire import pack_output, pack_stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.config import EngineConfig
    from nvcli.types import RequestOutput


Group = tuple[str, list[tuple[Any, ...]]]  # a request's ticket, its packed outputs
STATS_INTERVAL_S = 0.5


class Replica:
    """All methods run in the actor's event loop; the engine has a thread of its own."""

    def __init__(self, config: EngineConfig, load: Callable[[EngineConfig], Any]) -> None:
        self._config = config
        self._load = load
        self._llm: Any = None
        self._groups: list[Group] = []
        self._is_ending = False
        self._compiling: set[str] = set()  # tickets whose grammar is not ready

    async def hello(self) -> None:
        """Answered once Ray has placed and started the actor."""

    async def load(self) -> tuple[str, Any]:
        """(`loaded`, what was loaded) or (`failed`, the error). Loads once."""
        if self._llm is None:
            self._loop = asyncio.get_running_loop()
            self._has_groups = asyncio.Event()
            try:
                self._llm = await asyncio.to_thread(self._load, self._config)
            except NvcliError as error:
                return "failed", (type(error).__name__, error.message, error.hint)
        known = {"tokenizer": _tokenizer_digest(self._llm), "version": __version__}
        return "loaded", describe(self._llm) | known

    async def submit(self, ticket: str, frame: bytes, age_s: float, count: int) -> None:
        """A request, and its grammar where it has one; its outputs come with `poll`.

        age_s: since it arrived over there; another machine has another clock. count: of its
        outputs, known also where the frame cannot be read.
        """

        def sink(outputs: list[RequestOutput]) -> None:
            packed = [pack_output(output) for output in outputs]
            is_over = any(output.error_code == EngineClosedError.code for output in outputs)
            self._loop.call_soon_threadsafe(self._give, ticket, packed, is_over)

        try:
            request, spec = pickle.loads(frame)
            request.request_id = ticket
            request.arrival = time.monotonic() - age_s
            if spec is not None:  # it may take seconds, in which others are answered
                self._compiling.add(ticket)
                request.grammar = await asyncio.to_thread(self._llm.compile_grammar, spec)
                if ticket not in self._compiling:
                    return  # it was aborted
            self._llm.submit(request, sink)
        except NvcliError as error:
            sink(error_outputs(ticket, set(range(count)), error))
        except Exception as bug:  # noqa: BLE001 - Ray would keep it to itself
            wrapped = EngineError(f"the request could not be added: {bug!r}")
            sink(error_outputs(ticket, set(range(count)), wrapped))
        finally:
            self._compiling.discard(ticket)

    def _give(self, ticket: str, packed: list[Any], is_over: bool) -> None:
        if is_over and not self._is_ending:
            os._exit(1)  # the engine is gone: Ray starts this actor again
        self._groups.append((ticket, packed))
        self._has_groups.set()

    async def poll(self) -> tuple[list[Group], tuple[Any, ...]]:
        """What the engine has given since the last call, soon, and its statistics."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STATS_INTERVAL_S):
                await self._has_groups.wait()
        if not self._llm.is_alive and not self._is_ending:
            os._exit(1)  # it died while it had nothing to do
        self._has_groups.clear()
        groups, self._groups = self._groups, []
        return groups, pack_stats(self._llm.stats())

    async def abort(self, ticket: str) -> None:
        self._compiling.discard(ticket)
        self._llm.abort(ticket)

    async def end(self) -> None:
        """The engine lets go of its memory and of its processes; what it has open is dropped."""
        self._is_ending = True
        if self._llm is not None:
            await asyncio.to_thread(self._llm.close)


def _tokenizer_digest(llm: Any) -> str:
    """Of everything that makes ids of a conversation; empty where there is no tokenizer."""
    try:
        tokenizer = llm.tokenizer
    except TokenizerError:
        return ""
    parts = (tokenizer.to_json(), tokenizer.named_tokens, tokenizer.chat_templates)
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()
