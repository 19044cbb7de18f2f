"""Waiting for other threads and processes: for a condition or an end, never for a time.

A wait ends as soon as its condition holds, so a long deadline costs nothing; it only ends a test
that would fail anyhow. It has to be longer than any machine that runs the suite may stand still.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

PATIENCE_S = 480.0  # below pytest's own limit, so that a test says itself what did not come about

T = TypeVar("T")


def limits(first: float = 0.2) -> Iterator[float]:
    """Time limits to try until one is long enough for what has to come before it is over: a limit
    is what is tested, and no fixed one suits every machine. Leave the loop with `break`.
    """
    limit = first
    while limit < PATIENCE_S / 2:
        yield limit
        limit *= 5
    raise AssertionError(f"no limit up to {PATIENCE_S / 2:g} s was long enough")


def until(condition: Callable[[], T], what: str = "", *, pause_s: float = 0.01) -> T:
    """The first value of `condition` that is true; an `AssertionError` naming `what` without one.

    What `condition` raises is passed on: that is how a wait ends early for a process that died.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {PATIENCE_S:g} s: {what or 'what was waited for'}")
        time.sleep(pause_s)
    return value


def is_running(pid: int) -> bool:
    """False for a zombie too: it ended, and nobody has waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def interrupted_when(condition: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C comes to this process, once, when `condition` is true while the block runs."""
    is_left = threading.Event()

    def strike() -> None:
        until(lambda: is_left.is_set() or condition())
        if not is_left.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        is_left.set()
        thread.join()


def run_command(command: Sequence[str | Path], **more: Any) -> subprocess.CompletedProcess[str]:
    """`command` to its end, with what it said. `more` is for `subprocess.run`."""
    more = {"timeout": PATIENCE_S, "check": False, **more}
    return subprocess.run(command, capture_output=True, text=True, **more)
