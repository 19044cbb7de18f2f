"""The command that runs GPU tests under compute-sanitizer, with a stand-in for it: who gets which
test, what its output means, and what becomes of tests that fail, are reported or have no time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rows
from benchmarks.kernels import sanitize
from benchmarks.kernels.sanitize import split
from benchmarks.kernels.sanitized import read_log
from tests.waiting import interrupted_when, is_running, run_command, until

ROOT = Path(sanitize.__file__).parents[2]
REPORT = """\
========= Invalid __global__ read of size 4 bytes
=========     at _norm+0x1a0 in norm.py:53
=========     by thread (25,0,0) in block (3,0,0)
=========     Access to 0x7f2a9800019c is out of bounds
=========     and is 13 bytes after the nearest allocation at 0x7f2a98000000 of size 400 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernelEx [0x3a8be9] in libcuda.so.1
=========
"""
LOG = f"""\
========= COMPUTE-SANITIZER

@sanitize start tests/test_a.py::test_x[a-1]
.
@sanitize passed tests/test_a.py::test_x[a-1]

@sanitize start tests/test_a.py::test_x[two words-(1, 2)]
{REPORT}{REPORT}F
@sanitize failed tests/test_a.py::test_x[two words-(1, 2)]

@sanitize start tests/test_a.py::test_y
s
@sanitize skipped tests/test_a.py::test_y

=================================== FAILURES ===================================
    @sanitize start of a line in somebody's source
========================= short test summary info ==============================
@sanitize end 1
"""
TESTS = [f"tests/test_a.py::test_{name}" for name in ("x[a-1]", "x[two words-(1, 2)]", "y", "z")]


def test_a_log_is_understood() -> None:
    log = read_log(LOG + "========= ERROR SUMMARY: 2 errors\n")
    assert list(log.verdicts(TESTS).values()) == ["clean", "reported", "skipped", "not run"]
    first, second = log.reports
    assert first == second
    assert str(first) == (
        "Invalid __global__ read of size 4 bytes at _norm+0x1a0 in norm.py:53 "
        "(tests/test_a.py::test_x[two words-(1, 2)])"
    )
    plain = read_log(LOG.replace(REPORT, "") + "========= ERROR SUMMARY: 0 errors\n")
    assert not plain.reports
    assert list(plain.verdicts(TESTS).values()) == ["clean", "failed", "skipped", "not run"]


def test_what_comes_after_the_tests_is_of_none() -> None:
    log = read_log(LOG.replace(REPORT, "") + REPORT + "========= ERROR SUMMARY: 1 error\n")
    assert [report.test for report in log.reports] == [None]
    assert "reported" not in log.verdicts(TESTS).values()


def test_what_passed_is_clean_only_when_the_sanitizer_came_to_its_end() -> None:
    assert read_log(LOG).verdicts(TESTS[:1]) == {TESTS[0]: "not run"}
    many = "========= ERROR SUMMARY: 9 errors\n========= ERROR SUMMARY: 7 errors were not printed."
    assert read_log(LOG + many).verdicts(TESTS[:1]) == {TESTS[0]: "not run"}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("========= ERROR SUMMARY: 3 errors", "3 errors, of which the log does not tell"),
        (
            "========= Error: Race reported between Write access at _a+0x10 in a.py:3\n"
            "=========     and Read access at _a+0x90 in a.py:5 [8 hazards]\n=========\n"
            "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
            "Error: Race reported between Write access at _a+0x10 in a.py:3",
        ),
        (
            '========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified"'
            " on CUDA API call to cudaDeviceSynchronize.\n========= ERROR SUMMARY: 1 error",
            'Program hit cudaErrorLaunchFailure (error 719) due to "unspecified"'
            " on CUDA API call to cudaDeviceSynchronize.",
        ),
        (
            "========= Unable to find injection library libsanitizer-collection.so",
            "Unable to find injection library libsanitizer-collection.so",
        ),
    ],
)
def test_nothing_that_it_says_is_overlooked(said: str, told: str) -> None:
    assert [str(report) for report in read_log(f"{said}\n").reports] == [
        f"{told} (outside of tests)"
    ]


def test_no_hazard_is_no_report() -> None:
    text = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors"
    assert read_log(text).reports == []
    assert read_log(text).is_whole


@pytest.mark.parametrize("count", [1, 3, 12])
def test_shares(count: int) -> None:
    heads = ["(16, 8)", "(32, 8)", "(14, 2)"]
    tests = [f"a.py::test_a[{case}-{head}]" for case in range(24) for head in heads]
    tests += ["a.py::test_b", *(f"b.py::test_a[{case}]" for case in "xyz"), "b.py::test_b"]
    shares = split(tests, count)
    assert sorted(test for share in shares for test in share) == sorted(tests)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    if count > 1:  # few variants each, and single tests not all in one place
        for share in shares:
            assert len({test.rpartition("-")[2] for test in share if "-" in test}) == 1
            assert sum("-" not in test for test in share) <= 2
    assert len(split(tests[:2], 12)) == 2


TOOL = f"""\
#!{sys.executable}
import json, os, pathlib, subprocess, sys
at = sys.argv.index(sys.executable)
with open(os.environ["FAKE_CALLS"], "a") as calls:
    calls.write(json.dumps(sys.argv[1:at]) + "\\n")
