"""Several engines as one: requests go to the replica with the fewest, and come back once.

It has the interface of an engine as `nvcli batch` and `nvcli serve` need it. This process keeps
every request until its answer is here. When a replica is lost, with its node or alone, what it had
goes to the others and Ray starts it again where there is room. The same request gives the same
answer on any replica, so nothing is lost and nothing comes twice. Only a stream of which something
was handed out already ends with an error.

A request that was aboard of two lost replicas is under suspicion: it runs again alone on a replica,
and when that one is lost too, it was the request, which ends with an error.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import threading
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from nvcli import errors
from nvcli.cluster.replica import Replica
from nvcli.cluster.routing import PREFIX_TOKENS, Call, Router, Slot
from nvcli.cluster.runtime import connect, require_ray, resources_of
from nvcli.engine.engine import EngineStats
from nvcli.engine.engine_thread import error_outputs
from nvcli.errors import EngineClosedError, EngineError, NvcliError
from nvcli.server.described_engine import DescribedEngine
from nvcli.server.engine_worker import load_llm
from nvcli.server.wire import unpack_output

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from nvcli.config import EngineConfig
    from nvcli.engine.engine import Request
    from nvcli.engine.engine_thread import Sink
    from nvcli.types import RequestOutput

logger = logging.getLogger("nvcli")

MAX_LOSSES = 2  # of replicas that a request was aboard of, before it runs alone
COUNTERS = ("num_preemptions", "num_queried_tokens", "num_hit_tokens")
_RETRY_S = 1.0


class ReplicatedEngine(DescribedEngine):
    """Callbacks come from Ray's threads; the lock guards everything but the sinks."""

    def __init__(
        self,
        config: EngineConfig,
        num_replicas: int,
        *,
        address: str | None = None,
        note: Callable[[str], None] | None = None,
        load: Callable[[EngineConfig], Any] = load_llm,
    ) -> None:
        """Start the replicas and wait until they are loaded.

        Args:
            address: of a running Ray cluster; None: `RAY_ADDRESS`, or one on this machine.
            note: told in a sentence when a replica is lost or comes back.
            load: makes the engine, in the actor.

        Raises `UsageError` without Ray, `ClusterError` for a cluster that is not there or too
        small, and what loading the model raises.
        """
        ray = self._ray = require_ray()
        self._note = note or logger.info
        self._lock = threading.RLock()
        self._calls: dict[str, Call] = {}
        self._queue: deque[Call] = deque()  # while no replica is up
        self._suspects: deque[Call] = deque()
        self._tickets = itertools.count()
        self._retired: Counter[str] = Counter()  # counted by replicas that are lost
        self._error: EngineClosedError | None = None
        self._slots: list[Slot] = []
        self._owns_cluster = connect(address)
        try:
            actor_class = ray.remote(Replica).options(
                **resources_of(config, num_replicas),
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=100_000,  # the engine queues; a call is cheap
                scheduling_strategy="SPREAD",
            )
            self._slots = [Slot(i, actor_class.remote(config, load)) for i in range(num_replicas)]
            infos = [self._loaded(ray.get(slot.actor.load.remote())) for slot in self._slots]
        except BaseException as error:
            self.close()
            if isinstance(error, ray.exceptions.RayError):
                reason = (str(error).splitlines() or [""])[0]
                raise EngineClosedError(f"a replica ended while loading: {reason}") from error
            raise
        super().__init__(config, infos[0])
        self._router = Router(slack=max(1, super().max_num_seqs // 4))
        for slot in self._slots:
            slot.is_up = True
            self._poll(slot)

    @staticmethod
    def _loaded(answer: tuple[str, Any]) -> dict[str, Any]:
        kind, value = answer
        if kind == "failed":
            name, message, hint = value
            raise getattr(errors, name, NvcliError)(message, hint=hint)
        info: dict[str, Any] = value
        return info

    # --- what there is ----------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        return len(self._slots)

    @property
    def is_alive(self) -> bool:
        return self._error is None

    @property
    def max_num_seqs(self) -> int:
        return len(self._slots) * super().max_num_seqs

    @property
    def num_up(self) -> int:
        """Replicas that answer now."""
        return sum(slot.is_up for slot in self._slots)

    def stats(self) -> EngineStats:
        """The sum over the replicas, half a second old at most; counters never fall."""
        with self._lock:
            found = [slot.stats for slot in self._slots if slot.stats is not None]
            sums = {
                name: sum(getattr(stats, name) for stats in found) + self._retired.get(name, 0)
                for name in EngineStats.__dataclass_fields__
            }
        return EngineStats(**sums | {"block_size": self._stats.block_size})

    # --- requests ---------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink) -> None:
        """Raises what `LLM.submit` raises."""
        self._checks.validate(request)
        grammar, request.grammar = request.grammar, None  # compiled again over there
        spec = None if grammar is None else grammar.spec
        frame = pickle.dumps((request, spec), pickle.HIGHEST_PROTOCOL)
        request.grammar = grammar
        call = Call(
            request.request_id,
            frame,
            sink,
            set(range(request.params.n)),
            tuple(request.prompt_token_ids[:PREFIX_TOKENS]),
            request.is_streaming,
        )
        with self._lock:
            if self._error is not None:
                raise EngineClosedError(self._error.message, hint=self._error.hint)
            self._calls[call.request_id] = call
            self._place(call)

    def abort(self, request_id: str) -> None:
        """Its sink hears nothing more."""
        with self._lock:
            call = self._calls.pop(request_id, None)
            if call is None:
                return
            for slot in self._slots:
                if slot.calls.pop(call.ticket, None) is not None:
                    slot.actor.abort.remote(call.ticket)
                if slot.suspect is call:
                    slot.suspect = None
            self._go_on()

    def _place(self, call: Call) -> None:
        """Send it to a replica, or let it wait for one. Holds the lock."""
        if call.num_losses >= MAX_LOSSES:
            self._suspects.append(call)
            self._place_suspects()
            return
        free = [slot for slot in self._slots if slot.is_up and slot.suspect is None]
        if not free:
            self._queue.append(call)
            return
        self._send(self._router.choose(free, call.prefix), call)

    def _send(self, slot: Slot, call: Call) -> None:
        call.ticket = f"t{next(self._tickets)}"
        slot.calls[call.ticket] = call
        slot.actor.submit.remote(call.ticket, call.frame)

    def _place_suspects(self) -> None:
        """Each alone, on the replica with the least to finish before. Holds the lock."""
        for slot in self._slots:
            if slot.suspect is not None and slot.is_up and not slot.calls:
                self._send(slot, slot.suspect)
        if self._suspects and not any(slot.suspect is not None for slot in self._slots):
            up = [slot for slot in self._slots if slot.is_up]
            if up:
                slot = min(up, key=lambda slot: len(slot.calls))
                slot.suspect = self._suspects.popleft()
                if not slot.calls:
                    self._send(slot, slot.suspect)

    # --- answers ----------------------------------------------------------------------------------

    def _poll(self, slot: Slot) -> None:
        future = slot.actor.poll.remote().future()
        future.add_done_callback(partial(self._on_poll, slot))

    def _on_poll(self, slot: Slot, future: Future[Any]) -> None:
        try:
            told = self._handle_poll(slot, future)
        except Exception as error:  # a bug of ours, which Ray's thread would only log
            logger.debug("the replicas' answers", exc_info=error)
            with self._lock:
                told = self._end(EngineClosedError(f"the engine stopped: {error!r}"))
        for call, outputs in told:
            call.sink(outputs)
        if future.exception() is None and self.is_alive:
            self._poll(slot)  # only now, or what comes next might be told first

    def _handle_poll(
        self, slot: Slot, future: Future[Any]
    ) -> list[tuple[Call, list[RequestOutput]]]:
        """-> what is new, and for whom."""
        error = future.exception()
        with self._lock:
            if self._error is not None:
                return []
            if error is not None:
                told = self._lose(slot, error)
                self._go_on()
                return told
            groups, stats = future.result()
            slot.stats = EngineStats(*stats)
            told = [found for group in groups if (found := self._take(slot, *group))]
            self._go_on()
            return told

    def _take(
        self, slot: Slot, ticket: str, packed: list[Any]
    ) -> tuple[Call, list[RequestOutput]] | None:
        """What is new of a request; None where nobody waits for it. Holds the lock."""
        call = slot.calls.get(ticket)
        if call is None:
            return None
        outputs = [unpack_output(call.request_id, item) for item in packed]
        # without those that had come before a loss
        outputs = [output for output in outputs if output.index in call.open_indices]
        call.has_begun = True
        call.open_indices.difference_update(o.index for o in outputs if o.is_finished)
        if not call.open_indices:
            del slot.calls[ticket], self._calls[call.request_id]
            if slot.suspect is call:
                slot.suspect = None
        return call, outputs

    @staticmethod
    def _fail(call: Call, error: NvcliError) -> list[Any]:
        return error_outputs(call.request_id, call.open_indices, error)

    def _go_on(self) -> None:
        """Something has changed: whoever waits may find a replica. Holds the lock."""
        self._suspects = deque(c for c in self._suspects if c.request_id in self._calls)
        self._place_suspects()
        if not self._queue:
            return
        waiting, self._queue = self._queue, deque()
        for call in waiting:
            if call.request_id in self._calls:
                self._place(call)

    # --- lost and found ---------------------------------------------------------------------------

    def _lose(self, slot: Slot, error: BaseException) -> list[tuple[Call, list[RequestOutput]]]:
        """Its requests start again, and it may come back; -> what is told of those that cannot.
        Holds the lock.
        """
        logger.debug("replica %s: %s", slot.index, error)
        if not isinstance(error, self._ray.exceptions.RayActorError):
            self._ray.kill(slot.actor, no_restart=False)  # it lives, and gives errors
        calls, slot.calls = list(slot.calls.values()), {}
        suspect, slot.suspect = slot.suspect, None
        for name in COUNTERS if slot.stats is not None else ():
            self._retired[name] += getattr(slot.stats, name)
        slot.is_up, slot.stats = False, None
        self._note(
            f"replica {slot.index + 1} of {len(self._slots)} was lost; its {len(calls)} running "
            "requests start again elsewhere"
        )
        self._revive(slot)
        told = []
        if suspect is not None and suspect not in calls:  # it had still to wait
            self._suspects.appendleft(suspect)
        for call in calls:
            call.num_losses += 1
            reason = None
            if call is suspect:
                reason = f"the request ended its replica {call.num_losses} times, at last alone"
            elif call.is_streaming and call.has_begun:
                reason = "the replica that answered was lost"
            if reason is None:
                self._place(call)
            else:
                del self._calls[call.request_id]
                told.append((call, self._fail(call, EngineError(reason))))
        return told

    def _revive(self, slot: Slot) -> None:
        """Ask it to load; the call waits until Ray has started it again."""
        future = slot.actor.load.options(max_task_retries=-1).remote().future()
        future.add_done_callback(partial(self._on_loaded, slot))

    def _on_loaded(self, slot: Slot, future: Future[Any]) -> None:
        error = future.exception()
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            threading.Timer(_RETRY_S, self._revive, [slot]).start()
            return
        with self._lock:
            if self._error is not None:
                return
            try:
                if error is not None:
                    raise error
                self._loaded(future.result())
            except Exception as reason:  # noqa: BLE001 - Ray's errors, and what loading raises
                slot.is_gone = True
                text = (str(reason).splitlines() or [""])[0]
                self._note(f"replica {slot.index + 1} does not come back: {text}")
                if not all(other.is_gone for other in self._slots):
                    return
                ended = self._end(EngineClosedError(f"every replica is lost: {text}"))
            else:
                slot.is_up = True
                self._note(f"replica {slot.index + 1} of {len(self._slots)} is back")
                self._go_on()
                self._poll(slot)
                return
        for call, outputs in ended:
            call.sink(outputs)

    def _end(self, error: EngineClosedError) -> list[tuple[Call, list[Any]]]:
        """Nothing runs from now on; what is left to tell. Holds the lock."""
        self._error = error
        calls, self._calls = self._calls, {}
        return [(call, self._fail(call, error)) for call in calls.values()]

    def close(self) -> None:
        """End the replicas, and the cluster where it was started here. Safe to call twice."""
        with self._lock:
            if self._error is None:
                self._end(EngineClosedError("the engine is closed"))
            slots, self._slots = self._slots, []
        for slot in slots:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(slot.actor)
        if self._owns_cluster:
            self._owns_cluster = False
            self._ray.shutdown()
