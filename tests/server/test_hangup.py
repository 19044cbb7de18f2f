"""SIGHUP: a request for a rolling restart, or the end of the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nvcli.server import hangup
from nvcli.server.hangup import Hangup
from tests.server.conftest import DEFAULTS
from tests.waiting import PATIENCE_S, until

CHAT = "/v1/chat/completions"


class Process:
    """The server over a scripted engine; with a terminal of its own where `has_terminal`."""

    def __init__(
        self, folder: Path, *, has_terminal: bool = False, is_nohup: bool = False, **options: Any
    ) -> None:
        self.ready_file = folder / "ready.json"
        self.log = folder / "log"
        self._master, slave = pty.openpty()
        code = f"""
import fcntl, os, runpy, signal, sys, termios
signal.signal(signal.SIGHUP, signal.{"SIG_IGN" if is_nohup else "SIG_DFL"})
os.setsid()
if {has_terminal}:
    fcntl.ioctl({slave}, termios.TIOCSCTTY, 0)
os.close({slave})
os.close({self._master})
runpy.run_module("tests.server.run_scripted", run_name="__main__")
"""
        argument = json.dumps({"ready_file": str(self.ready_file), **options})
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, argument],
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[slave, self._master],
            )
        os.close(slave)

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, is_true: Callable[[], bool]) -> None:
        def check() -> bool:
            assert self.process.poll() is None, self.text
            return is_true()

        until(check)

    def client(self) -> httpx.Client:
        self.wait_for(self.ready_file.exists)
        url = json.loads(self.ready_file.read_text())["url"]
        return httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False)

    def hang_up(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    def take_terminal(self) -> None:
        """As a window that is closed, or a connection that is lost."""
        os.close(self._master)
        self._master = -1

    def end(self) -> None:
        if self._master >= 0:
            os.close(self._master)
        self.process.kill()
        self.process.wait()


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Process:
            process = Process(tmp_path, **options)
            stack.callback(process.end)
            return process

        yield make


def answer(client: httpx.Client) -> str:
    content = client.post(CHAT, json=DEFAULTS).json()["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


@pytest.mark.parametrize("has_terminal", [False, True])
def test_one_engine_says_that_it_cannot_be_replaced(start: Start, has_terminal: bool) -> None:
    """And goes on, where another program would be ended by the signal."""
    process = start(has_terminal=has_terminal)
    with process.client() as client:
        process.hang_up()
        told = "SIGHUP is ignored: the only engine cannot be replaced while it answers"
        process.wait_for(lambda: process.text.count(told) == 1)
        assert answer(client) == "Hello!"
        process.hang_up()
        process.wait_for(lambda: process.text.count(told) == 2)
        assert answer(client) == "Hello!"
    process.process.send_signal(signal.SIGTERM)
    assert process.process.wait(PATIENCE_S) == 0


def ask_until_drained(
    process: Process, gate: Path, client: httpx.Client, drain: Callable[[], None]
) -> str:
    """The text of a stream that is on its way when the server is told to drain."""
    replies: list[str] = []

    def post() -> None:
        replies.append(client.post(CHAT, json={**DEFAULTS, "stream": True}).text)

    thread = threading.Thread(target=post)
    thread.start()
    is_open = 'nvcli:open_sequences{model_name="scripted"} 1.0'
    with process.client() as other:
        process.wait_for(lambda: is_open in other.get("/metrics").text)
        drain()
        process.wait_for(lambda: "draining 1 request;" in process.text)
    gate.touch()
    thread.join(PATIENCE_S)
    return replies[0]


def test_while_it_loads_or_drains(start: Start, tmp_path: Path) -> None:
    load_gate, gate = tmp_path / "load", tmp_path / "answer"
    process = start(load_gate=str(load_gate), answer_gate=str(gate))
    told = "SIGHUP is ignored: the server is loading, or about to end"
    process.wait_for(lambda: _catches_hangup(process.process.pid))
    process.hang_up()
    process.wait_for(lambda: process.text.count(told) == 1)
    load_gate.touch()

    def drain() -> None:
        process.process.send_signal(signal.SIGTERM)
        process.wait_for(lambda: "draining" in process.text)
        process.hang_up()
        process.wait_for(lambda: process.text.count(told) == 2)

    with process.client() as client:
        text = ask_until_drained(process, gate, client, drain)
    assert text.endswith("data: [DONE]\n\n")
    assert process.process.wait(PATIENCE_S) == 0


def _catches_hangup(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) & 1 << (signal.SIGHUP - 1))
    return False


def test_without_its_terminal_it_drains_and_ends(start: Start, tmp_path: Path) -> None:
    gate = tmp_path / "answer"
    process = start(answer_gate=str(gate), has_terminal=True)
    with process.client() as client:
        text = ask_until_drained(process, gate, client, process.take_terminal)
    assert text.endswith("data: [DONE]\n\n")
    assert process.process.wait(PATIENCE_S) == 0


def test_nohup_outlives_the_terminal(start: Start) -> None:
    """And takes the next signal for what it is."""
    process = start(has_terminal=True, is_nohup=True)
    with process.client() as client:
        process.take_terminal()
        process.wait_for(lambda: not _has_terminal(process.process.pid))
        assert answer(client) == "Hello!"
        process.hang_up()
        process.wait_for(lambda: "the only engine cannot be replaced" in process.text)
        assert answer(client) == "Hello!"
    assert process.text.count("SIGHUP") == 1


def _has_terminal(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[4] != "0"


def test_an_engine_that_can_is_asked_in_a_thread_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hangup, "TERMINAL", "/nowhere")
    asked: list[tuple[float, str]] = []
    is_asked = threading.Event()

    class Engine:
        def restart(self, drain_s: float) -> None:
            asked.append((drain_s, threading.current_thread().name))
            is_asked.set()

    notes: list[str] = []
    Hangup(notes.append, lambda: notes.append("ended")).take(Engine(), 12.0)
    assert is_asked.wait(PATIENCE_S)
    assert asked == [(12.0, "nvcli-restart")]
    assert notes == []
