"""RMSNorm, alone or fused with the residual addition before it and the projection after it.

Under tensor parallelism the x of a norm between layers is this rank's part of a sum, and the norm
begins with adding up the parts of all ranks; for few rows that is one kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from nvcli import kernels
from nvcli.layers.linear import unfilled
from nvcli.parallel import SOLO, TPGroup

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nvcli.layers.linear import Linear


class RMSNorm(nn.Module):
    """group: the ranks that hold parts of x in `add`, `project` and `project_swiglu`."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: TPGroup = SOLO,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.group = group
        self.weight = unfilled(size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:  # [T, E] -> [T, E]
        return kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """([T, E] norm of the sum, [T, E] the sum): the sum is the next residual. Here and below x
        may be addends, [S, T, E] float32: see `Linear.addends`.
        """
        found = self.group.add_rms_norm(x, residual, self.weight, self.eps)
        if found is not None:
            return found
        return kernels.add_rms_norm(self.group.all_reduce(x), residual, self.weight, self.eps)

    def project(
        self, x: Tensor, residual: Tensor | None, projection: Linear
    ) -> tuple[Tensor, Tensor]:
        """([T, out] projection of the sum's norm, [T, E] the sum). No residual: the sum is x."""
        found = self.group.add_rms_norm(x, residual, self.weight, self.eps)
        if found is not None:
            normed, total = found
            return projection(normed), total
        x = self.group.all_reduce(x)
        return kernels.norm_linear(
            *(x, residual, self.weight, self.eps, projection.weight, projection.bias),
            scales=projection.weight_scale_inv,
            deterministic=projection.deterministic,
        )

    def project_swiglu(
        self, x: Tensor, residual: Tensor | None, gate_up: Linear
    ) -> tuple[Tensor, Tensor]:
        """([T, F] silu(gate) * up of the sum's norm, [T, E] the sum)."""
        found = self.group.add_rms_norm(x, residual, self.weight, self.eps)
        if found is not None:
            normed, total = found
            inner = kernels.linear_swiglu(
                *(normed, gate_up.weight, gate_up.bias),
                scales=gate_up.weight_scale_inv,
                deterministic=gate_up.deterministic,
            )
            return inner, total
        x = self.group.all_reduce(x)
        return kernels.norm_swiglu(
            *(x, residual, self.weight, self.eps, gate_up.weight, gate_up.bias),
            scales=gate_up.weight_scale_inv,
            deterministic=gate_up.deterministic,
        )
