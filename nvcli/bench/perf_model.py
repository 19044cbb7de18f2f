"""The physical model: bytes and FLOPs of a step, what they cost, and what follows under load.

    t_step = t_0 + c_1 b + max(weights streamed, linear FLOPs) + kv S + attention FLOPs of prompts

A decode step reads every weight once and the keys and values of all resident tokens; a prefill is
FLOPs. Costs come from a datasheet with priors for the efficiencies, or from a calibration
(`calibrate`). Throughput of B requests follows from splitting a second between prefills and decode
steps; Little's law holds by construction. Prompts beyond the step's token budget take several
steps, and a step may hold prompts and decodes at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from nvcli.bench import queueing

if TYPE_CHECKING:
    from nvcli.models.config import ModelConfig

PRIOR_BANDWIDTH, PRIOR_FLOPS = 0.8, 0.6  # efficiencies before anything was measured


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder as its costs need it; bytes are those of one stored number."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    is_tied: bool
    has_qk_norm: bool = True
    weight_bytes: int = 2
    kv_bytes: int = 2

    @classmethod
    def of(cls, config: ModelConfig, *, weight_bytes: int, kv_bytes: int) -> Self:
        return cls(
            hidden=config.hidden_size,
            layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            is_tied=config.tie_word_embeddings,
            has_qk_norm=config.has_qk_norm,
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
        )

    @property
    def p_lin(self) -> int:
        """Weights of the linear layers: L (2 d h D + 2 d k D + 3 d f)."""
        d, width = self.hidden, self.head_dim
        return self.layers * (
            2 * d * self.heads * width + 2 * d * self.kv_heads * width + 3 * d * self.intermediate
        )

    @property
    def p_head(self) -> int:
        return self.vocab * self.hidden

    @property
    def p_norm(self) -> int:
        qk = 2 * self.head_dim if self.has_qk_norm else 0
        return self.layers * (2 * self.hidden + qk) + self.hidden

    @property
    def num_params(self) -> int:
        return self.p_lin + self.p_norm + self.p_head * (1 if self.is_tied else 2)

    @property
    def bytes_per_step(self) -> int:
        """Weights read in a step; an untied input embedding is only gathered."""
        return self.weight_bytes * (self.p_lin + self.p_head + self.p_norm)

    @property
    def bytes_of_weights(self) -> int:
        return self.weight_bytes * self.num_params

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def attention_flops(self) -> int:
        """FLOPs of one (query, key) pair."""
        return 4 * self.layers * self.heads * self.head_dim

    def linear_flops(self, num_tokens: int, num_heads: int) -> int:
        """Of all linear layers over so many tokens, with logits for `num_heads` of them."""
        return 2 * num_tokens * self.p_lin + 2 * num_heads * self.p_head


@dataclass(frozen=True, slots=True)
class Hardware:
    """Peak rates; `source` says whether they are a datasheet's or measured here."""

    name: str
    bandwidth: float  # bytes/s
    flops: float  # dense, of the weights' type
    source: str = "datasheet"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step's parts cost, in seconds each. `source` is `datasheet` or `calibrated`."""

    fixed: float  # t_0: launch, scheduler, sampling
    per_sequence: float  # c_1
    weights: float  # streaming them once
    per_kv_token: float  # reading one resident token
    per_linear_flop: float
    per_attention_flop: float
    prefill_fixed: float  # of a step that holds prompts, in place of fixed + weights when larger
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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def pairs_of(p: int, c: int) -> int:
    """Query-key pairs of p new tokens behind c cached ones."""
    return p * c + p * (p + 1) // 2


@dataclass(frozen=True, slots=True)
class Prediction:
    """A closed loop of B requests, or an open one at a rate."""

    concurrency: float
    requests_per_s: float
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    output_tokens_per_s: float
    wait_s: float = 0.0  # for a slot, an upper estimate near saturation
    wait_p99_s: float = 0.0
    bound: str = "memory"


