"""The kernels' GPU tests under compute-sanitizer, in parallel processes on one GPU.

    python -m benchmarks.kernels.sanitize                        # memcheck, all of tests/kernels
    python -m benchmarks.kernels.sanitize --tool racecheck tests/kernels/test_gemm.py

Each process has a share of the tests and a Triton cache of its own. It runs its share once
without the sanitizer, which compiles everything, and then what passed once more with it, so that
no compiler runs under it, and no two processes compile into one cache.

- Memory is not cached (`PYTORCH_NO_CUDA_MEMORY_CACHING`): the sanitizer knows allocations, not
  tensors, and torch puts many of these into one. Every tensor is an allocation of its own, with
  padding behind it. A capture cannot allocate that way, so tests marked `captures` run with cached
  memory, in a process of their own.
- Only Triton's kernels are checked, those that the first run has put into the cache; PyTorch's take
  most of the time. `--all-kernels` checks those too, and initcheck always does, which has to see
  who writes. Beside the tests runs a canary, which memcheck has to report.
- Tests of several GPUs (`multi_gpu`) are left out: their ranks are processes that wait for each
  other within kernels. So are those whose work is a child process's (`child`): it is not followed.

A test is clean when it passed, nothing was reported while it ran, and the sanitizer came to its own
end and printed all that it had found. Appends a row to `benchmarks/results/sanitize.jsonl`, and
leaves all logs in `sanitize.log` beside it. The exit code is 0 when every test was clean or skipped
itself, 130 when it was interrupted (then nothing is written down), else 1.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.groups import INTERRUPTED, Groups
from benchmarks.kernels.sanitized import Log, Report, read_log
from benchmarks.rows import RESULTS, write_row
from benchmarks.stopwatch import say

ROOT = Path(__file__).resolve().parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
PYTEST += ["--import-mode=importlib", "--tb=short", "-rfE"]
CANARY = "benchmarks/kernels/canary.py::test_canary"
CHECKED = "gpu and not multi_gpu and not child"
VERDICTS = ("clean", "reported", "failed", "not run", "skipped")
FOUND = 99  # the sanitizer's exit code when it has something to report
GRACE_S = 45  # for the test under way when time is over


def split(tests: list[str], count: int) -> list[list[str]]:
    """Shares with a part of each test function, in the order of the last parameter: it is the heads
    of attention, as a rule, on which most of what is compiled depends.
    """
    shares: list[list[str]] = [[] for _ in range(count)]
    at = 0
    for _, group in itertools.groupby(tests, lambda test: test.partition("[")[0]):
        cases = sorted(group, key=lambda test: test.rpartition("-")[2])
        for index, case in enumerate(cases):
            shares[(at + index * min(count, len(cases)) // len(cases)) % count].append(case)
        at += len(cases)
    return [share for share in shares if share]


def collect(paths: list[str], marker: str) -> list[str]:
    command = [*PYTEST, "--collect-only", "-m", marker, *paths]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if run.returncode not in (0, 5):  # 5: none
        raise SystemExit(f"these tests cannot be collected:\n{(run.stdout + run.stderr)[-3000:]}")
    lines = itertools.takewhile(str.strip, run.stdout.splitlines())  # then warnings and a count
    return [line for line in lines if "::" in line]


@dataclass(frozen=True)
class Share:
    """Tests that one process runs, twice; and where it keeps what."""

    index: int
    tests: list[str]
    folder: Path
    groups: Groups
    is_cached: bool = False

    def sanitizer(self, tool: str, *, checks_all: bool) -> list[str]:
        """Ports are its own: with the usual ones there are ten for all. No compiler is followed."""
        found = ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only"]
        found += ["--port", str(49_152 + 20 * self.index), "--launch-timeout", "0"]
        found += ["--destroy-on-device-error", "kernel", "--check-exit-code", "no"]
        found += ["--error-exitcode", str(FOUND), "--print-limit", "1000"]
        found += ["--show-backtrace", "device"]  # the host's is 50 frames of Python each
        if tool == "memcheck":
            found += ["--padding", "512"]
        if not checks_all:
            groups = (self.folder / "cache").glob("*/__grp__*.json")
            for name in sorted({group.stem.removeprefix("__grp__") for group in groups}):
                found += ["--kernel-name", f"kernel_substring={name}"]
        return found

    def run(self, tests: list[str], name: str, prefix: list[str], deadline: float) -> Log:
        path = self.folder / name
        env = os.environ | {
            "SANITIZE_LOG": str(path),
            "SANITIZE_DEADLINE": str(deadline),
            "TRITON_CACHE_DIR": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        if not self.is_cached:
            env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        command = [*prefix, *PYTEST, "-p", "benchmarks.kernels.sanitized", *tests]
        with path.open("ab") as log:
            left = max(0, deadline + GRACE_S - time.time())
            code = self.groups.run(
                command, left, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=env
            )
            if code is None:
                log.write(b"\ncut off\n")
        said = read_log(path.read_text(encoding="utf-8", errors="replace"))
        if prefix and code == FOUND and not said.reports:
            said.reports.append(Report("an error that the log does not tell", None))
        return said

    def check(self, tool: str, deadline: float, *, checks_all: bool) -> tuple[dict[str, str], Log]:
        """Verdicts by test, and the log of the sanitized run. Half the time is for the other."""
        begin = time.time()
        self.folder.mkdir()
        plain = self.run(self.tests, "plain", [], begin + (deadline - begin) / 2)
        passed = [test for test in self.tests if plain.outcomes.get(test) == "passed"]
        verdicts = plain.verdicts(self.tests)
        middle, log = time.time(), Log()
        if passed:
            prefix = self.sanitizer(tool, checks_all=checks_all)
            log = self.run(passed, "sanitized", prefix, deadline)
            verdicts |= log.verdicts(passed)
        counts = ", ".join(f"{n} {verdict}" for verdict, n in Counter(verdicts.values()).items())
        say(f"{self.index}: {counts} ({middle - begin:.0f} s, {time.time() - middle:.0f} s)")
        return verdicts, log


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", default=["tests/kernels"], help="tests or folders")
    tools = ("memcheck", "racecheck", "synccheck", "initcheck")
    parser.add_argument("--tool", default="memcheck", choices=tools)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--budget", type=float, default=500, metavar="SECONDS")
    parser.add_argument("--all-kernels", action="store_true", help="PyTorch's too")
    args = parser.parse_args()
    if args.processes < 1:
        parser.error("--processes: at least 1")
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("compute-sanitizer is not in PATH; it comes with the CUDA toolkit")
    begin = time.time()
    captures = collect(args.paths, f"{CHECKED} and captures")
    tests = [test for test in collect(args.paths, CHECKED) if test not in captures]
    if not tests and not captures:
        raise SystemExit(f"no test marked gpu in {', '.join(args.paths)}")
    parts = [(part, False) for part in split(tests, args.processes)]
    parts += [(captures, True)] * bool(captures)
    parts += [([CANARY], False)] * (args.tool == "memcheck")
    checks_all = args.all_kernels or args.tool == "initcheck"
    groups = Groups()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(parts)) as pool:
        shares = [
            Share(index, part, Path(name, str(index)), groups, is_cached)
            for index, (part, is_cached) in enumerate(parts)
        ]
        say(f"{len(tests) + len(captures)} tests in {len(shares)} processes")
        with groups.ended_by_signals():
            found = list(
                pool.map(
                    lambda share: share.check(
                        args.tool, begin + args.budget, checks_all=checks_all
                    ),
                    shares,
                )
            )
        keep_logs(shares)
    is_seen = None
    if args.tool == "memcheck":
        canary, _ = found.pop()
        is_seen = canary[CANARY] == "reported"
    return tell(args, found, is_seen, time.time() - begin)


def keep_logs(shares: list[Share]) -> None:
    folder = Path(os.environ.get("NVCLI_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "sanitize.log").open("w", encoding="utf-8") as whole:
        for share, name in itertools.product(shares, ("plain", "sanitized")):
            if (path := share.folder / name).exists():
                text = path.read_text(encoding="utf-8", errors="replace")
                whole.write(f"===== process {share.index}, {name}\n{text}\n")


def tell(
    args: argparse.Namespace,
    found: list[tuple[dict[str, str], Log]],
    is_canary_seen: bool | None,
    seconds: float,
) -> int:
    """Print what there is to know, write the row, and return the exit code."""
    verdicts = {test: how for share, _ in found for test, how in share.items()}
    reports = [report for _, log in found for report in log.reports]
    by_file: dict[str, Counter[str]] = {}
    for test, how in verdicts.items():
        by_file.setdefault(test.partition("::")[0], Counter())[how] += 1
    for file, counts in sorted(by_file.items()):
        print(f"{file}: {', '.join(f'{number} {how}' for how, number in counts.items())}")
    for test, how in sorted(verdicts.items()):
        if how == "failed":
            print(f"failed: {test}")
    firsts = list({(report.text, report.where): report for report in reversed(reports)}.values())
    for report in firsts[::-1][:12]:
        print(f"{args.tool}: {report}")
    if is_canary_seen is False:
        print("the canary was not reported, or had no time: that nothing else is means nothing")
    total = Counter(verdicts.values())
    write_row(
        "sanitize",
        metrics={
            **{how.replace(" ", "_"): total[how] for how in VERDICTS},
            "reports": len(reports),
            "first_report": str(reports[0]) if reports else None,
            "canary_seen": is_canary_seen,
            "seconds": round(seconds, 1),
            "by_file": by_file,
        },
        config={
            "tool": args.tool,
            "paths": args.paths,
            "processes": args.processes,
            "budget_s": args.budget,
            "all_kernels": args.all_kernels or args.tool == "initcheck",
        },
    )
    is_clean = set(total) <= {"clean", "skipped"} and not reports and is_canary_seen is not False
    return 0 if is_clean else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
