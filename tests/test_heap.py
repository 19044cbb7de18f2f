"""What was loaded before stays out of garbage collection, and comes back."""

from __future__ import annotations

import gc
import threading

from nvcli.heap import frozen_heap


def test_objects_are_frozen_inside_and_thresholds_come_back() -> None:
    gc.unfreeze()
    before = gc.get_threshold()
    with frozen_heap():
        assert gc.get_freeze_count() > 2000
        assert gc.get_threshold() > before
        with frozen_heap():  # a call inside a run
            pass
        assert gc.get_freeze_count() > 2000
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_nothing_happens_in_somebody_elses_thread() -> None:
    before, found = gc.get_freeze_count(), []

    def look() -> None:
        with frozen_heap():
            found.append(gc.get_freeze_count())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
