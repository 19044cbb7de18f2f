"""The server's engine as `nvcli batch` sees it: shared with requests, and one that can be taken
away from a run without being closed; and what takes the place of the command line's progress."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from nvcli.engine.engine_thread import error_outputs
from nvcli.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.batch.progress import Counts
    from nvcli.config import EngineConfig
    from nvcli.engine.engine import Request
    from nvcli.engine.engine_thread import Sink
    from nvcli.engine.grammar import Grammar, GrammarSpec
    from nvcli.server.engine import ServerEngine
    from nvcli.text import Tokenizer
    from nvcli.types import RequestOutput, SamplingParams

logger = logging.getLogger("nvcli")

PRIORITY = 1000  # behind requests that somebody waits for
_REASON = "the batch was stopped"


class SharedEngine:
    """A `BatchEngine` over the server's. `stop` may be called from any thread."""

    def __init__(self, llm: ServerEngine, prefix: str, model_name: str) -> None:
        self._llm = llm
        self._prefix = prefix
        self.model_name = model_name
        self.max_model_len = llm.max_model_len
        self.hidden_size = llm.hidden_size
        self.startup: Any = getattr(llm, "startup", None)
        self._lock = threading.Lock()
        self._sinks: dict[str, tuple[Sink, set[int]]] = {}
        self._is_stopped = False
        self.config: EngineConfig = llm.config.replace(max_num_seqs=llm.max_num_seqs)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    def sampling(self, *, enable_thinking: bool = True, **overrides: Any) -> SamplingParams:
        return self._llm.sampling(enable_thinking=enable_thinking, **overrides)

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        return self._llm.compile_grammar(spec)

    def stats(self) -> Any:
        return self._llm.stats()

    def close(self) -> None:
        """The run is over; the engine goes on."""

    def submit(self, request: Request, sink: Sink) -> None:
        """Raises `EngineClosedError` once the run was stopped."""
        _, position, number = request.request_id.split("-")
        request.request_id = f"{self._prefix}-{position}-{number}"
        request.priority = request.priority or PRIORITY
        indices = set(range(request.params.n))
        with self._lock:
            if self._is_stopped:
                raise EngineClosedError(_REASON)
            self._sinks[request.request_id] = (sink, indices)

        def pass_on(outputs: list[RequestOutput]) -> None:
            with self._lock:
                indices.difference_update(o.index for o in outputs if o.is_finished)
                if not indices:
                    self._sinks.pop(request.request_id, None)
            sink(outputs)

        try:
            self._llm.submit(request, pass_on)
        except BaseException:
            with self._lock:
                self._sinks.pop(request.request_id, None)
            raise

    def abort(self, request_id: str) -> None:
        self._llm.abort(request_id)

    def stop(self) -> None:
        """End the run: what is on its way counts as never asked for."""
        with self._lock:
            self._is_stopped = True
            sinks = {key: (sink, set(indices)) for key, (sink, indices) in self._sinks.items()}
        for request_id, (sink, indices) in sinks.items():
            self._llm.abort(request_id)
            sink(error_outputs(request_id, indices, EngineClosedError(_REASON)))


class RunProgress:
    """Tells the counts of a run instead of showing them."""

    def __init__(self, count: Callable[[Counts], None]) -> None:
        self._count = count

    def update(self, counts: Counts) -> None:
        self._count(counts)

    def finish(self, counts: Counts, *, is_whole: bool = True) -> None:
        self._count(counts)

    def status(self, counts: Counts) -> None:
        pass

    def note(self, text: str) -> None:
        logger.debug("%s", text)

    def warn(self, text: str) -> None:
        logger.info("%s", text)
