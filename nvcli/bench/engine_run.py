"""Measuring inside the process: an engine, its step log, closed and open loops, micro-benchmarks.

Moments are taken on the engine's thread when a token is handed out. Lengths are exact: prompts are
token ids and `ignore_eos` makes every answer as long as planned.
"""

from __future__ import annotations

import queue
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nvcli.bench.calibrate import Calibration, Sample, calibrate, key_of
from nvcli.bench.machine import environment, hardware_of
from nvcli.bench.metrics import percentile
from nvcli.bench.perf_model import Cost, Hardware, PerfModel, Shape, pairs_of
from nvcli.bench.record import (
    ERROR,
    OK,
    UNFINISHED,
    RequestRecord,
    RunWriter,
    StepRecord,
    now_ns,
)
from nvcli.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nvcli.bench.workload import Planned
    from nvcli.engine.step import StepPlan
    from nvcli.llm import LLM
    from nvcli.types import RequestOutput

ROUNDS = 3
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Progress(Protocol):
    def __call__(self, text: str) -> None: ...


@dataclass(slots=True)
class Bench:
    """A loaded model with what the physical model needs of it."""

    llm: LLM
    shape: Shape
    hardware: Hardware
    budget: int
    device: str
    key: str

    @classmethod
    def of(cls, llm: LLM) -> Bench:
        startup, config = llm.startup, llm.config
        device = "cpu" if startup.device == "cpu" else "cuda"
        kv_dtype = config.kv_cache_dtype if config.kv_cache_dtype != "auto" else startup.dtype
        shape = Shape.of(
            llm.model_config,
            weight_bytes=BYTES[startup.dtype],
            kv_bytes=BYTES[kv_dtype],
        )
        hardware = hardware_of(device, device_name(llm), startup.dtype)
        budget = config.max_num_batched_tokens or (16_384 if device == "cuda" else 1_024)
        key = key_of(
            device=device_name(llm),
            shape=str(shape),
            dtype=startup.dtype,
            attention=startup.attention_backend,
            eager=config.enforce_eager,
            budget=budget,
        )
        return cls(llm, shape, hardware, budget, device, key)

    def header(self, calibration: Calibration | None) -> dict[str, Any]:
        """What a run of this model stores about it."""
        llm, startup = self.llm, self.llm.startup
        cost = calibration.cost if calibration else Cost.from_datasheet(self.shape, self.hardware)
        return {
            "model": {
                "name": model_name(llm.model_name),
                "dtype": startup.dtype,
                "attention": startup.attention_backend,
                "max_model_len": startup.max_model_len,
                "num_blocks": startup.num_blocks,
                "block_size": startup.block_size,
                "weights_bytes": startup.weights_bytes,
                "load_format": llm.config.load_format,
            },
            "calibration": calibration.as_json() if calibration else None,
            "environment": environment(self.device, device_name(llm)),
            "slots": llm.max_num_seqs,
            "perf_model": {
                "shape": asdict(self.shape),
                "cost": cost.as_json(),
                "budget": self.budget,
                "hardware": asdict(self.hardware),
            },
        }


def model_name(name: str) -> str:
    """A folder by its name only: records carry no paths."""
    return name.rstrip("/").rsplit("/", 1)[-1] if name.startswith(("/", ".")) else name


def device_name(llm: LLM) -> str:
    from nvcli.bench.machine import cpu_name

    return cpu_name() if llm.startup.device == "cpu" else llm.startup.device


# --- the step log --------------------------------------------------------------------------------


@dataclass(slots=True)
class StepLog:
    """Collects a record of every step while it is on."""

    llm: LLM
    steps: list[StepRecord] = field(default_factory=list)

    def __enter__(self) -> StepLog:
        self.llm.watch_steps(self._take)
        return self

    def __exit__(self, *args: object) -> None:
        self.llm.watch_steps(None)

    def _take(self, plan: StepPlan, start: float, end: float) -> None:
        stats = self.llm.stats()
        self.steps.append(
            step_record(
                plan,
                start,
                end,
                running=len(plan.rows),  # while it ran; those that ended are gone by now
                waiting=stats.num_waiting,
                free_blocks=stats.num_free_blocks,
                preemptions=stats.num_preemptions,
            )
        )


def step_record(plan: StepPlan, start: float, end: float, **gauges: int) -> StepRecord:
    """b, S, p, c of a plan. A row that computes one token behind its prompt is a decode."""
    b = S = p = c = pairs = heads = 0
    for row in plan.rows:
        heads += row.samples
        if row.n == 1 and row.start >= row.seq.num_prompt_tokens:
            b += 1
            S += row.start + 1
        else:
            p += row.n
            c += row.start
            pairs += pairs_of(row.n, row.start)
    return StepRecord(int(end * 1e9), end - start, b, S, p, c, pairs, heads, **gauges)


# --- loops ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Open:
    record: RequestRecord
    planned: Planned


