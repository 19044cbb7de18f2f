"""P12: help and version stay light. Run in a fresh process, because imports are what is tested."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.waiting import run_command

HEAVY = ("torch", "triton", "transformers", "tokenizers", "prompt_toolkit", "numpy", "rich")
MAX_MODULES = 450  # the interpreter's own, Typer's and ours are 300 to 370
MAX_CALLS = 450_000  # of Python's functions and of C's; they are 290,000 to 380,000
# Imports of the standard library: 0.09 s of a core on which nvcli's budget is 0.3.
YARDSTICK = (
    "import asyncio, argparse, csv, dataclasses, difflib, email.message, http.client, inspect,"
    "json, logging, pathlib, pdb, tempfile, typing, unittest.mock, urllib.request, xml.dom.minidom"
)
BUDGET = 3.4  # yardsticks


LIGHT = [
    ["--version"],
    ["--help"],
    ["chat", "--help"],
    ["chat", "-Z"],
    ["chat", "--show-config"],
    ["batch", "--help"],
    ["completion", "bash"],
    ["completion", "--values", "models"],
    ["completion", "--values", "sessions"],
    ["models", "list", "-q"],
]


@pytest.mark.parametrize("args", LIGHT, ids=" ".join)
def test_nothing_heavy_is_imported(args: list[str]) -> None:
    code = (
        "import sys\n"
        "from nvcli.__main__ import main\n"
        f"code = main({args!r})\n"
        f"print('loaded:', [m for m in {HEAVY!r} if m in sys.modules])\n"
        "print(len(sys.modules))\n"
    )
    result = run_command([sys.executable, "-c", code], check=True)
    *_, loaded, count = result.stdout.splitlines()
    assert loaded == "loaded: []"
    assert int(count) < MAX_MODULES


@pytest.mark.parametrize("args", [["--version"], *LIGHT[1:3], LIGHT[-1]], ids=" ".join)
def test_no_more_is_done_than_it_takes(args: list[str]) -> None:
    """Calls are counted, which are the same on every machine and under any load."""
    code = (
        "import sys\n"
        "count = 0\n"
        "def note(frame, event, arg):\n"
        "    global count\n"
        "    count += event in ('call', 'c_call')\n"
        "sys.setprofile(note)\n"
        "from nvcli.__main__ import main\n"
        f"main({args!r})\n"
        "sys.setprofile(None)\n"
        "print(count)\n"
    )
    result = run_command([sys.executable, "-c", code], check=True)
    assert int(result.stdout.splitlines()[-1]) < MAX_CALLS


def processor_s(*args: str) -> float:
    """Of a Python process with these arguments, which must end well."""
    process = subprocess.Popen([sys.executable, *args], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime


@pytest.mark.soak
@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_answer_within_the_budget(flag: str) -> None:
    """Processor time, the best of several runs, each between two of a yardstick: whatever slows a
    machine down, or shares its cores, slows both down alike.
    """
    best = float("inf")
    before = processor_s("-c", YARDSTICK)
    for _ in range(12):
        used = processor_s("-m", "nvcli", flag)
        after = processor_s("-c", YARDSTICK)
        best = min(best, used / min(before, after))
        if best < BUDGET:
            break
        before = after
    assert best < BUDGET


def test_ctrl_c_during_the_imports_ends_like_any_other() -> None:
    program = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'nvcli.cli.app':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from nvcli.__main__ import main\n"
        "sys.exit(main(['--help']))\n"
    )
    run = run_command([sys.executable, "-c", program])
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")
