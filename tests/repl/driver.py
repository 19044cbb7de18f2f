"""Two ways to sit at the terminal: a bare pseudo-terminal, and a real one inside tmux."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 15.0


def fake_chat(script: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "tests.repl.fake_chat", script, "chat", *flags]


class Log:
    """What the model was asked, from $FAKE_CHAT_LOG."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def requests(self) -> list[list[str]]:
        """The contents of each request's messages."""
        if not self.path.exists():
            return []
        lines = self.path.read_text("utf-8").splitlines()
        return [[m["content"] for m in json.loads(line)] for line in lines]

    def wait(self, count: int) -> list[list[str]]:
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.requests()) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.requests()


class PtyChat:
    """`fake_chat` on a pseudo-terminal: `type` keys, `wait_for` output."""

    def __init__(self, tmp_path: Path, script: str, *flags: str, stdin: bytes | None = None):
        self.log = Log(tmp_path / "log.jsonl")
        env = {
            **os.environ,
            "FAKE_CHAT_LOG": str(self.log.path),
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "XDG_STATE_HOME": str(tmp_path / "state"),
        }
        env.pop("COLUMNS", None)
        env.pop("XDG_RUNTIME_DIR", None)
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            if stdin is not None:
                read, write = os.pipe()
                os.write(write, stdin)
                os.close(write)
                os.dup2(read, 0)
            os.execve(sys.executable, fake_chat(script, *flags), env)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.output = ""
        self._seen = 0
        self.code: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def wait_for(self, pattern: str, timeout_s: float = TIMEOUT_S) -> str:
        """Read until `pattern` appears after the last match; returns what was read up to it."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = re.compile(pattern).search(self.output, self._seen)
            if found:
                text = self.output[self._seen : found.end()]
                self._seen = found.end()
                return text
            left = deadline - time.monotonic()
            assert left > 0, f"no {pattern!r} in {self.output[self._seen :][-800:]!r}"
            if select.select([self.fd], [], [], left)[0]:
                try:
                    data = os.read(self.fd, 65536)
                except OSError:
                    data = b""
                assert data, f"the program ended before {pattern!r}: {self.output!r}"
                self.output += data.decode("utf-8", "replace")

    def prompt(self) -> None:
        """The next prompt: prompt_toolkit turns bracketed paste on, then draws."""
        self.wait_for("\x1b\\[\\?2004h")
        self.wait_for(">>>")

    def end(self) -> int:
        """Wait for the process; returns its exit code."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if select.select([self.fd], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):
                    self.output += os.read(self.fd, 65536).decode("utf-8", "replace")
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                return self.code
        raise AssertionError(f"did not end: {self.output!r}")


class Tmux:
    """A shell in a tmux window of its own server."""

    def __init__(self, tmp_path: Path, width: int = 80, height: int = 24) -> None:
        self.log = Log(tmp_path / "log.jsonl")
        self._name = f"nvcli-{uuid.uuid4().hex[:8]}"
        env = {
            **os.environ,
            "PS1": "$ ",
            "FAKE_CHAT_LOG": str(self.log.path),
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "PYTHONPATH": str(ROOT),
        }
        env.pop("COLUMNS", None)
        env.pop("XDG_RUNTIME_DIR", None)
        env.pop("TMUX", None)
        size = ["-x", str(width), "-y", str(height)]
        command = ["tmux", "-L", self._name, "-f", "/dev/null", "new-session", "-d", *size]
        subprocess.run([*command, "env PS1='$ ' bash --norc"], env=env, check=True, cwd=ROOT)
        self.wait_for(r"^\$")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tmux("kill-server")

    def _tmux(self, *args: str, stdin: str | None = None) -> str:
        command = ["tmux", "-L", self._name, *args]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, input=stdin
        ).stdout

    def run(self, script: str, *flags: str) -> None:
        self.keys(" ".join(["clear;", *fake_chat(script, *flags)]), "Enter")
        self.wait_for(r"^>>>")

    def keys(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def paste(self, text: str) -> None:
        """As the terminal's paste: bracketed if the program asked for that."""
        self._tmux("load-buffer", "-", stdin=text)
        self._tmux("paste-buffer", "-p")

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p", "-S", "-500").rstrip("\n")

    def wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            screen = self.screen()
            if re.search(pattern, screen, re.MULTILINE):
                return screen
            assert time.monotonic() < deadline, f"no {pattern!r} on\n{screen}"
            time.sleep(0.05)

    def flag(self, name: str) -> str:
        return self._tmux("display-message", "-p", f"#{{{name}}}").strip()


has_tmux = shutil.which("tmux") is not None
