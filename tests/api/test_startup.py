"""P12: help and version stay light. Run in a fresh process, because imports are what is tested."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_S

HEAVY = ("torch", "triton", "transformers", "tokenizers", "prompt_toolkit", "numpy", "rich")
BUDGET_S = 0.3
MAX_MODULES = 450  # the interpreter's own and ours are 300 to 360


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
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    *_, loaded, count = result.stdout.splitlines()
    assert loaded == "loaded: []"
    assert int(count) < MAX_MODULES


@pytest.mark.soak
@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_answer_within_the_budget(flag: str) -> None:
    """The best processor time of several runs. It is the budget of an idle machine: a slower one,
    or one that shares its cores, needs more for the same work, so the usual run counts modules.
    """
    best = float("inf")
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-m", "nvcli", flag], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        best = min(best, used.ru_utime + used.ru_stime)
        if best < BUDGET_S:
            break
    assert best < BUDGET_S


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
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")
