"""`nvcli serve` as a process, and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tests.waiting import PATIENCE_S, until


class ServeProcess:
    """Ended with the block; `errors` are the lines of standard error so far."""

    def __init__(self, ready: Path, *options: str, **environment: str) -> None:
        command = [sys.executable, "-m", "nvcli", "serve", "--port", "0", "--device", "cpu"]
        self._ready = ready
        self.process = subprocess.Popen(
            [*command, "--ready-file", str(ready), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RAY_ADDRESS": "", **environment},
        )
        self.errors: list[str] = []
        self._clients: list[httpx.Client] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line.rstrip("\n"))

    def wait_ready(self) -> httpx.Client:
        until(lambda: self._ready.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.errors
        url = json.loads(self._ready.read_text())["url"]
        self._clients.append(httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False))
        return self._clients[-1]

    def wait_for(self, text: str) -> None:
        """A line with this text."""
        until(lambda: any(text in line for line in self.errors) or self.process.poll() is not None)
        assert any(text in line for line in self.errors), self.errors

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """-> the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        for client in self._clients:
            client.close()
        for stream in (self.process.stdout, self.process.stderr):
            with suppress(OSError, AttributeError):
                stream.close()  # type: ignore[union-attr]


def descendants(pid: int) -> set[int]:
    """Of a process, with all of theirs."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(path.parent.name))
    found: set[int] = set()
    left = [pid]
    while left:
        children = parents.get(left.pop(), [])
        found.update(children)
        left += children
    return found


def stream_chat(client: httpx.Client, text: str, **fields: Any) -> tuple[str, str | None]:
    """A greedy answer, streamed to its end, and its finish reason. Any error fails."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 24,
        "stream": True,
        "enable_thinking": False,
        **fields,
    }
    answer, reason = "", None
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]", lines[-3:]
    for line in lines[:-1]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        answer += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
    return answer, reason


def metric(client: httpx.Client, name: str) -> float:
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(f"{name}{{"):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"there is no {name}")
