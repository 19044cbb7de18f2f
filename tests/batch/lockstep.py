"""A run whose engine makes a step only when nothing else can happen before it: the feed has read as
far as its window goes, and the run has taken all that came. So what is in the engine at a step is
what the run's rules put there, on a machine of any speed.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from nvcli.batch import feed, run
from nvcli.types import RequestOutput
from tests.batch import fake_llm
from tests.waiting import PATIENCE_S


class Slots:
    """The feed's semaphore, which knows whether the feed waits at it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._is_waiting = False
        self._is_over = False

    def acquire(self) -> None:
        with self._changed:
            while self._count == 0:
                self._is_waiting = True
                self._changed.notify_all()
                self._changed.wait()
            self._count -= 1

    def release(self, count: int = 1) -> None:
        with self._changed:
            self._count += count
            self._is_waiting = False
            self._changed.notify_all()

    def end(self) -> None:
        """The feed has read everything."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait_for_the_feed(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_waiting or self._is_over, PATIENCE_S)


class Lockstep:
    """Stands for the engine's thread and for the queue of what happens to the run."""

    slots: Slots

    def __init__(self) -> None:
        self._happened: deque[Any] = deque()
        self._sinks: dict[str, Any] = {}

    # --- the engine's thread

    def attach(self, engine: fake_llm.FakeEngine) -> Lockstep:
        self._engine = engine
        return self

    def submit(self, request: Any, sink: Any) -> None:
        self._engine.validate(request)
        self._sinks[request.request_id] = sink
        self._engine.add(request)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def close(self) -> None:
        pass

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self._sinks[output.request_id]([output])

    # --- the run's queue

    def put(self, item: Any) -> None:
        self._happened.append(item)

    def get_nowait(self) -> Any:
        if not self._happened:
            raise queue.Empty
        return self._happened.popleft()

    def get(self, timeout: float) -> Any:
        if not self._happened:
            self.slots.wait_for_the_feed()
        if not self._happened:
            self._engine.step(self._deliver)
        return self.get_nowait()


def keep_in_step(patch: pytest.MonkeyPatch) -> None:
    """The next run here goes in lockstep."""
    lockstep = Lockstep()

    def make_slots(count: int) -> Slots:
        lockstep.slots = Slots(count)
        return lockstep.slots

    def read(self: feed.Feed) -> None:
        whole(self)
        lockstep.slots.end()

    whole = feed.Feed._run
    patch.setattr(feed.Feed, "_run", read)
    patch.setattr(feed, "threading", SimpleNamespace(Semaphore=make_slots, Thread=threading.Thread))
    patch.setattr(run, "queue", SimpleNamespace(SimpleQueue=lambda: lockstep, Empty=queue.Empty))
    patch.setattr(fake_llm, "EngineThread", lockstep.attach)
