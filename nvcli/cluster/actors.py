"""The actors of the replicas: where there is room for one, started, asked to load, ended."""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nvcli import __version__, errors
from nvcli.cluster.replica import Replica
from nvcli.cluster.routing import Slot
from nvcli.cluster.runtime import ClusterError, reason_of, require_ray, resources_of
from nvcli.errors import EngineClosedError, NvcliError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.config import EngineConfig

LOAD_ATTEMPTS = 3  # of one actor: what ends it while it loads may have been an accident
PLACE_S = 60.0  # for an actor that Ray said it has room for
WAITING_S = 20.0  # without a place, until it is told
_ROOM_S = 10.0
_TICK_S = 0.2
_CLOSE_S = 10.0


class Actors:
    """Makes slots with an actor each, and knows all that were not ended."""

    def __init__(
        self, config: EngineConfig, num_replicas: int, load: Callable[[EngineConfig], Any]
    ) -> None:
        """`load` makes the engine, in the actor. Raises `ClusterError` for a cluster too small."""
        self._ray = require_ray()
        self._config = config
        self._load = load
        self._resources = resources_of(config, num_replicas)
        self._living: list[Slot] = []
        self._is_closed = False
        self._class = self._ray.remote(Replica).options(
            **self._resources,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=100_000,  # the engine queues; a call is cheap
            scheduling_strategy="SPREAD",
        )

    def start(self, index: int) -> Slot:
        """An actor that Ray places as soon as it can. Raises `EngineClosedError`."""
        self.check_open()
        slot = Slot(index, self._class.remote(self._config, self._load))
        self._living.append(slot)
        return slot

    def has_room(self) -> bool:
        """Whether one more fits beside those that run, by what Ray has free on each machine. It
        takes a while to know of a place that has just become free."""
        deadline = time.monotonic() + _ROOM_S
        while not self._fits_now():
            if time.monotonic() > deadline:
                return False
            self.check_open()
            time.sleep(_TICK_S)
        return True

    def _fits_now(self) -> bool:
        state = self._ray._private.state  # the public way sums over machines
        if hasattr(state, "available_resources_per_node"):
            nodes = list(state.available_resources_per_node().values())
        else:
            nodes = [self._ray.available_resources()]
        wanted = {"CPU": self._resources["num_cpus"], "GPU": self._resources.get("num_gpus", 0)}
        return any(
            all(node.get(name, 0) >= count for name, count in wanted.items()) for node in nodes
        )

    def load_all(
        self, slots: list[Slot], note: Callable[[str], None], *, place_s: float | None = None
    ) -> list[dict[str, Any]]:
        """What each says of its model. Raises what loading raises, `EngineClosedError`, and after
        `place_s` seconds without a place `ClusterError`; without it a line tells who waits."""
        began = time.monotonic()
        placed = [slot.actor.hello.remote().future() for slot in slots]
        loaded = [self.ask_to_load(slot, LOAD_ATTEMPTS - 1) for slot in slots]
        is_told = False
        while any(not future.done() for future in loaded):
            wait(loaded, timeout=_TICK_S)
            self.check_open()
            if any(map(_has_failed, loaded)):
                break
            waited, count = time.monotonic() - began, sum(future.done() for future in placed)
            if count == len(slots):
                continue
            if place_s is not None and waited > place_s:
                raise ClusterError("Ray has found no place for it")
            if not is_told and waited > WAITING_S:
                is_told = True
                note(f"waiting for Ray: {count} of {len(slots)} replicas have a place")
        return [self.info_of(future) for future in [*filter(_has_failed, loaded)] or loaded]

    def ask_for_start(self, slot: Slot) -> Future[Any]:
        """Done when Ray has started the actor again, which takes as long as it has no room."""
        future: Future[Any] = slot.actor.hello.options(max_task_retries=-1).remote().future()
        return future

    def ask_to_load(self, slot: Slot, num_retries: int) -> Future[Any]:
        """The call waits until Ray has started the actor, the first time."""
        call = slot.actor.load.options(max_task_retries=num_retries)
        future: Future[Any] = call.remote().future()
        return future

    def info_of(self, future: Future[Any]) -> dict[str, Any]:
        """What loading gave. Raises what it raised; an actor's end is an `EngineClosedError`."""
        try:
            kind, value = future.result()
        except self._ray.exceptions.RayError as error:
            raise EngineClosedError(f"a replica ended while loading: {reason_of(error)}") from error
        if kind == "failed":
            name, message, hint = value
            raise getattr(errors, name, NvcliError)(message, hint=hint)
        info: dict[str, Any] = value
        check_version(info.get("version"))
        return info

    def check_open(self) -> None:
        """Raises `EngineClosedError` once all were ended."""
        if self._is_closed:
            raise EngineClosedError("the engine is closed")

    def kill(self, slot: Slot, *, is_for_good: bool = True) -> None:
        """At once; unless for good, Ray starts it again. Not from a thread of Ray's own, as its
        callbacks are: the call would wait for itself."""
        if is_for_good:
            with suppress(ValueError):
                self._living.remove(slot)
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(slot.actor, no_restart=is_for_good)

    def close(self, slot: Slot) -> None:
        """Let its engine end by itself first, so that its GPUs are free when this returns."""
        ending = slot.actor.end.remote().future()
        deadline = time.monotonic() + _CLOSE_S
        while not ending.done() and not self._is_closed and time.monotonic() < deadline:
            wait([ending], timeout=_TICK_S)
        if not self._is_closed:
            self.kill(slot)

    def kill_all(self) -> None:
        """No other starts from now on."""
        self._is_closed = True
        for slot in list(self._living):
            self.kill(slot)


def check_version(version: object) -> None:
    """Of nvcli over there: a node may have another installed, which reads no request of ours.
    Raises `ClusterError`."""
    if version != __version__:
        raise ClusterError(
            f"a replica runs nvcli {version or 'of another version'}, here it is {__version__}",
            hint="Every machine of the cluster needs the same.",
        )


def _has_failed(loading: Future[Any]) -> bool:
    return loading.done() and (loading.exception() is not None or loading.result()[0] == "failed")
