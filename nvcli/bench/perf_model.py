"""The physical model: bytes and FLOPs of a step, what they cost, and what follows under load.

    t_step = t_0 + c_1 b + max(weights streamed, linear FLOPs) + kv S + attention FLOPs of prompts

A decode step reads every weight once and the keys and values of all resident tokens; a prefill is
FLOPs. Of experts a step reads those that its tokens hit, if routing is uniform. Costs come from a
datasheet with priors for the efficiencies, or from a calibration (`calibrate`). Prompts beyond the
step's token budget take several steps, and a step may hold prompts and decodes at once.
`under_load` tells what follows for many requests.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from nvcli.bench import under_load
from nvcli.models.moe_config import num_hit
from nvcli.types import FP8_BLOCK

if TYPE_CHECKING:
    from nvcli.models.config import ModelConfig

PRIOR_BANDWIDTH, PRIOR_FLOPS = 0.8, 0.6  # efficiencies before anything was measured


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder as its costs need it; bytes are those of one stored number, where it is no fp8
    weight.
    """

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
    moe_layers: int = 0  # that have experts in place of the MLP
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    is_fp8: bool = False  # the layers' weights: a byte each, and a float32 for 128 x 128

    @classmethod
    def of(
        cls, config: ModelConfig, *, weight_bytes: int, kv_bytes: int, is_fp8: bool = False
    ) -> Self:
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
            moe_layers=config.num_moe_layers,
            experts=config.moe.num_experts if config.moe else 0,
            experts_per_token=config.moe.num_experts_per_tok if config.moe else 0,
            expert_intermediate=config.moe.intermediate_size if config.moe else 0,
            is_fp8=is_fp8,
        )

    @property
    def p_lin(self) -> int:
        """Weights of the linear layers that a token passes: L (2 d h D + 2 d k D + 3 d f), where a
        layer of experts has a router d X and K experts 3 d f' in place of 3 d f.
        """
        d, width = self.hidden, self.head_dim
        attention = self.layers * (2 * d * self.heads * width + 2 * d * self.kv_heads * width)
        mlps = (self.layers - self.moe_layers) * 3 * d * self.intermediate
        routers = self.moe_layers * d * self.experts
        return attention + mlps + routers + self.experts_per_token * self.p_expert

    @property
    def p_expert(self) -> int:
        """Weights of one expert in all layers that have experts."""
        return self.moe_layers * 3 * self.hidden * self.expert_intermediate

    @property
    def p_head(self) -> int:
        return self.vocab * self.hidden

    @property
    def p_norm(self) -> int:
        qk = 2 * self.head_dim if self.has_qk_norm else 0
        return self.layers * (2 * self.hidden + qk) + self.hidden

    @property
    def num_params(self) -> int:
        idle = (self.experts - self.experts_per_token) * self.p_expert
        return self.p_lin + idle + self.p_norm + self.p_head * (1 if self.is_tied else 2)

    @property
    def bytes_of_layers(self) -> int:
        """Of the linear layers' weights."""
        if self.is_fp8:
            return self.p_lin + 4 * self.p_lin // FP8_BLOCK**2
        return self.weight_bytes * self.p_lin

    @property
    def bytes_per_step(self) -> int:
        """Weights read in a step of one token; an untied input embedding is only gathered."""
        return self.bytes_of_layers + self.weight_bytes * (self.p_head + self.p_norm)

    def reading(self, num_tokens: float) -> float:
        """Weights read in a step of so many tokens, as a multiple of `bytes_per_step`."""
        if not self.moe_layers:
            return 1.0
        hit = num_hit(self.experts, self.experts_per_token, max(num_tokens, 1))
        more = (hit - self.experts_per_token) * self.p_expert
        return 1 + self.weight_bytes * more / self.bytes_per_step

    @property
    def bytes_of_weights(self) -> int:
        return self.bytes_of_layers + self.weight_bytes * (self.num_params - self.p_lin)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def attention_flops(self) -> int:
        """FLOPs of one (query, key) pair."""
        return 4 * self.layers * self.heads * self.head_dim

    def linear_flops(self, num_tokens: float, num_heads: float) -> float:
        """Of all linear layers over so many tokens, with logits for `num_heads` of them."""
        return 2 * num_tokens * self.p_lin + 2 * num_heads * self.p_head


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
    mixed_fixed: float | None = None  # prefill_fixed where others decode in the same step
    hand_over: float = 0.0  # of a lone request: on its way to the engine and back, beside its steps
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
class PerfModel:
    """Predicts one model on one machine."""

    shape: Shape
    cost: Cost
    budget: int = 16_384  # tokens a step may hold
    depth: int = 0  # steps launched ahead of the one that runs

    def as_json(self, hardware: Hardware) -> dict[str, Any]:
        """What a run keeps of it, with the machine's peaks."""
        return {**asdict(self), "hardware": asdict(hardware)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> tuple[Self, Hardware]:
        shape, cost = Shape(**value["shape"]), Cost(**value["cost"])
        model = cls(shape, cost, value["budget"], value.get("depth", 0))
        return model, Hardware(**value["hardware"])

    # --- one step ---------------------------------------------------------------------------------

    def step(self, b: float, S: float, p: int = 0, pairs: float = 0, heads: float = 0) -> float:
        """b sequences decoding over S tokens, and p prompt tokens with `pairs` and `heads`."""
        cost, shape = self.cost, self.shape
        flops = 2 * (b + p) * shape.p_lin + 2 * (b + heads) * shape.p_head
        compute = flops * cost.per_linear_flop
        base = cost.fixed + max(cost.weights * shape.reading(b + p), compute)
        if cost.few_rows is not None and b + p > cost.few_rows:
            base += cost.many_rows_more
        if p:
            is_mixed = b > 0 and cost.mixed_fixed is not None
            fixed = cost.mixed_fixed if is_mixed else cost.prefill_fixed
            base = max(base, (fixed or 0.0) + compute)
        base += cost.per_sequence * b
        if cost.lone is not None and not p and 0 < b < 2:  # a mean of 1 and 2 in between
            share = min(2 - b, 1)
            base = share * cost.lone + (1 - share) * base
        return (
            base
            + cost.per_token * (b + p)
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

    throughput = under_load.throughput
    closed = under_load.closed
    open = under_load.open_loop

    def serial_share(self, n_in: int, n_out: float) -> float:
        """sigma of Amdahl's law: what batching cannot share of a lone request's time, while the
        linear layers are bound by memory."""
        own = self.cost.per_sequence + self.cost.per_kv_token * (n_in + n_out / 2)
        prompt = self.prefill(n_in)
        if n_in <= self.budget:  # it shares a step with those that decode
            prompt = max(prompt - self.step(0, 0), 0.0)
        return min((n_out * own + prompt) * self.throughput(1, n_in, n_out), 1.0)
