"""The physical model: bytes and FLOPs of a step, what they cost, and what follows under load.

    t_step = t_0 + c_1 b + max(weights streamed, linear FLOPs) + kv S + attention FLOPs of prompts

A decode step reads every weight once and the keys and values of all resident tokens; a prefill is
FLOPs. Of experts a step reads those that its tokens hit, if routing is uniform. A captured step
computes its whole bucket (`nvcli.engine.buckets`). Costs come from a datasheet with priors for the
efficiencies, or from a calibration (`calibrate`), and then a step takes what the law says times
what the measured steps nearest to it were off by. Prompts beyond the step's token budget take
several steps, and a step may hold prompts and decodes at once. `under_load` tells what follows for
many requests.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from nvcli.bench.fit import nearby
from nvcli.bench.shape import Shape, pairs_of
from nvcli.bench.under_load import Traffic
from nvcli.engine.buckets import Buckets

if TYPE_CHECKING:
    from collections.abc import Sequence

PRIOR_BANDWIDTH, PRIOR_FLOPS = 0.8, 0.6  # efficiencies before anything was measured


@dataclass(frozen=True, slots=True)
class Hardware:
    """Peak rates; `source` says whether they are a datasheet's or measured here."""

    name: str
    bandwidth: float  # bytes/s
    flops: float  # dense, of the weights' type
    source: str = "datasheet"

    def times(self, count: int, *, is_shared: bool = False) -> Hardware:
        """So many of them as one: what tensor parallelism has. Shared: it is one all the same."""
        if count == 1:
            return self
        factor = 1 if is_shared else count
        name = f"{count} x {self.name}"
        return Hardware(name, factor * self.bandwidth, factor * self.flops, self.source)

    @property
    def count(self) -> int:
        number, _, rest = self.name.partition(" x ")
        return int(number) if rest and number.isdigit() else 1


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step's parts cost, in seconds each. `source` is `datasheet` or `calibrated`."""

    fixed: float  # t_0: launch, scheduler, sampling
    per_sequence: float  # c_1
    weights: float  # streaming once those of one token
    per_kv_token: float  # reading one resident token
    per_linear_flop: float
    per_attention_flop: float
    prefill_fixed: float  # of a step that holds prompts, in place of fixed + weights when larger
    # Between GPUs; a calibration has it in its other terms.
    per_token: float = 0.0  # moved
    few_rows: int | None = None  # steps of more rows have slower sums,
    many_rows_more: float = 0.0  # by this
    # What a calibration finds beside them; a datasheet knows nothing of it.
    lone: float | None = None  # a decode step of one sequence but for its context: other kernels
    lone_per_kv_token: float | None = None  # as `per_kv_token`, there
    mixed_fixed: float | None = None  # prefill_fixed where others decode in the same step
    mixed_per_kv_token: float | None = None
    hand_over: float = 0.0  # of a lone request: on its way to the engine and back, beside its steps
    seen: tuple[tuple[float, float, float, float], ...] = ()  # (b, S, T, measured / this law)
    source: str = "datasheet"

    @classmethod
    def from_datasheet(cls, shape: Shape, hardware: Hardware) -> Self:
        bandwidth = hardware.bandwidth * PRIOR_BANDWIDTH
        flops = hardware.flops * PRIOR_FLOPS
        return cls(
            fixed=0.0,
            per_sequence=0.0,
            weights=shape.bytes_per_step / bandwidth,
            per_kv_token=shape.kv_bytes_per_token / bandwidth,
            per_linear_flop=1 / flops,
            per_attention_flop=1 / flops,
            prefill_fixed=0.0,
        )

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**{**value, "seen": tuple(tuple(row) for row in value.get("seen", ()))})


