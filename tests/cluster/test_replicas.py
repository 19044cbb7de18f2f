"""Replicas on a local Ray cluster of three nodes: nothing is lost, nothing comes twice."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nvcli.cluster.replicated_engine import ReplicatedEngine
from nvcli.cluster.runtime import ClusterError, require_ray
from nvcli.config import EngineConfig
from nvcli.engine.engine import Request
from nvcli.errors import ContextLengthError, EngineClosedError, UsageError, WeightsError
from nvcli.types import FinishReason, RequestOutput, SamplingParams
from tests.cluster.scripted_replica import POISON, load
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.torch
ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'nvcli[ray]'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes of one CPU each; the test's process is connected."""
    from ray.cluster_utils import Cluster

    require_ray()
    found = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    for _ in range(2):
        found.add_node(num_cpus=1)
    ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture
def make(cluster: Any) -> Iterator[Callable[..., ReplicatedEngine]]:
    made: list[ReplicatedEngine] = []

    def make(count: int = 3, notes: list[str] | None = None, **options: Any) -> ReplicatedEngine:
        config = EngineConfig(model=json.dumps(options), device="cpu")
        told = notes if notes is not None else []
        made.append(ReplicatedEngine(config, count, note=told.append, load=load))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def ask(engine: ReplicatedEngine, prompts: list[list[int]]) -> list[RequestOutput]:
    """The answers in the order of the prompts; each comes once."""
    answers: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=8)
        request = Request(
            request_id=f"r-{i}", prompt_token_ids=prompt, params=params, is_streaming=False
        )
        engine.submit(request, answers.put)
    found: dict[str, RequestOutput] = {}
    while len(found) < len(prompts):
        for output in answers.get(timeout=PATIENCE_S):
            assert output.request_id not in found, "an answer came twice"
            found[output.request_id] = output
    with pytest.raises(queue.Empty):
        answers.get(timeout=0.05)
    return [found[f"r-{i}"] for i in range(len(prompts))]


def prompts_of(count: int) -> list[list[int]]:
    return [[100 + i % 150, 20 + i // 150, 5, 6, 100 + i % 7] for i in range(count)]


def check(outputs: list[RequestOutput], prompts: list[list[int]]) -> None:
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.error is None
        assert list(output.token_ids)[:4] == prompt[-4:]


def test_answers_come_from_all_replicas(make: Callable[..., ReplicatedEngine]) -> None:
    engine = make(delay_s=0.002)
    prompts = prompts_of(200)
    check(ask(engine, prompts), prompts)
    assert engine.num_replicas == 3
    until(lambda: engine.stats().num_queried_tokens >= 1000)  # of all together
    for slot in engine._slots:
        assert slot.stats is not None
        assert 0 < slot.stats.num_queried_tokens < 1000


def test_requests_that_begin_alike_meet_in_one_replica(
    make: Callable[..., ReplicatedEngine],
) -> None:
    engine = make(delay_s=0.001)
    common = list(range(20, 60))
    check(ask(engine, prompts := [[*common, 7, 7, 7, 7] for _ in range(3)]), prompts)
    ask(engine, [[*common, 100, 101, 102, 103]])
    until(lambda: engine.stats().num_hit_tokens > 0)


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
    ray.kill(engine._slots[0].actor, no_restart=False)
    last = heard.get(timeout=PATIENCE_S)[-1]
    while not last.is_finished:
        last = heard.get(timeout=PATIENCE_S)[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "the replica that answered was lost"
    check(ask(engine, prompts := prompts_of(3)), prompts)


def test_an_abort_is_not_answered(make: Callable[..., ReplicatedEngine]) -> None:
    engine = make(1, delay_s=0.3)
    heard: list[Any] = []
    params = SamplingParams(temperature=0.0, max_tokens=8)
    engine.submit(Request(request_id="x", prompt_token_ids=[5, 6], params=params), heard.append)
    engine.abort("x")
    prompts = prompts_of(3)
    check(ask(engine, prompts), prompts)
    assert heard == []


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
    source.write_text("".join(f'{{"prompt": "Tell me about {i}."}}\n' for i in range(120)))
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
    run.stdin.writelines(records[:60])
    run.stdin.flush()
    until(lambda: run.poll() is not None or (output.exists() and output.stat().st_size > 0))
    assert run.poll() is None, run.communicate()
    cluster.remove_node(node, allow_graceful=False)
    printed, errors = run.communicate("".join(records[60:]))
    assert run.returncode == 0, errors
    assert printed == ""  # without -o the answers stand there
    assert "was lost; its" in errors
    for line in errors.splitlines():  # no library speaks
        assert line.startswith("replica ") or " records " in line
    found, expected = lines_of(output), lines_of(tmp_path / "one.jsonl")
    assert [line["index"] for line in found] == list(range(120))
    assert [line["text"] for line in found] == [line["text"] for line in expected]


def test_serve_over_replicas(cluster: Any, tmp_path: Path) -> None:
    """The same server: streams, metrics over all replicas, an end on SIGTERM."""
    from openai import OpenAI

    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "nvcli", "serve", "--port", "0", "--ready-file", str(ready)]
    command += ["--device", "cpu", "--replicas", "2", "--ray-address", cluster.address]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: ready.exists() or server.poll() is not None)
        url = json.loads(ready.read_text())["url"]

        def answer(i: int) -> str:
            chunks = client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": f"What is {i} + 1?"}],
                temperature=0,
                max_tokens=24,
                stream=True,
                extra_body={"chat_template_kwargs": {"enable_thinking": False}},
            )
            return "".join(
                chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
            )

        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(answer, range(1, 9)))
            metrics = client._client.get(f"{url}/metrics")
        assert [str(i + 1) in text for i, text in enumerate(answers, 1)].count(True) >= 6
        assert 'nvcli:replicas_up{model_name="demo"} 2.0' in metrics.text
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=PATIENCE_S)
        assert server.returncode == 0, errors
    finally:
        server.kill()
        server.communicate()


def test_ray_started_by_a_thread_that_ends() -> None:
    """As a server loads. Ray goes on, takes no SIGTERM for a crash, and its word of a lost node
    does not stand between the answers of a batch."""
    script = """
import os, signal, threading, time
caught = []
signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
from nvcli.cluster import runtime
thread = threading.Thread(target=runtime.connect, args=(None,))
thread.start()
thread.join()
import ray
ray._private.worker.print_to_stdstream(
    {"lines": ["a node died"], "pid": "raylet", "is_err": False}, ignore_prefix=False
)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1)
print(caught, ray.get(ray.remote(lambda: True).remote()), flush=True)
ray.shutdown()
"""
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "RAY_ADDRESS": ""},
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "[15] True\n", "")


def test_batch_without_a_cluster_at_the_address(tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "hi"}\n')
    command = batch(str(source), "--replicas", "1", "--ray-address", "127.0.0.1:1")
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 3
    assert "there is no Ray cluster at 127.0.0.1:1" in found.stderr
    assert found.stderr.count("\n") == 1


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--replicas needs Ray") as caught:
        require_ray()
    assert caught.value.hint == "pip install 'nvcli[ray]'."