print("========= COMPUTE-SANITIZER", flush=True)
code = subprocess.run(sys.argv[at:], env=os.environ | {{"FAKE": "1"}}).returncode
errors = pathlib.Path(os.environ["SANITIZE_LOG"]).read_text().count("Invalid __global__")
print(f"========= ERROR SUMMARY: {{errors}} errors")
sys.exit(99 if errors or "FAKE_FINDS" in os.environ else code)
"""
KERNEL_TESTS = f"""
import os, pathlib
import pytest

def reported():
    if "FAKE" in os.environ:
        with open(os.environ["SANITIZE_LOG"], "a") as log:
            log.write({REPORT!r})

@pytest.mark.gpu
@pytest.mark.parametrize("case", ["one", "two words", "three"])
def test_good(case):
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ
    kernel = pathlib.Path(os.environ["TRITON_CACHE_DIR"], "ABC")
    kernel.mkdir(parents=True, exist_ok=True)
    (kernel / "__grp___good.json").write_text("")

@pytest.mark.gpu
@pytest.mark.captures
def test_captured():
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ

@pytest.mark.gpu
def test_skipped():
    pytest.skip("not here")

@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_of_two():
    assert False

@pytest.mark.gpu
@pytest.mark.child
def test_of_a_child():
    assert False

def test_of_no_gpu():
    assert False
"""
REPORTED = "\n@pytest.mark.gpu\ndef test_reported():\n    reported()\n"
FAILS = "\n@pytest.mark.gpu\ndef test_fails():\n    assert 'FAKE' not in os.environ\n"
CANARY = KERNEL_TESTS + "\ndef test_canary():\n    reported()\n"


class Bench:
    """A repository with a few tests, and a stand-in for the sanitizer."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._patch = monkeypatch
        (folder / "pytest.ini").write_text(
            "[pytest]\nmarkers =\n    gpu\n    multi_gpu\n    captures\n    child\n"
        )
        tool = folder / "bin" / "compute-sanitizer"
        tool.parent.mkdir()
        tool.write_text(TOOL)
        tool.chmod(0o755)
        (folder / "tests").mkdir()
        self.write()
        monkeypatch.setattr(sanitize, "ROOT", folder)
        monkeypatch.setattr(sanitize, "CANARY", "canary.py::test_canary")
        monkeypatch.setattr(sanitize, "GRACE_S", 600)
        monkeypatch.setattr(rows, "hardware", lambda: "none")
        monkeypatch.setenv("PATH", str(tool.parent))
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("NVCLI_RESULTS", str(folder / "results"))
        monkeypatch.setenv("FAKE_CALLS", str(folder / "calls"))
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def write(self, more: str = "", canary: str = CANARY) -> None:
        (self.folder / "tests" / "test_k.py").write_text(KERNEL_TESTS + more)
        (self.folder / "canary.py").write_text(canary)

    def run(self, *options: str) -> tuple[int, dict[str, Any]]:
        self._patch.setattr(sys, "argv", ["sanitize", *options, "tests"])
        code = sanitize.main()
        row = (self.folder / "results" / "sanitize.jsonl").read_text().splitlines()[-1]
        return code, json.loads(row)["metrics"]

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_clean(bench: Bench) -> None:
    code, row = bench.run("--processes", "2")
    assert code == 0
    counts = {"clean": 4, "skipped": 1}
    assert row["by_file"] == {"tests/test_k.py": counts}
    assert (row["reports"], row["canary_seen"], row["not_run"]) == (0, True, 0)
    calls = bench.calls()
    assert len(calls) == 4  # two shares, the capture, the canary
    assert len({call[call.index("--port") + 1] for call in calls}) == 4
    assert sum("kernel_substring=_good" in call for call in calls) == 2  # who launched it
    assert "===== process 0, sanitized" in (bench.folder / "results/sanitize.log").read_text()


