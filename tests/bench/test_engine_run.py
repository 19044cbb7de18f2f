"""In the process, with the built-in model: exact lengths, every step logged, short runs (S1)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvcli.bench import points
from nvcli.bench.calibrate import Sample, calibrate
from nvcli.bench.engine_run import step_record
from nvcli.bench.offline import essential_first
from nvcli.bench.perf_model import Cost, Hardware, PerfModel
from nvcli.bench.points import Point
from nvcli.bench.shape import Shape
from nvcli.engine.step import Row, StepPlan
from tests.bench.runs import own_runs
from tests.builders import make_sequence
from tests.cli.conftest import Cli

SHAPE = Shape(1024, 28, 16, 8, 128, 3072, 151_936, True)
H200 = Hardware("H200", 4.8e12, 989e12)
TRUE = Cost(1e-3, 5e-6, 1.192e9 / (0.8 * 4.8e12), 114_688 / (0.8 * 4.8e12), 2e-15, 3e-15, 2e-3)


def test_step_log_tells_decodes_from_prompts() -> None:
    a, b = make_sequence(range(10)), make_sequence(range(6))
    plan = StepPlan(0, [Row(a, 0, 0, 12, 1, True), Row(b, 0, 1, 2, 4, True)])
    found = step_record(plan, 1.0, 1.5)
    assert (found.b, found.S, found.p, found.c) == (1, 13, 4, 2)
    assert found.pairs == 3 + 4 + 5 + 6
    assert found.dt_s == 0.5
    assert found.heads == 2
    last = step_record(StepPlan(1, [Row(a, 0, 0, 9, 1, True)]), 0, 1)
    assert (last.b, last.p) == (0, 1)  # the last prompt token is still the prompt's


def samples(model: PerfModel) -> list[Sample]:
    prompts = [Sample(f"prefill {p}", 0, 0, p, 0, model.prefill(p)) for p in (128, 512, 2048, 8192)]
    grid = [(1, 128), (1, 1024), (1, 16384), (4, 1024), (16, 1024), (64, 1024), (64, 128)]
    return prompts + [
        Sample(f"decode {b} {c}", b, b * c, 0, 0, model.step(b, b * c)) for b, c in grid
    ]


def test_calibration_recovers_its_own_model() -> None:
    truth = PerfModel(SHAPE, TRUE)
    found = calibrate(SHAPE, H200, samples(truth), budget=16_384, key="k")
    assert found is not None
    assert found.cost.per_sequence == pytest.approx(TRUE.per_sequence, rel=0.02)
    assert found.cost.per_kv_token == pytest.approx(TRUE.per_kv_token, rel=0.02)
    assert found.cost.fixed == pytest.approx(TRUE.fixed, rel=0.05)
    assert found.weights_efficiency == pytest.approx(0.8, rel=0.02)
    assert max(map(abs, found.errors.values())) < 0.35  # a corner left out is extrapolated
    for n_in, n_out, b in ((512, 128, 1), (512, 128, 16), (1024, 256, 64)):
        want, got = (
            truth.under(n_in, n_out).closed(b),
            found.perf_model.under(n_in, n_out).closed(b),
        )
        assert got.requests_per_s == pytest.approx(want.requests_per_s, rel=0.02)
    assert found.covers(128, 100_000, 16_000)
    assert not found.covers(129, 1, 1)


def test_calibration_needs_points() -> None:
    few = samples(PerfModel(SHAPE, TRUE))[:5]
    assert calibrate(SHAPE, H200, few, budget=16_384, key="k") is None


def test_what_a_calibration_needs_comes_first() -> None:
    found = [Point(0, n, 0) for n in (128, 512, 2048)]
    found += [Point(1, 0, c) for c in (128, 1024, 2048)] + [Point(4, 0, 1024), Point(16, 0, 128)]
    found += [Point(4, 128, 128), Point(15, 512, 128)]
    ordered = essential_first(found)
    assert sorted(ordered, key=str) == sorted(found, key=str)
    assert [p.b > 0 for p in ordered[:5]] == [False, False, True, True, True]
    assert all(p.p == 0 for p in ordered[2:5])


@pytest.mark.torch
@pytest.mark.parametrize(("requests", "n_in", "n_out"), [(1, 1, 1), (1, 4, 2), (6, 9, 3)])
def test_throughput_of_the_built_in_model(
    tmp_path: Path, cli: Cli, requests: int, n_in: int, n_out: int
) -> None:
    flags = ["--device", "cpu", "--requests", str(requests), "-c", "1"]
    flags += ["--in-len", str(n_in), "--out-len", str(n_out), "--max-model-len", "64"]
    result = cli("bench", "throughput", *flags, "--json")
    assert result.code in (0, 6), result.err
    found = json.loads(result.out, parse_constant=pytest.fail)
    assert found["counts"]["ok"] == requests
    assert (found["tpot_ms"]["mean"] is None) == (n_out == 1)
    (run,) = own_runs(tmp_path)
    assert [r.num_tokens for r in run.requests] == [n_out] * requests
    assert sum(s.p for s in run.steps) == requests * n_in  # a cold cache: every prompt token
    assert sum(s.b for s in run.steps) == requests * (n_out - 1)
    assert cli("bench", "report", "last").code == result.code


@pytest.mark.torch
def test_conversations_find_their_prompt_in_the_cache_and_runs_repeat(
    tmp_path: Path, cli: Cli
) -> None:
    flags = ["--device", "cpu", "--requests", "6", "-c", "2", "--in-len", "20", "--out-len", "3"]
    flags += ["--max-model-len", "96", "--turns", "3", "--repeat", "2", "--json"]
    result = cli("bench", "throughput", *flags)
    assert result.code in (0, 6), result.err
    first, second = own_runs(tmp_path)
    assert first.id != second.id
    assert first.header["workload"]["hash"] == second.header["workload"]["hash"]
    for run in (first, second):
        # 20 said and 3 answered a turn; of the turn before, whole blocks of 16 are found again
        expected = {1: (20, 0), 2: (43, 16), 3: (66, 32)}
        assert len(run.requests) == 6
        assert all((r.n_in, r.cached) == expected[r.turn] for r in run.requests)
    found = json.loads(result.out, parse_constant=pytest.fail)
    assert found["cache"]["hit_share"] > 0
    assert len(found["runs"]) == 2


@pytest.mark.torch
def test_warm_cache_in_the_process(tmp_path: Path, cli: Cli) -> None:
    flags = ["--device", "cpu", "--requests", "4", "-c", "2", "--in-len", "3", "--out-len", "2"]
    flags += ["--max-model-len", "96", "--prefix", "32:2", "--cache", "warm", "--json"]
    result = cli("bench", "throughput", *flags)
    assert result.code in (0, 6), result.err
    (run,) = own_runs(tmp_path)
    assert [r.cached for r in run.requests] == [32] * 4


@pytest.mark.torch
def test_ctrl_c_keeps_the_steps_that_were_measured(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def measure(bench: object, point: points.Point, **more: object) -> points.Timed:
        calls.append(point.name)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return points.Timed([0.01] * 5)

    monkeypatch.setattr(points, "measure_point", measure)
    result = cli("bench", "latency", "--device", "cpu", "--max-model-len", "64", "--repeat", "5")
    assert result.code == 130
    assert "interrupted: these are the samples until then" in result.out
    (run,) = own_runs(tmp_path)
    assert [p["name"] for p in run.points] == calls[1:3]  # the first warms up
    assert not list((tmp_path / "state" / "nvcli" / "bench" / "calibration").glob("*"))
