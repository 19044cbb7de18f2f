"""Which request is at which replica. It knows nothing of Ray but that an actor takes a request.

A request is kept until its answer is here. When a replica is lost, or ends before its requests
have, they start again on the others. The same request gives the same answer on any replica, so
nothing is lost and nothing comes twice. Only a stream of which something was handed out already
ends with an error.

A request that was aboard of two lost replicas is under suspicion: it runs again alone on a replica,
and when that one is lost too, it was the request, which ends with an error.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from nvcli.engine.engine import EngineStats
from nvcli.engine.engine_thread import error_outputs
from nvcli.errors import EngineClosedError, EngineError
from nvcli.server.wire import unpack_output
from nvcli.types import FinishReason, RequestOutput

if TYPE_CHECKING:
    from nvcli.cluster.replica import Group
    from nvcli.cluster.routing import Call, Router, Slot
    from nvcli.errors import NvcliError

    Told = list[tuple[Call, list[RequestOutput]]]  # what is new, and for whom

MAX_LOSSES = 2  # of replicas that a request was aboard of, before it runs alone
COUNTERS = ("num_preemptions", "num_queried_tokens", "num_hit_tokens")
_TICK_S = 0.5


class Dispatcher:
    """Safe to call from any thread. What comes back is handed to the sinks by the caller, outside
    the lock.

    slots: one a replica, in order; `leaving` are replaced ones that still have requests.
    """

    def __init__(self, slots: list[Slot], router: Router) -> None:
        self.slots = list(slots)
        self.leaving: list[Slot] = []
        self.error: EngineClosedError | None = None
        self._router = router
        self._calls: dict[str, Call] = {}
        self._queue: deque[Call] = deque()  # while no replica is up
        self._suspects: deque[Call] = deque()
        self._tickets = itertools.count()
        self._retired: Counter[str] = Counter()  # counted by replicas that are no more
        self._changed = threading.Condition(threading.RLock())

    @property
    def num_up(self) -> int:
        """Replicas that take requests now."""
        return sum(slot.takes_requests for slot in self.slots)

    @property
    def num_draining(self) -> int:
        """Replicas that take none any more and end those that they have."""
        return sum(slot.is_leaving for slot in (*self.slots, *self.leaving))

    def stats(self, block_size: int) -> EngineStats:
        """The sum over the replicas; counters never fall."""
        with self._changed:
            found = [slot.stats for slot in (*self.slots, *self.leaving) if slot.stats is not None]
            sums = {
                name: sum(getattr(stats, name) for stats in found) + self._retired.get(name, 0)
                for name in EngineStats.__dataclass_fields__
            }
        return EngineStats(**sums | {"block_size": block_size})

    # --- requests ---------------------------------------------------------------------------------

    def add(self, call: Call) -> None:
        """Raises `EngineClosedError`."""
        with self._changed:
            if self.error is not None:
                raise type(self.error)(self.error.message, hint=self.error.hint)
            self._calls[call.request_id] = call
            self._place(call)

    def abort(self, request_id: str) -> Told:
        """-> its last outputs; its replica is not waited for."""
        with self._changed:
            call = self._calls.pop(request_id, None)
            if call is None:
                return []
            for slot in (*self.slots, *self.leaving):
                if slot.calls.pop(call.ticket, None) is not None:
                    slot.actor.abort.remote(call.ticket)
                if slot.suspect is call:
                    slot.suspect = None
            self._go_on()
            return [(call, _aborted(call))]

    def _place(self, call: Call) -> None:
        """Send it to a replica, or let it wait for one. Holds the lock."""
        if call.num_losses >= MAX_LOSSES:
            self._suspects.append(call)
            self._place_suspects()
            return
        free = [slot for slot in self.slots if slot.takes_requests and slot.suspect is None]
        if not free:
            self._queue.append(call)
            return
        self._send(self._router.choose(free, call.prefixes), call)

    def _send(self, slot: Slot, call: Call) -> None:
        call.ticket = f"t{next(self._tickets)}"
        slot.calls[call.ticket] = call
        age_s = time.monotonic() - call.arrival
        slot.actor.submit.remote(call.ticket, call.frame, age_s, max(call.open_indices) + 1)

    def _place_suspects(self) -> None:
        """Each alone, on the replica with the least to finish before. Holds the lock."""
        for slot in self.slots:
            if slot.suspect is not None and slot.takes_requests and not slot.calls:
                self._send(slot, slot.suspect)
        if self._suspects and not any(slot.suspect is not None for slot in self.slots):
            up = [slot for slot in self.slots if slot.takes_requests]
            if up:
                slot = min(up, key=lambda slot: len(slot.calls))
                slot.suspect = self._suspects.popleft()
                if not slot.calls:
                    self._send(slot, slot.suspect)

    def _go_on(self) -> None:
        """Something has changed: whoever waits may find a replica. Holds the lock."""
        self._suspects = deque(c for c in self._suspects if c.request_id in self._calls)
        self._place_suspects()
        waiting, self._queue = self._queue, deque()
        for call in waiting:
            if call.request_id in self._calls:
                self._place(call)
        self._changed.notify_all()

    # --- answers ----------------------------------------------------------------------------------

    def take(self, slot: Slot, groups: list[Group], stats: tuple[Any, ...]) -> Told:
        """What a replica has given since it was asked last."""
        with self._changed:
            if self.error is not None or slot.is_ended:
                return []
            slot.stats = EngineStats(*stats)
            told = [found for group in groups if (found := self._take_group(slot, *group))]
            self._go_on()
            return told

    def _take_group(
        self, slot: Slot, ticket: str, packed: list[Any]
    ) -> tuple[Call, list[RequestOutput]] | None:
        """What is new of a request; None where nobody waits for it. Holds the lock."""
        call = slot.calls.get(ticket)
        if call is None:
            return None
        outputs = [unpack_output(call.request_id, item) for item in packed]
        # without those that had come before it started again
        outputs = [output for output in outputs if output.index in call.open_indices]
        call.has_begun = True
        call.open_indices.difference_update(o.index for o in outputs if o.is_finished)
        if not call.open_indices:
            del slot.calls[ticket], self._calls[call.request_id]
            if slot.suspect is call:
                slot.suspect = None
        return call, outputs

    # --- replicas that come and go ----------------------------------------------------------------

    def bring_up(self, slot: Slot) -> bool:
        """It has loaded and takes requests; False once everything has ended."""
        with self._changed:
            if self.error is not None:
                return False
            slot.is_up, slot.num_ends = True, 0
            self._go_on()
            return True

    def lose(self, slot: Slot) -> tuple[int, Told]:
        """Its actor has died; -> how many requests it had, and what is told of those that cannot
        start again."""
        with self._changed:
            if slot.is_ended:
                return 0, []
            slot.is_up = False
            found = self._release(slot, "the replica that answered was lost", is_loss=True)
            if slot in self.leaving:
                self.leaving.remove(slot)
            self._go_on()
            return found

    def stand_down(self, slot: Slot) -> None:
        """It gets nothing new."""
        with self._changed:
            slot.is_leaving = True
            if slot.suspect is not None and slot.suspect not in slot.calls.values():
                self._suspects.appendleft(slot.suspect)  # it had still to wait
                slot.suspect = None
            self._go_on()

    def replace(self, old: Slot, new: Slot) -> bool:
        """The new one stands in the old one's place, whose requests go on; False once everything
        has ended."""
        with self._changed:
            if self.error is not None:
                return False
            self.slots[self.slots.index(old)] = new
            if not old.is_ended:
                self.leaving.append(old)
            self.stand_down(old)
            return True

    def wait_drained(self, slot: Slot, seconds: float) -> bool:
        """Until it has no requests or everything has ended. False when time ran out."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while slot.calls and self.error is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, _TICK_S))
            return True

    def end(self, slot: Slot) -> tuple[int, Told]:
        """Nothing is heard of it any more; -> as `lose`, of the requests it still had."""
        with self._changed:
            slot.is_up, slot.is_ended = False, True
            found = self._release(slot, "the replica that answered was replaced", is_loss=False)
            if slot in self.leaving:
                self.leaving.remove(slot)
            self._go_on()
            return found

    def give_up(self, slot: Slot, reason: str) -> Told:
        """It could not be loaded. Where that is so of every replica all requests end with that."""
        with self._changed:
            slot.is_gone = True
            if not all(other.is_gone for other in self.slots):
                return []
            return self.end_all(EngineClosedError(f"every replica is lost: {reason}"))

    def _release(self, slot: Slot, reason: str, *, is_loss: bool) -> tuple[int, Told]:
        """Holds the lock."""
        calls, slot.calls = list(slot.calls.values()), {}
        suspect, slot.suspect = slot.suspect, None
        for name in COUNTERS if slot.stats is not None else ():
            self._retired[name] += getattr(slot.stats, name)
        slot.stats = None
        if suspect is not None and suspect not in calls:  # it had still to wait
            self._suspects.appendleft(suspect)
        told = []
        for call in calls:
            call.num_losses += is_loss
            why = None
            if is_loss and call is suspect:
                why = f"the request ended its replica {call.num_losses} times, at last alone"
            elif call.is_streaming and call.has_begun:
                why = reason
            if why is None:
                self._place(call)
            else:
                del self._calls[call.request_id]
                told.append((call, _failed(call, EngineError(why))))
        return len(calls), told

    def end_all(self, error: EngineClosedError) -> Told:
        """Nothing runs from now on; -> what is left to tell. The first error stays."""
        with self._changed:
            if self.error is not None:
                return []
            self.error = error
            calls, self._calls = self._calls, {}
            self._changed.notify_all()
            return [(call, _failed(call, error)) for call in calls.values()]


def _aborted(call: Call) -> list[RequestOutput]:
    return [
        RequestOutput(request_id=call.request_id, index=index, finish_reason=FinishReason.ABORT)
        for index in sorted(call.open_indices)
    ]


def _failed(call: Call, error: NvcliError) -> list[RequestOutput]:
    return error_outputs(call.request_id, call.open_indices, error)