def test_other_tools_have_no_canary(bench: Bench) -> None:
    code, row = bench.run("--processes", "1", "--tool", "initcheck")
    assert (code, row["canary_seen"]) == (0, None)
    assert not any("--kernel-name" in call or "--padding" in call for call in bench.calls())


def test_reports_and_failures_are_told_apart(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.write(REPORTED + FAILS)
    code, row = bench.run("--processes", "1")
    assert code == 1
    found = (row["clean"], row["reported"], row["failed"], row["skipped"])
    assert found == (4, 1, 1, 1)
    printed = capsys.readouterr().out
    assert "memcheck: Invalid __global__ read of size 4 bytes at _norm+0x1a0 in norm.py:53" in (
        printed
    )
    assert "failed: tests/test_k.py::test_fails" in printed


def test_a_silent_canary_spoils_all(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.write(canary=CANARY.replace("    reported()", "    pass"))
    code, row = bench.run("--processes", "1")
    assert (code, row["clean"], row["canary_seen"]) == (1, 4, False)
    assert "the canary was not reported" in capsys.readouterr().out


def test_its_exit_code_is_heard(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it finds something and says nothing that is understood."""
    monkeypatch.setenv("FAKE_FINDS", "1")
    code, row = bench.run("--processes", "1")
    assert (code, row["clean"], row["reports"]) == (1, 4, 2)
    assert row["first_report"] == "an error that the log does not tell (outside of tests)"


def test_time_ends_between_tests(bench: Bench) -> None:
    """Without any, each process does the one test that it has begun, and says the rest is left."""
    code, row = bench.run("--processes", "1", "--budget", "0")
    assert (code, row["clean"], row["not_run"]) == (1, 2, 3)


def test_who_does_not_end_is_cut_off(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "GRACE_S", 0)
    code, row = bench.run("--processes", "1", "--budget", "0")
    assert (code, row["clean"], row["not_run"], row["canary_seen"]) == (1, 0, 5, False)


WAITS = """
@pytest.mark.gpu
def test_waits():
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    place = pathlib.Path(os.environ["FAKE_CALLS"]).parent / "began"
    place.with_suffix(".tmp").write_text(f"{os.getpid()} {child.pid}")
    place.with_suffix(".tmp").rename(place)
    time.sleep(600)
"""


def test_ctrl_c_ends_it_at_once(bench: Bench) -> None:
    """Its tests, and what they started, long before the budget; nothing is written down."""
    bench.write(WAITS)
    began = bench.folder / "began"
    with interrupted_when(began.exists), pytest.raises(KeyboardInterrupt):
        bench.run("--processes", "3", "--budget", "3000")
    pids = [int(pid) for pid in began.read_text().split()]
    until(lambda: not any(map(is_running, pids)))
    assert not (bench.folder / "results").exists()


def test_ctrl_c_is_no_traceback() -> None:
    """Also before the tests are collected."""
    code = (
        "import os, runpy, shutil, signal, sys\n"
        "def which(name):\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "shutil.which = which\n"
        "sys.argv = ['sanitize']\n"
        "runpy.run_module('benchmarks.kernels.sanitize', run_name='__main__', alter_sys=True)\n"
    )
    ran = run_command([sys.executable, "-c", code], cwd=ROOT)
    assert (ran.returncode, ran.stderr) == (130, "")


def test_without_the_sanitizer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=r"^compute-sanitizer is not in PATH; it comes with"):
        bench.run()


def test_tests_that_do_not_load_are_told(bench: Bench) -> None:
    bench.write("\nimport nowhere_to_be_found\n")
    with pytest.raises(SystemExit, match="nowhere_to_be_found"):
        bench.run()
