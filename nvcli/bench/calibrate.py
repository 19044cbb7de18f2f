"""From a few measured steps to the costs of the physical model, with its own error stated.

Prefill first: non-negative least squares of T_p on [1, linear FLOPs, attention FLOPs]. Then decode
on [1, b, S], less what linear layers of b tokens cost beyond streaming the weights of one. Weights
1 / t^2 make relative errors count alike. Where the engine has other kernels for a lone row (CUDA),
its steps have a constant of their own. Steps that hold prompts and decodes give theirs last: what
is left of their time, the median. Leave-one-out tells how well a point is predicted without itself.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from nvcli.bench.fit import nnls
from nvcli.bench.perf_model import PRIOR_BANDWIDTH, Cost, Hardware, PerfModel, Shape, pairs_of
from nvcli.bench.record import dump, runs_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


# Options of the engine that change what a step costs; the number of GPUs is the hardware's.
CHANGE_STEPS = (
    *("device", "dtype", "kv_cache_dtype", "max_num_batched_tokens", "run_ahead"),
    *("enforce_eager", "deterministic", "attention_backend"),
)
NEEDED = {"prefill": 2, "decode": 3, "mixed": 0}


@dataclass(frozen=True, slots=True)
class Sample:
    """A kind of step and its median time: b sequences decode over S tokens, p of a prompt are
    computed behind c others."""

    name: str
    b: int
    S: float
    p: int
    c: int
    t_s: float

    @property
    def kind(self) -> str:
        return "decode" if self.p == 0 else "mixed" if self.b else "prefill"


@dataclass(slots=True)
class Calibration:
    """Costs of one model on one machine, and how far they may be trusted."""

    key: str
    shape: Shape
    hardware: Hardware
    cost: Cost
    budget: int
    errors: dict[str, float] = field(default_factory=dict)  # leave-one-out, by sample
    max_b: int = 1
    max_S: float = 0.0
    max_p: int = 0
    notes: list[str] = field(default_factory=list)
    model_name: str = ""
    slots: int = 1
    max_model_len: int | None = None
    num_blocks: int | None = None
    block_size: int = 16
    weights_efficiency: float | None = None
    flops_efficiency: float | None = None
    depth: int = 0  # steps the engine launches ahead
    asked: dict[str, Any] = field(default_factory=dict)  # options of the engine, as `options_of`
    is_limited: bool = False  # slots, context and pool were asked for, and are not the machine's

    @property
    def perf_model(self) -> PerfModel:
        return PerfModel(self.shape, self.cost, self.budget, self.depth)

    def covers(self, b: float, S: float, p: float) -> bool:
        """Whether a prediction stays within twice of what was measured."""
        return b <= 2 * self.max_b and 2 * self.max_S >= S and p <= 2 * self.max_p

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Calibration:
        return cls(
            **{
                **value,
                "shape": Shape(**value["shape"]),
                "hardware": Hardware(**value["hardware"]),
                "cost": Cost(**value["cost"]),
            }
        )


def fit_cost(
    shape: Shape,
    hardware: Hardware,
    samples: Sequence[Sample],
    budget: int,
    *,
    has_lone_kernels: bool = False,
) -> Cost:
    """Needs at least two prefill and three decode samples."""
    fixed, per_flop, per_attention = _fit_prefill(
        shape, [s for s in samples if s.kind == "prefill"], budget
    )
    decode = [s for s in samples if s.kind == "decode"]
    others = [s for s in decode if s.b > 1]
    is_apart = has_lone_kernels and len(others) >= 3 and len(others) < len(decode)
    weights = shape.bytes_per_step / (hardware.bandwidth * PRIOR_BANDWIDTH)
    lone = a0 = a1 = a2 = 0.0
    for _ in range(4):  # the efficiency of reading is an outcome of the fit it enters
        rows = []
        for s in decode:
            is_lone = is_apart and s.b == 1
            rows.append((float(is_lone), float(not is_lone), 0.0 if is_lone else s.b, s.S))
        times = [s.t_s - _beyond(shape, s.b, per_flop, weights) for s in decode]
        times = [max(t, 0.05 * s.t_s) for t, s in zip(times, decode, strict=True)]
        lone, a0, a1, a2 = (float(v) for v in nnls(rows, times, [1 / s.t_s**2 for s in decode]))
        efficiency = shape.kv_bytes_per_token / (a2 * hardware.bandwidth) if a2 > 0 else 0.0
        if 0.2 <= efficiency <= 1.02:
            weights = shape.bytes_per_step / (efficiency * hardware.bandwidth)
        weights = min(weights, a0)
    cost = Cost(
        fixed=a0 - weights,
        per_sequence=a1,
        weights=weights,
        per_kv_token=a2,
        per_linear_flop=per_flop,
        per_attention_flop=per_attention,
        prefill_fixed=fixed,
        lone=lone if is_apart else None,
        source="calibrated",
    )
    mixed = [s for s in samples if s.kind == "mixed"]
    if mixed:
        bare = PerfModel(shape, replace(cost, fixed=0.0, weights=0.0, mixed_fixed=0.0), budget)
        left = [max(s.t_s - predict(bare, s), 0.0) for s in mixed]
        cost = replace(cost, mixed_fixed=median(left))
    return cost


def _beyond(shape: Shape, b: int, per_flop: float, weights: float) -> float:
    return max(shape.linear_flops(b, b) * per_flop, weights * shape.reading(b)) - weights


def _fit_prefill(
    shape: Shape, samples: Sequence[Sample], budget: int
) -> tuple[float, float, float]:
    rows = []
    for s in samples:
        flops, pairs, steps, done = 0.0, 0, 0, 0
        while done < s.p:
            n = min(budget, s.p - done)
            flops += shape.linear_flops(n, 1)
            pairs += pairs_of(n, s.c + done)
            done += n
            steps += 1
        rows.append((float(steps), flops, float(shape.attention_flops * pairs)))
    found = nnls(rows, [s.t_s for s in samples], [1 / s.t_s**2 for s in samples])
    return float(found[0]), float(found[1]), float(found[2])


def calibrate(
    shape: Shape,
    hardware: Hardware,
    samples: Sequence[Sample],
    *,
    budget: int,
    key: str,
    has_lone_kernels: bool = False,
) -> Calibration | None:
    """None with fewer than two prefill or three decode samples."""
    kinds = {k: [s for s in samples if s.kind == k] for k in NEEDED}
    decode = kinds["decode"]
    if any(len(kinds[kind]) < least for kind, least in NEEDED.items()):
        return None
    fit = partial(fit_cost, shape, hardware, budget=budget, has_lone_kernels=has_lone_kernels)
    cost = fit(samples)
    found = Calibration(key, shape, hardware, cost, budget)
    found.max_b = max(s.b for s in decode)
    found.max_S = max(s.S for s in decode)
    found.max_p = max(s.p for s in kinds["prefill"])
    for left_out in samples:
        if len(kinds[left_out.kind]) > max(NEEDED[left_out.kind], 1):
            model = PerfModel(shape, fit([s for s in samples if s is not left_out]), budget)
            found.errors[left_out.name] = predict(model, left_out) / left_out.t_s - 1
    if cost.weights > 0:
        found.weights_efficiency = shape.bytes_per_step / (cost.weights * hardware.bandwidth)
    if cost.per_linear_flop > 0:
        found.flops_efficiency = 1 / (cost.per_linear_flop * hardware.flops)
    for name, value in (
        ("reading weights", found.weights_efficiency),
        ("linear layers", found.flops_efficiency),
    ):
        if value is not None and not 0 < value <= 1.02:
            found.notes.append(
                f"{name} come out at {value:.0%} of the machine's peak: "
                "the peak or the timing is wrong"
            )
    if cost.fixed <= 0:
        found.notes.append("weights stream faster than keys and values; no fixed cost is left")
    return found


def predict(model: PerfModel, sample: Sample) -> float:
    if sample.b:
        pairs = pairs_of(sample.p, sample.c)
        return model.step(sample.b, sample.S, sample.p, pairs, heads=float(sample.p > 0))
    return model.prefill(sample.c + sample.p, sample.c)


# --- the file ------------------------------------------------------------------------------------


def key_of(**facts: Any) -> str:
    """Names a calibration by everything that makes it another one."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _path(key: str) -> Path:
    return runs_folder() / "calibration" / f"{key}.json"


def save(calibration: Calibration) -> Path:
    path = _path(calibration.key)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_text(dump(calibration.as_json()) + "\n", encoding="utf-8")
    return path


def load(key: str) -> Calibration | None:
    """The stored one; None where there is none, or one of another version."""
    return _read(_path(key))


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    """Of the engine's options those that make its steps another time."""
    plain = (None, False, "auto")
    return {k: given[k] for k in CHANGE_STEPS if given.get(k) not in plain}


def find(
    model_name: str, num_gpus: int = 1, given: dict[str, Any] | None = None
) -> Calibration | None:
    """The latest of a model over so many GPUs, by its name, measured with such options."""
    asked = options_of(given or {})
    paths = sorted(_path("x").parent.glob("*.json"), key=lambda p: p.stat().st_mtime)
    found = (_read(path) for path in reversed(paths))
    return next(
        (
            c
            for c in found
            if c is not None and (c.model_name, c.hardware.count) == (model_name, num_gpus)
            if c.asked == asked
        ),
        None,
    )


def _read(path: Path) -> Calibration | None:
    try:
        return Calibration.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
