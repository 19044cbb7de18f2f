"""Tools as a user writes them, good and bad."""

from __future__ import annotations

import os
import sys
import time
from typing import Literal


def add(a: int, b: int = 1) -> int:
    """Add two whole numbers."""
    return a + b


def greet(name: str, style: Literal["short", "long"] = "short") -> dict[str, str]:
    """Greet somebody.

    The second paragraph is read as well.
    """
    return {"greeting": f"Hi {name}", "style": style}


async def later(text: str) -> str:
    """Say it later."""
    return text


def nothing() -> None:
    """Do nothing."""


def fail(text: str) -> str:
    """Always fail."""
    raise ValueError(f"no {text}")


def leave() -> str:
    """Call sys.exit."""
    sys.exit("bye")


def crash() -> str:
    """End the process."""
    os._exit(3)


def hang() -> str:
    """Never answer."""
    print("it hangs", flush=True)
    time.sleep(600)
    return ""


def flood(count: int) -> str:
    """Say very much."""
    return "x" * count


def noisy() -> str:
    """Print to both streams."""
    print("noise on stdout")
    os.write(1, b"more noise\n")
    return "quiet"


def _private() -> str:
    return "not a tool"
