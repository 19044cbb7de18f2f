"""How Ray is started and joined, and what is told where that cannot be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nvcli import __version__
from nvcli.cluster import actors, reaper, runtime
from nvcli.cluster.own_cluster import OwnCluster
from nvcli.cluster.runtime import ClusterError, connect, require_ray, resources_of
from nvcli.config import EngineConfig
from nvcli.errors import UsageError
from tests.cluster.processes import listening, of_session
from tests.waiting import PATIENCE_S, run_command, until

pytestmark = pytest.mark.torch
ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'nvcli[ray]'")


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """`init(error, ...)`: what Ray's start raises each time, None where it works; gives the calls
    that Ray gets."""

    def make(*errors: Exception | None) -> list[str]:
        calls: list[str] = []
        left = list(errors)

        def fake(**options: Any) -> None:
            calls.append(f"init {options['address']}")
            error = left.pop(0)
            if error is not None:
                raise error

        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray, "init", fake)
        monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
        monkeypatch.setattr(runtime, "_keep_stdout_ours", lambda ray: None)
        monkeypatch.setenv("RAY_ADDRESS", "")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "of the test")
        return calls

    yield make
    runtime._end_own()


def test_a_start_that_fails_is_tried_once_more(init: Callable[..., list[str]]) -> None:
    """Ray raises whatever it likes, bare `Exception` too."""
    calls = init(Exception("The current node timed out during startup."), None)
    assert connect(None)
    assert calls == ["init local", "shutdown", "init local"]


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ({}, "/tmp"),
        ({"TMPDIR": "/scratch"}, "/scratch"),
        ({"TMPDIR": "/scratch", "RAY_TMPDIR": "/fast"}, "/fast"),
    ],
)
def test_a_start_that_fails_twice_is_one_line(
    init: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    folder: str,
) -> None:
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    calls = init(RuntimeError("a port"), Exception("\n  no room on the disk.\nmore\nlines"))
    with pytest.raises(ClusterError) as caught:
        connect(None)
    assert caught.value.message == "Ray cannot be started on this machine: no room on the disk"
    assert caught.value.hint == f"Its logs are in {folder}/ray/session_latest/logs."
    assert calls == ["init local", "shutdown", "init local"]


def test_what_was_waited_for_is_not_waited_for_again(
    init: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = init(ConnectionError("nobody there"))
    clock = iter([0.0, 90.0])
    monkeypatch.setattr(runtime.time, "monotonic", lambda: next(clock))
    with pytest.raises(ClusterError, match="there is no Ray cluster at auto: nobody there"):
        connect("auto")
    assert calls == ["init auto", "shutdown"]


def test_a_cluster_of_ours_has_a_token_of_its_own(
    init: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = set()
    for _ in range(2):
        init(None)
        monkeypatch.delenv("RAY_AUTH_TOKEN")
        assert connect(None)
        tokens.add(os.environ.pop("RAY_AUTH_TOKEN"))
    assert [len(token) for token in tokens] == [64, 64]
    init(None)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    assert connect(None)
    assert os.environ["RAY_AUTH_TOKEN"] == "given"
    init(None)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    assert connect("auto")
    assert "RAY_AUTH_TOKEN" not in os.environ  # that of the cluster is in the home folder


def test_every_replica_has_our_version() -> None:
    actors.check_version(__version__)
    for version, told in (("0.0.1", "a replica runs nvcli 0.0.1, "), (None, "another version, ")):
        with pytest.raises(ClusterError, match=told) as caught:
            actors.check_version(version)
        assert caught.value.message.endswith(f"here it is {__version__}")


NODE = {"CPU": 4.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("nodes", "size", "count", "expected"),
    [
        ([NODE, NODE], 1, 8, {"num_cpus": 0, "num_gpus": 1}),
        ([{"CPU": 1.0, "GPU": 8.0}], 1, 8, {"num_cpus": 0, "num_gpus": 1}),
        ([NODE, NODE], 2, 4, {"num_cpus": 0, "num_gpus": 2}),
        ([NODE, NODE], 1, 9, "9 replicas take 9 GPUs, and the cluster has 8"),
        (
            [NODE, NODE],
            8,
            1,
            "1 replica takes 8 GPUs of one machine, and the cluster has room for 0",
        ),
        ([NODE, {"GPU": 3.0}], 2, 3, {"num_cpus": 0, "num_gpus": 2}),
        ([{"CPU": 4.0}], 1, 4, {"num_cpus": 1}),
        ([{"CPU": 1.5}, {"CPU": 1.5}], 1, 3, "3 replicas take a CPU each, and the cluster has 2"),
        ([], 1, 1, "1 replica takes a CPU, and the cluster has 0"),
        ([], 4, 2, "2 replicas take a CPU each, and the cluster has 0"),
        (
            [{"GPU": 1.0}] * 4,
            2,
            2,
            "2 replicas take 2 GPUs of one machine each, and the cluster has room for 0",
        ),
        ([{"GPU": 1.0}], 2, 1, "1 replica takes 2 GPUs, and the cluster has 1"),
    ],
)
def test_what_replicas_take(
    monkeypatch: pytest.MonkeyPatch,
    nodes: list[dict[str, float]],
    size: int,
    count: int,
    expected: Any,
) -> None:
    """An engine's GPUs are on one machine; a cluster that cannot hold all is told at once."""
    alive = [{"Alive": True, "Resources": node} for node in nodes]
    dead = {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 64.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [*alive, dead])
    config = EngineConfig(model="demo", tensor_parallel_size=size)
    if isinstance(expected, str):
        with pytest.raises(ClusterError) as caught:
            resources_of(config, count)
        assert caught.value.message == expected
    else:
        assert resources_of(config, count) == expected


