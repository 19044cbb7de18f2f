"""What `plan` predicts, against the real scheduler on a device of known cost, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nvcli.bench.perf_model import Cost, PerfModel
from nvcli.bench.points import default_points, run_points
from nvcli.bench.shape import Shape
from nvcli.bench.under_load import Prediction
from tests.bench.virtual import VirtualLLM, bench_of, closed, install, law_of, open_loop, spread

# What was measured on an H200 (8B and 0.6B in bfloat16) and on two CPU cores.
BIG = PerfModel(
    Shape(4096, 36, 32, 8, 128, 12288, 151_936, False),
    Cost(1.3e-3, 2e-6, 3.8e-3, 3.7e-8, 1.4e-15, 3.8e-15, 3.6e-3, lone=5.3e-3, mixed_fixed=4.5e-3),
    depth=1,
)
FAST = PerfModel(
    Shape(1024, 28, 16, 8, 128, 3072, 151_936, True),
    Cost(0.8e-3, 2e-6, 0.25e-3, 2.9e-8, 2.5e-15, 2.8e-15, 1.9e-3, lone=0.69e-3, mixed_fixed=1e-3),
    depth=1,
)
CPU = PerfModel(
    Shape(256, 6, 4, 2, 128, 768, 4096, True, weight_bytes=4, kv_bytes=4),
    Cost(0.0, 0.5e-3, 3e-3, 3e-6, 1.4e-11, 1.75e-11, 3e-3),
    budget=1024,
)


def virtual(model: PerfModel, monkeypatch: pytest.MonkeyPatch, **more: Any) -> VirtualLLM:
    llm = VirtualLLM(law_of(model), depth=model.depth, budget=model.budget, **more)
    install(llm, monkeypatch)
    return llm


def assert_rows_near(measured: dict[str, Any], share: float) -> None:
    """Predicted, for the lengths that were counted, beside measured."""
    rows = {row["name"]: row["ratio"] for row in measured["model_rows"]}
    for name in ("ttft_ms", "tpot_ms", "output_tokens_per_s"):
        assert rows[name] == pytest.approx(1, abs=share), name


def assert_near(found: Prediction, measured: dict[str, Any], share: float) -> None:
    assert found.ttft_s * 1e3 == pytest.approx(measured["ttft_ms"]["mean"], rel=share)
    rate = measured["throughput"]["output_tokens_per_s"]
    assert found.output_tokens_per_s == pytest.approx(rate, rel=share)
    assert found.tpot_s is not None
    assert found.tpot_s * 1e3 == pytest.approx(measured["tpot_ms"]["mean"], rel=share)


@pytest.mark.parametrize(
    ("model", "n_in", "n_out", "clients"),
    [
        (BIG, 1024, 256, (1, 8)),
        (BIG, 1024, 64, (64, 256)),
        (FAST, 1024, 256, (1, 8)),
        (FAST, 512, 64, (64, 256)),
        (CPU, 128, 64, (1, 8, 16)),
    ],
    ids=["8B", "8B, many", "0.6B", "0.6B, many", "CPU"],
)
def test_a_plan_from_measured_points_is_within_a_tenth(
    model: PerfModel,
    n_in: int,
    n_out: int,
    clients: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Points, calibration, prediction, load and report, all as on a device that is there."""
    slots = 256 if model.depth else 16
    llm = virtual(model, monkeypatch, way_s=0.8e-3, host_s=0.1e-3, slots=slots)
    bench = bench_of(llm, model)
    measured = run_points(
        bench, default_points(bench), repeats=5, seed=0, progress=lambda text: None, rounds=1
    )
    calibration = measured.calibration
    assert calibration is not None
    for number in clients:
        found = calibration.perf_model.under(n_in, n_out).closed(number, llm.max_num_seqs)
        load = closed(
            llm,
            spread(n_in, n_out),
            clients=number,
            duration_s=max(6, 60 / number) * found.e2e_s,
            stagger_s=found.e2e_s,
            model=calibration.perf_model,
        )
        assert_rows_near(load, 0.08)


