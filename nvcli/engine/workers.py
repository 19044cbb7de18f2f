"""The processes of the ranks beside rank 0: started, watched, and ended together.

Each worker has one pipe. Rank 0 writes step records to it; the worker writes `ready` once it is
loaded, and otherwise only what ended it. A thread here listens to all of them: whatever ends one
worker, a signal too, becomes one error within a moment, the group is aborted so that nobody waits
for the dead, and the other workers are killed. Workers end by themselves when rank 0's process does
(`tp_worker`).
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, Any

from nvcli import errors
from nvcli.engine.child import start_child
from nvcli.errors import EngineClosedError, NvcliError, first_line
from nvcli.paths import module_command, module_environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.parallel import TPGroup

WORKER = "nvcli.engine.tp_worker"
_END_S = 5.0  # for a worker to end after it was told to
_REPORT_S = 3.0  # for a worker to say what ended it, after rank 0 noticed
_TICK_S = 1.0
_SUSPICION_S = 1.0  # after a worker reports that it lost a peer: for the peer's own end to be seen


def how_it_ended(code: int | None) -> str:
    """The end of a process, in words. code: as `Popen.returncode`."""
    if code is None:
        return "has closed its pipe"
    if code < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


class Workers:
    """Ranks 1 .. size - 1. `send` and `fail` are called from one thread."""

    def __init__(self, size: int, orders: Callable[[int], dict[str, Any]]) -> None:
        """Start them. orders: rank -> what its process is to load (see `tp_worker`)."""
        self.group: TPGroup | None = None  # aborted when a worker is lost
        self.on_lost: Callable[[NvcliError], None] | None = None
        self.error: NvcliError | None = None  # what ended the group, once it has
        self.deadline: float | None = None  # of the step that rank 0 waits for, by `monotonic`
        self._lock = threading.Lock()
        self._is_closing = False
        self._changed = threading.Condition(self._lock)
        self._heard: dict[int, set[str]] = {rank: set() for rank in range(1, size)}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._pipes: dict[int, Connection] = {}
        threads = max(1, (os.cpu_count() or 1) // size)
        environment = {"OMP_NUM_THREADS": str(threads)} | module_environment()
        try:
            for rank in range(1, size):
                ours, theirs = Pipe()
                with theirs:
                    self._pipes[rank] = ours
                    self._processes[rank] = start_child(
                        [*module_command(WORKER), str(theirs.fileno()), str(os.getpid())],
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        env=environment,
                    )
                with suppress(OSError):  # it is dead already: the watcher tells
                    ours.send_bytes(pickle.dumps(orders(rank)))
        except BaseException:
            self._kill()
            raise
        self._watcher = threading.Thread(target=self._watch, name="nvcli-workers", daemon=True)
        self._watcher.start()

    # --- to the workers --------------------------------------------------------------------------

    def send(self, record: bytes) -> None:
        """The same record to all of them. Raises the error that ended the group."""
        self.check()
        for pipe in self._pipes.values():
            try:
                pipe.send_bytes(record)
            except OSError as error:
                raise self.fail(error) from error

    def check(self) -> None:
        """Raises the error that ended the group, if one has."""
        if self.error is not None:
            raise self.error

    def wait_for(self, word: str) -> None:
        """Until every worker has said it. Raises the error that ended the group."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.error is not None or all(word in h for h in self._heard.values())
            )
        self.check()

    def fail(self, error: Exception) -> NvcliError:
        """End the group because rank 0 cannot go on; -> the error to raise: a worker's own, where
        `error` is only what its end looked like from here.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None, _REPORT_S)
        if self.error is None:
            if not isinstance(error, NvcliError):
                reason = f"the engine stopped: rank 0 failed: {first_line(error)}"
                error = EngineClosedError(reason)
            self._lose(error)
        assert self.error is not None, "a lost group has an error"
        return self.error

    def abandon(self) -> None:
        """Kill the workers and abort the group: nobody waits for the step at hand any more."""
        self._lose(EngineClosedError("the engine was closed"))

    # --- from the workers ------------------------------------------------------------------------

    def _watch(self) -> None:
        ranks = {pipe: rank for rank, pipe in self._pipes.items()}
        suspicion: NvcliError | None = None
        limit = _TICK_S
        while ranks and self.error is None and not self._is_closing:
            ready = wait(list(ranks), limit)
            if not ready and suspicion is not None:
                self._lose(suspicion)
            if self.deadline is not None and time.monotonic() > self.deadline:
                self._lose(EngineClosedError("the engine stopped: a step does not come to an end"))
            for pipe in ready:
                assert isinstance(pipe, Connection), "the pipes of __init__"
                try:
                    message = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    self._lose(self._describe_end(ranks.pop(pipe)))
                    continue
                if isinstance(message, str):
                    with self._changed:
                        self._heard[ranks[pipe]].add(message)
                        self._changed.notify_all()
                    continue
                name, text, hint, param = message
                error = getattr(errors, name, EngineClosedError)(text, hint=hint, param=param)
                if isinstance(error, EngineClosedError):
                    # It may only be what another rank's end looks like from there.
                    del ranks[pipe]
                    suspicion, limit = suspicion or error, _SUSPICION_S
                else:
                    self._lose(error)
        if suspicion is not None:
            self._lose(suspicion)

    def _describe_end(self, rank: int) -> NvcliError:
        process = self._processes[rank]
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        name = f"the process of rank {rank} of {len(self._pipes) + 1}"
        return EngineClosedError(f"the engine stopped: {name} {how_it_ended(process.returncode)}")

    def _lose(self, error: NvcliError) -> None:
        with self._changed:
            if self.error is not None or self._is_closing:
                return
            self.error = error
            self._changed.notify_all()
        self._kill()
        if self.on_lost is not None:
            self.on_lost(error)
        if self.group is not None:
            self.group.abort()

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End all workers and wait for them. Safe to call twice."""
        with self._lock:
            self._is_closing = True
            are_ready = all("ready" in words for words in self._heard.values())
        if are_ready:  # one that still loads reads nothing, and has nothing to put away
            for pipe in self._pipes.values():
                with suppress(OSError):
                    pipe.send_bytes(b"")
            for process in self._processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
        self._kill()
        if self._watcher is not threading.current_thread():
            self._watcher.join(_END_S)
        for pipe in self._pipes.values():
            pipe.close()

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
