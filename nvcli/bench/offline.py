"""`bench latency` and `bench throughput`: in-process runs, stored as any other. Each tells whether
Ctrl-C ended it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nvcli.bench import calibrate, machine
from nvcli.bench.engine_loop import EngineLoop
from nvcli.bench.engine_run import Bench, StepLog
from nvcli.bench.limits import resources
from nvcli.bench.machine import GcWatch
from nvcli.bench.nvml import Sampler
from nvcli.bench.points import Point, default_points, run_points
from nvcli.bench.precision import Precision
from nvcli.bench.record import RunWriter, id_in, now_ns
from nvcli.errors import InterruptedRunError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from nvcli.bench.calibrate import Calibration
    from nvcli.bench.workload import Workload


CARD_S, POINTS_S, MIN_LOAD_S = 60.0, 35.0, 10.0


def base_header(command: str, run_id: str) -> dict[str, Any]:
    return {
        "id": run_id,
        "command": command,
        "created": machine.created(),
        "clock": machine.clock(),
    }


def run_latency(
    bench: Bench, *, repeats: int, seed: int, progress: Callable[[str], None], path: Path
) -> bool:
    """Micro-benchmarks and a calibration, which is stored for `plan` and the other verbs."""
    with _steps_run(bench, "latency", f"single steps, {repeats} repeats", path) as run:
        measured = run_points(
            bench, default_points(bench), repeats=repeats, seed=seed, progress=progress
        )
        for row in measured.rows:
            run.point(**row)
        found = measured.calibration
        if found is not None and not measured.was_interrupted:
            calibrate.save(found)
        run.finish(
            interrupted=measured.was_interrupted,
            calibration=asdict(found) if found is not None else None,
        )
    return measured.was_interrupted


def _steps_run(bench: Bench, command: str, text: str, path: Path) -> RunWriter:
    header = {**base_header(command, id_in(path)), **bench.header(None)}
    return RunWriter(path, {**header, "load": {"mode": "steps", "text": text}})


def run_throughput(
    bench: Bench,
    workload: Workload,
    *,
    concurrency: int,
    num_requests: int | None,
    duration_s: float | None,
    warmup: str | float,
    slo: dict[str, float],
    path: Path,
    command: str = "throughput",
    points: Sequence[dict[str, Any]] = (),
    until_ci: float | None = None,
    with_gpu: bool = False,
) -> bool:
    """A closed loop that keeps `concurrency` requests in the engine, without HTTP.

    `points` were measured before on the same engine and are stored with it. The first sends are
    spread over the stay of a request. A file that is there gets one run more.
    """
    llm = bench.llm
    workload.check_fits(llm.max_model_len)
    calibration: Calibration | None = calibrate.load(bench.key)
    salt = now_ns() % 2**32
    bounds = {"vocab_size": llm.vocab_size, "max_len": llm.max_model_len, "salt": salt}
    planned = workload.requests(**bounds)
    startup = llm.startup
    header = {
        **base_header(command, id_in(path)),
        **bench.header(calibration),
        "load": {
            "mode": "closed",
            "concurrency": concurrency,
            "text": f"in the process, closed loop, c = {concurrency}",
        },
        "workload": workload.as_json(),
        "until_ci": until_ci,
        "warmup": warmup,
        "slo": slo,
        "gpu_metrics": with_gpu,
        "resources": resources(
            num_blocks=startup.num_blocks, block_size=startup.block_size, slots=llm.max_num_seqs
        ),
    }
    first = list(itertools.islice(planned, 1))
    stay_s = _warm_up(bench, workload)
    if calibration is not None:
        n_in, n_out = round(workload.in_len.mean), workload.out_len.mean
        predicted = calibration.perf_model.under(n_in, n_out).closed(concurrency, llm.max_num_seqs)
        stay_s = max(stay_s, predicted.e2e_s)
    warm = list(workload.warm_up(**bounds))
    EngineLoop(llm).run_closed(iter(warm), concurrency=1, num_requests=len(warm))
    precision = Precision(header, share=until_ci) if until_ci is not None else None
    num_gpus = startup.tensor_parallel_size
    sampler = Sampler(num_gpus) if with_gpu else None
    with (
        RunWriter(path, header) as run,
        StepLog(llm) as log,
        GcWatch() as gc_watch,
        sampler or contextlib.nullcontext(),
    ):
        for point in points:
            run.point(**point)
        loop = EngineLoop(llm, run)
        start_ns, start_cpu = now_ns(), time.process_time()
        was_interrupted = False
        try:
            loop.run_closed(
                itertools.chain(first, planned),
                concurrency=concurrency,
                duration_s=duration_s,
                num_requests=num_requests,
                stagger_s=stay_s,
                precision=precision,
            )
        except KeyboardInterrupt:
            was_interrupted = True
            loop.abandon()
        for step in log.steps:
            run.step(step)
        for sample in sampler.take() if sampler is not None else ():
            run.gauge(**sample)
        run.finish(
            planned=loop.num_sent,
            interrupted=was_interrupted,
            wall_s=(now_ns() - start_ns) / 1e9,
            process_cpu_s=time.process_time() - start_cpu,
            **gc_watch.as_json(),
        )
    return was_interrupted


def run_card(
    bench: Bench, workload: Workload, *, progress: Callable[[str], None], seed: int, path: Path
) -> bool:
    """Bare `nvcli bench`: single steps, a calibration from them, and every slot busy; a minute."""
    workload.check_fits(bench.llm.max_model_len)
    start = time.monotonic()
    measured = run_points(
        bench,
        essential_first(default_points(bench)),
        repeats=5,
        seed=seed,
        progress=progress,
        deadline=start + POINTS_S,
    )
    if measured.was_interrupted:
        if not measured.rows:
            raise InterruptedRunError("interrupted before anything was measured whole")
        with _steps_run(bench, "card", "single steps", path) as run:
            for row in measured.rows:
                run.point(**row)
            run.finish(interrupted=True)
        return True
    if measured.calibration is not None:
        calibrate.save(measured.calibration)
    progress("every slot busy")
    left = CARD_S - (time.monotonic() - start)
    return run_throughput(
        bench,
        workload,
        concurrency=bench.llm.max_num_seqs,
        num_requests=None,
        duration_s=max(left, MIN_LOAD_S),
        warmup="auto",
        slo={},
        path=path,
        command="card",
        points=measured.rows,
    )


def essential_first(points: list[Point]) -> list[Point]:
    """What a calibration needs at least comes first, for a machine that is too slow for all."""
    prompts = [p for p in points if p.b == 0]
    decodes = sorted((p for p in points if p.b > 0 and not p.p), key=lambda p: p.b * p.c)
    first = [*prompts[:2], *decodes[:2], *decodes[len(decodes) // 2 : len(decodes) // 2 + 1]]
    return [*first, *(p for p in points if p not in first)]


def _warm_up(bench: Bench, workload: Workload) -> float:
    """One request before the clock starts; how long it took, to spread the first sends over."""
    planned = workload.requests(
        vocab_size=bench.llm.vocab_size,
        max_len=bench.llm.max_model_len,
        salt=(now_ns() + 1) % 2**32,
    )
    start = time.monotonic()
    EngineLoop(bench.llm).run_closed(planned, concurrency=1, num_requests=1)
    return time.monotonic() - start