@dataclass(frozen=True, slots=True)
class PerfModel:
    """Predicts one model on one machine."""

    shape: Shape
    cost: Cost
    budget: int = 16_384  # tokens a step may hold
    depth: int = 0  # steps launched ahead of the one that runs
    buckets: Buckets | None = None  # steps are padded to them; None: to nothing

    def as_json(self, hardware: Hardware) -> dict[str, Any]:
        """What a run keeps of it, with the machine's peaks."""
        return {**asdict(self), "hardware": asdict(hardware)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> tuple[Self, Hardware]:
        shape, cost = Shape(**value["shape"]), Cost.from_json(value["cost"])
        buckets = Buckets.from_json(value.get("buckets"))
        model = cls(shape, cost, value["budget"], value.get("depth", 0), buckets)
        return model, Hardware(**value["hardware"])

    # --- one step ---------------------------------------------------------------------------------

    def step(self, b: float, S: float, p: float = 0, pairs: float = 0, heads: float = 0) -> float:
        """b sequences decoding over S tokens, and p prompt tokens with `pairs` and `heads`."""
        cost = self.cost
        if cost.lone is None or p or not 0 < b < 2:
            return self.law(b, S, p, pairs, heads) * self.correction(b, S, p)
        share = min(2 - b, 1)  # a mean of 1 and 2 is in between
        found = share * self.lone_law(S / b) * self.correction(1, S / b)
        if share < 1:
            found += (1 - share) * self.law(2, 2 * S / b) * self.correction(2, 2 * S / b)
        return found

    def correction(self, b: float, S: float, p: float = 0) -> float:
        """What steps of this kind were off by, near such a one."""
        kind, place = self._kind(b, p), self.place(b, S, p)
        known = (((m, n, t), f) for m, n, t, f in self.cost.seen if self._kind(m, t) == kind)
        return nearby(known, place)

    def place(self, b: float, S: float, p: float) -> tuple[float, float, float]:
        """(b, S, T) of a step: what makes steps alike. T: tokens it computes, 0 without prompts."""
        padded = self.buckets.padded(b, p) if p and self.buckets is not None else None
        return b, S, padded[0] if padded else b + p if p else 0

    def _kind(self, b: float, p: float) -> str:
        if p:
            return "mixed" if b else "prefill"
        return "lone" if self.cost.lone is not None and b < 2 else "decode"

    def lone_law(self, context: float) -> float:
        """One sequence that decodes, where it has kernels of its own."""
        cost = self.cost
        per_token = cost.lone_per_kv_token
        per_token = cost.per_kv_token if per_token is None else per_token
        return (cost.lone or 0.0) + cost.per_token + per_token * context

    def law(self, b: float, S: float, p: float = 0, pairs: float = 0, heads: float = 0) -> float:
        """`step` before it is compared with what was measured."""
        cost, shape = self.cost, self.shape
        padded = self.buckets.padded(b, p) if self.buckets is not None else None
        tokens, rows = padded or (b + p, b + heads)
        compute = (2 * tokens * shape.p_lin + 2 * rows * shape.p_head) * cost.per_linear_flop
        base = cost.fixed + max(cost.weights * shape.reading(b + p), compute)
        if cost.few_rows is not None and tokens > cost.few_rows:
            base += cost.many_rows_more
        per_kv_token = cost.per_kv_token
        if p:
            is_mixed = b > 0 and cost.mixed_fixed is not None
            fixed = cost.mixed_fixed if is_mixed else cost.prefill_fixed
            base = max(base, (fixed or 0.0) + compute)
            if is_mixed and cost.mixed_per_kv_token is not None:
                per_kv_token = cost.mixed_per_kv_token
        return (
            base
            + cost.per_sequence * b
            + cost.per_token * tokens
            + per_kv_token * S
            + shape.attention_flops * pairs * cost.per_attention_flop
        )

    def decode(self, b: float, context: float) -> float:
        """One step of b sequences with so many tokens each."""
        return self.step(b, b * context)

    def prefill(self, num_tokens: int, cached: int = 0) -> float:
        """A prompt of which `cached` tokens are in the KV cache, alone, in as many steps as the
        budget asks for."""
        total, done = 0.0, cached
        while done < num_tokens:
            p = min(self.budget, num_tokens - done)
            total += self.step(0, 0, p, pairs_of(p, done), heads=1)
            done += p
        return total

    def is_compute_bound(self, b: float) -> bool:
        flops = self.shape.linear_flops(1, 1) * b
        weights = self.cost.weights * self.shape.reading(b)
        return flops * self.cost.per_linear_flop > weights

    # --- floors -----------------------------------------------------------------------------------

    def step_floor(self, hardware: Hardware, b: float, S: float, p: int = 0) -> float:
        """No step can be faster than its bytes, or its FLOPs."""
        read = self.shape.bytes_per_step * self.shape.reading(b + p)
        read += self.shape.kv_bytes_per_token * S
        flops = self.shape.linear_flops(b + p, b + (p > 0))
        flops += self.shape.attention_flops * pairs_of(p, 0)
        return max(read / hardware.bandwidth, flops / hardware.flops)

    def decode_floor(self, hardware: Hardware, b: float = 1, context: float = 0) -> float:
        return self.step_floor(hardware, b, b * context)

    def prefill_floor(self, hardware: Hardware, num_tokens: int) -> float:
        return self.step_floor(hardware, 0, 0, num_tokens)

    # --- under load -------------------------------------------------------------------------------

    def under(self, n_in: int, n_out: float, cached: int = 0, lens: Sequence[int] = ()) -> Traffic:
        """Many requests of `n_in` tokens and `n_out` more: see `Traffic`."""
        return Traffic(self, n_in, n_out, cached, lens)

    def serial_share(self, n_in: int, n_out: float) -> float:
        """sigma of Amdahl's law: what batching cannot share of a lone request's time, while the
        linear layers are bound by memory."""
        own = self.cost.per_sequence + self.cost.per_kv_token * (n_in + n_out / 2)
        prompt = self.prefill(n_in)
        if n_in <= self.budget:  # it shares a step with those that decode
            prompt = max(prompt - self.step(0, 0), 0.0)
        return min((n_out * own + prompt) * self.under(n_in, n_out).throughput(1), 1.0)
