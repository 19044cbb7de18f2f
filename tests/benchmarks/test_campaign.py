"""The campaign's commands are valid before a GPU is lent, and its jobs end in time with what they
started.
"""

from __future__ import annotations

import argparse
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import campaign
from benchmarks.campaign import CAMPAIGNS, Gpus, Job, Lane, run_lane, show
from benchmarks.groups import Groups
from benchmarks.stopwatch import elapsed_s
from tests.waiting import interrupted_when, is_running, limits, until

ROOT = Path(campaign.__file__).parent.parent
JOBS = {job.name: job for lanes in CAMPAIGNS.values() for lane in lanes for job in lane.jobs}


class Parsed(BaseException):
    """The command line was understood."""


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_every_command_line_is_understood(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    module, *arguments = shlex.split(job.command)
    if module == "pytest":
        paths = [argument for argument in arguments if argument.startswith("tests/")]
        assert paths
        assert all((ROOT / path).exists() for path in paths)
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *_: Any) -> None:
        parse(parser)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    for loaded in (module, f"{module}.__main__"):  # runpy warns of it
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    with pytest.raises(Parsed):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def test_a_job_ends_at_its_limit_with_its_children(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stuck.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    now = elapsed_s()
    for limit in limits(1.0):
        jobs = [Job("stuck", "stuck", limit_s=limit), Job("after", "this"), Job("late", "this")]
        run_lane(Lane(jobs[:1]), Gpus(["0"]), tmp_path, now + 3600, Groups())
        if "child" in (tmp_path / "stuck").read_text():  # it had come so far
            break
    run_lane(Lane(jobs[1:2]), Gpus(["0"]), tmp_path, now + 3600, Groups())
    run_lane(Lane(jobs[2:]), Gpus(["0"]), tmp_path, now, Groups())
    show(jobs, tmp_path, tmp_path / "results")
    printed = capsys.readouterr().out
    assert "stuck: cut off" in printed
    assert "after: exit 0" in printed
    assert "Namespaces are one honking great idea" in printed
    assert "late: left out, no time" in printed
    assert not is_running(int(printed.split("child ")[1].split()[0]))
    log = (tmp_path / "results" / "campaign.log").read_text()
    assert log.startswith("===== stuck: python -m stuck")
    assert "===== after" in log


def test_jobs_have_a_folder_in_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "told.py").write_text("import os, sys; print(sys.argv[1:], os.environ['TABLE'])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = Job("told", "told --write $CAMPAIGN/a", env={"TABLE": "$CAMPAIGN/b"})
    run_lane(Lane([job]), Gpus(["0"]), tmp_path, elapsed_s() + 3600, Groups())
    assert (tmp_path / "told").read_text() == f"['--write', '{tmp_path}/a'] {tmp_path}/b\n"


def test_ctrl_c_ends_all_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before their limits, and shows what they had said; no other job begins."""
    (tmp_path / "stuck.py").write_text(
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('pids', os.getpid(), child.pid, flush=True)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "time.sleep(600)\n"
    )
    began = [tmp_path / "one", tmp_path / "two"]
    lanes = [Lane([Job(p.name, f"stuck {p}", 3000), Job("more", "this")], 0) for p in began]
    monkeypatch.setitem(CAMPAIGNS, "check", lanes)
    monkeypatch.setattr(sys, "argv", ["campaign", "check"])
    for name, value in (("PYTHONPATH", tmp_path), ("CUDA_VISIBLE_DEVICES", "0")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("NVCLI_RESULTS", str(tmp_path / "results"))
    with interrupted_when(lambda: all(path.exists() for path in began)):
        assert campaign.main() == 130
    printed = capsys.readouterr().out
    assert printed.index("interrupted") < printed.index("== one")
    said = [line.split()[1:] for line in printed.splitlines() if line.startswith("pids")]
    pids = [int(pid) for line in said for pid in line]
    assert len(pids) == 4
    until(lambda: not any(map(is_running, pids)))
    assert "more" not in printed


def test_lanes_wait_for_their_gpus() -> None:
    gpus = Gpus(["0", "1"])
    assert gpus.take(0) == []
    both = gpus.take(2)
    assert sorted(both) == ["0", "1"]
    gpus.give(["0", "1"])
    assert gpus.take(1) == ["1"]  # the first is the one that is shared
