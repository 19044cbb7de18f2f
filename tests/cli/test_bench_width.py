"""Reports of `nvcli bench` on narrow terminals: broken between their parts, tables row by row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from nvcli.bench.card import card
from nvcli.bench.record import read_runs
from nvcli.bench.selftest import Check, SelfTest
from nvcli.bench.summary import summarize
from nvcli.bench.sweep import analyse
from nvcli.bench.sweep import table as sweep_table
from nvcli.cli.bench_shared import fitted
from nvcli.repl.wrap import cells
from tests.bench.runs import closed_loop, noisy, store
from tests.cli.conftest import Cli

WIDTHS = [10, 20, 25, 32, 40, 60, 80, 99]


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    one = store(tmp_path / "one.jsonl", noisy(closed_loop(400), 1.0, 1), slo={"ttft": 0.03})
    two = store(tmp_path / "two.jsonl", noisy(closed_loop(400), 1.4, 2), slo={"ttft": 0.03})
    return [str(one), str(two)]


def check(lines: Sequence[str], width: int) -> None:
    """What is wider is one word, with what stands before it: its name, or the indentation."""
    for line in lines:
        assert line == line.rstrip() or cells(line.rstrip()) <= width, line
        if cells(line) > width:
            longest = max(map(cells, line.split()))
            assert longest > width - 12, (width, line)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_report(
    cli: Cli, runs: list[str], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = ["--gate", "e2e.p99<=+5%"]
    for args in (
        ["report", runs[0]],
        ["report", "--define"],
        ["compare", *runs, *gate],
        ["plan", "demo", "--gpu", "H200", "--rate", "4", "--explain"],
        ["plan", "demo", "--gpu", "H200", "--tp", "1", "--replicas", "2"],
    ):
        monkeypatch.setenv("COLUMNS", str(width))
        narrow = cli("bench", *args, terminals=("out",))
        piped = cli("bench", *args)
        assert narrow.code == piped.code
        assert narrow.err == piped.err
        check(narrow.out.splitlines(), width)
        monkeypatch.setenv("COLUMNS", "400")
        assert cli("bench", *args, terminals=("out",)).out == piped.out, "nothing else changes"
        assert set(re.findall(r"\d+", piped.out)) == set(re.findall(r"\d+", narrow.out))


def test_a_row_says_what_its_numbers_are(
    cli: Cli, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "32")
    lines = cli("bench", "report", runs[0], terminals=("out",)).out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("ttft ms: mean "))
    assert " · p50 " in lines[at] or lines[at + 1].startswith("  p50 ")
    assert not any(line.startswith("ms  ") for line in lines), "no header of columns"
    compared = cli("bench", "compare", *runs, terminals=("out",)).out
    assert "\ne2e.p50: A " in compared
    assert "worse" in compared


@pytest.mark.parametrize("width", WIDTHS)
def test_a_sweep_and_the_self_test(runs: list[str], width: int) -> None:
    swept = sweep_table(analyse([summarize(run) for name in runs for run in read_runs(Path(name))]))
    tested = SelfTest([Check("ttft p50", 20.0, 20.125), Check("e2e p99", 50.0, 90.0)], 0.1, 4000.0)
    for lines in (swept, tested.lines(), card(summarize(read_runs(Path(runs[0]))[0]))):
        check([part for line in lines for part in fitted(line, width)], width)
        assert [part for line in lines for part in fitted(line, 400)] == lines