@pytest.mark.parametrize(("repeats", "rounds"), [(2, 3), (5, 3), (5, 1), (7, 2)])
def test_a_prompt_is_measured_as_often_as_asked(
    repeats: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(virtual(BIG, monkeypatch), BIG)
    points = [point for point in default_points(bench) if point.b == 0]
    measured = run_points(
        bench, points, repeats=repeats, seed=0, progress=lambda text: None, rounds=rounds
    )
    assert points
    assert [len(row["t_s"]) for row in measured.rows] == [repeats] * len(points)


def test_a_calibration_finds_what_the_device_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = virtual(BIG, monkeypatch, way_s=2e-3)
    bench = bench_of(llm, BIG)
    measured = run_points(
        bench, default_points(bench), repeats=5, seed=0, progress=lambda text: None, rounds=1
    )
    assert measured.calibration is not None
    assert max(map(abs, measured.calibration.errors.values())) < 0.1
    cost, true = measured.calibration.cost, BIG.cost
    assert cost.hand_over == pytest.approx(2e-3, rel=0.01)
    assert cost.mixed_fixed == pytest.approx(true.mixed_fixed, rel=0.1)
    assert cost.lone == pytest.approx(true.lone, rel=0.02)
    assert cost.per_kv_token == pytest.approx(true.per_kv_token, rel=0.05)
    names = [row["name"] for row in measured.rows]
    assert "mixed b=16 at 128 + 512" in names


def test_a_load_that_is_short_measures_what_a_long_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two stays of 64 requests each: in a loop that emptied, those sent last would have had less
    and less company, and time per token came out at two thirds."""
    llm = virtual(BIG, monkeypatch)
    expected = BIG.under(1024, 64).closed(64, 256)
    short = closed(
        llm, spread(1024, 64), clients=64, duration_s=2 * expected.e2e_s, stagger_s=expected.e2e_s
    )
    assert_near(expected, short, 0.1)
    assert short["concurrency"]["peak"] == 64


def test_what_keeps_places_taken_is_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvcli.bench.engine_loop import EngineLoop
    from nvcli.bench.engine_run import StepLog

    llm = virtual(CPU, monkeypatch, slots=16)
    stay_s = CPU.under(64, 32).closed(8).e2e_s
    requests = spread(64, 32).requests(vocab_size=llm.vocab_size)
    loop = EngineLoop(llm)  # type: ignore[arg-type]
    with StepLog(llm) as log:  # type: ignore[arg-type]
        loop.run_closed(requests, concurrency=8, duration_s=3 * stay_s)
    assert {r.status for r in loop.records} == {"ok"}
    assert len(loop.records) == loop.num_sent
    assert max(r.s_star_ns for r in loop.records) < 3 * stay_s * 1e9
    last = max(r.end_ns for r in loop.records)
    running = [s.running for s in log.steps if s.t_ns <= last]
    assert min(running) >= 5, "places stayed empty"  # three may end in one step
    few = EngineLoop(llm)  # type: ignore[arg-type]
    with StepLog(llm) as log:  # type: ignore[arg-type]
        few.run_closed(requests, concurrency=8, num_requests=40)
    assert len(few.records) == few.num_sent == 40
    assert min(s.running for s in log.steps if s.t_ns <= max(r.end_ns for r in few.records)) >= 5


def test_one_request_that_hangs_does_not_go_on_with_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside it places are kept taken for as long as the load was, not for ever."""
    from nvcli.bench.engine_loop import EngineLoop
    from nvcli.bench.engine_run import StepLog
    from nvcli.bench.workload import Planned

    llm = virtual(CPU, monkeypatch, slots=16)
    step_s = CPU.decode(4, 64)

    def requests() -> Iterator[Planned]:
        yield Planned(0, list(range(64)), 3000)
        for index in range(1, 10_000):
            yield Planned(index, [index % 1000] * 16, 10)

    loop = EngineLoop(llm)  # type: ignore[arg-type]
    with StepLog(llm) as log:  # type: ignore[arg-type]
        loop.run_closed(requests(), concurrency=4, duration_s=200 * step_s)
    assert loop.records[-1].id == "r0"
    assert sum(s.running > 1 for s in log.steps) < 600
    assert log.steps[-1].running == 1


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("b", [2, 8])
def test_closed_loop_meets_the_scheduler(
    b: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TTFT counts the step that runs when the request arrives, and the one launched ahead."""
    for true, n_in, n_out in ((BIG, 1024, 64), (CPU, 128, 64)):
        model = replace(true, depth=depth)
        found = model.under(n_in, n_out).closed(b, 256)
        load = closed(
            virtual(model, monkeypatch),
            spread(n_in, n_out),
            clients=b,
            duration_s=max(6, 100 / b) * found.e2e_s,
            stagger_s=found.e2e_s,
        )
        assert_near(found, load, 0.08)


def test_prompts_beyond_what_steps_hold_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,500 tokens in, 8 out, 2,048 a step: the prompts alone fill every step."""
    model = replace(BIG, budget=2048)
    found = model.under(1500, 8).closed(64, 256)
    load = closed(
        virtual(model, monkeypatch),
        spread(1500, 8),
        clients=64,
        duration_s=6 * found.e2e_s,
        stagger_s=found.e2e_s,
    )
    rate = load["throughput"]["output_tokens_per_s"]
    assert found.output_tokens_per_s == pytest.approx(rate, rel=0.1)
    assert found.ttft_s * 1e3 == pytest.approx(load["ttft_ms"]["mean"], rel=0.1)
    assert found.requests_per_s <= 1 / model.prefill(1500)


@pytest.mark.parametrize(("depth", "way_s"), [(0, 1e-6), (1, 4e-3)])
def test_open_loop_meets_the_scheduler(
    depth: int, way_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poisson at .3 and .8 of what 64 slots can do."""
    model = replace(BIG, depth=depth, cost=replace(BIG.cost, hand_over=way_s))
    top = model.under(1024, 64).throughput(64)
    for rho in (0.3, 0.8):
        rng = random.Random(1)
        moments = [0.0]
        while len(moments) < 600:
            moments.append(moments[-1] + rng.expovariate(rho * top))
        found = model.under(1024, 64).open(rho * top, 64)
        assert found is not None
        llm = virtual(model, monkeypatch, slots=64, way_s=way_s)
        load = open_loop(llm, spread(1024, 64), times=iter(moments))
        assert found.ttft_s * 1e3 == pytest.approx(load["ttft_ms"]["mean"], rel=0.1)
        assert found.e2e_s * 1e3 == pytest.approx(load["e2e_ms"]["mean"], rel=0.08)
