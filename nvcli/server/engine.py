"""What the server needs of an engine; `nvcli.llm.LLM` is one, and tests bring a scripted one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nvcli.batch.engine import BatchEngine

if TYPE_CHECKING:
    from nvcli.engine.engine import EngineStats
    from nvcli.errors import EngineClosedError


class ServerEngine(BatchEngine, Protocol):
    """Requests in, outputs to a sink that is called from the engine's thread."""

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def error(self) -> EngineClosedError | None: ...
    @property
    def supports_thinking(self) -> bool: ...
    def stats(self) -> EngineStats: ...