def test_ray_started_by_a_thread_that_ends() -> None:
    """As a server loads. Ray goes on, takes no SIGTERM for a crash, and its word of a lost node
    does not stand between the answers of a batch."""
    script = """
import ctypes, os, signal, threading, time
caught = []
signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
from nvcli.cluster import runtime
import ray
start, handlers = ray.init, []
def init(**options):
    start(**options)
    handlers.append(ctypes.pythonapi.PyOS_getsig(signal.SIGTERM))
ray.init = init
ctypes.pythonapi.PyOS_getsig.restype = ctypes.c_void_p
before = ctypes.pythonapi.PyOS_getsig(signal.SIGTERM)
thread = threading.Thread(target=runtime.connect, args=(None,))
thread.start()
thread.join()
ray._private.worker.print_to_stdstream(
    {"lines": ["a node died"], "pid": "raylet", "is_err": False}, ignore_prefix=False
)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1)
print(caught, ray.get(ray.remote(lambda: True).remote()), handlers == [before], flush=True)
runtime.disconnect()
"""
    found = run_command([sys.executable, "-c", script], env={**os.environ, "RAY_ADDRESS": ""})
    assert (found.returncode, found.stdout, found.stderr) == (0, "[15] True True\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' /proc")
def test_a_cluster_of_ours_is_this_machines_and_ends_with_its_process() -> None:
    """However that ends. Ray's own helpers would look for a killed cluster for a minute."""
    script = """
import sys
from nvcli.cluster import runtime
runtime.connect(None)
import ray
class Actor:
    def hello(self):
        return "up"
actor = ray.remote(Actor).remote()
print(ray.get(actor.hello.remote()), flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "RAY_ADDRESS": ""},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        pids = of_session(process.pid)
        assert len(pids) > 4
        assert listening(pids) == {"127.0.0.1"}
        process.kill()
        until(lambda: not of_session(process.pid), "the cluster ends")


def test_the_next_cluster_may_have_other_machines(init: Callable[..., list[str]]) -> None:
    """What is set while one is started here does not outlast the start, also where that fails."""
    constants = ray._private.ray_constants
    init(None)
    assert connect(None)
    init(RuntimeError("no"), RuntimeError("no"))
    with pytest.raises(ClusterError):
        connect(None)
    assert not {reaper.MARK, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"} & os.environ.keys()
    assert constants.ENABLE_RAY_CLUSTER


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' /proc")
def test_the_reaper_kills_what_has_its_mark_and_nothing_else() -> None:
    """Also what has given itself a title, as Ray's agents do."""
    title = "import ray; ray._raylet.setproctitle('ray::Agent')"
    stay = "import sys; print('up', flush=True); sys.stdin.read()"
    own = OwnCluster()
    with own.starting(ray):
        # A variable set anew, as Ray's import does, may keep the title from the environment.
        environment = {k: v for k, v in os.environ.items() if k != "RAY_CLIENT_MODE"}
    mark = environment[reaper.MARK]
    ours, other = (
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, reaper.MARK: value},
        )
        for code, value in ((f"{title}; {stay}", mark), (stay, f"{mark} too"))
    )
    with ours, other:
        for process in (ours, other):
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        assert reaper.marked(mark) == [ours.pid]
        own.end()
        assert ours.wait(PATIENCE_S) == -signal.SIGKILL
        assert other.poll() is None


def test_batch_without_a_cluster_at_the_address(tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "hi"}\n')
    command = [sys.executable, "-m", "nvcli", "batch", str(source), "--device", "cpu"]
    command += ["--replicas", "1", "--ray-address", "127.0.0.1:1"]
    found = run_command(command)
    assert found.returncode == 3
    assert "there is no Ray cluster at 127.0.0.1:1" in found.stderr
    assert found.stderr.count("\n") == 1


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--replicas needs Ray") as caught:
        require_ray()
    assert caught.value.hint == "pip install 'nvcli[ray]'."