@dataclass(frozen=True, slots=True)
class PerfModel:
    """Predicts one model on one machine."""

    shape: Shape
    cost: Cost
    budget: int = 16_384  # tokens a step may hold

    # --- one step ---------------------------------------------------------------------------------

    def step(self, b: float, S: float, p: int = 0, pairs: float = 0, heads: float = 0) -> float:
        """b sequences decoding over S tokens, and p prompt tokens with `pairs` and `heads`."""
        cost, shape = self.cost, self.shape
        flops = 2 * (b + p) * shape.p_lin + 2 * (b + heads) * shape.p_head
        compute = flops * cost.per_linear_flop
        base = cost.fixed + max(cost.weights, compute)
        if p:
            base = max(base, cost.prefill_fixed + compute)
        return (
            base
            + cost.per_sequence * b
            + cost.per_kv_token * S
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
        return flops * self.cost.per_linear_flop > self.cost.weights

    # --- floors -----------------------------------------------------------------------------------

    def decode_floor(self, hardware: Hardware, b: float = 1, context: float = 0) -> float:
        """No step can be faster than its bytes, or its FLOPs."""
        read = self.shape.bytes_per_step + self.shape.kv_bytes_per_token * b * context
        return max(read / hardware.bandwidth, b * self.shape.linear_flops(1, 1) / hardware.flops)

    def prefill_floor(self, hardware: Hardware, num_tokens: int) -> float:
        flops = self.shape.linear_flops(num_tokens, 1)
        flops += self.shape.attention_flops * pairs_of(num_tokens, 0)
        return max(flops / hardware.flops, self.shape.bytes_per_step / hardware.bandwidth)

    # --- under load -------------------------------------------------------------------------------

    def prefill_share(self, n_in: int) -> float:
        """What a prompt adds to a step that decodes anyway."""
        return (
            max(self.prefill(n_in) - self.step(0, 0), 0.0)
            if n_in <= self.budget
            else (self.prefill(n_in))
        )

    def cycle(self, b: float, n_in: int, n_out: float) -> tuple[float, float, float]:
        """(decode step, prefill, time of a whole request) with b requests running."""
        step = self.decode(b, n_in + n_out / 2)
        alone = self.prefill(n_in)
        prefill = alone if b <= 1 else self.prefill_share(n_in)
        return step, prefill, max(n_out - 1, 0) * step + (b - 1) * prefill + alone

    def throughput(self, b: float, n_in: int, n_out: float) -> float:
        """X(B) = B / (O t_dec(B) + B T_p) requests/s; the first token comes with the prefill."""
        return b / self.cycle(b, n_in, n_out)[2]

    def closed(self, b: int, n_in: int, n_out: float, slots: int | None = None) -> Prediction:
        """A closed loop of b requests, of which `slots` run at once."""
        running = min(b, slots) if slots else b
        step, prefill, whole = self.cycle(running, n_in, n_out)
        rate = running / whole
        queue = (b - running) / rate
        alone = self.prefill(n_in)
        # The arriving request waits for half of the step that runs, then shares its first step
        # with those that decode.
        ttft = alone if running == 1 else (step / 2 + max(step, alone) + prefill * (running > 1))
        ttft = min(ttft, whole) + queue
        tpot = None
        if n_out > 1:
            tpot = step + (running - 1) * prefill / n_out
        return Prediction(
            concurrency=b,
            requests_per_s=rate,
            ttft_s=ttft,
            tpot_s=tpot,
            e2e_s=b / rate,
            output_tokens_per_s=rate * n_out,
            wait_s=queue,
            bound="compute" if self.is_compute_bound(running) else "memory",
        )

    def open(
        self, rate: float, n_in: int, n_out: float, slots: int, arrival_cv: float = 1.0
    ) -> Prediction | None:
        """Arrivals at a rate; None where the queue would grow for ever."""
        queue = queueing.birth_death(rate, lambda n: self.throughput(n, n_in, n_out), slots)
        if queue is None:
            return None
        top = self.throughput(slots, n_in, n_out)
        wait = queue.W_q * queueing.burstiness(arrival_cv, 1.0)
        step, prefill, _ = self.cycle(max(queue.L, 1.0), n_in, n_out)
        alone = self.prefill(n_in)
        busy = queueing.md1_wait(rate, prefill or alone)
        ttft = alone + step / 2 * min(queue.L, 1.0) + (busy or 0.0) + wait
        e2e = queue.W - queue.W_q + wait
        tpot = max(e2e - ttft, 0.0) / (n_out - 1) if n_out > 1 else None
        return Prediction(
            concurrency=rate * e2e,
            requests_per_s=rate,
            ttft_s=ttft,
            tpot_s=tpot,
            e2e_s=e2e,
            output_tokens_per_s=rate * n_out,
            wait_s=wait,
            wait_p99_s=queueing.wait_p99(queue.p_wait, top, rate),
            bound="compute" if self.is_compute_bound(queue.L) else "memory",
        )

    def serial_share(self, n_in: int, n_out: float) -> float:
        """sigma of Amdahl's law: what batching cannot share of a lone request's time, while the
        linear layers are bound by memory."""
        own = self.cost.per_sequence + self.cost.per_kv_token * (n_in + n_out / 2)
        alone = self.cycle(1, n_in, n_out)[2]
        return min((n_out * own + self.prefill_share(n_in)) / alone, 1.0)
