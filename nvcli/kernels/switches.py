"""Variables of the environment that turn a fast path off, for comparing and for looking for a
fault: `NAME=0`. They are read once, when the module that asks is imported.
"""

from __future__ import annotations

import os

from nvcli.errors import UsageError


def is_on(name: str) -> bool:
    """Whether the variable leaves its path on: it is 1, empty or not there.

    Raises `UsageError` where it is set to neither.
    """
    text = os.environ.get(name) or "1"
    if text not in ("0", "1"):
        raise UsageError(f"{name} must be 0 or 1, got {text!r}", param=name)
    return text == "1"
