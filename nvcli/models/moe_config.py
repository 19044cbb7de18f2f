"""Experts in a checkpoint's configuration, and how many of them so many tokens reach."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvcli.models.json_file import JsonFile


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Experts in place of the MLP: how many, of what size, and in which layers."""

    num_experts: int  # X
    num_experts_per_tok: int  # K, which a token goes to
    intermediate_size: int  # F of one expert
    norm_topk_prob: bool = False  # whether a token's K weights are made to add up to 1
    decoder_sparse_step: int = 1  # every n-th layer has experts
    mlp_only_layers: tuple[int, ...] = ()  # these have an MLP all the same

    def has_experts(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    def num_hit(self, num_tokens: float) -> float:
        """Experts of a layer that so many tokens go to: see `num_hit`."""
        return num_hit(self.num_experts, self.num_experts_per_tok, num_tokens)


def num_hit(num_experts: int, per_token: int, num_tokens: float) -> float:
    """Distinct experts of so many tokens, in the mean of uniform routing: X (1 - (1 - K / X)^T)."""
    return num_experts * (1 - math.pow(1 - per_token / num_experts, num_tokens))


def read_moe(raw: JsonFile) -> MoeConfig:
    """Names and rules of transformers' `Qwen3MoeConfig`; its version 5 writes `num_experts` as
    `num_local_experts`.
    """
    key = "num_experts" if raw.data.get("num_experts") is not None else "num_local_experts"
    num_experts, per_token = raw.count(key), raw.count("num_experts_per_tok")
    if per_token > num_experts:
        raise raw.error(f"num_experts_per_tok {per_token} is more than {key} {num_experts}")
    dense, num_layers = raw.data.get("mlp_only_layers") or [], raw.count("num_hidden_layers")
    if not isinstance(dense, list) or any(
        isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < num_layers for i in dense
    ):
        raise raw.error(f"mlp_only_layers must be a list of layers' numbers, got {dense!r}")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        intermediate_size=raw.count("moe_intermediate_size"),
        norm_topk_prob=raw.flag("norm_topk_prob"),
        decoder_sparse_step=raw.count("decoder_sparse_step", 1),
        mlp_only_layers=tuple(dense),
    )
