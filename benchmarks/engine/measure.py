"""Run workloads on one engine and put the numbers next to their floors."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.engine import workloads
from benchmarks.engine.workloads import Job, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.engine.engines import BenchEngine

BATCHES = (8, 32, 64, 256)
FP8 = "float8_e4m3fn"
ALL = "BCADEL"  # short ones first: a run that is cut has most of them


def warm_up(engine: BenchEngine) -> None:
    engine.generate(Job(workloads.random_prompts(999, 4, 64), [16] * 4, 0.6))
    engine.generate(Job(workloads.random_prompts(998, 64, 300), [32] * 64, 0.6))


def measure(
    engine: BenchEngine,
    shape: Shape,
    names: str,
    repeat: int,
    tell: Callable[[str, dict[str, Any]], None],
) -> dict[str, Any]:
    """Metrics by workload; `tell` hears each as soon as it is there. Seconds and rates are of the
    best run; `step_ms` is the best run's time over the tokens of its longest output.
    """
    if engine.report().get("kv_cache_dtype") == FP8:
        shape = replace(shape, fp8_cache=True)
    warm_up(engine)
    metrics: dict[str, Any] = {}
    for name in names:
        for key, values in _MEASURES[name](engine, shape, repeat).items():
            metrics[key] = {k: _rounded(v) for k, v in values.items()} | used_memory()
            tell(key, metrics[key])
    return metrics


def used_memory() -> dict[str, int]:
    """In use on the device now, by everybody: what allocators once took they keep, so it is the
    peak so far. Nothing without a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"used_bytes": int(total - free)}


def _measure_a(engine: BenchEngine, shape: Shape, repeat: int) -> dict[str, dict[str, Any]]:
    rates = []
    for i in range(repeat):
        job = workloads.offline_batch(i)
        engine.forget_prefixes()
        rates.append(job.num_output_tokens / engine.generate(job))
    floor = job.num_output_tokens / workloads.floor_s(shape, job)
    best = max(rates)
    step_ms = 1e3 * job.num_output_tokens / best / max(job.output_lens)
    found = {"tok_s": best, "all_tok_s": rates, "step_ms": step_ms, "floor_share": best / floor}
    return {"A": found}


def _measure_b(engine: BenchEngine, shape: Shape, repeat: int) -> dict[str, dict[str, Any]]:
    times = [engine.stream(workloads.streams(2000 + i, 1)) for i in range(repeat + 1)]
    floor = workloads.decode_floor_s(shape, [128], [512]) / 511
    tpot = statistics.median(t.tpot[0] for t in times)
    return {
        "B": {
            "tpot_ms": 1e3 * tpot,
            "ttft_ms": 1e3 * min(t.ttft[0] for t in times),
            "floor_share": floor / tpot,
        }
    }


def _measure_c(engine: BenchEngine, shape: Shape, repeat: int) -> dict[str, dict[str, Any]]:
    found = {}
    for batch in BATCHES:
        times = [
            engine.generate(workloads.streams(3000 + 10 * batch + i, batch)) for i in range(repeat)
        ]
        best = min(times)
        step_job = workloads.streams(3005 + 10 * batch, batch)
        step = engine.stream(step_job)
        floor = workloads.floor_s(shape, workloads.streams(0, batch))
        found[f"C{batch}"] = {
            "tok_s": step_job.num_output_tokens / best,
            "tpot_ms": 1e3 * statistics.mean(step.tpot),
            "ttft_max_ms": 1e3 * max(step.ttft),
            "floor_share": floor / best,
        }
    return found


def _measure_d(engine: BenchEngine, shape: Shape, repeat: int) -> dict[str, dict[str, Any]]:
    times = []
    for i in range(repeat + 1):
        engine.forget_prefixes()
        times.append(engine.generate(workloads.prefill(i)))
    best = min(times)
    floor = workloads.prefill_floor_s(shape, [2048] * 64)
    return {"D": {"prefill_tok_s": 64 * 2048 / best, "floor_share": floor / best}}


def _measure_e(engine: BenchEngine, shape: Shape, repeat: int) -> dict[str, dict[str, Any]]:
    engine.forget_prefixes()
    cold, warm = [], []
    for trial in range(repeat):
        job = workloads.shared_prefix(trial, is_warm=False)
        cold.append(engine.generate(job))
        warm.append(engine.generate(workloads.shared_prefix(trial, is_warm=True)))
    best = min(cold)
    floor = workloads.shared_floor_s(shape, job, workloads.SHARED_TOKENS)
    return {
        "E": {
            "cold_s": best,
            "warm_s": min(warm),
            "tok_s": job.num_output_tokens / best,
            "step_ms": 1e3 * best / max(job.output_lens),
            "floor_share": floor / best,
        }
    }


def _measure_l(engine: BenchEngine, shape: Shape, repeat: int) -> dict[str, dict[str, Any]]:
    times = []
    for i in range(repeat + 1):
        engine.forget_prefixes()
        job = workloads.long_prompt(i)
        times.append(engine.generate(job))
    best = min(times)
    return {
        "L": {
            "ttft_s": best,
            "prefill_tok_s": job.num_prompt_tokens / best,
            "floor_share": workloads.floor_s(shape, job) / best,
        }
    }


_MEASURES = {
    "A": _measure_a,
    "B": _measure_b,
    "C": _measure_c,
    "D": _measure_d,
    "E": _measure_e,
    "L": _measure_l,
}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return round(value, 1 if abs(value) >= 1000 else 4)


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start
