"""Linear layers, fused where the checkpoint keeps parts apart, and the embedding.

A fused layer is one parameter whose row ranges are named: `qkv_proj` holds q_proj, k_proj and
v_proj one below the other. The loader asks `checkpoint_parts` which checkpoint tensor fills which
rows, so that fusing costs no copy and no tensor is forgotten.

Parameters are born as NaN: a row that no tensor filled cannot pass for a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from nvcli import kernels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def unfilled(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter full of NaN, to be filled by the loader."""
    data = torch.full(shape, float("nan"), dtype=dtype, device=device)
    return nn.Parameter(data, requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b over named parts, whose rows stand one below the other in W.

    parts: name in the checkpoint -> output rows, in order. A plain layer has one part.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.parts = parts
        out_features = sum(parts.values())
        self.weight = unfilled(out_features, in_features, dtype=dtype, device=device)
        self.bias = unfilled(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        return kernels.linear(x, self.weight, self.bias)

    def checkpoint_parts(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, the rows it fills), relative to the layer's parent module."""
        start = 0
        for name, rows in self.parts.items():
            yield f"{name}.weight", self.weight[start : start + rows]
            if self.bias is not None:
                yield f"{name}.bias", self.bias[start : start + rows]
            start += rows


class Embedding(nn.Module):
    """Token ids -> hidden states; its weight may serve as the LM head too."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = unfilled(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, input_ids: Tensor) -> Tensor:  # [T] -> [T, E]
        return torch.nn.functional.embedding(input_ids, self.weight)
