"""Tensor parallelism with worker processes: real text, and what happens when a process ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import nvcli
from nvcli import LLM, SamplingParams
from nvcli.engine import engine_thread, executor, model_runner, workers
from nvcli.engine.executor import TensorParallelDevice
from nvcli.errors import EngineClosedError, NvcliError, UsageError, WeightsError
from nvcli.types import FinishReason
from tests.engine.short_sums import LibrarySums
from tests.tiny import write_tensors, write_tiny_checkpoint
from tests.waiting import PATIENCE_S, is_running, until

pytestmark = pytest.mark.torch

GREEDY = SamplingParams(temperature=0.0, max_tokens=30)


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may take as long as the machine needs to say what it died of."""
    for name in ("_END_S", "_REPORT_S", "_SUSPICION_S"):
        monkeypatch.setattr(workers, name, PATIENCE_S / 4)


def copy_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(nvcli.__file__).parent / "demo" / name, folder)


def worker_pids(llm: LLM) -> list[int]:
    assert isinstance(llm._runner, TensorParallelDevice)
    return [process.pid for process in llm._runner._workers._processes.values()]


def test_text_equals_that_of_one_process_and_two_engines_get_along() -> None:
    prompts = ["What is 3+4?", "Say hello.", "Name a colour."]
    with (
        LLM(device="cpu") as alone,
        LLM(device="cpu", tensor_parallel_size=2) as first,
        LLM(device="cpu", tensor_parallel_size=2) as second,
    ):
        pids = [*worker_pids(first), *worker_pids(second)]
        assert first.startup.tensor_parallel_size == 2
        for prompt in prompts:
            expected = alone.chat(prompt, GREEDY, enable_thinking=False).text
            streams = [llm.stream(prompt, GREEDY, enable_thinking=False) for llm in (first, second)]
            for stream in streams:
                assert "".join(output.text for output in stream) == expected
    assert not any(map(is_running, pids))


def test_a_killed_worker_is_one_error_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch)
    write_tiny_checkpoint(tmp_path, heads=3, kv_heads=3, max_position_embeddings=16384)
    llm = LLM(str(tmp_path), device="cpu", tensor_parallel_size=3, load_format="dummy")
    pids = worker_pids(llm)
    params = SamplingParams(temperature=0.0, max_tokens=16000, ignore_eos=True)
    streams = [llm.stream([5, 6, 7], params) for _ in range(2)]
    for stream in streams:
        next(stream)
    os.kill(pids[1], signal.SIGKILL)
    for stream in streams:
        last = list(stream)[-1]
        assert last.finish_reason is FinishReason.ERROR
        assert last.error == "the engine stopped: the process of rank 2 of 3 was ended by SIGKILL"
    until(lambda: not any(map(is_running, pids)), "all workers have ended")
    with pytest.raises(EngineClosedError, match="rank 2 of 3 was ended by SIGKILL"):
        llm.stream([5], GREEDY)
    llm.close()


