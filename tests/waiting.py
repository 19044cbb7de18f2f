"""Waiting for other threads and processes: for a condition, never for a time.

A wait ends as soon as its condition holds, so a long deadline costs nothing; it only ends a test
that would fail anyhow. It has to be longer than any machine that runs the suite may stand still.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 240.0  # below pytest's own limit, so that a test says itself what did not come about

T = TypeVar("T")


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