class EngineLoop:
    """Drives an engine with planned requests; every request becomes a record."""

    def __init__(self, llm: LLM, run: RunWriter | None = None) -> None:
        self._llm = llm
        self._run = run
        self._done: queue.SimpleQueue[tuple[str, RequestOutput, int]] = queue.SimpleQueue()
        self._open: dict[str, _Open] = {}
        self.num_sent = 0
        self.records: list[RequestRecord] = []

    def run_closed(
        self,
        planned: Iterator[Planned],
        *,
        concurrency: int,
        duration_s: float | None = None,
        num_requests: int | None = None,
        stagger_s: float = 0.0,
    ) -> None:
        """Keep `concurrency` requests running until the time or the number is reached, then let
        the rest end. The first sends are spread over `stagger_s`, against lock-step."""
        start = now_ns()
        end = start + int(duration_s * 1e9) if duration_s is not None else None
        first = [start + int(stagger_s * 1e9 * i / concurrency) for i in range(concurrency)]
        free: list[int] = first[::-1]  # the moment each free place became free; next is last
        while True:
            is_over = (end is not None and now_ns() >= end) or self.num_sent == num_requests
            if is_over and not self._open:
                return
            while free and not is_over and free[-1] <= now_ns():
                self.send(next(planned), free.pop())
                is_over = self.num_sent == num_requests
            wait = max(free[-1] - now_ns(), 0) / 1e9 if free and not is_over else 0.5
            moment = self.wait(wait)
            if moment is not None:
                free.insert(0, moment)

    def send(self, planned: Planned, s_star: int) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=planned.n_out, min_tokens=planned.n_out, ignore_eos=True
        )
        request = self._llm.request(_as_prompt(planned.prompt), params, raw=True)
        s_ns = now_ns()
        record = RequestRecord(f"r{planned.index}", s_star, s_ns, s_ns, UNFINISHED)
        record.n_in = len(request.prompt_token_ids)
        self._open[request.request_id] = _Open(record, planned)
        self.num_sent += 1
        done = self._done

        def sink(outputs: list[RequestOutput]) -> None:
            moment = now_ns()
            for output in outputs:
                if output.token_ids:
                    record.chunks.append((moment, len(output.token_ids)))
                if output.is_finished:
                    done.put((request.request_id, output, moment))

        self._llm.submit(request, sink)

    def wait(self, timeout: float) -> int | None:
        """Wait for one request to end; the moment it did."""
        try:
            request_id, output, moment = self._done.get(timeout=max(timeout, 1e-4))
        except queue.Empty:
            return None
        record = self._open.pop(request_id).record
        record.status = ERROR if output.finish_reason is FinishReason.ERROR else OK
        record.error = output.error
        record.n_out = output.usage.completion_tokens
        record.cached = output.usage.cached_tokens
        record.end_ns = record.chunks[-1][0] if record.chunks and record.status == OK else moment
        times = output.times
        if times is not None and times.first_scheduled is not None:
            moments = {
                "arrive": times.arrival,
                "sched": times.first_scheduled,
                "first": times.first_token,
                "done": times.finished,
            }
            record.server = {k: int(v * 1e9) for k, v in moments.items() if v is not None}
        self._keep(record)
        return moment

    def abandon(self) -> None:
        """Ctrl-C: end what runs, and keep what there is of it."""
        moment = now_ns()
        for request_id, entry in self._open.items():
            self._llm.abort(request_id)
            entry.record.end_ns = moment
            self._keep(entry.record)
        self._open.clear()

    def _keep(self, record: RequestRecord) -> None:
        self.records.append(record)
        if self._run is not None:
            self._run.request(record)


def _as_prompt(prompt: Any) -> Any:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        from nvcli.types import Message

        return [Message(m["role"], m["content"]) for m in prompt]
    return prompt


# --- micro-benchmarks ----------------------------------------------------------------------------


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
                loop = EngineLoop(llm)
                loop.run_closed(iter([Planned(0, ids(point.p), 1)]), concurrency=1, num_requests=1)
            times.append(sum(s.dt_s for s in log.steps))
        return times[1:], 0.0
    num_steps = max(repeats + 3, 12)
    num_steps += -(-point.b * point.c // bench.budget)  # the first decodes while others prefill
    with StepLog(llm) as log:
        loop = EngineLoop(llm)
        planned = (Planned(i, ids(point.c), num_steps + 4) for i in range(point.b))
        loop.run_closed(planned, concurrency=point.b, num_requests=point.b)
    for step in log.steps:
        if step.p == 0 and step.b == point.b:
            times.append(step.dt_s)
            depths.append(step.S)
    times, depths = times[2:] or times, depths[2:] or depths
    return times, sum(depths) / len(depths) if depths else 0.0


def run_points(
    bench: Bench,
    points: list[Point],
    *,
    repeats: int,
    seed: int,
    progress: Callable[[str], None],
    deadline: float | None = None,
) -> tuple[list[dict[str, Any]], Calibration | None]:
    """Measure the points, fit the costs, and put floor and prediction beside each. Past the
    deadline no more than the first five are begun.

    The prediction of a point is the fit that left it out, where there are enough others.
    """
    warm = Point(0, min(64, bench.llm.max_model_len - 2), 0)
    measure_point(bench, warm, repeats=2, seed=seed)
    times_of: dict[Point, list[float]] = {}
    depth_of: dict[Point, float] = {}
    # In rounds: what else the machine does for a second then spoils no point alone.
    for number in range(ROUNDS):
        for index, point in enumerate(points):
            is_late = deadline is not None and time.monotonic() > deadline
            if is_late and (number > 0 or index >= 5):
                break
            progress(f"{point.name}, round {number + 1} of {ROUNDS}")
            times, depth = measure_point(bench, point, repeats=-(-repeats // ROUNDS), seed=seed)
            if times:
                times_of.setdefault(point, []).extend(times)
                depth_of[point] = depth
    measured: list[tuple[Point, list[float], Sample]] = []
    for point, times in times_of.items():
        median = percentile(sorted(times), 0.5)
        sample = Sample(point.name, point.b, depth_of[point], point.p, 0, median)
        measured.append((point, times, sample))
    samples = [sample for _, _, sample in measured]
    found = calibrate(bench.shape, bench.hardware, samples, budget=bench.budget, key=bench.key)
    if found is not None:
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
    return rows, found
