"""Commands that threads wait for, each in a process group of its own, so that what it starts ends
with it: at its limit, and all of them at once when the benchmark is interrupted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

INTERRUPTED = 130


class EndedError(Exception):
    """The benchmark was interrupted: no command begins any more, and those that ran were ended."""


class Groups:
    """The commands that run. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_over = False

    def run(self, command: Sequence[str], limit_s: float, **options: Any) -> int | None:
        """Its exit code, or None when it was cut off after `limit_s` seconds. `options` are for
        `subprocess.Popen`. Raises `EndedError`."""
        with self._lock:
            if self._is_over:
                raise EndedError
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, start_new_session=True, **options
            )
            self._running.add(process)
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            _kill(process)
            process.wait()
            with self._lock:
                self._running.remove(process)
        if self._is_over:
            raise EndedError
        return code

    @contextmanager
    def ended_by_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM, in the main thread, end everything that runs and leave the block as
        they would leave it: a `KeyboardInterrupt`, or a `SystemExit`."""
        before = signal.signal(signal.SIGTERM, _leave)
        try:
            yield
        except BaseException:
            self.end()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)

    def end(self) -> None:
        """End what runs; nothing else begins."""
        with self._lock:
            self._is_over = True
            for process in self._running:
                _kill(process)


def _leave(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole group: also when its first process has ended before the others."""
    with suppress(ProcessLookupError):  # all gone by themselves
        os.killpg(process.pid, signal.SIGKILL)
