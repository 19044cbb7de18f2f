"""Processes the benchmark starts: nvcli's own server, and the stub. None outlives its parent."""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from nvcli.errors import DeviceError, NvcliError
from nvcli.paths import module_command, module_environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PR_SET_PDEATHSIG = 1
START_S = 600.0  # that a server gets to load its model
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """Runs in the child before exec: the kernel kills it when this process is gone."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextlib.contextmanager
def own_server(flags: Sequence[str]) -> Iterator[str]:
    """`nvcli serve` on a free port, in a process of its own; its URL.

    Raises `DeviceError` when the model or device cannot be used (exit 3), else `NvcliError`.
    """
    with tempfile.TemporaryDirectory(prefix="nvcli-bench-") as folder:
        ready, log = Path(folder) / "ready", Path(folder) / "log"
        command = [*module_command("nvcli"), "serve", "--port", "0", "--metrics", "open"]
        command += ["--ready-file", str(ready), "-q", *flags]
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=module_environment(),
                preexec_fn=_die_with_parent,
                start_new_session=True,  # Ctrl-C is ours; the server ends when we say so
            )
        try:
            yield _wait_for(process, ready, log)
        finally:
            _stop(process)


def _wait_for(process: subprocess.Popen[bytes], ready: Path, log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if ready.exists():
            return str(json.loads(ready.read_text())["url"])
        code = process.poll()
        if code is not None:
            lines = log.read_text(errors="replace").strip().splitlines() or ["no reason was given"]
            reason = lines[-1].removeprefix("nvcli: ").rstrip(".")
            kind = DeviceError if code == DeviceError.exit_code else NvcliError
            raise kind(f"nvcli serve ended with code {code}: {reason}")
        time.sleep(0.05)
    raise NvcliError(f"nvcli serve was not ready within {START_S:g} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Two signals: the second ends a server that still answers somebody."""
    for _ in range(2):
        if process.poll() is not None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
    _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


@contextlib.contextmanager
def stub_server(ttft_ms: float, step_ms: float, gap_ms: float) -> Iterator[str]:
    """The stub in a process of its own; its URL."""
    process = subprocess.Popen(
        [*module_command("nvcli.bench.stub"), str(ttft_ms), str(step_ms), str(gap_ms)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=module_environment(),
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.strip().isdigit():
            raise NvcliError("the stub server did not start")
        yield f"http://127.0.0.1:{int(line)}"
    finally:
        process.stdin.close()
        process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        _kill(process)
