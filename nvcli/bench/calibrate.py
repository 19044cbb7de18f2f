"""From a few measured steps to the costs of the physical model, with its own error stated.

Prefill first: non-negative least squares of T_p on [1, linear FLOPs, attention FLOPs], the FLOPs
those of the bucket that the step is padded to. Then decode on [1, b, S], less what linear layers of
b tokens cost beyond streaming the weights of one. Weights 1 / t^2 make relative errors count alike.
Where the engine has other kernels for a lone row (CUDA), its steps are fitted apart, on [1, S].
Steps that hold prompts and decodes come last: what is left of their time, on [1, S] again. What the
law then misses at each point is kept beside it (`Cost.seen`): kernels get faster in jumps. Leave-
one-out tells how well a point is predicted without itself.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nvcli.bench.fit import nnls
from nvcli.bench.perf_model import PRIOR_BANDWIDTH, Cost, Hardware, PerfModel
from nvcli.bench.record import dump, runs_folder
from nvcli.bench.shape import Shape, pairs_of
from nvcli.config import EngineConfig
from nvcli.engine.buckets import Buckets
from nvcli.errors import NvcliError
from nvcli.paths import write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


# Options of the engine that change what a step costs; the number of GPUs is the hardware's.
CHANGE_STEPS = (
    *("device", "dtype", "kv_cache_dtype", "max_num_batched_tokens", "run_ahead"),
    *("enforce_eager", "deterministic", "attention_backend", "block_size"),
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
    buckets: Buckets | None = None  # that its steps are padded to
    asked: dict[str, Any] = field(default_factory=dict)  # options of the engine, as `options_of`
    is_limited: bool = False  # slots, context and pool were asked for, and are not the machine's

    @property
    def perf_model(self) -> PerfModel:
        return PerfModel(self.shape, self.cost, self.budget, self.depth, self.buckets)

    def covers(self, b: float, S: float, p: float) -> bool:
        """Whether a prediction stays within twice of what was measured."""
        return b <= 2 * self.max_b and 2 * self.max_S >= S and p <= 2 * self.max_p

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Calibration:
        return cls(
            **{
                **value,
                "shape": Shape(**value["shape"]),
                "hardware": Hardware(**value["hardware"]),
                "cost": Cost.from_json(value["cost"]),
                "buckets": Buckets.from_json(value.get("buckets")),
            }
        )


def fit_cost(
    shape: Shape,
    hardware: Hardware,
    samples: Sequence[Sample],
    budget: int,
    *,
    buckets: Buckets | None = None,
    has_lone_kernels: bool = False,
) -> Cost:
    """Needs at least two prefill and three decode samples."""
    kinds = {kind: [s for s in samples if s.kind == kind] for kind in NEEDED}
    bare = PerfModel(shape, _NOTHING, budget, buckets=buckets)
    fixed, per_flop, per_attention = _fit_prefill(bare, kinds["prefill"])
    bare = replace(bare, cost=replace(_NOTHING, per_linear_flop=per_flop))
    decode = kinds["decode"]
    others = [s for s in decode if s.b > 1]
    is_apart = has_lone_kernels and len(others) >= 3 and len(others) < len(decode)
    many = others if is_apart else decode
    weights = shape.bytes_per_step / (hardware.bandwidth * PRIOR_BANDWIDTH)
    a0 = a1 = a2 = 0.0
    for _ in range(4):  # the efficiency of reading is an outcome of the fit it enters
        streams = replace(bare, cost=replace(bare.cost, weights=weights))
        beyond = [streams.law(s.b, 0) - weights for s in many]
        a0, a1, a2 = _fit([(1.0, s.b, s.S) for s in many], many, beyond)
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
        source="calibrated",
    )
    if is_apart:
        lone = [s for s in decode if s.b == 1]
        base, per_token = _fit_line(lone, [0.0] * len(lone), a2)
        cost = replace(cost, lone=base, lone_per_kv_token=per_token)
    if kinds["mixed"]:
        nothing_fixed = replace(cost, fixed=0.0, weights=0.0, mixed_fixed=0.0, per_kv_token=0.0)
        bare = replace(bare, cost=nothing_fixed)
        known = [bare.law(s.b, s.S, s.p, pairs_of(s.p, s.c), heads=1.0) for s in kinds["mixed"]]
        base, per_token = _fit_line(kinds["mixed"], known, a2)
        cost = replace(cost, mixed_fixed=base, mixed_per_kv_token=per_token)
    model = PerfModel(shape, cost, budget, buckets=buckets)
    seen = tuple((*model.place(s.b, s.S, s.p), s.t_s / predict(model, s)) for s in samples)
    return replace(cost, seen=seen)


def _fit(
    rows: Sequence[tuple[float, ...]], samples: Sequence[Sample], known: Sequence[float]
) -> list[float]:
    """Coefficients of what is left of the samples' times beside what is known of them."""
    left = [max(s.t_s - t, 0.05 * s.t_s) for s, t in zip(samples, known, strict=True)]
    return [float(v) for v in nnls(rows, left, [1 / s.t_s**2 for s in samples])]


