"""`nvcli serve --replicas`: one address for several engines, a rolling restart behind it, and two
of them on one machine."""

from __future__ import annotations

import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from nvcli.models.resolve import resolve_model
from tests.cluster.serving import ServeProcess, descendants, metric, stream_chat
from tests.waiting import PATIENCE_S, is_running, until

pytestmark = pytest.mark.torch
pytest.importorskip("ray", reason="Ray is not installed: pip install 'nvcli[ray]'")


def test_serve_over_replicas(cluster: Any, tmp_path: Path) -> None:
    """The same server: streams, metrics over all replicas, an end on SIGTERM."""
    options = ("--replicas", "2", "--ray-address", cluster.address)
    with ServeProcess(tmp_path / "ready.json", *options) as server:
        client = server.wait_ready()

        def ask(i: int) -> str:
            return stream_chat(client, f"What is {i} + 1?")[0]

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(1, 9)))
        assert [str(i + 1) in text for i, text in enumerate(answers, 1)].count(True) >= 6
        assert metric(client, "nvcli:replicas") == 2
        assert metric(client, "nvcli:replicas_up") == 2
        assert metric(client, "nvcli:replicas_draining") == 0
        text = client.get("/metrics").text
        counts = [
            line.rpartition(" ")[2]
            for line in text.splitlines()
            if line.startswith("nvcli:request_success_total{")
        ]
        assert sum(map(float, counts)) == 8
        # of the engines, half a second old at most
        until(lambda: metric(client, "vllm:prefix_cache_queries_total") >= 8 * 8)
        until(lambda: metric(client, "nvcli:num_requests_running") == 0)
        assert metric(client, "nvcli:kv_blocks_free") == metric(client, "nvcli:kv_blocks")
        for _ in range(3):  # a client that leaves frees what was counted for it
            body = {"model": "demo", "prompt": "x", "max_tokens": 2000, "ignore_eos": True}
            with client.stream(
                "POST", "/v1/completions", json={**body, "stream": True}
            ) as response:
                next(response.iter_bytes())
        until(lambda: metric(client, "nvcli:requests_aborted_total") == 3)
        until(lambda: metric(client, "nvcli:open_sequences") == 0)
        until(lambda: metric(client, "nvcli:num_requests_running") == 0)
        assert server.end() == 0, server.errors


def change_weights(folder: Path) -> None:
    """Another file in place of the old one, as a download does it."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    changed = {
        name: tensor if tensor.ndim < 2 else torch.randn_like(tensor.float()).to(tensor.dtype) / 8
        for name, tensor in tensors.items()
    }
    save_file(changed, folder / "new.safetensors", metadata={"format": "pt"})
    (folder / "new.safetensors").replace(folder / "model.safetensors")


def test_sighup_replaces_the_replicas_under_load(cluster: Any, tmp_path: Path) -> None:
    """No stream is refused, none breaks; the new ones have what is on the disk. SIGTERM in the
    middle of another restart drains and ends all."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("demo"), folder)
    options = ("--replicas", "2", "--ray-address", cluster.address, "-m", str(folder))
    name = ("--served-model-name", "demo")
    with ServeProcess(tmp_path / "ready.json", *options, *name) as server:
        client = server.wait_ready()
        question = "What is the capital of France?"
        before, _ = stream_chat(client, question)
        change_weights(folder)
        is_over = threading.Event()

        def keep_asking(number: int) -> int:
            count = 0
            while not is_over.is_set():
                assert stream_chat(client, f"What is {number} + {count}?")[1] in ("stop", "length")
                count += 1
            return count

        with ThreadPoolExecutor(2) as pool:
            clients = [pool.submit(keep_asking, number) for number in range(2)]
            try:
                until(lambda: metric(client, "nvcli:generation_tokens_total") > 50)
                server.process.send_signal(signal.SIGHUP)
                server.wait_for("rolling restart of 2 replicas, one after another")
                server.process.send_signal(signal.SIGHUP)
                server.wait_for("under way already; this one is ignored")
                server.wait_for("the rolling restart is done")
            finally:
                is_over.set()
            assert all(client.result(PATIENCE_S) > 0 for client in clients)
        assert metric(client, "nvcli:replicas_up") == 2
        assert stream_chat(client, question)[0] != before

        server.process.send_signal(signal.SIGHUP)
        until(lambda: sum("rolling restart of 2" in line for line in server.errors) == 2)
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(stream_chat, client, question, max_tokens=200, ignore_eos=True)
            until(lambda: last.done() or metric(client, "nvcli:open_sequences") == 1)
            assert server.end() == 0, server.errors
            assert last.result(PATIENCE_S)[1] == "length"
        assert not any("Traceback" in line for line in server.errors)


def test_two_servers_with_replicas_on_one_machine(tmp_path: Path) -> None:
    """Started at once, by a user who has never started Ray; one that is killed takes all of its own
    processes with it and none of the other's."""
    first, second = (
        ServeProcess(tmp_path / f"{i}.json", "--replicas", "2", HOME=str(tmp_path))
        for i in range(2)
    )
    with first, second:
        clients = [first.wait_ready(), second.wait_ready()]
        for client in clients:
            assert metric(client, "nvcli:replicas_up") == 2
            assert stream_chat(client, "What is 2 + 2?")[1] == "stop"
        processes = descendants(first.process.pid)
        assert len(processes) >= 3  # Ray's and the replicas
        first.process.kill()
        first.process.wait()
        until(lambda: not any(map(is_running, processes)))
        with ThreadPoolExecutor(4) as pool:
            answers = list(
                pool.map(lambda i: stream_chat(clients[1], f"What is {i} + 2?"), range(8))
            )
        assert all(reason == "stop" for _, reason in answers)
        with pytest.raises(httpx.TransportError):
            clients[0].get("/live")
        rest = descendants(second.process.pid)
        assert second.end() == 0, second.errors
        until(lambda: not any(map(is_running, rest)))
        assert not (tmp_path / ".ray").exists()  # a token of its own, in no file
        for line in (*first.errors, *second.errors):  # no library speaks
            assert line.startswith("serving ") or line.endswith(" s"), line
