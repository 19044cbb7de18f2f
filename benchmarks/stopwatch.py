"""Lines of a benchmark with the seconds since it began."""

from __future__ import annotations

import time

START = time.monotonic()


def elapsed_s() -> float:
    return time.monotonic() - START


def say(text: str) -> None:
    print(f"[{elapsed_s():6.1f} s] {text}", flush=True)
