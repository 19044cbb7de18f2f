"""The log of a process of `benchmarks.kernels.sanitize`, by those who write and read it.

A pytest plugin says there, between what the sanitizer says, which test runs and how it ended; it
stops between tests when time is over, so that the sanitizer ends by itself and has said all.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field

import pytest

MARK = "@sanitize"
SAID = re.compile(r"(?<!=)={9} (.*)")  # pytest's own lines are longer


def say(what: str, about: str) -> None:
    """One line, appended whole, whatever stands before it."""
    log = os.open(os.environ["SANITIZE_LOG"], os.O_WRONLY | os.O_APPEND)
    os.write(log, f"\n{MARK} {what} {about}\n".encode())
    os.close(log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    say("start", nodeid)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:  # a teardown that fails has the last word
        say(report.outcome, report.nodeid)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if time.time() > float(os.environ["SANITIZE_DEADLINE"]):
        item.session.shouldstop = "out of time"


def pytest_sessionfinish(exitstatus: int) -> None:
    say("end", str(int(exitstatus)))


@dataclass
class Report:
    """What the sanitizer has to say, where in which kernel, and which test ran when it did."""

    text: str
    test: str | None
    where: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.where}".strip() + f" ({self.test or 'outside of tests'})"


@dataclass
class Log:
    """What the log of one process says."""

    outcomes: dict[str, str] = field(default_factory=dict)  # passed, failed or skipped
    reports: list[Report] = field(default_factory=list)
    is_whole: bool = False  # the sanitizer came to its summary, and printed all it had found

    def verdicts(self, tests: list[str]) -> dict[str, str]:
        """By test: clean, reported, failed, skipped, or not run, also where nobody knows."""
        found = {test: self.outcomes.get(test, "not run") for test in tests}
        known = "clean" if self.is_whole else "not run"
        found = {test: known if how == "passed" else how for test, how in found.items()}
        return found | {one.test: "reported" for one in self.reports if one.test in found}


def read_log(text: str) -> Log:
    log, test, counted = Log(), None, 0
    for line in text.splitlines():
        said = SAID.search(line)
        if line.startswith(f"{MARK} "):
            what, _, about = line.removeprefix(f"{MARK} ").partition(" ")
            if what == "start":
                test = about
            elif what == "end":
                test = None
            else:
                log.outcomes[about] = what
        elif said is None or not said[1].strip() or said[1].startswith("COMPUTE-SANITIZER"):
            continue
        elif found := re.search(r"SUMMARY: (\d+)", said[1]):
            log.is_whole = "not printed" not in text
            counted += int(found[1])
        elif not said[1].startswith(" "):
            log.reports.append(Report(said[1], test))
        elif log.reports and not log.reports[-1].where and said[1].lstrip().startswith("at "):
            log.reports[-1].where = said[1].strip()
    if counted and not log.reports:
        log.reports.append(Report(f"{counted} errors, of which the log does not tell", test))
    return log
