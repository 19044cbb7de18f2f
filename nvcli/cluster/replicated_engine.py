"""Several engines as one: requests go to the replica with the fewest, and come back once.

It has the interface of an engine as `nvcli batch` and `nvcli serve` need it. Which request is where
is `dispatcher.py`; here is what Ray says: answers, replicas that are lost, with their node or
alone, and those that it has started again. `restart` replaces all of them while they answer.
"""

from __future__ import annotations

import logging
import pickle
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from nvcli.cluster.actors import LOAD_ATTEMPTS, WAITING_S, Actors
from nvcli.cluster.dispatcher import Dispatcher
from nvcli.cluster.rolling import RollingRestart
from nvcli.cluster.routing import Call, Router, prefix_keys
from nvcli.cluster.runtime import connect, disconnect, reason_of, require_ray
from nvcli.errors import EngineClosedError
from nvcli.server.described_engine import DescribedEngine
from nvcli.server.engine_worker import load_llm

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from nvcli.cluster.dispatcher import Told
    from nvcli.cluster.routing import Slot
    from nvcli.config import EngineConfig
    from nvcli.engine.engine import EngineStats, Request
    from nvcli.engine.engine_thread import Sink

logger = logging.getLogger("nvcli")

_RETRY_S = 1.0
_RESTART_END_S = 15.0  # for a restart to see that everything has ended


