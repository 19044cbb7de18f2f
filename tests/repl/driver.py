"""Two ways to sit at the terminal: a bare pseudo-terminal, and a real one inside tmux."""

from __future__ import annotations

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

from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[2]


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
        lines = self.path.read_text("utf-8").split("\n")[:-1]  # whole ones
        return [[m["content"] for m in json.loads(line)] for line in lines]

    def wait(self, count: int) -> list[list[str]]:
        until(lambda: len(self.requests()) >= count, f"{count} requests")
        return self.requests()

    def wait_taken(self, count: int) -> None:
        """Until so many pieces of the last answer were taken from the model."""
        path = taken_path(self.path)
        until(lambda: path.exists() and path.stat().st_size >= count, f"{count} pieces")


def taken_path(log: Path) -> Path:
    """The file with a byte for each piece of the last answer."""
    return log.with_suffix(".taken")


class PtyChat:
    """`fake_chat` on a pseudo-terminal: `type` keys, `wait_for` output."""

    def __init__(self, tmp_path: Path, script: str, *flags: str, stdin: bytes | None = None):
        self.log = Log(tmp_path / "log.jsonl")
        env = {
            **os.environ,
            "FAKE_CHAT_LOG": str(self.log.path),
            "PROMPT_TOOLKIT_NO_CPR": "1",
        }
        env.pop("COLUMNS", None)
        go, started = os.pipe()
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.read(go, 1)
            os.chdir(ROOT)
            if stdin is not None:
                read, write = os.pipe()
                os.write(write, stdin)
                os.close(write)
                os.dup2(read, 0)
            os.execve(sys.executable, fake_chat(script, *flags), env)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.mode = termios.tcgetattr(self.fd)  # before the program changes it
        os.write(started, b"x")
        os.close(go)
        os.close(started)
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

    def type(self, keys: str, *, until: str = "") -> None:
        """Press keys; then wait until `until` appears."""
        os.write(self.fd, keys.encode())
        if until:
            self.wait_for(until)

    def wait_for(self, pattern: str) -> str:
        """Read until `pattern` appears after the last match; returns what was read up to it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = re.compile(pattern).search(self.output, self._seen)
            if found:
                text = self.output[self._seen : found.end()]
                self._seen = found.end()
                return text
            told = self.output[self._seen :][-800:]
            assert self._read(deadline, f"no {pattern!r} in {told!r}"), (
                f"the program ended before {pattern!r}: {self.output!r}"
            )

    def _read(self, deadline: float, otherwise: str) -> bool:
        """Add what comes next to `output`; false at its end."""
        left = deadline - time.monotonic()
        assert left > 0, otherwise
        if select.select([self.fd], [], [], left)[0]:
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # Linux' word for: nobody has the other side open
                return False
            self.output += data.decode("utf-8", "replace")
            return bool(data)
        return True

    def prompt(self) -> None:
        """The next prompt: prompt_toolkit turns bracketed paste on, then draws."""
        self.wait_for("\x1b\\[\\?2004h")
        self.wait_for(">>>")

    def say(self, line: str, *, until: str = "") -> None:
        """At the next prompt type a line, with Enter; then wait until `until` appears."""
        self.prompt()
        self.type(line + "\r", until=until)

    def leave(self) -> int:
        """Ctrl+D at the next prompt; returns the exit code."""
        self.prompt()
        self.type("\x04")
        return self.end()

    def wait_raw(self) -> None:
        """Until keys are read one by one: a prompt on a dumb terminal stands there before."""
        until(lambda: not termios.tcgetattr(self.fd)[3] & termios.ICANON, "raw keys")

    def hang_up(self) -> int:
        """Close the terminal, as a window or a connection that is gone; returns the exit code."""
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, self.fd)
        os.close(null)
        _, status = os.waitpid(self.pid, 0)
        self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def end(self) -> int:
        """Wait for the process, and for all that it wrote; returns its exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(deadline, f"did not end: {self.output!r}"):
            pass
        _, status = os.waitpid(self.pid, 0)
        self.code = os.waitstatus_to_exitcode(status)
        return self.code


class Tmux:
    """A shell in a tmux window of its own server."""

    def __init__(self, tmp_path: Path, width: int = 80, height: int = 24) -> None:
        self.log = Log(tmp_path / "log.jsonl")
        self._name = f"nvcli-{uuid.uuid4().hex[:8]}"
        env = {
            **os.environ,
            "PS1": "$ ",
            "FAKE_CHAT_LOG": str(self.log.path),
            "PYTHONPATH": str(ROOT),
        }
        env.pop("COLUMNS", None)
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
        deadline = time.monotonic() + PATIENCE_S
        while True:
            screen = self.screen()
            if re.search(pattern, screen, re.MULTILINE):
                return screen
            assert time.monotonic() < deadline, f"no {pattern!r} on\n{screen}"
            time.sleep(0.05)

    def counted(self) -> int:
        """How far the answer to "count" has come on the screen."""
        return max(map(int, re.findall(r"\d+", self.screen().rpartition("count")[2])), default=0)

    def wait_counted(self, more: int) -> None:
        """Until the answer has come so many numbers further: the program has read its keys since,
        and has drawn itself in the window as it is now."""
        start = self.counted()
        until(lambda: self.counted() >= start + more, f"{more} more numbers", pause_s=0.05)

    def flag(self, name: str) -> str:
        return self._tmux("display-message", "-p", f"#{{{name}}}").strip()


has_tmux = shutil.which("tmux") is not None
