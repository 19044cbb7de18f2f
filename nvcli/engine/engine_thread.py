"""A thread of its own for the engine, so that no caller's signal, event loop or HTTP work can stop
a step half-way.

Callers hand in requests with a sink; the thread runs steps and calls each sink with what is new of
all requests that share it, one call a step. A sink must be quick and must not raise: it puts the
outputs on a queue.

    submit / abort  ->  inbox  ->  engine thread: drain inbox, step, sinks  ->  queues
"""

from __future__ import annotations

import atexit
import logging
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from nvcli.errors import EngineClosedError, EngineError, NvcliError
from nvcli.types import FinishReason, RequestOutput

if TYPE_CHECKING:
    from nvcli.engine.engine import Engine, Request

logger = logging.getLogger("nvcli")

Sink = Callable[[list[RequestOutput]], None]

# After so long a thread that computes has to leave the interpreter to another. Python's 5 ms are
# longer than a step on a GPU, which would idle until the engine's thread gets its turn.
SWITCH_INTERVAL_S = 0.1e-3
_LAST_STEP_S = 5.0  # `close` waits so long for a step to end before it calls `abandon`

_running: weakref.WeakSet[EngineThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """At exit: a thread still inside torch when the interpreter goes away aborts the process."""
    for thread in list(_running):
        thread.close()


class EngineThread:
    """Owns an engine and steps it as long as it has requests. All methods may be called from any
    thread.
    """

    def __init__(self, engine: Engine, abandon: Callable[[], None] | None = None) -> None:
        """abandon: makes a step that hangs return soon; `close` calls it after `_LAST_STEP_S`."""
        self._engine = engine
        self._abandon = abandon
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._sinks: dict[str, tuple[Sink, set[int]]] = {}  # id -> sink, indices still to finish
        self._lock = threading.Lock()  # orders submit against the end of the thread
        self._error: EngineClosedError | None = None
        self._is_closing = False
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._run, name="nvcli-engine", daemon=True)
        self._thread.start()
        _running.add(self)

    def submit(self, request: Request, sink: Sink) -> None:
        """Check the request now, queue it, and send its outputs to `sink`.

        Raises what `Engine.validate` raises, and `EngineClosedError` once the engine has ended.
        """
        self._engine.validate(request)
        self.submit_together([request], sink)

    def submit_together(self, requests: list[Request], sink: Sink) -> None:
        """Queue requests that `Engine.validate` let through; no step begins with some of them only.

        Raises `EngineClosedError` once the engine has ended.
        """

        def add() -> None:
            for request in requests:
                self._add(request, sink)

        if not self._post(add):
            assert self._error is not None, "a thread that has ended says why"
            raise EngineClosedError(self._error.message, hint=self._error.hint)

    def abort(self, request_id: str) -> None:
        """End a request within one step; does nothing for an id that is unknown or finished."""
        self._post(lambda: self._engine.abort(request_id))

    def close_thinking(self, request_id: str) -> None:
        """Let a request that is reasoning answer now; does nothing for one that is not."""
        self._post(lambda: self._engine.close_thinking(request_id))

    def close(self) -> None:
        """Stop the thread and wait for it; open requests end with an error. Safe to call twice."""

        def stop() -> None:
            self._is_closing = True

        self._post(stop)
        if threading.current_thread() is self._thread:  # it may be the last to drop an LLM
            return
        if self._abandon is not None:
            self._thread.join(_LAST_STEP_S)
            if self._thread.is_alive():
                self._abandon()
        self._thread.join()

    def fail(self, error: NvcliError) -> None:
        """End the thread: the engine cannot go on. From any thread; does not wait."""

        def stop() -> None:
            raise error

        self._post(stop)

    @property
    def error(self) -> EngineClosedError | None:
        """What ended the thread; None while it runs."""
        return self._error

    @property
    def is_alive(self) -> bool:
        return self._error is None

    def _post(self, call: Callable[[], object]) -> bool:
        """Have the thread make this call between two steps. False, and nothing done, once it has
        ended.
        """
        with self._lock:
            if self._error is None:
                self._inbox.put(call)
            return self._error is None

    def _add(self, request: Request, sink: Sink) -> None:
        open_indices = set(range(request.params.n))
        try:
            self._engine.add(request, is_valid=True)
        except NvcliError as error:
            sink(error_outputs(request.request_id, open_indices, error))
        except Exception as exc:  # a bug of ours: this request tells of it, then the thread ends
            wrapped = EngineError(f"the request could not be added: {type(exc).__name__}: {exc}")
            sink(error_outputs(request.request_id, open_indices, wrapped))
            raise
        else:
            self._sinks[request.request_id] = (sink, open_indices)

    def _run(self) -> None:
        error = EngineClosedError("the engine was closed")
        try:
            while not self._is_closing:
                self._drain_inbox()
                if self._engine.has_unfinished:
                    self._engine.step(self._hand_out)
        except EngineClosedError as exc:
            error = exc
        except Exception as exc:
            logger.debug("the engine thread ended", exc_info=exc)
            error = EngineClosedError(
                f"the engine stopped: {type(exc).__name__}: {exc}",
                hint="Run again with --debug for the traceback.",
            )
            error.__cause__ = exc
        self._end(error)

    def _drain_inbox(self) -> None:
        """Run what callers posted, and first wait for a post when there is nothing to step.

        Only what is there now: callers may post faster than this thread takes, and steps go on.
        """
        if not self._engine.has_unfinished:
            self._inbox.get()()
        for _ in range(self._inbox.qsize()):
            self._inbox.get_nowait()()

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        by_sink: dict[Sink, list[RequestOutput]] = {}
        for output in outputs:
            sink, open_indices = self._sinks[output.request_id]
            by_sink.setdefault(sink, []).append(output)
            if output.finish_reason is not None:
                open_indices.discard(output.index)
                if not open_indices:
                    del self._sinks[output.request_id]
        for sink, group in by_sink.items():
            sink(group)

    def _end(self, error: EngineClosedError) -> None:
        with self._lock:
            self._error = error
        self._is_closing = True
        while True:  # requests that were on their way
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                break
            except Exception as exc:
                logger.debug("after the end of the engine thread", exc_info=exc)
        for request_id, (sink, open_indices) in self._sinks.items():
            sink(error_outputs(request_id, open_indices, error))
        self._sinks.clear()


def error_outputs(request_id: str, indices: set[int], error: NvcliError) -> list[RequestOutput]:
    """The last outputs of a request that never ran, or whose engine ended."""
    return [
        RequestOutput(
            request_id=request_id,
            index=index,
            finish_reason=FinishReason.ERROR,
            error=str(error),
            error_code=error.code,
        )
        for index in sorted(indices)
    ]
