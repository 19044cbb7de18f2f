"""Garbage collection while a call, a run or a server lasts: it looks at new objects only.

Requests and records that come and go trigger full passes of Python's collector. Each would walk all
that torch and the tokenizer have loaded, find nothing, and stop every thread meanwhile, the
engine's too.
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
    """Leave all objects that exist now out of collections, and collect less often.

    Does nothing where objects are frozen already (by a run around this, or by the program that uses
    nvcli), nor outside the main thread: the collector is the whole process's.
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
