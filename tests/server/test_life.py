"""The life cycle, with real processes: ready file, drain, signals, ports, sockets, failures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from nvcli.errors import UsageError
from nvcli.server.run import _write_ready_file as write_ready_file
from tests.server import test_mcp as mcp
from tests.server.conftest import DEFAULTS, parse_events
from tests.waiting import PATIENCE_S, is_running, run_command, until

CHAT = "/v1/chat/completions"


class Process:
    def __init__(self, ready_file: Path, options: dict[str, Any]) -> None:
        self.ready_file = ready_file
        self.answer = ""
        options = {"ready_file": str(ready_file), **options}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.run_scripted", json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_ready(self) -> dict[str, Any]:
        until(lambda: self.ready_file.exists() or self.process.poll() is not None, "it is ready")
        assert self.process.poll() is None, self.process.communicate()[0]
        value: dict[str, Any] = json.loads(self.ready_file.read_text())
        return value

    def client(self) -> httpx.Client:
        url = self.wait_ready()["url"]
        return httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False)

    def ask(self, client: httpx.Client) -> threading.Thread:
        """Start a stream that another client sees to be on its way; its text is `self.answer`."""

        def post() -> None:
            with contextlib.suppress(httpx.HTTPError):  # the server may end before its answer
                self.answer = client.post(CHAT, json={**DEFAULTS, "stream": True}).text

        thread = threading.Thread(target=post)
        thread.start()
        self.wait_open(1)
        return thread

    def wait_open(self, count: int) -> None:
        is_open = f'nvcli:open_sequences{{model_name="scripted"}} {count}.0'
        with self.client() as other:
            until(lambda: is_open in other.get("/metrics").text, "the requests run")

    def signal_and_see(self, number: int, client: httpx.Client) -> None:
        """Send a signal, and wait until the server has taken it."""
        self.process.send_signal(number)
        until(lambda: client.get("/health").status_code == 503, "the server drains")

    def end(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Process] = []

    def make(**options: Any) -> Process:
        process = Process(tmp_path / f"ready-{len(running)}.json", options)
        running.append(process)
        return process

    yield make
    for process in running:
        if process.process.poll() is None:
            process.process.kill()
            process.process.communicate()


def test_ready_then_drain_then_exit_0(start: Start, tmp_path: Path) -> None:
    process = start(answer="x" * 60, answer_gate=str(tmp_path / "gate"))
    ready = process.wait_ready()
    assert ready["pid"] == process.process.pid
    assert ready["model"] == "scripted"
    with process.client() as client, process.client() as other:
        assert other.get("/health").status_code == 200
        thread = process.ask(client)
        process.signal_and_see(signal.SIGTERM, other)
        refused = other.post(CHAT, json=DEFAULTS)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert other.get("/live").status_code == 200
        (tmp_path / "gate").touch()
        thread.join()
    assert process.answer.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"stop"' in process.answer
    code, out = process.end()
    assert code == 0
    assert "serving scripted on http://127.0.0.1:" in out
    assert not process.ready_file.exists()


POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n"


def send(process: Process, data: bytes) -> socket.socket:
    """A connection on which these bytes have reached the server, and nothing comes after them."""
    host, port = process.wait_ready()["url"].removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    sock.sendall(data)
    with process.client() as other:
        assert other.get("/live").status_code == 200  # it reads in the order of arrival
    return sock


def read_to_end(sock: socket.socket) -> bytes:
    with sock:
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def test_what_has_not_arrived_holds_up_no_drain(start: Start, tmp_path: Path) -> None:
    """Whoever is still sending is refused at once; what is being answered is finished."""
    process = start(answer="x" * 60, answer_gate=str(tmp_path / "gate"), drain_timeout=1e6)
    in_body = [
        send(process, POST + b"\r\n{"),
        send(process, POST + b"expect: 100-continue\r\n\r\n"),
    ]
    others = [send(process, data) for data in (b"", POST, b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")]
    with process.client() as client, process.client() as other:
        thread = process.ask(client)
        process.signal_and_see(signal.SIGTERM, other)
        in_body.append(send(process, POST + b"\r\n{"))  # while it drains
        for sock in in_body:
            reply = read_to_end(sock).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert reply.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nconnection: close\r\n" in reply
            assert reply.count(b"the server is shutting down") == 1
        assert thread.is_alive(), "the answer is on its way"
        (tmp_path / "gate").touch()
        thread.join()
    assert process.answer.endswith("data: [DONE]\n\n")
    assert [read_to_end(sock)[:15] for sock in others] == [b"", b"", b"HTTP/1.1 200 OK"]
    code, out = process.end()
    assert code == 0
    assert "draining 1 request;" in out


def test_half_a_body_does_not_hold_up_the_end_of_loading(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "serve.sock"
    process = start(uds=str(path), load_gate="/nowhere", close_s=1e6)
    wait_listening(path)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.sendall(POST.replace(CHAT.encode(), b"/tokenize") + b"\r\n{")
        with client_of(path) as client:
            assert client.get("/health").status_code == 503
        process.process.send_signal(signal.SIGTERM)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
    assert process.end()[0] == 0


def test_the_drain_has_a_timeout(start: Start) -> None:
    process = start(answer_gate="/nowhere", drain_timeout=0.3, close_s=0.3)  # it never comes
    with process.client() as client:
        thread = process.ask(client)
        process.process.send_signal(signal.SIGTERM)
        code, out = process.end()
        thread.join()
    assert code == 0
    assert "1 request did not end in time" in out
    assert "Traceback" not in out
    assert '"message":"the server is shutting down' in process.answer, "though the engine hangs"


@pytest.mark.parametrize("is_remote", [False, True])
def test_who_is_not_done_in_time_is_told(start: Start, is_remote: bool) -> None:
    """A stream ends with an error event, any other request with a status: nothing breaks off."""
    endless = "x" * 100_000
    process = start(answer=endless, delay_s=0.02, drain_timeout=0.3, is_remote=is_remote)
    process.wait_ready()
    plain: list[httpx.Response] = []
    with process.client() as client, process.client() as other:
        thread = process.ask(client)
        body = DEFAULTS | {"stream": False}
        waiting = threading.Thread(target=lambda: plain.append(other.post(CHAT, json=body)))
        waiting.start()
        process.wait_open(2)
        process.process.send_signal(signal.SIGTERM)
        thread.join()
        waiting.join()
        code, out = process.end()
    assert code == 0
    assert "2 requests did not end in time" in out
    assert "Traceback" not in out
    assert '"error":{"message":"the server is shutting down' in process.answer
    assert process.answer.endswith("\n\n")
    assert plain[0].status_code == 503
    assert plain[0].json()["error"]["message"].startswith("the server is shutting down")


@pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed")
def test_who_waits_for_a_tool_is_told(start: Start, tmp_path: Path) -> None:
    """The call of a tool that hangs ends with an error, and so does the response it belongs to."""
    answer = mcp.call("multiply", '{"a": 2, "b": 3}')
    servers = str(mcp.write(tmp_path, "held"))
    size = {"max_model_len": 8192, "num_blocks": 2048}
    process = start(answer=answer, mcp_file=servers, drain_timeout=0.3, **size)
    tools = [mcp.tool("held")]
    body = {"model": "scripted", "input": "hi", "stream": True, "tools": tools}
    text = ""
    with process.client() as client, client.stream("POST", mcp.PATH, json=body) as response:
        for line in response.iter_lines():
            text += f"{line}\n"
            if line == "event: response.mcp_call_arguments.done":
                process.process.send_signal(signal.SIGTERM)
    assert "event: response.mcp_call_arguments.done" in text
    code, out = process.end()
    assert code == 0
    assert "1 request did not end in time" in out
    assert "Traceback" not in out
    final = mcp.check(parse_events(text))
    assert final["status"] == "failed"
    assert final["error"]["message"].startswith("the server is shutting down")
    listed, made = final["output"]
    assert listed["error"] is None
    assert "connection" in made["error"].lower()  # of the SDK, or of ours: who notices first


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(start: Start, number: signal.Signals) -> None:
    process = start(answer_gate="/nowhere", drain_timeout=1e6)
    with process.client() as client, process.client() as other:
        thread = process.ask(client)
        process.signal_and_see(number, other)
        process.process.send_signal(number)
        code, _ = process.end()
        thread.join()
    assert code == 128 + number
    assert not process.ready_file.exists()


def test_a_signal_while_loading_ends(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "serve.sock"
    process = start(uds=str(path), load_gate="/nowhere")
    with client_of(path) as client:
        wait_listening(path)
        assert client.get("/health").status_code == 503
    process.process.send_signal(signal.SIGTERM)
    assert process.end()[0] == 0


def client_of(path: Path) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(path))
    return httpx.Client(base_url="http://x", transport=transport, timeout=PATIENCE_S)


def wait_listening(path: Path) -> None:
    def listens() -> bool:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(path))
            return True
        return False

    until(listens, f"somebody listens at {path}")


def test_a_unix_socket_answers_while_loading(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "serve.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    process = start(uds=str(path), load_gate=str(tmp_path / "gate"))
    with client_of(path) as client:
        wait_listening(path)
        response = client.get("/health")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "not_ready"
        assert client.post(CHAT, json=DEFAULTS).status_code == 503
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        (tmp_path / "gate").touch()
        process.wait_ready()
        assert client.post(CHAT, json=DEFAULTS).status_code == 200
    second = start(uds=str(path))
    code, out = second.end()
    assert code == 1
    assert "in use" in out
    process.process.send_signal(signal.SIGTERM)
    assert process.end()[0] == 0
    assert not path.exists()


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rsplit(")", 1)[1].split()
            if fields[0] != "Z" and int(fields[1]) == pid:
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_engine_of_its_own_lives_and_dies_with_the_server(
    start: Start, number: signal.Signals
) -> None:
    process = start(is_remote=True)
    process.wait_ready()
    (child,) = children_of(process.process.pid)
    time.sleep(1.0)  # the thread that loaded has ended
    with process.client() as client:
        name = client.get("/v1/models").json()["data"][0]["id"]
        value = client.post(CHAT, json={**DEFAULTS, "model": name}).json()
        assert value["choices"][0]["message"]["content"] == "Hello!"
    process.process.send_signal(number)
    assert process.end()[0] == (0 if number == signal.SIGTERM else -9)
    until(lambda: not is_running(child), "the engine ends with its server")


def test_a_server_says_what_ended_its_engine(start: Start) -> None:
    process = start(is_remote=True)
    process.wait_ready()
    (child,) = children_of(process.process.pid)
    os.kill(child, signal.SIGKILL)
    code, out = process.end()
    assert code == 1
    assert out.splitlines()[-1] == "the engine stopped: its process was ended by SIGKILL"


def test_a_second_door_for_attach(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "nvcli" / "serve.sock"
    first = start(attach_socket=str(path))
    first.wait_ready()
    with client_of(path) as client, first.client() as other:
        assert client.get("/v1/models").json() == other.get("/v1/models").json()
    second = start(attach_socket=str(path))  # the door is taken: it serves without
    second.wait_ready()
    second.process.send_signal(signal.SIGTERM)
    assert second.end()[0] == 0
    assert path.exists()
    first.process.send_signal(signal.SIGTERM)
    assert first.end()[0] == 0
    assert not path.exists()


def test_a_model_that_does_not_load_is_told(start: Start) -> None:
    code, out = start(load_error="no such weights").end()
    assert code == 3
    assert "no such weights" in out


def test_a_port_in_use_is_told_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        command = [sys.executable, "-m", "nvcli", "serve", "--port", port, "-m", "/nowhere"]
        done = run_command(command)
    assert done.returncode == 1
    assert done.stderr.startswith(f"nvcli: 127.0.0.1:{port} is in use by another process")


def test_a_wide_address_without_a_key_is_warned_about(start: Start) -> None:
    process = start(host="0.0.0.0")
    process.wait_ready()
    process.process.send_signal(signal.SIGTERM)
    code, out = process.end()
    assert code == 0
    assert "give --api-key-file" in out


def test_a_ready_file_that_cannot_be_written_leaves_nothing_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "ready"
    folder.mkdir()
    with pytest.raises(UsageError, match=f"cannot write {folder}"):
        write_ready_file(folder, "http://127.0.0.1:1", "m")
    assert list(tmp_path.iterdir()) == [folder]
