"""Measuring inside the process: a loaded engine with what a run stores of it, and its step log."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nvcli import __version__
from nvcli.bench.calibrate import Calibration, key_of
from nvcli.bench.machine import cpu_name, environment, hardware_of
from nvcli.bench.nvml import gpu_facts
from nvcli.bench.perf_model import Cost, Hardware, PerfModel
from nvcli.bench.record import StepRecord
from nvcli.bench.shape import Shape, pairs_of
from nvcli.config import MAX_NUM_BATCHED_TOKENS

if TYPE_CHECKING:
    from pathlib import Path

    from nvcli.engine.step import StepPlan
    from nvcli.llm import LLM

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_BYTES = {**BYTES, "float8_e4m3fn": 1}


@dataclass(slots=True)
class Bench:
    """A loaded model with what the physical model needs of it."""

    llm: LLM
    shape: Shape
    hardware: Hardware
    budget: int
    depth: int
    device: str
    key: str

    @classmethod
    def of(cls, llm: LLM) -> Bench:
        startup, config = llm.startup, llm.config
        device = "cpu" if startup.device == "cpu" else "cuda"
        shape = Shape.of(
            llm.model_config,
            weight_bytes=BYTES[startup.dtype],
            kv_bytes=KV_BYTES[startup.kv_cache_dtype],
            is_fp8=startup.weights_dtype == "float8_e4m3fn",
        )
        hardware = hardware_of(device, one_device_name(llm), startup.dtype)
        hardware = hardware.times(startup.tensor_parallel_size, is_shared=device == "cpu")
        budget = config.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS[device]
        depth = int(device == "cuda" if config.run_ahead is None else config.run_ahead)
        key = key_of(
            device=device_name(llm),
            shape=str(shape),
            dtype=startup.dtype,
            attention=startup.attention_backend,
            block_size=startup.block_size,
            eager=config.enforce_eager,
            deterministic=startup.deterministic,
            budget=budget,
            depth=depth,
            buckets=str(startup.buckets),
            engine=__version__,
            limits=_gpu_limits() if device == "cuda" else None,
        )
        return cls(llm, shape, hardware, budget, depth, device, key)

    @property
    def perf_model(self) -> PerfModel:
        """By the datasheet."""
        cost = Cost.from_datasheet(self.shape, self.hardware)
        return PerfModel(self.shape, cost, self.budget, self.depth, self.llm.startup.buckets)

    def header(self, calibration: Calibration | None) -> dict[str, Any]:
        """What a run of this model stores about it."""
        llm, startup = self.llm, self.llm.startup
        model = calibration.perf_model if calibration else self.perf_model
        return {
            "model": {
                "name": model_name(llm.model_name),
                "dtype": startup.dtype,
                "weights_dtype": startup.weights_dtype,
                "kv_cache_dtype": startup.kv_cache_dtype,
                "attention": startup.attention_backend,
                "max_model_len": startup.max_model_len,
                "num_blocks": startup.num_blocks,
                "block_size": startup.block_size,
                "weights_bytes": startup.weights_bytes,
                "load_format": llm.config.load_format,
                "digest": model_digest(llm.folder),
                "tensor_parallel_size": startup.tensor_parallel_size,
            },
            "calibration": asdict(calibration) if calibration else None,
            "environment": environment(self.device, device_name(llm)),
            "engine": {k: v for k, v in asdict(llm.config).items() if k != "model"},
            "slots": llm.max_num_seqs,
            "perf_model": model.as_json(self.hardware),
        }


def _gpu_limits() -> list[Any]:
    """What makes the same GPU another machine: its power cap and highest clock."""
    facts = gpu_facts() or {}
    return [facts.get("power_cap_w"), facts.get("max_sm_clock_mhz")]


def model_name(name: str) -> str:
    """A folder by its name only: records carry no paths."""
    return name.rstrip("/").rsplit("/", 1)[-1] if name.startswith(("/", ".")) else name


def model_digest(folder: Path) -> str:
    """Names the checkpoint: its config.json, and names and sizes of its weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*")):
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.suffix == ".safetensors":
            digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()[:12]


def device_name(llm: LLM) -> str:
    """With the number of them under tensor parallelism: `2 x NVIDIA H200`."""
    num_ranks = llm.startup.tensor_parallel_size
    return f"{num_ranks} x {one_device_name(llm)}" if num_ranks > 1 else one_device_name(llm)


def one_device_name(llm: LLM) -> str:
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
