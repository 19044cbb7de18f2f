"""Replicas on a local Ray cluster of three nodes: nothing is lost, nothing comes twice."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvcli.cluster import replicated_engine
from nvcli.cluster.replicated_engine import ReplicatedEngine
from nvcli.cluster.runtime import ClusterError
from nvcli.engine.engine import Request
from nvcli.errors import ContextLengthError, EngineClosedError, WeightsError
from nvcli.types import FinishReason, RequestOutput, SamplingParams
from tests.cluster.asking import ask, check, prompts_of
from tests.cluster.scripted_replica import POISON
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.torch
ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'nvcli[ray]'")


def test_answers_come_from_all_replicas(make: Callable[..., ReplicatedEngine]) -> None:
    engine = make(delay_s=0.002)
    prompts = prompts_of(200)
    check(ask(engine, prompts), prompts)
    assert engine.num_replicas == 3
    until(lambda: engine.stats().num_queried_tokens >= 1000)  # of all together
    for slot in engine.dispatcher.slots:
        assert slot.stats is not None
        assert 0 < slot.stats.num_queried_tokens < 1000


def test_requests_that_begin_alike_meet_in_one_replica(
    make: Callable[..., ReplicatedEngine],
) -> None:
    engine = make(delay_s=0.001)
    common = list(range(20, 60))
    for i in range(6):
        check(ask(engine, prompts := [[*common, 100 + i, 7, 7, 7]]), prompts)
    until(lambda: engine.stats().num_queried_tokens >= 6 * 44)
    until(lambda: all(slot.stats is not None for slot in engine.dispatcher.slots))
    found = [slot.stats for slot in engine.dispatcher.slots if slot.stats is not None]
    assert sorted(stats.num_queried_tokens > 0 for stats in found) == [False, False, True]
    assert engine.stats().num_hit_tokens >= 5 * 40


def test_a_bad_request_is_refused_here(make: Callable[..., ReplicatedEngine]) -> None:
    engine = make(1)
    with pytest.raises(ContextLengthError):
        engine.submit(
            Request(request_id="r", prompt_token_ids=[5] * 100_000, params=SamplingParams()),
            lambda outputs: None,
        )


def test_replicas_that_die_lose_nothing(
    make: Callable[..., ReplicatedEngine], tmp_path: Path
) -> None:
    """Ray starts them again."""
    notes: list[str] = []
    for name in ("first", "second"):
        (tmp_path / name).touch()
    engine = make(3, notes, delay_s=0.001, deaths=str(tmp_path))
    prompts = prompts_of(200)
    check(ask(engine, prompts), prompts)
    assert sum("was lost" in note for note in notes) == 2
    until(lambda: sum("is back" in note for note in notes) == 2)
    check(ask(engine, prompts), prompts)


def test_a_replica_that_gives_errors_is_started_again(
    make: Callable[..., ReplicatedEngine], tmp_path: Path
) -> None:
    """Its actor lives, so nobody else would."""
    notes: list[str] = []
    engine = make(2, notes, confused=str(tmp_path / "confused"))
    check(ask(engine, prompts := prompts_of(10)), prompts)
    (tmp_path / "confused").touch()
    until(lambda: sum("is back" in note for note in notes) == 1)
    assert sum("was lost" in note for note in notes) == 1
    check(ask(engine, prompts := prompts_of(40)), prompts)
    assert engine.num_up == 2


def test_a_replica_that_ends_each_time_it_loads_is_given_up(
    make: Callable[..., ReplicatedEngine], tmp_path: Path
) -> None:
    """What waits for the last one ends with an error; Ray would start it for ever."""
    notes: list[str] = []
    weights = tmp_path / "weights.json"
    weights.write_text("{}")
    engine = make(1, notes, weights=str(weights))
    weights.write_text('{"dies": true}')
    ray.kill(engine.dispatcher.slots[0].actor, no_restart=False)
    until(lambda: engine.num_up == 0)
    (output,) = ask(engine, prompts_of(1))
    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None
    assert output.error.startswith("every replica is lost: a replica ended while loading: ")
    assert notes[-1].startswith("replica 1 does not come back: a replica ended while loading: ")
    with pytest.raises(EngineClosedError, match="every replica is lost"):
        ask(engine, prompts_of(1))


def test_a_replica_without_room_is_waited_for(
    make: Callable[..., ReplicatedEngine], cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And somebody is told."""
    monkeypatch.setattr(replicated_engine, "WAITING_S", 0.1)
    notes: list[str] = []
    node = cluster.add_node(num_cpus=1)
    engine = make(4, notes)
    cluster.remove_node(node, allow_graceful=False)
    until(lambda: any("waits for room in Ray" in note for note in notes))
    assert engine.num_up == 3
    again = cluster.add_node(num_cpus=1)
    until(lambda: engine.num_up == 4)
    check(ask(engine, prompts := prompts_of(40)), prompts)
    engine.close()
    cluster.remove_node(again)


