"""The engine's process: `python -m nvcli.server.engine_worker FD`, started by `RemoteEngine`.

It reads requests from the socket and writes outputs back, all that are there in one frame. It ends
with its parent: at the end of the socket, or when it sees that it has another parent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from nvcli.engine.child import be_child_of
from nvcli.engine.engine_thread import error_outputs
from nvcli.errors import EngineError, NvcliError, UsageError
from nvcli.heap import frozen_heap
from nvcli.logs import configure_logging
from nvcli.server.wire import encode, pack_output, pack_stats, read_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.config import EngineConfig
    from nvcli.server.engine import ServerEngine
    from nvcli.types import RequestOutput

logger = logging.getLogger("nvcli")

_STATS_INTERVAL_S = 0.25
COMPILERS = 2  # grammars at once, beside the engine's thread

Piece = tuple[str, Any]  # id of the request, packed output


class Worker:
    """Serves one engine over one socket."""

    def __init__(self, sock: socket.socket, llm: ServerEngine) -> None:
        self._sock = sock
        self._llm = llm
        self._given: queue.SimpleQueue[list[Piece]] = queue.SimpleQueue()
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="nvcli-grammar")
        self._lock = threading.Lock()
        self._compiling: dict[str, bool] = {}  # requests without their grammar yet: aborted or not

    def run(self) -> None:
        """Until the parent says so or is gone."""
        sender = threading.Thread(target=self._send, name="nvcli-send", daemon=True)
        sender.start()
        try:
            while (message := read_frame(self._sock)) is not None:
                kind, value = message
                if kind == "submit":
                    self._submit(*value)
                else:
                    self._abort(value)
        except (EOFError, OSError):  # the parent is gone
            os._exit(1)
        self._llm.close()

    def _submit(self, request: Any, spec: Any) -> None:
        if spec is None:
            self._start(request)
            return
        with self._lock:  # a grammar may take seconds, in which other requests come and go
            self._compiling[request.request_id] = False
        self._compilers.submit(self._compile, request, spec)

    def _compile(self, request: Any, spec: Any) -> None:
        error: NvcliError | None = None
        try:
            request.grammar = self._llm.compile_grammar(spec)
        except NvcliError as exc:
            error = exc
        except Exception as exc:  # noqa: BLE001 - a bug: this request tells of it
            error = EngineError(f"the grammar could not be compiled: {exc!r}")
        self._start(request, error)
        with self._lock:
            is_aborted = self._compiling.pop(request.request_id)
        if is_aborted:
            self._llm.abort(request.request_id)

    def _start(self, request: Any, error: NvcliError | None = None) -> None:
        try:
            if error is None:
                self._llm.submit(request, self._sink)
        except NvcliError as exc:
            error = exc
        except Exception as bug:  # noqa: BLE001 - a compiler's thread would keep it to itself
            error = EngineError(f"the request could not be added: {bug!r}")
        if error is not None:
            self._sink(error_outputs(request.request_id, set(range(request.params.n)), error))

    def _sink(self, outputs: list[RequestOutput]) -> None:
        self._given.put([(output.request_id, pack_output(output)) for output in outputs])

    def _abort(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._compiling:
                self._compiling[request_id] = True
                return
        self._llm.abort(request_id)

    def _send(self) -> None:
        """Whatever the engine has given since the last frame goes out as one. Nobody would hear
        anything without this thread, so the process ends with it."""
        try:
            self._send_frames()
        except OSError:  # the parent is gone
            pass
        except Exception:
            logger.exception("the engine's outputs")
        os._exit(1)

    def _send_frames(self) -> None:
        while True:
            pieces: list[Piece] = []
            with contextlib.suppress(queue.Empty):
                pieces += self._given.get(timeout=_STATS_INTERVAL_S)
                while True:
                    pieces += self._given.get_nowait()
            error = self._llm.error
            end = None if error is None else (error.message, error.hint)
            self._sock.sendall(encode((pieces, pack_stats(self._llm.stats()), end)))


def describe(llm: Any) -> dict[str, Any]:
    """What the parent must know of the model."""
    return {
        "model_name": llm.model_name,
        "max_model_len": llm.max_model_len,
        "max_num_seqs": llm.max_num_seqs,
        "vocab_size": llm.vocab_size,
        "hidden_size": llm.hidden_size,
        "eos_token_ids": tuple(llm.eos_token_ids),
        "folder": str(llm.folder),
        "sampling_defaults": dict(llm.model_config.sampling_defaults),
        "startup": llm.startup,
        "stats": pack_stats(llm.stats()),
    }


def load_llm(config: EngineConfig) -> ServerEngine:
    from nvcli.llm import LLM  # torch comes with it

    return LLM(config=config)


def main(load: Callable[[EngineConfig], ServerEngine] = load_llm) -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    be_child_of(int(sys.argv[2]))
    try:
        config, setup = read_frame(sock)
        if setup is not None:
            with contextlib.suppress(UsageError):  # /dev/fd/N is another file here, or none
                configure_logging(*setup)
        llm = load(config)
        sock.sendall(encode(("loaded", describe(llm))))
    except NvcliError as error:
        kind = type(error).__name__
        sock.sendall(encode(("failed", (kind, error.message, error.hint))))
        return
    with frozen_heap():
        Worker(sock, llm).run()


if __name__ == "__main__":
    main()
