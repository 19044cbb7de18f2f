"""A rolling restart, with a client that never stops asking: every request is answered, once."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvcli.cluster import actors as cluster_actors
from nvcli.cluster.replicated_engine import ReplicatedEngine
from nvcli.engine.engine import Request
from nvcli.types import FinishReason, RequestOutput, SamplingParams
from tests.cluster.asking import ask
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.torch
ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'nvcli[ray]'")

Make = Callable[..., ReplicatedEngine]
PROMPT = [50, 51, 52, 53]
OLD, NEW = 101, 102


class Weights:
    """What a replica finds on the disk when it loads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write(version=OLD)

    def write(self, **options: Any) -> None:
        self.path.write_text(json.dumps(options))


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return Weights(tmp_path / "weights.json")


@pytest.fixture
def all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for a place that might become free: none does."""
    monkeypatch.setattr(cluster_actors, "_ROOM_S", 0.3)


def actors(engine: ReplicatedEngine) -> list[Any]:
    return [slot.actor for slot in engine.dispatcher.slots]


def versions(engine: ReplicatedEngine, count: int = 12) -> set[int]:
    """Of the weights that answer, asked at once, so that every replica gets some."""
    outputs = ask(engine, [[40 + i, *PROMPT] for i in range(count)])
    assert all(list(output.token_ids)[1:5] == PROMPT for output in outputs)
    return {output.token_ids[0] for output in outputs}


class Client:
    """Streams one request after another until it is stopped, and keeps the answers."""

    def __init__(self, engine: ReplicatedEngine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._stopped = threading.Event()
        self.answers: list[list[RequestOutput]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for number in range(1_000_000):
            if self._stopped.is_set():
                return
            self.answers.append(stream(self._engine, f"{self._name}-{number}", 5).wait())

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "a request was never answered"


class Stream:
    def __init__(self, engine: ReplicatedEngine, name: str, count: int) -> None:
        self.heard: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        engine.submit(
            Request(request_id=name, prompt_token_ids=PROMPT, params=params), self.heard.put
        )

    def wait(self) -> list[RequestOutput]:
        pieces: list[RequestOutput] = []
        while not pieces or not pieces[-1].is_finished:
            pieces += self.heard.get(timeout=PATIENCE_S)
        return pieces


def stream(engine: ReplicatedEngine, name: str, count: int) -> Stream:
    return Stream(engine, name, count)


def check_whole(pieces: list[RequestOutput]) -> int:
    """-> the version that answered, from the first token to the last."""
    assert pieces[-1].error is None
    ids = [token_id for piece in pieces for token_id in piece.token_ids]
    assert ids[1:] == PROMPT
    return ids[0]


def counted(engine: ReplicatedEngine) -> int:
    return engine.stats().num_queried_tokens


@pytest.mark.parametrize("count", [2, 3])
def test_every_request_is_answered_while_all_replicas_are_replaced(
    make: Make, weights: Weights, count: int, request: pytest.FixtureRequest
) -> None:
    """Two replicas leave one of three places free, three none."""
    if count == 3:
        request.getfixturevalue("all_taken")
    notes: list[str] = []
    engine = make(count, notes, weights=str(weights.path), delay_s=0.002)
    before = actors(engine)
    assert versions(engine) == {OLD}
    clients = [Client(engine, f"c{i}") for i in range(4)]
    until(lambda: all(client.answers for client in clients))
    weights.write(version=NEW)
    until(lambda: counted(engine) > 0)
    seen = [counted(engine)]
    watch = threading.Event()

    def look() -> None:
        while not watch.wait(0.01):
            seen.append(counted(engine))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    engine.restart(60.0)
    watch.set()
    watcher.join()
    numbers = [len(client.answers) for client in clients]
    until(
        lambda: all(
            len(client.answers) > number + 1
            for client, number in zip(clients, numbers, strict=True)
        )
    )
    for client in clients:
        client.stop()
        found = [check_whole(pieces) for pieces in client.answers]
        assert found[0] == OLD
        assert found[-1] == NEW
    assert versions(engine) == {NEW}
    assert not set(before) & set(actors(engine))
    assert (engine.num_up, engine.num_draining) == (count, 0)
    assert seen == sorted(seen)
    way = "" if count == 2 else ", each drained first, since all places are taken"
    assert notes == [
        f"rolling restart of {count} replicas, one after another{way}",
        *(f"replica {i} of {count} is new" for i in range(1, count + 1)),
        "the rolling restart is done",
    ]


def test_a_new_replica_that_cannot_load_leaves_the_old_ones(make: Make, weights: Weights) -> None:
    notes: list[str] = []
    engine = make(2, notes, weights=str(weights.path))
    before = actors(engine)
    for options, reason in (
        ({"error": "no such weights"}, "no such weights. Find another."),
        ({"dies": True}, "a replica ended while loading: "),
        ({"version": NEW, "template": " "}, "the model has another tokenizer or chat template. "),
    ):
        weights.write(**options)
        notes.clear()
        engine.restart(60.0)
        assert len(notes) == 2
        told = "replica 1 of 2 could not be replaced; the others stay as they are: "
        assert notes[1].startswith(told + reason), notes
        assert actors(engine) == before
        assert versions(engine) == {OLD}
    weights.write(version=NEW)
    engine.restart(60.0)
    assert versions(engine) == {NEW}


@pytest.mark.usefixtures("all_taken")
def test_without_room_a_place_that_cannot_be_filled_stays_empty_and_is_filled_later(
    make: Make, weights: Weights
) -> None:
    notes: list[str] = []
    engine = make(3, notes, weights=str(weights.path))
    weights.write(error="no such weights")
    engine.restart(60.0)
    assert "replica 1 of 3 could not be replaced; the others stay" in notes[-1]
    assert engine.num_up == 2
    assert versions(engine) == {OLD}
    weights.write(version=NEW)
    engine.restart(60.0)
    assert engine.num_up == 3
    assert versions(engine) == {NEW}
    assert notes[2] == "replica 1 of 3 is new"


@pytest.mark.usefixtures("all_taken")
def test_the_only_replica_without_room_is_left_alone(make: Make, weights: Weights) -> None:
    others = make(2)
    notes: list[str] = []
    engine = make(1, notes, weights=str(weights.path))
    before = actors(engine)
    engine.restart(60.0)
    assert notes[-1] == (
        "replica 1 of 1 could not be replaced: it is the only one that answers, and Ray has no "
        "room beside it"
    )
    assert actors(engine) == before
    assert versions(engine) == {OLD}
    others.close()


def test_a_stream_longer_than_the_drain_timeout_ends_with_an_error(
    make: Make, weights: Weights
) -> None:
    """And what has told nothing yet starts again."""
    notes: list[str] = []
    engine = make(1, notes, weights=str(weights.path), delay_s=1.0)
    begun = stream(engine, "begun", 400)
    assert begun.heard.get(timeout=PATIENCE_S)[0].error is None
    silent: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    request = Request(
        request_id="silent", prompt_token_ids=PROMPT, params=params, is_streaming=False
    )
    engine.submit(request, silent.put)
    weights.write(version=NEW, delay_s=0.001)
    engine.restart(0.5)
    pieces = begun.wait()
    assert pieces[-1].finish_reason is FinishReason.ERROR
    assert pieces[-1].error == "the replica that answered was replaced"
    (whole,) = silent.get(timeout=PATIENCE_S)
    assert whole.error is None
    assert whole.token_ids[0] == NEW
    assert len(whole.token_ids) == 400
    told = "2 requests did not end in 0.5 s; 1 were streams and end with an error, 1 start again"
    assert any(told in note for note in notes), notes


def test_a_second_restart_is_ignored_and_the_end_cuts_the_first_short(
    make: Make, weights: Weights, tmp_path: Path
) -> None:
    notes: list[str] = []
    (tmp_path / "gate").touch()
    engine = make(2, notes, weights=str(weights.path), gate=str(tmp_path / "gate"))
    (tmp_path / "gate").unlink()
    first = threading.Thread(target=engine.restart, args=(60.0,), daemon=True)
    first.start()
    until(lambda: len(notes) == 1)
    engine.restart(60.0)
    assert notes[1:] == ["a rolling restart is under way already; this one is ignored"]
    assert versions(engine) == {OLD}  # they answer while the new one loads
    engine.close()
    first.join(PATIENCE_S)
    assert not first.is_alive()
    assert len(notes) == 2


def test_a_replica_that_is_lost_comes_first(make: Make, weights: Weights, tmp_path: Path) -> None:
    """Ray starts it again, and would take the place that the restart wants."""
    notes: list[str] = []
    (tmp_path / "gate").touch()
    engine = make(2, notes, weights=str(weights.path), gate=str(tmp_path / "gate"))
    (tmp_path / "gate").unlink()
    ray.kill(engine.dispatcher.slots[1].actor, no_restart=False)
    until(lambda: engine.num_up == 1)
    engine.restart(60.0)
    assert "no rolling restart: replica 2 of 2 is lost and about to load by itself" in notes[-1]
    (tmp_path / "gate").touch()
    until(lambda: engine.num_up == 2)
    engine.restart(60.0)
    assert notes[-1] == "the rolling restart is done"


def test_an_old_replica_that_dies_while_it_drains_is_not_brought_back(
    make: Make, weights: Weights
) -> None:
    notes: list[str] = []
    engine = make(1, notes, weights=str(weights.path), delay_s=1.0)
    begun = stream(engine, "begun", 400)
    assert begun.heard.get(timeout=PATIENCE_S)[0].error is None
    weights.write(version=OLD, delay_s=0.001)
    restart = threading.Thread(target=engine.restart, args=(300.0,), daemon=True)
    restart.start()
    until(lambda: engine.num_draining == 1)
    (old,) = engine.dispatcher.leaving
    ray.kill(old.actor, no_restart=False)
    assert begun.wait()[-1].error == "the replica that answered was lost"
    restart.join(PATIENCE_S)
    assert notes[-1] == "the rolling restart is done"
    assert any("was lost; its 1 running" in note for note in notes)
    time.sleep(0.5)
    assert not any("is back" in note for note in notes)
    assert versions(engine) == {OLD}
