"""A decoder's sizes as the physical model needs them: weights, bytes and FLOPs of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from nvcli.models.moe_config import num_hit
from nvcli.types import FP8_BLOCK

if TYPE_CHECKING:
    from nvcli.models.config import ModelConfig


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


def pairs_of(p: int, c: int) -> int:
    """Query-key pairs of p new tokens behind c cached ones."""
    return p * c + p * (p + 1) // 2
