"""What a process that nvcli starts for itself and the one that starts it owe to each other."""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_INTERVAL_S = 0.5
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """`subprocess.Popen`, for a process that calls `be_child_of`. Raises what that raises.

    The kernel ends such a process when the *thread* that started it ends, and that may be one that
    only loads. So all of them are started by one thread that lives as long as this process.
    """
    started: Future[subprocess.Popen[bytes]] = Future()

    def start() -> None:
        try:
            started.set_result(subprocess.Popen(command, **options))
        except BaseException as error:  # noqa: BLE001 - it is raised where the child was asked for
            started.set_exception(error)

    _starts(os.getpid()).put(start)
    try:
        return started.result()
    except KeyboardInterrupt:  # nobody will know it
        started.add_done_callback(_end)
        raise


@functools.cache
def _starts(pid: int) -> queue.SimpleQueue[Callable[[], None]]:
    """What the thread of process `pid` is to start: a fork has this queue without its thread."""
    waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run() -> None:
        # A child has this from the thread that starts it: Ctrl-C waits while it imports, and is
        # dropped by `be_child_of`, where it would print a traceback among the parent's lines.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        while True:
            waiting.get()()

    threading.Thread(target=run, name="nvcli-start", daemon=True).start()
    return waiting


def _end(started: Future[subprocess.Popen[bytes]]) -> None:
    if started.exception() is None:
        started.result().kill()
        started.result().wait()


def be_child_of(parent: int) -> None:
    """From here on signals that are sent to the whole group are left to the parent, and this
    process ends when the parent has, however it did: on Linux at once, by the kernel, also while
    this one is stopped; elsewhere soon after. The parent has used `start_child`.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # blocked by `start_child`
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another libc: the thread does it
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        # Also for a parent that had ended before the kernel was asked.
        while os.getppid() == parent:
            time.sleep(_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=watch, name="nvcli-parent", daemon=True).start()
