"""Python functions as tools: a file's functions, run in a process of their own.

The file is never imported here. A function that raises, exits, crashes, prints or hangs ends or
disturbs its own process, which is started again for the next call.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from nvcli.errors import UsageError
from nvcli.tools.toolbox import ToolError, ToolSpec

if TYPE_CHECKING:
    from pathlib import Path

_START_TIMEOUT_S = 30.0
_MAX_LINE = 16 * 1024 * 1024  # bytes of a result; more is a flood


class FunctionTools:
    """The functions of one file. Raises `UsageError` when it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
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
        process, self._process, self._buffer = self._process, None, b""
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            process.wait(0.2)  # its input has ended
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> list[dict[str, Any]]:
        """Start the process; returns what its tools are."""
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nvcli.tools.worker", str(self._path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
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
        except ToolError:
            self.close()
            raise
        except BaseException:  # Ctrl+C while it runs
            self.close()
            raise

    def _answer(self, request: str | None, timeout_s: float) -> dict[str, Any]:
        process = self._process
        assert process is not None, "the process was started"
        assert process.stdin is not None, "with pipes"
        assert process.stdout is not None, "with pipes"
        if request is not None:
            try:
                process.stdin.write(request.encode() + b"\n")
            except OSError as exc:
                raise ToolError("its process has ended") from exc
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise ToolError(f"it did not answer in {timeout_s:g} s and was ended")
                chunk = process.stdout.read(1 << 16)
                if not chunk:
                    code = process.wait()
                    raise ToolError(f"its process ended with code {code}")
                self._buffer += chunk
                if len(self._buffer) > _MAX_LINE:
                    raise ToolError(f"it gave more than {_MAX_LINE >> 20} MB and was ended")
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer
