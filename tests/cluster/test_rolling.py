"""A rolling restart without room, over actors that only write down what is asked of them."""

from __future__ import annotations

from typing import Any

import pytest

from nvcli.cluster.dispatcher import Dispatcher
from nvcli.cluster.rolling import RollingRestart
from nvcli.cluster.routing import Call, Router, Slot
from nvcli.errors import EngineClosedError, NvcliError, WeightsError
from nvcli.types import RequestOutput
from tests.cluster.test_dispatcher import Actor


class FakeActors:
    """`fails`: the step that does, and with what. `meanwhile` is called as a drained one ends."""

    def __init__(self, fails: tuple[str, Exception]) -> None:
        self._fails = fails
        self.meanwhile: Any = lambda: None
        self.steps: list[str] = []

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if name == self._fails[0]:
            raise self._fails[1]

    def check_open(self) -> None:
        pass

    def has_room(self) -> bool:
        return False

    def close(self, slot: Slot) -> None:
        self.meanwhile()
        self._step("close")

    def start(self, index: int) -> Slot:
        self._step("start")
        return Slot(index, Actor())

    def load_all(self, slots: list[Slot], note: Any, *, place_s: float) -> Any:
        self._step("load")

    def kill(self, slot: Slot) -> None:
        self._step("kill")


class Restart:
    """Of two replicas; what the one request that is added hears."""

    def __init__(self, step: str, error: Exception) -> None:
        self.slots = [Slot(i, Actor()) for i in range(2)]
        self.dispatcher = Dispatcher(self.slots, Router(2))
        for slot in self.slots:
            self.dispatcher.bring_up(slot)
        self.outputs: list[RequestOutput] = []
        self.notes: list[str] = []
        self.fakes = FakeActors((step, error))
        actors: Any = self.fakes
        self._restart = RollingRestart(
            self.dispatcher, actors, self.notes.append, {}, poll=lambda slot: None, tell=self.tell
        )

    @staticmethod
    def tell(told: Any) -> None:
        for call, outputs in told:
            call.sink(outputs)

    def add(self) -> None:
        self.dispatcher.add(Call("a", b"", self.outputs.extend, {0}, (), False))

    def give_up_other(self) -> None:
        self.tell(self.dispatcher.give_up(self.slots[1], "no weights either"))

    def run(self) -> None:
        self._restart.run(1.0)


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("load", WeightsError("no weights")),
        ("load", RuntimeError("a bug")),
        ("start", RuntimeError("a bug")),
        ("close", RuntimeError("a bug")),
    ],
)
def test_a_request_ends_when_no_place_can_be_filled(
    step: str, error: Exception, is_last: bool
) -> None:
    """The other replica is lost meanwhile, and cannot be loaded either. Whichever comes last."""
    restart = Restart(step, error)

    def meanwhile() -> None:
        restart.dispatcher.lose(restart.slots[1])
        restart.add()
        if is_last:
            restart.give_up_other()

    restart.fakes.meanwhile = meanwhile
    if isinstance(error, NvcliError):
        restart.run()
        rest = "" if is_last else "; the others stay as they are"
        assert restart.notes[-1] == f"replica 1 of 2 could not be replaced{rest}: {error}"
    else:
        with pytest.raises(type(error)):
            restart.run()
    assert bool(restart.outputs) == is_last
    restart.give_up_other()
    (output,) = restart.outputs
    assert output.error is not None
    assert output.error.startswith("every replica is lost: ")
    with pytest.raises(EngineClosedError):
        restart.add()


def test_nothing_is_loaded_once_everything_has_ended() -> None:
    restart = Restart("", ValueError())
    restart.fakes.meanwhile = lambda: restart.tell(
        restart.dispatcher.end_all(EngineClosedError("all is over"))
    )
    restart.run()
    assert "load" not in restart.fakes.steps
    assert restart.notes[-1] == "replica 1 of 2 could not be replaced: all is over"
