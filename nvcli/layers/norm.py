"""RMSNorm, alone or fused with the residual addition before it and the projection after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from nvcli import kernels
from nvcli.layers.linear import unfilled

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nvcli.layers.linear import Linear


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = unfilled(size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:  # [T, E] -> [T, E]
        return kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """([T, E] norm of the sum, [T, E] the sum): the sum is the next residual. Here and below x
        may be addends, [S, T, E] float32: see `Linear.addends`.
        """
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def project(
        self, x: Tensor, residual: Tensor | None, projection: Linear
    ) -> tuple[Tensor, Tensor]:
        """([T, out] projection of the sum's norm, [T, E] the sum). No residual: the sum is x."""
        return kernels.norm_linear(
            *(x, residual, self.weight, self.eps, projection.weight, projection.bias),
            deterministic=projection.deterministic,
        )

    def project_swiglu(
        self, x: Tensor, residual: Tensor | None, gate_up: Linear
    ) -> tuple[Tensor, Tensor]:
        """([T, F] silu(gate) * up of the sum's norm, [T, E] the sum)."""
        return kernels.norm_swiglu(
            *(x, residual, self.weight, self.eps, gate_up.weight, gate_up.bias),
            deterministic=gate_up.deterministic,
        )
