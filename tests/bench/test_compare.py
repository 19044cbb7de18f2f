"""`bench compare`: verdicts and gates, and exit codes that never pass on doubt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvcli.bench.gates import parse_gate
from nvcli.bench.text import number
from nvcli.errors import UsageError
from tests.bench.runs import closed_loop, noisy, store
from tests.cli.conftest import Cli


@pytest.fixture
def a(tmp_path: Path) -> str:
    return str(store(tmp_path / "a.jsonl", noisy(closed_loop(), 1.0, 1)))


def other(tmp_path: Path, factor: float, **header: object) -> str:
    return str(store(tmp_path / "b.jsonl", noisy(closed_loop(), factor, 2), **header))


def test_same_code_is_not_worse(tmp_path: Path, a: str, cli: Cli) -> None:
    result = cli("bench", "compare", a, other(tmp_path, 1.0), "--gate", "e2e.p50<=+5%")
    assert (result.code, result.err) == (0, "")
    assert "worse" not in result.out
    assert "pass" in result.out


def test_slower_fails_its_gate_with_5(tmp_path: Path, a: str, cli: Cli) -> None:
    b = other(tmp_path, 1.2)
    result = cli("bench", "compare", a, b, "--gate", "e2e.p50<=+5%")
    assert result.code == 5
    assert "worse" in result.out
    assert cli("bench", "compare", a, b).code == 0  # without a gate it only tells
    found = json.loads(cli("bench", "compare", a, b, "--json").out)["comparisons"][0]
    row = next(r for r in found["rows"] if r["name"] == "e2e.p50")
    assert 0.15 < row["low"] < row["change"] < row["high"] < 0.25
    assert row["p"] < 0.001


def test_interval_across_the_limit_is_inconclusive(tmp_path: Path, a: str, cli: Cli) -> None:
    b = other(tmp_path, 1.05)
    assert cli("bench", "compare", a, b, "--gate", "e2e.p50<=+5%").code == 6
    assert cli("bench", "compare", a, b, "--gate", "e2e.p50<=+5%", "--lenient").code == 0


def test_absolute_gates(tmp_path: Path, a: str, cli: Cli) -> None:
    b = other(tmp_path, 1.0, slo={"e2e": 0.1})
    for gate, code in (
        ("e2e.p99<=100ms", 0),
        ("e2e.p99<=10ms", 5),
        ("goodput>=0.95", 0),
        ("out_tok_s>=100", 0),
        ("out_tok_s>=10000", 5),
        ("ttft.mean<=0.1s", 0),
    ):
        assert cli("bench", "compare", a, b, "--gate", gate).code == code, gate


@pytest.mark.parametrize("gate", ["e2e.p50<=1ms", "e2e.p50<=0.001s"])
def test_a_gate_of_a_time_tells_what_was_measured_in_ms(
    tmp_path: Path, a: str, cli: Cli, gate: str
) -> None:
    """0.05 beside "<=1ms" would look like a pass."""
    b = other(tmp_path, 1.0)
    result = cli("bench", "compare", a, b, "--gate", gate, "--json")
    (found,) = json.loads(result.out)["comparisons"]
    median = next(row["b"] for row in found["rows"] if row["name"] == "e2e.p50")
    (judged,) = found["gates"]
    assert (judged["value"], judged["unit"]) == (pytest.approx(median), "ms")
    assert judged["low"] <= judged["value"] <= judged["high"]
    text = cli("bench", "compare", a, b, "--gate", gate).out
    assert f"(measured {number(median)} ms)" in text


def test_percentile_the_sample_does_not_allow_stays_open(tmp_path: Path, a: str, cli: Cli) -> None:
    assert cli("bench", "compare", a, other(tmp_path, 1), "--gate", "e2e.p999<=+5%").code == 6


def test_other_workload_is_refused(tmp_path: Path, a: str, cli: Cli) -> None:
    b = other(tmp_path, 1.0, workload={"hash": "w2"})
    result = cli("bench", "compare", a, b, "--gate", "e2e.p50<=+50%")
    assert result.code == 6
    assert "workloads differ" in result.out
    assert cli("bench", "compare", a, b, "--gate", "e2e.p50<=+50%", "--any-workload").code == 0


def test_gate_never_passes_on_an_unsound_run(tmp_path: Path, a: str, cli: Cli) -> None:
    records = noisy(closed_loop(), 0.5, 2)
    records[3].end_ns = records[3].s_ns - 1
    b = str(store(tmp_path / "b.jsonl", records))
    assert cli("bench", "compare", a, b, "--gate", "e2e.p50<=+5%", "--lenient").code == 6


def test_other_load_is_refused(tmp_path: Path, a: str, cli: Cli) -> None:
    load = {"mode": "closed", "concurrency": 8, "text": "closed, c = 8"}
    b = other(tmp_path, 1.0, load=load)
    assert cli("bench", "compare", a, b).code == 2
    assert cli("bench", "compare", a, b, "--any-workload").code == 0


def test_gates_parse() -> None:
    gate = parse_gate("e2e.p99 <= +5%")
    assert (gate.metric, gate.stat, gate.limit, gate.is_relative) == ("e2e", "p99", 0.05, True)
    assert parse_gate("ttft<=300ms").stat == "mean"
    assert parse_gate("out_tok_s>=-3%").limit == pytest.approx(-0.03)
    for bad in (
        "e2e",
        "e2e.p99<5%",
        "e2e.p98<=5%",
        "x>=1",
        "e2e.p99<=5",
        "goodput>=1ms",
        "e2e<=.%",
    ):
        with pytest.raises(UsageError):
            parse_gate(bad)
