"""Ctrl-C before a command has begun, and when it is done: exit code 130, and not a word.

A module that Python imports first (`sitecustomize`) brings it at a moment that is known.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvcli.__main__ import INTERRUPTED
from nvcli.engine.child import start_child
from nvcli.errors import InterruptedRunError
from tests.waiting import PATIENCE_S, run_command

ROOT = Path(__file__).resolve().parents[2]
SITE = """
import atexit, os, signal, sys, weakref

class Target:
    pass

def strike(_=None):
    if os.environ["STRIKE"] == "raise":
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)

# As in `_get_module_lock`: what a callback of a weak reference raises is printed and dropped.
CALLBACK = "def callback(_): signal.raise_signal(signal.SIGINT)"
LOST = compile(CALLBACK, "<frozen importlib._bootstrap>", "exec")

def strike_where_it_is_lost():
    exec(LOST, globals())
    target = Target()
    reference = weakref.ref(target, callback)
    del target
    while True:  # it comes again
        pass

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["STRIKE_AT"]:
            strike_where_it_is_lost() if os.environ["STRIKE"] == "lost" else strike()

sys.meta_path.insert(0, Finder())
if os.environ["STRIKE_AT"] == "exit":
    atexit.register(strike)
"""
SCRIPT = "import sys; sys.argv[0] = 'nvcli'; from nvcli.__main__ import main; sys.exit(main())"
STARTS = {"module": ["-m", "nvcli"], "script": ["-c", SCRIPT]}


def run(
    folder: Path, start: str, at: str, how: str, *args: str
) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(SITE)
    environment = {**os.environ, "STRIKE": how, "STRIKE_AT": at}
    environment["PYTHONPATH"] = f"{folder}{os.pathsep}{ROOT}"
    return run_command(
        [sys.executable, *STARTS[start], *args], env=environment, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("how", ["raise", "signal", "lost"])
@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("nvcli.cli.app", ""),
        ("nvcli.errors", ""),
        ("typer", ""),
        ("nvcli.repl.wrap", ""),
        ("tomllib", "nvcli: interrupted\n"),  # a command has begun
        ("tokenizers", "nvcli: interrupted\n"),
    ],
)
def test_while_it_is_imported(tmp_path: Path, start: str, at: str, said: str, how: str) -> None:
    ran = run(tmp_path, start, at, how, "tokens", "x")
    assert (ran.returncode, ran.stdout, ran.stderr) == (INTERRUPTED, "", said)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("how", "code"), [("signal", INTERRUPTED), ("none", 0)])
def test_when_all_is_done(tmp_path: Path, start: str, how: str, code: int) -> None:
    ran = run(tmp_path, start, "exit" if how == "signal" else "nowhere", how, "--version")
    assert (ran.returncode, ran.stderr) == (code, "")
    assert ran.stdout.startswith("nvcli ")


def test_ignored_it_stays_ignored(tmp_path: Path) -> None:
    """As the shell has it for a command in the background of a script."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    environment = {**os.environ, "STRIKE": "signal", "STRIKE_AT": "nvcli.cli.app"}
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    command = f"trap '' INT; exec {sys.executable} -m nvcli --version"
    ran = run_command(["/bin/sh", "-c", command], env=environment)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_caller_keeps_its_handlers() -> None:
    code = (
        "import signal; from nvcli.__main__ import main; before = signal.getsignal(signal.SIGINT)\n"
        "assert main(['--version']) == 0 and signal.getsignal(signal.SIGINT) is before"
    )
    assert run_command([sys.executable, "-c", code]).returncode == 0


def test_the_number() -> None:
    assert InterruptedRunError.exit_code == INTERRUPTED


def test_a_child_that_is_still_imported_says_nothing() -> None:
    """Ctrl-C goes to the whole group; the parent ends the child, which has nothing to add."""
    code = (
        "import os, signal, sys\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "from nvcli.engine.child import be_child_of\n"
        "be_child_of(os.getppid())\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
        "print('alive')\n"
    )
    child = start_child(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    out, _ = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, out) == (0, b"alive\n")
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
