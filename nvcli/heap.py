"""Garbage collection while a call, a run or a server lasts: what came before is left out of it.

A full pass walks all that torch and the tokenizer brought, holds the interpreter meanwhile - the
engine's thread too - and finds nothing; records and requests that come and go make for many.
"""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_THRESHOLDS = (20_000, 20, 50)  # Python's: 700, 10, 10 and 25 % more
_OWN_OBJECTS = 2000  # Python 3.12 starts with some hundreds of its own frozen


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Does nothing where something is frozen already, by a run around this or by whoever owns the
    process, nor outside the main thread, where it belongs to somebody else.
    """
    is_frozen = gc.get_freeze_count() > _OWN_OBJECTS
    if is_frozen or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
