"""The engine in a process of its own, so that HTTP work never takes a step's time.

It has the interface of `LLM` as the server needs it. Checks that need no device are made here, so a
bad request is refused at once; everything else crosses a socket (`nvcli.server.wire`). The outputs
arrive in the event loop's own thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from typing import TYPE_CHECKING, Any

from nvcli import errors
from nvcli.engine.child import start_child
from nvcli.engine.engine import EngineStats
from nvcli.engine.engine_thread import error_outputs
from nvcli.engine.workers import how_it_ended
from nvcli.errors import EngineClosedError, NvcliError
from nvcli.logs import logging_setup
from nvcli.paths import module_command, module_environment
from nvcli.server.described_engine import DescribedEngine
from nvcli.server.wire import FrameReader, encode, merge_packed, read_frame, unpack_output

if TYPE_CHECKING:
    import asyncio

    from nvcli.config import EngineConfig
    from nvcli.engine.engine import Request
    from nvcli.engine.engine_thread import Sink

WORKER = "nvcli.server.engine_worker"
_CLOSE_S = 10.0
_REPORT_S = 1.0  # for the system to say how the process ended, after its socket has
_CHUNK = 4 << 20


class RemoteEngine(DescribedEngine):
    """Raises what loading the model raises. `listen` must be called before outputs come."""

    def __init__(self, config: EngineConfig, *, worker: str = WORKER) -> None:
        self._sock, theirs = socket.socketpair()
        command = [*module_command(worker), str(theirs.fileno()), str(os.getpid())]
        self._process = start_child(command, pass_fds=[theirs.fileno()], env=module_environment())
        theirs.close()
        self._lock = threading.Lock()  # of the socket's writing end and the sinks
        self._sinks: dict[str, tuple[Sink, set[int]]] = {}
        self._reader = FrameReader()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._error: EngineClosedError | None = None
        try:
            self._sock.sendall(encode((config, logging_setup())))
            kind, value = read_frame(self._sock)
        except (EOFError, OSError) as exc:
            self._sock.close()
            how = how_it_ended(self._process.wait())
            raise EngineClosedError(f"the engine's process {how} while loading") from exc
        if kind == "failed":
            self._sock.close()
            self._process.wait()
            name, message, hint = value
            raise getattr(errors, name, NvcliError)(message, hint=hint)
        super().__init__(config, value)

    @property
    def is_alive(self) -> bool:
        return self._error is None

    @property
    def error(self) -> EngineClosedError | None:
        """What ended the engine, or its process; None while it is alive."""
        return self._error

    @property
    def pid(self) -> int:
        return self._process.pid

    def stats(self) -> EngineStats:
        """As of the last frame, a quarter of a second ago at most."""
        return self._stats

    # --- requests ---------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink) -> None:
        """Raises what `LLM.submit` raises."""
        self._checks.validate(request)
        grammar, request.grammar = request.grammar, None  # compiled again over there
        frame = encode(("submit", (request, None if grammar is None else grammar.spec)))
        request.grammar = grammar
        with self._lock:
            if self._error is not None:
                raise EngineClosedError(self._error.message, hint=self._error.hint)
            self._sinks[request.request_id] = (sink, set(range(request.params.n)))
            self._write(frame)

    def abort(self, request_id: str) -> None:
        with self._lock:
            if self._error is None:
                self._write(encode(("abort", request_id)))

    def _write(self, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # the end is found where the socket is read
            self._sock.sendall(frame)

    # --- outputs ----------------------------------------------------------------------------------

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand outputs over in this loop from now on."""
        self._loop = loop
        loop.add_reader(self._sock.fileno(), self._read)

    def _read(self) -> None:
        try:
            data = self._sock.recv(_CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(self._how_it_ended())
            return
        waiting: dict[str, list[Any]] = {}
        error: EngineClosedError | None = None
        for pieces, stats, end in self._reader.feed(data):
            self._stats = EngineStats(*stats)
            for request_id, packed in pieces:
                waiting.setdefault(request_id, []).append(packed)
            if end is not None:
                message, hint = end
                error = EngineClosedError(message, hint=hint)
        for request_id, packed in waiting.items():
            self._hand_out(request_id, merge_packed(packed))
        if error is not None:
            self._end(error)

    def _hand_out(self, request_id: str, packed: list[Any]) -> None:
        found = self._sinks.get(request_id)
        if found is None:
            return
        sink, indices = found
        outputs = [unpack_output(request_id, item) for item in packed]
        indices.difference_update(output.index for output in outputs if output.is_finished)
        if not indices:
            del self._sinks[request_id]
        sink(outputs)

    def _how_it_ended(self) -> EngineClosedError:
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_REPORT_S)
        return EngineClosedError(f"the engine stopped: its process {how_it_ended(code)}")

    def _end(self, error: EngineClosedError) -> None:
        """Nothing comes any more: every open request ends with the error."""
        if self._loop is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._loop = None
        with self._lock:
            self._error = self._error or error
            sinks, self._sinks = self._sinks, {}
        for request_id, (sink, indices) in sinks.items():
            sink(error_outputs(request_id, indices, error))

    def close(self) -> None:
        """End the process and wait for it. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        closed = EngineClosedError("the engine was closed")
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, closed)
        with self._lock:
            self._error = self._error or closed
            self._write(encode(None))
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._sock.close()
