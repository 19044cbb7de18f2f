"""Every test runs in a fixed environment: no user settings, no colour, 80 columns."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):  # the GPU tests run without it
    from hypothesis import HealthCheck, settings

    # How long an example takes says something about the machine, not about what is tested. The
    # usual run has the same examples each time; `make soak` looks for others.
    for name, is_fixed in (("fixed", True), ("random", False)):
        settings.register_profile(
            name,
            deadline=None,
            derandomize=is_fixed,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        )
    settings.load_profile("fixed")

# A background job ignores Ctrl-C and hands that on, and nohup does so with SIGHUP; tests that send
# them start from the usual.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """The command line, run in this process, takes signals."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        if handler is not None:  # what was not set from Python cannot be set again
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def fixed_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("NVCLI_") or name == "XDG_RUNTIME_DIR":  # where a server may listen
            monkeypatch.delenv(name)
    for name in ("NO_COLOR", "FORCE_COLOR", "GITHUB_ACTIONS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