class ReplicatedEngine(DescribedEngine):
    """Callbacks come from Ray's threads; sinks are called outside of any lock."""

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
            note: told in a sentence when a replica is lost, comes back or is replaced.
            load: makes the engine, in the actor.

        Raises `UsageError` without Ray, `ClusterError` for a cluster that is not there or too
        small, and what loading the model raises.
        """
        self._ray = require_ray()
        self._note = note or logger.info
        self._actors: Actors | None = None
        self._loaded: Dispatcher | None = None  # once all of them are
        self._restart_lock = threading.Lock()
        self._owns_cluster = connect(address)
        try:
            actors = self._actors = Actors(config, num_replicas, load)
            slots = [actors.start(i) for i in range(num_replicas)]
            self._infos = actors.load_all(slots, self._note)
        except BaseException:
            self.close()
            raise
        super().__init__(config, self._infos[0])
        self._loaded = Dispatcher(slots, Router(slack=max(1, super().max_num_seqs // 4)))
        for slot in slots:
            self._loaded.bring_up(slot)
            self._poll(slot)

    # --- what there is ----------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        return len(self.dispatcher.slots)

    @property
    def num_up(self) -> int:
        """Replicas that take requests now."""
        return self.dispatcher.num_up

    @property
    def num_draining(self) -> int:
        """Replicas that end their last requests."""
        return self.dispatcher.num_draining

    @property
    def is_alive(self) -> bool:
        return self.dispatcher.error is None

    @property
    def error(self) -> EngineClosedError | None:
        """What ended all of them; None while one may answer."""
        return self.dispatcher.error

    @property
    def max_num_seqs(self) -> int:
        return self.num_replicas * super().max_num_seqs

    def stats(self) -> EngineStats:
        """The sum over the replicas, half a second old at most; counters never fall."""
        return self.dispatcher.stats(self._stats.block_size)

    @property
    def dispatcher(self) -> Dispatcher:
        """Which request is where, once the replicas are loaded."""
        assert self._loaded is not None
        return self._loaded

    # --- requests ---------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink) -> None:
        """Raises what `LLM.submit` raises."""
        self._checks.validate(request)
        grammar, request.grammar = request.grammar, None  # compiled again over there
        spec = None if grammar is None else grammar.spec
        frame = pickle.dumps((request, spec), pickle.HIGHEST_PROTOCOL)
        request.grammar = grammar
        self.dispatcher.add(
            Call(
                request.request_id,
                frame,
                sink,
                set(range(request.params.n)),
                prefix_keys(request.prompt_token_ids, request.cache_salt),
                request.is_streaming,
                request.arrival,
            )
        )

    def abort(self, request_id: str) -> None:
        """Its sink hears the end, with reason `abort`, before this returns."""
        self._tell(self.dispatcher.abort(request_id))

    # --- answers ----------------------------------------------------------------------------------

    @staticmethod
    def _tell(told: Told) -> None:
        for call, outputs in told:
            call.sink(outputs)

    def _poll(self, slot: Slot) -> None:
        future = slot.actor.poll.remote().future()
        future.add_done_callback(partial(self._on_poll, slot))

    def _on_poll(self, slot: Slot, future: Future[Any]) -> None:
        error = future.exception()
        if slot.is_ended or not self.is_alive:
            return
        try:
            if error is None:
                told = self.dispatcher.take(slot, *future.result())
            else:
                told = self._lose(slot, error)
            self._tell(told)
            if error is None and self.is_alive:
                self._poll(slot)  # only now, or what comes next might be told first
        except Exception as bug:  # of ours, which Ray's thread would only log
            logger.debug("the replicas' answers", exc_info=bug)
            told = self.dispatcher.end_all(EngineClosedError(f"the engine stopped: {bug!r}"))
            self._tell(told)

    # --- lost and found ---------------------------------------------------------------------------

    def _lose(self, slot: Slot, error: BaseException) -> Told:
        """Its requests start again, and it may come back; -> what is told of those that cannot."""
        logger.debug("replica %s: %s", slot.index, error)
        count, told = self.dispatcher.lose(slot)
        self._note(
            f"replica {slot.index + 1} of {self.num_replicas} was lost; its {count} running "
            "requests start again elsewhere"
        )
        if slot.is_leaving:
            return told
        if isinstance(error, self._ray.exceptions.RayActorError):
            self._revive(slot)
        else:  # it lives, and gives errors; Ray's thread, which this is, would wait for itself
            self._later(0.0, self._kill_and_revive, slot)
        return told

    def _kill_and_revive(self, slot: Slot) -> None:
        assert self._actors is not None
        self._actors.kill(slot, is_for_good=False)
        self._revive(slot)

    def _revive(self, slot: Slot) -> None:
        """Ask it to load once Ray has started it again."""
        if self._is_missed(slot):
            assert self._actors is not None
            started = self._actors.ask_for_start(slot)
            started.add_done_callback(partial(self._or_give_up, slot, self._on_started))
            self._later(WAITING_S, self._note_waiting, slot, started)

    def _is_missed(self, slot: Slot) -> bool:
        return self.is_alive and self._actors is not None and not slot.is_ended

    def _note_waiting(self, slot: Slot, started: Future[Any]) -> None:
        if self._is_missed(slot) and not started.done():
            self._note(f"replica {slot.index + 1} of {self.num_replicas} waits for room in Ray")

    def _on_started(self, slot: Slot, started: Future[Any]) -> None:
        assert self._actors is not None
        if isinstance(started.exception(), self._ray.exceptions.ActorUnavailableError):
            self._later(_RETRY_S, self._revive, slot)
            return
        started.result()
        loaded = self._actors.ask_to_load(slot, 0)  # no retries: who would count them?
        loaded.add_done_callback(partial(self._or_give_up, slot, self._on_loaded))

    def _on_loaded(self, slot: Slot, loaded: Future[Any]) -> None:
        assert self._actors is not None
        if isinstance(loaded.exception(), self._ray.exceptions.RayActorError):
            slot.num_ends += 1
            if slot.num_ends < LOAD_ATTEMPTS:
                self._later(_RETRY_S, self._revive, slot)
                return
        self._actors.info_of(loaded)
        if self.dispatcher.bring_up(slot):
            self._note(f"replica {slot.index + 1} of {self.num_replicas} is back")
            self._poll(slot)

    def _later(self, seconds: float, work: Callable[..., None], slot: Slot, *args: Any) -> None:
        """In a thread of its own, which keeps no process alive."""
        timer = threading.Timer(seconds, self._or_give_up, [slot, work, *args])
        timer.daemon = True
        timer.start()

    def _or_give_up(self, slot: Slot, work: Callable[..., None], *args: Any) -> None:
        """A step towards bringing it back. No other is under way, so whatever is raised, be it
        Ray's or ours, it will not come back."""
        if not self._is_missed(slot):
            return
        try:
            work(slot, *args)
        except Exception as error:  # noqa: BLE001 - it is told
            self._note(f"replica {slot.index + 1} does not come back: {reason_of(error)}")
            self._tell(self.dispatcher.give_up(slot, reason_of(error)))

    # --- a rolling restart, and the end -----------------------------------------------------------

    def restart(self, drain_s: float) -> None:
        """Replace each replica by a new one, which loads what is on the disk now; returns when all
        are. Says in notes what it did, and what it could not do; raises nothing.

        Args:
            drain_s: seconds that a replica's running requests get; then they start again on
                another, and streams that have begun end with an error.
        """
        if not self._restart_lock.acquire(blocking=False):
            self._note("a rolling restart is under way already; this one is ignored")
            return
        try:
            assert self._actors is not None
            RollingRestart(
                self.dispatcher,
                self._actors,
                self._note,
                self._infos[0],
                poll=self._poll,
                tell=self._tell,
            ).run(drain_s)
        except EngineClosedError:
            logger.info("a rolling restart was cut short: everything ends")
        except Exception as bug:
            logger.exception("a rolling restart")
            self._note(f"the rolling restart stopped: {reason_of(bug)}")
        finally:
            self._restart_lock.release()

    def close(self) -> None:
        """End the replicas, and the cluster where it was started here. Safe to call twice."""
        if self._loaded is not None:
            self._loaded.end_all(EngineClosedError("the engine is closed"))
        if self._actors is not None:
            self._actors.kill_all()
        if self._owns_cluster:
            self._owns_cluster = False
            # A call that comes after Ray's end would start it again.
            if self._restart_lock.acquire(timeout=_RESTART_END_S):
                self._restart_lock.release()
            disconnect()
