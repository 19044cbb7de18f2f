"""A rolling restart: one replica after another is replaced by a new one, which loads what is on the
disk now. The requests of the old one are answered by it, within the drain timeout.

    room for one more:  start new - load - new takes requests, old drains - end old
    all GPUs taken:     old drains - end old - start new - load - new takes requests

In the first way a new one that cannot be loaded costs nothing. In the second its place stays empty,
so it is gone only where another replica answers, and the others are left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvcli.cluster.actors import PLACE_S
from nvcli.cluster.runtime import ClusterError
from nvcli.errors import ModelError, NvcliError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.cluster.actors import Actors
    from nvcli.cluster.dispatcher import Dispatcher, Told
    from nvcli.cluster.routing import Slot

# What is checked and rendered in front of the replicas, so that old and new must agree in it.
SHARED = {
    "max_model_len": "context length",
    "vocab_size": "vocabulary",
    "hidden_size": "hidden size",
    "eos_token_ids": "end tokens",
    "sampling_defaults": "sampling defaults",
    "tokenizer": "tokenizer or chat template",
}


class RollingRestart:
    """`info`: what the first replica said of its model. `poll` begins to hear a new one, `tell`
    hands out what is told of requests."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        actors: Actors,
        note: Callable[[str], None],
        info: dict[str, Any],
        *,
        poll: Callable[[Slot], None],
        tell: Callable[[Told], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._actors = actors
        self._note = note
        self._info = info
        self._poll = poll
        self._tell = tell
        self._has_room = False

    def run(self, drain_s: float) -> None:
        """Raises `EngineClosedError` when everything ends meanwhile."""
        slots = list(self._dispatcher.slots)
        count = len(slots)
        waiting = next((s for s in slots if not s.is_up and not s.is_gone), None)
        if waiting is not None:
            self._note(
                f"no rolling restart: replica {waiting.index + 1} of {count} is lost and about to "
                "load by itself; try again when it is back"
            )
            return
        for old in filter(lambda slot: slot.is_gone, slots):  # their places are free
            if not self._replace(old, count, drain_s):
                return
        self._has_room = self._actors.has_room()
        way = "" if self._has_room else ", each drained first, since all places are taken"
        self._note(f"rolling restart of {count} replicas, one after another{way}")
        for old in filter(lambda slot: not slot.is_gone, slots):
            if not self._replace(old, count, drain_s):
                return
        self._note("the rolling restart is done")

    def _replace(self, old: Slot, count: int, drain_s: float) -> bool:
        """False, and a line, where that cannot be."""
        name = f"replica {old.index + 1} of {count}"
        self._actors.check_open()
        try:
            if self._has_room:
                try:
                    self._beside(old, name, drain_s)
                except ClusterError:  # somebody else has taken the place
                    self._has_room = False
            if not self._has_room:
                self._in_its_place(old, name, drain_s)
        except NvcliError as error:
            self._actors.check_open()
            are_left = count > 1 and self._dispatcher.error is None
            rest = "; the others stay as they are" if are_left else ""
            self._note(f"{name} could not be replaced{rest}: {error}")
            return False
        self._note(f"{name} is new")
        return True

    def _beside(self, old: Slot, name: str, drain_s: float) -> None:
        new = self._actors.start(old.index)
        try:
            self._load(new)
        except NvcliError:
            self._actors.kill(new)
            raise
        self._put_in(old, new)
        self._poll(new)
        self._drain(old, name, drain_s)

    def _in_its_place(self, old: Slot, name: str, drain_s: float) -> None:
        others = [slot for slot in self._dispatcher.slots if slot is not old]
        if old.is_up and not any(slot.takes_requests for slot in others):
            raise ClusterError("it is the only one that answers, and Ray has no room beside it")
        place = old
        try:
            self._dispatcher.stand_down(old)
            self._drain(old, name, drain_s)
            new = self._actors.start(old.index)
            self._put_in(old, new, is_up=False)
            place = new
            self._load(new)
        except Exception as error:  # whatever it is: nobody else fills this place
            self._tell(self._dispatcher.give_up(place, str(error)))
            self._actors.kill(place)
            raise
        if self._dispatcher.bring_up(new):
            self._poll(new)

    def _load(self, new: Slot) -> None:
        (info,) = self._actors.load_all([new], self._note, place_s=PLACE_S)
        for key, name in SHARED.items():
            before, after = self._info[key], info[key]
            is_same = after >= before if key == "max_model_len" else after == before
            if not is_same:
                raise ModelError(
                    f"the model has another {name}",
                    hint="A rolling restart takes other weights; for another model start a server.",
                )

    def _put_in(self, old: Slot, new: Slot, *, is_up: bool = True) -> None:
        """Raises `EngineClosedError` once everything has ended."""
        new.is_up = is_up
        if not self._dispatcher.replace(old, new):
            self._actors.kill(new)
            assert self._dispatcher.error is not None
            raise self._dispatcher.error

    def _drain(self, old: Slot, name: str, drain_s: float) -> None:
        self._dispatcher.wait_drained(old, drain_s)
        count, told = self._dispatcher.end(old)
        self._tell(told)
        if count:
            self._note(
                f"{name}: {count} requests did not end in {drain_s:g} s; {len(told)} were streams "
                f"and end with an error, {count - len(told)} start again on another"
            )
        self._actors.close(old)
