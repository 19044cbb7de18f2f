"""Python functions as tools: a file's functions, run in a process of their own.

The file is never imported here. A function that raises, exits, crashes, prints or hangs ends or
disturbs its own process, which is started again for the next call; with it ends what it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

from nvcli.errors import UsageError
from nvcli.paths import module_command, module_environment
from nvcli.tools.toolbox import ToolError, ToolSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_START_TIMEOUT_S = 30.0
_CHUNK = 1 << 16
_MAX_PRINTED = 20  # lines of one call
_MAX_PRINTED_WIDTH = 1000
_MAX_LINE = 16 * 1024 * 1024  # bytes of a result; more is a flood


class FunctionTools:
    """The functions of one file. Raises `UsageError` when it cannot be loaded."""

    def __init__(self, path: Path, say: Callable[[str], None] | None = None) -> None:
        """`say` is given the lines that the functions print, of each call only the first."""
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = bytearray()
        self._say = say
        if not path.is_file():
            raise UsageError(f"there is no file of tools {path}", param="tools")
        try:
            described = self._start()
        except ToolError as exc:
            raise UsageError(f"cannot load the tools of {path}: {exc}", param="tools") from exc
        self.specs = [
            ToolSpec(t["name"], t["description"], t["parameters"], str(path)) for t in described
        ]
        if not self.specs:
            self.close()
            raise UsageError(
                f"{path} has no tools", hint="Public functions with type hints are tools."
            )

    def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        if self._process is None or self._process.poll() is not None:
            self._start()
        request = json.dumps({"name": name, "arguments": arguments})
        answer = self._exchange(request, timeout_s)
        if "error" in answer:
            raise ToolError(str(answer["error"]))
        return str(answer["result"])

    def close(self) -> None:
        process, self._process, self._buffer = self._process, None, bytearray()
        if process is None:
            return
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            process.wait(0.2)  # its input has ended
        except subprocess.TimeoutExpired:
            _end_group(process)
            process.wait()

    def _start(self) -> list[dict[str, Any]]:
        """Start the process; returns what its tools are."""
        self.close()
        self._process = subprocess.Popen(
            [*module_command("nvcli.tools.worker"), str(self._path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=module_environment(),
            start_new_session=True,  # Ctrl+C is for us
        )
        answer = self._exchange(None, _START_TIMEOUT_S)
        if "error" in answer:
            self.close()
            raise ToolError(str(answer["error"]))
        tools: list[dict[str, Any]] = answer["tools"]
        return tools

    def _exchange(self, request: str | None, timeout_s: float) -> dict[str, Any]:
        try:
            return self._answer(request, timeout_s)
        except BaseException:  # also Ctrl+C while it runs
            self.close()
            raise

    def _answer(self, request: str | None, timeout_s: float) -> dict[str, Any]:
        process = self._process
        assert process is not None, "the process was started"
        assert process.stdin is not None, "with pipes"
        assert process.stdout is not None, "with pipes"
        assert process.stderr is not None, "with pipes"
        if request is not None:
            try:
                process.stdin.write(request.encode() + b"\n")
            except OSError as exc:
                raise ToolError("its process has ended") from exc
        printed = _Printed(self._say)
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector, contextlib.closing(printed):
            selector.register(process.stderr, selectors.EVENT_READ)
            selector.register(process.stdout, selectors.EVENT_READ)
            is_whole = b"\n" in self._buffer
            while not is_whole:
                left = deadline - time.monotonic()
                ready = {key.fileobj for key, _ in selector.select(left)} if left > 0 else set()
                if not ready:
                    raise ToolError(f"it did not answer in {timeout_s:g} s and was ended")
                if process.stderr in ready:  # first: it was printed before the result
                    text = process.stderr.read(_CHUNK)
                    printed.feed(text)
                    if not text:
                        selector.unregister(process.stderr)
                if process.stdout not in ready:
                    continue
                chunk = process.stdout.read(_CHUNK)
                if not chunk:
                    _end_group(process)
                    code = process.wait()
                    raise ToolError(f"its process ended with code {code}")
                is_whole = b"\n" in chunk
                self._buffer += chunk
                if len(self._buffer) > _MAX_LINE:
                    raise ToolError(f"it gave more than {_MAX_LINE >> 20} MB and was ended")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as exc:  # a tool found the pipe and wrote into it
            raise ToolError("its process gave what is no result and was ended") from exc
        return answer


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """The process, and all that a tool has started in it."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


class _Printed:
    """What a tool prints while it runs: the first lines are passed on, of the rest their number."""

    def __init__(self, say: Callable[[str], None] | None) -> None:
        self._say = say
        self._rest = b""
        self._count = 0

    def feed(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[:_MAX_PRINTED_WIDTH]
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        self._count += 1
        if self._say is not None and self._count <= _MAX_PRINTED:
            self._say(line[:_MAX_PRINTED_WIDTH].decode("utf-8", "replace"))

    def close(self) -> None:
        if self._rest:
            self._line(self._rest)
        if self._say is not None and self._count > _MAX_PRINTED:
            self._say(f"[{self._count - _MAX_PRINTED:,} more lines were left out]")
