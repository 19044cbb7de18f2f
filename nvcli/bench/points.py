"""Micro-benchmarks: single steps of an engine, prefill by length, decode by batch and context."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvcli.bench.calibrate import Calibration, Sample, calibrate
from nvcli.bench.engine_loop import EngineLoop
from nvcli.bench.engine_run import Bench, StepLog, model_name
from nvcli.bench.metrics import percentile
from nvcli.bench.perf_model import Cost, PerfModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nvcli.bench.workload import Planned
    from nvcli.llm import LLM

ROUNDS = {"cuda": 1, "cpu": 3}  # a CPU does other things now and then


@dataclass(frozen=True, slots=True)
class Point:
    """A prefill of p tokens (b = 0), or b sequences decoding at a context of c tokens."""

    b: int
    p: int
    c: int

    @property
    def name(self) -> str:
        return f"prefill {self.p}" if self.b == 0 else f"decode b={self.b} at {self.c}"


def default_points(llm: LLM) -> list[Point]:
    """Short, middle and long prompts; decode over batch and context, as far as they fit."""
    room = llm.max_model_len - 33
    pool = llm.startup.num_blocks * llm.startup.block_size
    lengths = sorted({min(n, room, pool // 2) for n in (128, 512, 2048, 8192)})
    long, middle = min(16_384, room, pool // 2), min(1024, max(room // 2, 1))
    wanted = [(1, min(128, room)), (1, middle), (1, long)]
    wanted += [(b, middle) for b in (4, 16, 64, 256)] + [(16, min(128, room)), (64, min(128, room))]
    decode = sorted(
        {
            (b, c)
            for b, c in wanted
            if b <= llm.max_num_seqs and b * (c + 64) <= pool * 0.95 and c > 0
        }
    )
    return [Point(0, p, 0) for p in lengths if p > 0] + [Point(b, 0, c) for b, c in decode]


def measure_point(
    bench: Bench, point: Point, *, repeats: int, seed: int
) -> tuple[list[float], float]:
    """Times of the point, and the mean S of its steps (0 for a prefill)."""
    import numpy as np

    from nvcli.bench.workload import Planned

    llm = bench.llm
    rng = np.random.default_rng([seed, time.monotonic_ns()])

    def ids(n: int) -> list[int]:
        return [int(i) for i in rng.integers(0, llm.vocab_size, n)]

    times, depths = [], []
    if point.b == 0:
        for _ in range(repeats + 1):
            with StepLog(llm) as log:
                _drive(llm, iter([Planned(0, ids(point.p), 1)]), 1)
            times.append(sum(s.dt_s for s in log.steps))
        return times[1:], 0.0
    num_steps = max(repeats + 3, 12)
    num_steps += -(-point.b * point.c // bench.budget)  # the first decodes while others prefill
    with StepLog(llm) as log:
        planned = (Planned(i, ids(point.c), num_steps + 4) for i in range(point.b))
        _drive(llm, planned, point.b)
    for step in log.steps:
        if step.p == 0 and step.b == point.b:
            times.append(step.dt_s)
            depths.append(step.S)
    times, depths = times[2:] or times, depths[2:] or depths
    return times, sum(depths) / len(depths) if depths else 0.0


def _drive(llm: LLM, planned: Iterator[Planned], number: int) -> None:
    loop = EngineLoop(llm)
    try:
        loop.run_closed(planned, concurrency=number, num_requests=number)
    except KeyboardInterrupt:
        loop.abandon()  # nothing of it goes on in the engine
        raise


@dataclass(frozen=True, slots=True)
class Measured:
    """Rows for the run's file, and the costs that were fitted to them."""

    rows: list[dict[str, Any]]
    calibration: Calibration | None
    was_interrupted: bool = False


def run_points(
    bench: Bench,
    points: list[Point],
    *,
    repeats: int,
    seed: int,
    progress: Callable[[str], None],
    deadline: float | None = None,
    rounds: int | None = None,
) -> Measured:
    """Measure the points, fit the costs, and put floor and prediction beside each. Past the
    deadline no more than the first five are begun; Ctrl-C keeps those that were measured.

    The prediction of a point is the fit that left it out, where there are enough others.
    """
    rounds = rounds or ROUNDS[bench.device]
    warm = Point(0, min(64, bench.llm.max_model_len - 2), 0)
    times_of: dict[Point, list[float]] = {}
    depth_of: dict[Point, float] = {}
    was_interrupted = False
    try:
        measure_point(bench, warm, repeats=2, seed=seed)
        # In rounds: what else the machine does for a second then spoils no point alone.
        for number, (index, point) in itertools.product(range(rounds), enumerate(points)):
            is_late = deadline is not None and time.monotonic() > deadline
            if is_late and (number > 0 or index >= 5):
                continue
            progress(f"{point.name}, round {number + 1} of {rounds}")
            times, depth = measure_point(bench, point, repeats=-(-repeats // rounds), seed=seed)
            if times:
                times_of.setdefault(point, []).extend(times)
                depth_of[point] = depth
    except KeyboardInterrupt:
        was_interrupted = True
    measured: list[tuple[Point, list[float], Sample]] = []
    for point, times in times_of.items():
        median = percentile(sorted(times), 0.5)
        sample = Sample(point.name, point.b, depth_of[point], point.p, 0, median)
        measured.append((point, times, sample))
    samples = [sample for _, _, sample in measured]
    found = calibrate(bench.shape, bench.hardware, samples, budget=bench.budget, key=bench.key)
    if found is not None:
        found.depth = bench.depth
        startup = bench.llm.startup
        found.model_name = model_name(bench.llm.model_name)
        found.slots = bench.llm.max_num_seqs
        found.max_model_len = startup.max_model_len
        found.num_blocks, found.block_size = startup.num_blocks, startup.block_size
    model = PerfModel(
        bench.shape, found.cost if found else Cost.from_datasheet(bench.shape, bench.hardware),
        bench.budget,
    )  # fmt: skip
    rows = []
    for point, times, sample in measured:
        if point.b == 0:
            floor = model.prefill_floor(bench.hardware, point.p)
            predicted, tokens = model.prefill(point.p), point.p
        else:
            floor = model.decode_floor(bench.hardware, point.b, sample.S / point.b)
            predicted, tokens = model.step(point.b, sample.S), point.b
        error = found.errors.get(point.name) if found else None
        if error is not None:
            predicted = sample.t_s * (1 + error)
        rows.append(
            {
                "name": point.name,
                "b": point.b,
                "S": sample.S,
                "p": point.p,
                "c": 0,
                "tokens": tokens,
                "t_s": times,
                "floor_s": floor,
                "predicted_s": predicted,
                "predictor": "leave-one-out" if error is not None else model.cost.source,
            }
        )
    return Measured(rows, found, was_interrupted)
