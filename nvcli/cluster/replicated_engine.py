"""Several engines as one: requests go to the replica with the fewest, and come back once.

It has the interface of an engine as `nvcli batch` needs it. This process keeps every request until
its answer is here. When a replica is lost, with its node or alone, what it had goes to the others
and Ray starts it again where there is room. The same request gives the same answer on any replica,
so nothing is lost and nothing comes twice.

A request that was aboard of two lost replicas is under suspicion: it runs again alone on a replica,
and when that one is lost too, it was the request, which ends with an error.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from nvcli import errors
from nvcli.cluster.replica import Replica
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

logger = logging.getLogger("nvcli")

MAX_LOSSES = 2  # of replicas that a request was aboard of, before it runs alone
PREFIX_TOKENS = 16  # requests that begin alike go to one replica, whose cache knows the prefix
MAX_PREFIXES = 4096
_RETRY_S = 1.0
_STATS_S = 10.0


@dataclass(slots=True, eq=False)
class _Call:
    """A request that has no answer yet."""

    request_id: str
    frame: bytes
    sink: Sink
    num_outputs: int
    prefix: tuple[int, ...]
    num_losses: int = 0


@dataclass(slots=True, eq=False)
class _Slot:
    """A replica as this process sees it."""

    index: int
    actor: Any
    is_up: bool = False
    is_gone: bool = False  # for good
    epoch: int = 0  # counts losses: what was sent before one says nothing about what is there now
    calls: dict[str, _Call] = field(default_factory=dict)
    suspect: _Call | None = None  # it runs alone here, or waits until it can


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
        self._calls: dict[str, _Call] = {}
        self._queue: deque[_Call] = deque()  # while no replica is up
        self._suspects: deque[_Call] = deque()
        self._prefixes: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._error: EngineClosedError | None = None
        self._slots: list[_Slot] = []
        self._owns_cluster = connect(address)
        try:
            actor_class = ray.remote(Replica).options(
                **resources_of(config, num_replicas),
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=100_000,  # the engine queues; a call is cheap
                scheduling_strategy="SPREAD",
            )
            self._slots = [_Slot(i, actor_class.remote(config, load)) for i in range(num_replicas)]
            infos = [self._loaded(ray.get(slot.actor.load.remote())) for slot in self._slots]
        except BaseException as error:
            self.close()
            if isinstance(error, ray.exceptions.RayError):
                reason = (str(error).splitlines() or [""])[0]
                raise EngineClosedError(f"a replica ended while loading: {reason}") from error
            raise
        for slot in self._slots:
            slot.is_up = True
        super().__init__(config, infos[0])

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

    def stats(self) -> EngineStats:
        """The sum over the replicas that are up."""
        with self._lock:
            refs = [slot.actor.stats.remote() for slot in self._slots if slot.is_up]
        found = []
        for ref in refs:
            with suppress(self._ray.exceptions.RayError):
                found.append(EngineStats(*self._ray.get(ref, timeout=_STATS_S)))
        if not found:
            return self._stats
        sums = {
            name: sum(getattr(stats, name) for stats in found)
            for name in EngineStats.__dataclass_fields__
        }
        return EngineStats(**sums | {"block_size": found[0].block_size})

    # --- requests ---------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink) -> None:
        """Raises what `LLM.submit` raises."""
        self._checks.validate(request)
        grammar, request.grammar = request.grammar, None  # compiled again over there
        is_streaming, request.is_streaming = request.is_streaming, False
        spec = None if grammar is None else grammar.spec
        frame = pickle.dumps((request, spec), pickle.HIGHEST_PROTOCOL)
        request.grammar, request.is_streaming = grammar, is_streaming
        prefix = tuple(request.prompt_token_ids[:PREFIX_TOKENS])
        call = _Call(request.request_id, frame, sink, request.params.n, prefix)
        with self._lock:
            if self._error is not None:
                raise EngineClosedError(self._error.message, hint=self._error.hint)
            self._calls[call.request_id] = call
            self._place(call)

    def abort(self, request_id: str) -> None:
        """Its sink hears nothing more."""
        with self._lock:
            if self._calls.pop(request_id, None) is None:
                return
            for slot in self._slots:
                if slot.is_up and request_id in slot.calls:
                    slot.actor.abort.remote(request_id)

    def _place(self, call: _Call) -> None:
        """Send it to a replica, or let it wait for one. Holds the lock."""
        if call.num_losses >= MAX_LOSSES:
            self._suspects.append(call)
            self._place_suspects()
            return
        free = [slot for slot in self._slots if slot.is_up and slot.suspect is None]
        if not free:
            self._queue.append(call)
            return
        slot = self._choose(free, call.prefix)
        self._send(slot, call)

    def _choose(self, free: list[_Slot], prefix: tuple[int, ...]) -> _Slot:
        """The one that knows the prefix, unless another has much less to do."""
        least = min(free, key=lambda slot: (len(slot.calls), slot.index))
        known = self._prefixes.get(prefix)
        chosen = least
        for slot in free:
            if slot.index == known and len(slot.calls) <= len(least.calls) + self._slack:
                chosen = slot
        self._prefixes[prefix] = chosen.index
        self._prefixes.move_to_end(prefix)
        if len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)
        return chosen

    @property
    def _slack(self) -> int:
        return max(1, self.max_num_seqs // 4)

    def _send(self, slot: _Slot, call: _Call) -> None:
        slot.calls[call.request_id] = call
        future = slot.actor.answer.remote(call.frame).future()
        future.add_done_callback(partial(self._on_answer, slot, slot.epoch, call))

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

    def _on_answer(self, slot: _Slot, epoch: int, call: _Call, future: Future[Any]) -> None:
        error = future.exception()
        outputs = None
        with self._lock:
            if slot.calls.get(call.request_id) is call:
                del slot.calls[call.request_id]
            was_alone = slot.suspect is call
            if was_alone:
                slot.suspect = None
            is_wanted = self._calls.get(call.request_id) is call and self._error is None
            if error is None:
                outputs = [unpack_output(call.request_id, item) for item in future.result()]
            elif isinstance(error, self._ray.exceptions.RayActorError):
                call.num_losses += 1
                if slot.epoch == epoch:
                    self._lose(slot, error)
                if was_alone:
                    lost = EngineError(
                        f"the request ended its replica {call.num_losses} times, at last alone"
                    )
                    outputs = self._fail(call, lost)
                elif is_wanted:
                    is_wanted = False  # not yet
                    self._place(call)
            else:
                reason = (str(error).splitlines() or [""])[-1].strip()
                outputs = self._fail(call, EngineError(f"the replica failed: {reason}"))
            if is_wanted:
                del self._calls[call.request_id]
            self._go_on()
        if is_wanted and outputs is not None:
            call.sink(outputs)

    @staticmethod
    def _fail(call: _Call, error: NvcliError) -> list[Any]:
        return error_outputs(call.request_id, set(range(call.num_outputs)), error)

    def _go_on(self) -> None:
        """Something has changed: whoever waits may find a replica. Holds the lock."""
        self._place_suspects()
        waiting, self._queue = self._queue, deque()
        for call in waiting:
            if call.request_id in self._calls:
                self._place(call)

    # --- lost and found ---------------------------------------------------------------------------

    def _lose(self, slot: _Slot, error: Exception) -> None:
        """Its other calls fail one by one. Holds the lock."""
        slot.is_up = False
        slot.epoch += 1
        if slot.suspect is not None:
            self._suspects.appendleft(slot.suspect)
            slot.suspect = None
        logger.debug("replica %s: %s", slot.index, error)
        running = len(slot.calls) + 1
        self._note(
            f"replica {slot.index + 1} of {len(self._slots)} was lost; its {running} running "
            "requests start again elsewhere"
        )
        self._revive(slot)

    def _revive(self, slot: _Slot) -> None:
        """Ask it to load; the call waits until Ray has started it again."""
        future = slot.actor.load.options(max_task_retries=-1).remote().future()
        future.add_done_callback(partial(self._on_loaded, slot))

    def _on_loaded(self, slot: _Slot, future: Future[Any]) -> None:
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
                return
        for call, outputs in ended:
            call.sink(outputs)

    def _end(self, error: EngineClosedError) -> list[tuple[_Call, list[Any]]]:
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
