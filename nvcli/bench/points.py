"""Micro-benchmarks: single steps of an engine, prefill by length, decode by batch and context, and
both in one step.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nvcli.bench.calibrate import Calibration, Sample, calibrate, options_of, predict
from nvcli.bench.engine_loop import EngineLoop
from nvcli.bench.engine_run import Bench, StepLog, model_name
from nvcli.bench.metrics import mean, percentile
from nvcli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.bench.record import RequestRecord, StepRecord
    from nvcli.bench.workload import Planned
    from nvcli.llm import LLM

ROUNDS = {"cuda": 1, "cpu": 3}  # a CPU does other things now and then
SHORTEST = 16  # tokens of a prompt that says something about prompts
PROMPT_EVERY = 6  # steps from one prompt to the next of a place, at most


@dataclass(frozen=True, slots=True)
class Point:
    """A prefill of p tokens (b = 0), b sequences decoding at a context of c tokens (p = 0), or both
    in one step."""

    b: int
    p: int
    c: int

    @property
    def name(self) -> str:
        if self.b == 0:
            return f"prefill {self.p}"
        if self.p:
            return f"mixed b={self.b} at {self.c} + {self.p}"
        return f"decode b={self.b} at {self.c}"


def default_points(bench: Bench) -> list[Point]:
    """Short, middle and long prompts; decode over batch and context; prompts beside decodes, as far
    as they fit. Raises `UsageError` where none does."""
    llm = bench.llm
    room = llm.max_model_len - 33
    if room < SHORTEST:
        raise UsageError(
            f"single steps need a context of {SHORTEST + 33} tokens, this one holds "
            f"{llm.max_model_len}",
            hint="Raise --max-model-len.",
            param="max_model_len",
        )
    pool = llm.startup.num_blocks * llm.startup.block_size
    lengths = sorted({min(n, room, pool // 2) for n in (128, 512, 1024, 2048, 8192)})
    short, middle = min(128, room), min(1024, max(room // 2, 1))
    lone = (short, middle, *(min(n, room, pool // 2) for n in (4096, 16_384)))
    wanted = [(1, c) for c in lone] + [(b, c) for b in (8, 16, 64, 256) for c in (short, middle)]
    decode = sorted(
        {
            (b, c)
            for b, c in wanted
            if b <= llm.max_num_seqs and b * (c + 64) <= pool * 0.95 and c > 0
        }
    )
    most, few = llm.max_num_seqs - 1, min(128, middle)
    mixed = {
        (min(b, most), min(p, bench.budget // 2, lengths[-1]), few if c == 128 else middle)
        for b, p, c in (
            *((4, 128, 128), (16, 512, 128), (8, 1024, 1024)),
            *((64, 1024, 1024), (255, 1024, 1024), (255, 3072, 1024)),
        )
    }
    return [
        *(Point(0, p, 0) for p in lengths if p > 0),
        *(Point(b, 0, c) for b, c in decode),
        *(
            Point(*m)
            for m in sorted(mixed)
            if m[0] > 0 and m[0] * (m[2] + 64) + m[1] <= pool * 0.95
        ),
    ]


@dataclass(slots=True)
class Timed:
    """Times of a point's steps, the mean S of those that decode, and what a lone request took
    beside its steps."""

    times: list[float] = field(default_factory=list)
    depths: list[float] = field(default_factory=list)
    hand_overs: list[float] = field(default_factory=list)

    def add(self, other: Timed) -> None:
        self.times += other.times
        self.depths += other.depths
        self.hand_overs += other.hand_overs


def measure_point(
    bench: Bench, point: Point, *, repeats: int, seed: int, salt: int | None = None
) -> Timed:
    """Run the engine until it has done the point's steps.

    Sequences of equal `salt` that decode have equal prompts, so that a prefix cache spares their
    computation. Prompts that are measured are new every time.
    """
    import numpy as np

    from nvcli.bench.workload import Planned, random_ids

    llm, moment = bench.llm, time.monotonic_ns()
    salt = moment if salt is None else salt
    fresh = np.random.default_rng([seed, moment])

    def planned(index: int, n: int, n_out: int, rng: np.random.Generator = fresh) -> Planned:
        return Planned(index, random_ids(rng, llm.vocab_size, n), n_out)

    if point.b == 0:
        with StepLog(llm) as log:
            records = _drive(llm, [planned(i, point.p, 1) for i in range(repeats + 1)], 1)
        return _timed_prompts(records, log.steps)
    # A prompt beside them takes its place again some steps after the one before was answered.
    num_steps = PROMPT_EVERY * (repeats + 3) if point.p else max(repeats + 3, 12)
    num_steps += -(-point.b * point.c // bench.budget)  # the first decodes while others prefill
    requests = [
        planned(i, point.c, num_steps + 4, np.random.default_rng([seed, salt, i]))
        for i in range(point.b)
    ]
    if point.p:
        requests += [planned(point.b + i, point.p, 1) for i in range(repeats + 3)]
    with StepLog(llm) as log:
        _drive(llm, requests, point.b + (point.p > 0))
    if point.p:
        return _timed_mixed(point, log.steps, is_ahead=bench.depth > 0)
    steps = [step for step in log.steps if (step.p, step.b) == (0, point.b)]
    steps = steps[2:] if len(steps) > 2 else steps
    return Timed([s.dt_s for s in steps], [float(s.S) for s in steps])


def _timed_prompts(records: list[RequestRecord], steps: list[StepRecord]) -> Timed:
    """Lone prompts, each sent when the one before was answered; the first is left out. What a
    request takes beside its steps begins there, as in a closed loop.
    """
    found = Timed()
    for before, record in itertools.pairwise(records):
        own = math.fsum(s.dt_s for s in steps if before.end_ns < s.t_ns <= record.end_ns)
        found.times.append(own)
        found.hand_overs.append((record.end_ns - record.s_star_ns) / 1e9 - own)
    return found


def _timed_mixed(point: Point, steps: list[StepRecord], *, is_ahead: bool) -> Timed:
    """Steps that hold a prompt beside decodes.

    With run-ahead, a step that is launched kernel by kernel begins to be so while the one before
    runs, which then is read late: what that one took longer than others belongs to this one.
    """
    found = Timed()
    pairs = list(itertools.pairwise(steps))
    usual = sorted(s.dt_s for s, after in pairs if (s.p, s.b, after.p) == (0, point.b, 0))
    for before, step in pairs:
        if (step.p, step.b) != (point.p, point.b):
            continue
        late = 0.0
        if is_ahead and usual and (before.p, before.b) == (0, point.b):
            late = before.dt_s - percentile(usual, 0.5)
        found.times.append(step.dt_s + late)
        found.depths.append(float(step.S))
    return found


def _drive(llm: LLM, planned: list[Planned], places: int) -> list[RequestRecord]:
    loop = EngineLoop(llm)
    try:
        loop.run_closed(iter(planned), concurrency=places, num_requests=len(planned), fills=False)
    except KeyboardInterrupt:
        loop.abandon()  # nothing of it goes on in the engine
        raise
    return loop.records


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
    timed: dict[Point, Timed] = {}
    was_interrupted = False
    try:
        measure_point(bench, warm, repeats=2, seed=seed)
        salt = time.monotonic_ns()
        # In rounds: what else the machine does for a second then spoils no point alone.
        for number, (index, point) in itertools.product(range(rounds), enumerate(points)):
            is_late = deadline is not None and time.monotonic() > deadline
            if is_late and (number > 0 or index >= 5):
                continue
            before, after = (-(-repeats * n // rounds) for n in (number, number + 1))
            if before == after:  # fewer repeats than rounds
                continue
            progress(f"{point.name}, round {number + 1} of {rounds}")
            found = measure_point(bench, point, repeats=after - before, seed=seed, salt=salt)
            if found.times:
                timed.setdefault(point, Timed()).add(found)
    except KeyboardInterrupt:
        was_interrupted = True
    samples = {p: _sample(p, of) for p, of in timed.items()}
    hand_overs = [value for of in timed.values() for value in of.hand_overs]
    calibration = _calibrated(bench, list(samples.values()), hand_overs)
    model = bench.perf_model
    if calibration is not None:
        model = replace(model, cost=calibration.cost)
    rows = []
    for point, sample in samples.items():
        error = calibration.errors.get(point.name) if calibration else None
        rows.append(
            {
                "name": point.name,
                "b": point.b,
                "S": sample.S,
                "p": point.p,
                "c": 0,
                "tokens": point.b + point.p,
                "t_s": timed[point].times,
                "floor_s": model.step_floor(bench.hardware, point.b, sample.S, point.p),
                "predicted_s": predict(model, sample)
                if error is None
                else sample.t_s * (1 + error),
                "predictor": "leave-one-out" if error is not None else model.cost.source,
            }
        )
    return Measured(rows, calibration, was_interrupted)


def _sample(point: Point, timed: Timed) -> Sample:
    median = percentile(sorted(timed.times), 0.5)
    return Sample(point.name, point.b, mean(timed.depths) or 0.0, point.p, 0, median)


def _calibrated(bench: Bench, samples: list[Sample], hand_overs: list[float]) -> Calibration | None:
    found = calibrate(
        bench.shape,
        bench.hardware,
        samples,
        budget=bench.budget,
        key=bench.key,
        buckets=bench.llm.startup.buckets,
        has_lone_kernels=bench.device == "cuda",
    )
    if found is None:
        return None
    startup = bench.llm.startup
    hand_over = percentile(sorted(hand_overs), 0.5) if hand_overs else 0.0
    found.cost = replace(found.cost, hand_over=max(hand_over, 0.0))
    found.depth = bench.depth
    config = bench.llm.config
    found.asked = options_of(asdict(config))
    limits = (config.max_model_len, config.max_num_seqs, config.num_blocks)
    found.is_limited = any(v is not None for v in (*limits, config.memory_utilization))
    found.model_name = model_name(bench.llm.model_name)
    found.slots = bench.llm.max_num_seqs
    found.max_model_len = startup.max_model_len
    found.num_blocks, found.block_size = startup.num_blocks, startup.block_size
    return found
