"""What was loaded before stays out of garbage collection, and comes back."""

from __future__ import annotations

import gc
import threading

from nvcli.heap import frozen_heap


def test_objects_are_frozen_inside_and_thresholds_come_back() -> None:
    before, count = gc.get_threshold(), gc.get_freeze_count()
    with frozen_heap():
        assert gc.get_freeze_count() > count
        assert gc.get_threshold() > before
        with frozen_heap():  # a call inside a run
            pass
        assert gc.get_freeze_count() > count
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() <= count


def test_nothing_happens_in_somebody_elses_thread() -> None:
    before, found = gc.get_freeze_count(), []

    def look() -> None:
        with frozen_heap():
            found.append(gc.get_freeze_count())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