def test_a_poisoned_request_ends_alone(make: Callable[..., ReplicatedEngine]) -> None:
    engine = make(2, delay_s=0.002)
    prompts = prompts_of(40)
    prompts[17] = [50, POISON, 51]
    outputs = ask(engine, prompts)
    poisoned, prompt = outputs.pop(17), prompts.pop(17)
    assert prompt == [50, POISON, 51]
    assert poisoned.finish_reason is FinishReason.ERROR
    assert poisoned.error == "the request ended its replica 3 times, at last alone"
    check(outputs, prompts)


def stream(engine: ReplicatedEngine, count: int) -> queue.SimpleQueue[list[RequestOutput]]:
    heard: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    engine.submit(Request(request_id="s", prompt_token_ids=[5, 6, 7, 8], params=params), heard.put)
    return heard


def test_a_stream_that_has_not_begun_starts_again(
    make: Callable[..., ReplicatedEngine], tmp_path: Path
) -> None:
    (tmp_path / "death").touch()
    engine = make(1, delay_s=0.02, deaths=str(tmp_path))
    check(ask(engine, prompts := prompts_of(24)), prompts)
    heard, pieces = stream(engine, 4), list[RequestOutput]()
    while not pieces or not pieces[-1].is_finished:
        pieces += heard.get(timeout=PATIENCE_S)
    assert [id_ for piece in pieces for id_ in piece.token_ids] == [5, 6, 7, 8]


def test_a_stream_that_has_begun_ends_with_an_error(
    make: Callable[..., ReplicatedEngine],
) -> None:
    """What was handed out cannot be taken back."""
    engine = make(1, delay_s=0.2)
    heard = stream(engine, 400)
    assert heard.get(timeout=PATIENCE_S)[0].error is None
    ray.kill(engine.dispatcher.slots[0].actor, no_restart=False)
    last = heard.get(timeout=PATIENCE_S)[-1]
    while not last.is_finished:
        last = heard.get(timeout=PATIENCE_S)[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "the replica that answered was lost"
    check(ask(engine, prompts := prompts_of(3)), prompts)


def test_an_abort_is_the_last_that_is_heard(make: Callable[..., ReplicatedEngine]) -> None:
    engine = make(1, delay_s=0.3)
    heard: list[RequestOutput] = []
    params = SamplingParams(temperature=0.0, max_tokens=8)
    engine.submit(Request(request_id="x", prompt_token_ids=[5, 6], params=params), heard.extend)
    engine.abort("x")
    prompts = prompts_of(3)
    check(ask(engine, prompts), prompts)
    assert [output.finish_reason for output in heard if output.is_finished] == [FinishReason.ABORT]
    assert heard[-1].is_finished


def test_what_cannot_be_loaded_is_told_as_ever(make: Callable[..., ReplicatedEngine]) -> None:
    with pytest.raises(WeightsError, match="no such weights") as caught:
        make(2, error="no such weights")
    assert caught.value.hint == "Find another."


def test_a_closed_engine_answers_what_waits(make: Callable[..., ReplicatedEngine]) -> None:
    engine = make(1)
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.submit(Request(request_id="r", prompt_token_ids=[5], params=SamplingParams()), print)


def test_more_replicas_than_the_cluster_holds(make: Callable[..., ReplicatedEngine]) -> None:
    with pytest.raises(ClusterError, match="4 replicas take a CPU each, and the cluster has 3"):
        make(4)


# --- the command ---------------------------------------------------------------------------------


def batch(*args: str) -> list[str]:
    return [sys.executable, "-m", "nvcli", "batch", *args, "--device", "cpu", "--seed", "7"]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_batch_over_three_nodes_of_which_one_is_killed(cluster: Any, tmp_path: Path) -> None:
    """Its output is that of one engine."""
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(f'{{"prompt": "Tell me about {i}."}}\n' for i in range(72)))
    options = ["--max-tokens", "24", "-o"]
    subprocess.run(batch(str(source), *options, str(tmp_path / "one.jsonl")), check=True)

    node = cluster.add_node(num_cpus=1)  # the fourth: the module's three stay for other tests
    output = tmp_path / "three.jsonl"
    run = subprocess.Popen(
        batch("-", *options, str(output), "--replicas", "4", "--ray-address", cluster.address),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_ADDRESS": ""},
    )
    assert run.stdin is not None
    records = source.read_text().splitlines(keepends=True)
    run.stdin.writelines(records[:36])
    run.stdin.flush()
    until(lambda: run.poll() is not None or (output.exists() and output.stat().st_size > 0))
    assert run.poll() is None, run.communicate()
    cluster.remove_node(node, allow_graceful=False)
    printed, errors = run.communicate("".join(records[36:]))
    assert run.returncode == 0, errors
    assert printed == ""  # without -o the answers stand there
    assert "was lost; its" in errors
    for line in errors.splitlines():  # no library speaks
        assert line.startswith("replica ") or " records " in line
    found, expected = lines_of(output), lines_of(tmp_path / "one.jsonl")
    assert [line["index"] for line in found] == list(range(72))
    assert [line["text"] for line in found] == [line["text"] for line in expected]