def test_a_rank_that_waited_too_long_is_one_error() -> None:
    llm = LLM(device="cpu", tensor_parallel_size=2)
    pids = worker_pids(llm)
    assert isinstance(llm._runner, TensorParallelDevice)
    group = llm._runner._workers.group
    assert group is not None
    params = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
    stream = llm.stream([5, 6, 7], params)
    next(stream)
    sums = group.short = LibrarySums(group, 0, fuses_norm=True)  # takes none
    sums.gave_up = True
    last = list(stream)[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "the engine stopped: rank 0 of 2 waited too long for another"
    until(lambda: not any(map(is_running, pids)))
    llm.close()
    assert sums.calls[-1] == "close"
    assert "stop" in sums.calls[:-1]


def test_an_engine_whose_rank_stands_still_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped and not dead: nothing tells of it, and the step never ends."""
    monkeypatch.setattr(engine_thread, "_LAST_STEP_S", 0.5)
    llm = LLM(device="cpu", tensor_parallel_size=2)
    pids = worker_pids(llm)
    params = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
    stream = llm.stream([5, 6, 7], params)
    next(stream)
    os.kill(pids[0], signal.SIGSTOP)
    llm.close()
    assert [output.finish_reason for output in stream][-1] is FinishReason.ERROR
    assert not any(map(is_running, pids))


def test_a_step_without_an_end_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(executor.STEP_S, "cpu", PATIENCE_S / 4)
    llm = LLM(device="cpu", tensor_parallel_size=2)
    pids = worker_pids(llm)
    params = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
    stream = llm.stream([5, 6, 7], params)
    next(stream)
    os.kill(pids[0], signal.SIGSTOP)
    assert isinstance(llm._runner, TensorParallelDevice)
    waiting = llm._runner._workers
    until(lambda: waiting.deadline is not None, "a step waits")
    llm._runner._step_s = 0.0
    waiting.deadline = 0.0
    last = list(stream)[-1]
    assert last.error == "the engine stopped: a step does not come to an end"
    until(lambda: not any(map(is_running, pids)))
    llm.close()


def test_ctrl_c_while_loading_waits_for_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that loads does not hear that it should end."""
    monkeypatch.setattr(workers, "_END_S", PATIENCE_S)
    found: list[int] = []

    def interrupted(*args: object, **options: object) -> None:
        found.extend(int(pid) for pid in _children())
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(PATIENCE_S)

    monkeypatch.setattr(model_runner, "ModelRunner", interrupted)
    before = {int(pid) for pid in _children()}
    with pytest.raises(KeyboardInterrupt):
        LLM(device="cpu", tensor_parallel_size=2)
    started = set(found) - before
    assert started
    assert not any(map(is_running, started))


def test_a_worker_that_dies_while_nothing_runs_is_noticed() -> None:
    llm = LLM(device="cpu", tensor_parallel_size=2)
    assert llm.is_alive
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # for the whole group: ignored
        os.kill(worker_pids(llm)[0], number)
    os.kill(worker_pids(llm)[0], signal.SIGKILL)
    until(lambda: not llm.is_alive, "the end is noticed")
    llm.close()
    llm.close()


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Also one that stands still; and not with the thread that loaded."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import threading, time\n"
        "from nvcli import LLM\n"
        "loaded = []\n"
        "def load(): loaded.append(LLM(device='cpu', tensor_parallel_size=2))\n"
        "thread = threading.Thread(target=load)\n"
        "thread.start()\n"
        "thread.join()\n"
        "(llm,) = loaded\n"
        "assert llm.generate('2 + 2', llm.sampling(max_tokens=2))[0].token_ids\n"
        "print(*(p.pid for p in llm._runner._workers._processes.values()), flush=True)\n"
        "time.sleep(3600)\n"
    )
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert pids
    assert all(map(is_running, pids))
    if sys.platform == "linux":
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not any(map(is_running, pids)), "the workers end with their parent")


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_cannot_load_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Only that rank reads the damaged part; the other one waits for it in a collective."""
    if rank > 0:
        be_patient(monkeypatch)
    tensors = write_tiny_checkpoint(tmp_path, vocab=4200, write_tokenizer=copy_tokenizer)
    weight = tensors["model.layers.1.mlp.down_proj.weight"]
    weight[3, rank * weight.shape[1] // 2] = float("nan")
    write_tensors(tmp_path, tensors)
    before = _children()
    with pytest.raises(WeightsError, match=r"down_proj\.weight holds values that are not numbers"):
        LLM(str(tmp_path), device="cpu", tensor_parallel_size=2, load_format="safetensors")
    assert _children() <= before


def test_a_size_that_does_not_fit_costs_nothing() -> None:
    before = _children()
    with pytest.raises(UsageError, match="--tensor-parallel-size 5") as caught:
        LLM(device="cpu", tensor_parallel_size=5)
    assert isinstance(caught.value, NvcliError)
    assert _children() <= before


def _children() -> set[str]:
    found: set[str] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            found.update((task / "children").read_text().split())
    return found