def _fit_line(
    samples: Sequence[Sample], known: Sequence[float], per_kv_token: float
) -> tuple[float, float]:
    """(constant, seconds a resident token); with fewer than 3 samples the latter is given."""
    if len(samples) < 3:
        known = [t + per_kv_token * s.S for s, t in zip(samples, known, strict=True)]
        (base,) = _fit([(1.0,)] * len(samples), samples, known)
        return base, per_kv_token
    base, per_kv_token = _fit([(1.0, s.S) for s in samples], samples, known)
    return base, per_kv_token


def _fit_prefill(bare: PerfModel, samples: Sequence[Sample]) -> tuple[float, float, float]:
    flops = replace(bare, cost=replace(_NOTHING, per_linear_flop=1.0))
    pairs = replace(bare, cost=replace(_NOTHING, per_attention_flop=1.0))
    steps = replace(bare, cost=replace(_NOTHING, fixed=1.0))
    rows = [tuple(predict(model, s) for model in (steps, flops, pairs)) for s in samples]
    fixed, per_flop, per_attention = _fit(rows, samples, [0.0] * len(samples))
    return fixed, per_flop, per_attention


def calibrate(
    shape: Shape,
    hardware: Hardware,
    samples: Sequence[Sample],
    *,
    budget: int,
    key: str,
    buckets: Buckets | None = None,
    has_lone_kernels: bool = False,
) -> Calibration | None:
    """None with fewer than two prefill or three decode samples."""
    kinds = {k: [s for s in samples if s.kind == k] for k in NEEDED}
    decode = kinds["decode"]
    if any(len(kinds[kind]) < least for kind, least in NEEDED.items()):
        return None
    fit = partial(
        fit_cost, shape, hardware, budget=budget, buckets=buckets, has_lone_kernels=has_lone_kernels
    )
    cost = fit(samples)
    found = Calibration(key, shape, hardware, cost, budget, buckets=buckets)
    found.max_b = max(s.b for s in decode)
    found.max_S = max(s.S for s in decode)
    found.max_p = max(s.p for s in kinds["prefill"])
    for left_out in samples:
        if len(kinds[left_out.kind]) > max(NEEDED[left_out.kind], 1):
            others = fit([s for s in samples if s is not left_out])
            model = PerfModel(shape, others, budget, buckets=buckets)
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


_NOTHING = Cost(
    fixed=0.0,
    per_sequence=0.0,
    weights=0.0,
    per_kv_token=0.0,
    per_linear_flop=0.0,
    per_attention_flop=0.0,
    prefill_fixed=0.0,
)


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
    """Raises `NvcliError` when the disk refuses; the one that was there stays then."""
    path = _path(calibration.key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, dump(asdict(calibration)).encode() + b"\n")
    except OSError as exc:
        raise NvcliError(f"cannot write {path}: {exc.strerror or exc}") from exc
    return path


def load(key: str) -> Calibration | None:
    """The stored one; None where there is none, or one of another version."""
    return _read(_path(key))


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    """Of the engine's options those that make its steps another time, where they are not what they
    would be anyway.
    """
    usual = {field.name: field.default for field in fields(EngineConfig)}
    return {k: given[k] for k in CHANGE_STEPS if given.get(k) not in (None, usual[k])}


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
