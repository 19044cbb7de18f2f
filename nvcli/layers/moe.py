"""A mixture of experts in place of an MLP: a router, and for each token the K experts it names.

The experts' matrices stand one below the other in one parameter, so that a kernel finds them by
number. To the loader each is a part of it, as q_proj is of qkv_proj; checkpoints that keep all
experts in one tensor are read too. Under tensor parallelism every rank has the router and a share
of each expert's inner size, and what comes out is its part of a sum over the group, as an MLP's is.
All ranks route alike, since what they route is such a sum, the same bits everywhere.

Dimension key: T tokens, E hidden, F an expert's inner size, X experts, K of them a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from nvcli import kernels
from nvcli.layers.linear import Linear, Part
from nvcli.parallel import Share

if TYPE_CHECKING:
    from nvcli.layers.linear import Placement
    from nvcli.layers.norm import RMSNorm
    from nvcli.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class StackedPart:
    """As `Part`, of a checkpoint tensor that has the matrices of all experts."""

    target: Tensor  # [X, rows, columns]
    shape: tuple[int, ...]  # of the whole checkpoint tensor
    rows: Share  # of its first dimension: all
    parts: tuple[Part, ...]  # one below the other, of equal height

    @property
    def is_whole(self) -> bool:
        return all(part.is_whole for part in self.parts)

    def cut(self, whole: Any) -> Tensor:
        height = self.parts[0].shape[0]
        pieces = []
        for i, part in enumerate(self.parts):
            expert, first = divmod(i * height, self.shape[1])
            pieces.append(part.cut(whole[expert, first : first + height]))
        return torch.cat(pieces).view(self.target.shape)


class ExpertStack(Linear):
    """The same linear layer of X experts: [X rows, in], rows being those of one expert's parts.

    Its checkpoint names are the parts' behind the expert's number. It is no product of its own:
    `kernels.experts` multiplies.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: Share | int,
        parts: dict[str, Share],
        **place: Unpack[Placement],
    ) -> None:
        each = {f"{e}.{name}": share for e in range(num_experts) for name, share in parts.items()}
        super().__init__(in_features, each, bias=False, **place)
        self.num_experts = num_experts

    @property
    def matrices(self) -> Tensor:
        """[X, rows, in]"""
        return self.weight.view(self.num_experts, -1, self.weight.shape[1])

    def stacked_part(self) -> StackedPart:
        """What fills it where one checkpoint tensor, of this module's own name, has all experts."""
        parts = tuple(part for _, part in self.checkpoint_parts())
        rows = sum(share.whole for share in self.parts.values()) // self.num_experts
        shape = (self.num_experts, rows, self.columns.whole)
        return StackedPart(self.matrices, shape, Share.all_of(self.num_experts), parts)


class Experts(nn.Module):
    """SwiGLU MLPs of one shape, of which each token goes through K."""

    def __init__(self, config: ModelConfig, **place: Unpack[Placement]) -> None:
        super().__init__()
        assert config.moe is not None, "a configuration without experts"
        size, inner = config.moe.num_experts, place["group"].share(config.moe.intermediate_size)
        gate_up = {"gate_proj": inner, "up_proj": inner}
        down = {"down_proj": Share.all_of(config.hidden_size)}
        self.gate_up_proj = ExpertStack(size, config.hidden_size, gate_up, **place)
        self.down_proj = ExpertStack(size, inner, down, **place)

    def forward(
        self,
        x: Tensor,  # [T, E]
        expert_ids: Tensor,  # [T, K] int32
        weights: Tensor,  # [T, K] float32
    ) -> Tensor:  # [T, E], this rank's part of it, or addends: see `Linear.addends`
        return kernels.experts(
            *(x, expert_ids, weights, self.gate_up_proj.matrices, self.down_proj.matrices),
            deterministic=self.down_proj.deterministic,
            as_addends=not self.down_proj.is_part,
        )


class MoE(nn.Module):
    """Parameters: gate (the router), experts."""

    def __init__(self, config: ModelConfig, **place: Unpack[Placement]) -> None:
        super().__init__()
        assert config.moe is not None, "a configuration without experts"
        self.top_k = config.moe.num_experts_per_tok
        self.renormalise = config.moe.norm_topk_prob
        router = {"gate": Share.all_of(config.moe.num_experts)}
        self.gate = Linear(config.hidden_size, router, bias=False, **place)
        self.experts = Experts(config, **place)

    def forward(
        self,
        x: Tensor,  # [T, E] or addends, what attention adds to the residual, or a part of it
        residual: Tensor,  # [T, E]
        norm: RMSNorm,  # of their sum
        is_token: Tensor | None,  # [T] bool; None: all are
    ) -> tuple[Tensor, Tensor]:  # [T, E] to add next, or its addends, and the new residual
        normed, residual = norm.add(x, residual)
        expert_ids, weights = kernels.route(
            self.gate(normed), self.top_k, renormalise=self.renormalise, is_token=is_token
        )
        return self.experts(normed, expert_ids, weights), residual
