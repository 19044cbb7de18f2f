"""RMSNorm, alone or fused with the residual addition before it and the projection after it.

RMSNorm divides a row by its root mean square and multiplies it by the weight; a projection follows.
Both factors can be applied elsewhere with the same result. `fold_into` multiplies the projection's
columns by the weight, once after loading. In steps of many rows such a norm then comes *late*: the
projection takes the rows as they are, and its result is divided by their root mean square in the
kernel that uses it. No kernel runs for the norm itself, so the product before it adds to the
residual in place.

Under tensor parallelism the x of a norm between layers is this rank's part of a sum, and the norm
begins with adding up the parts of all ranks; for few rows that and the norm are one kernel.
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


ROWS_AT_ONCE = 4096  # of a projection, so that their float32 copy is small


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
        self.late_rows: int | None = None  # from how many on it comes late; set by `fold_into`
        self.weight = unfilled(size, dtype=dtype, device=device)

    def fold_into(self, projection: Linear, late_rows: int) -> None:
        """Multiply the projection's columns by the weight, which becomes ones. Once, after loading.

        projection:  dense, without a bias, and behind no other norm
        late_rows:   from how many rows of a step on the norm comes late
        """
        assert projection.weight_scale_inv is None, "fp8 has a scale for many columns"
        assert projection.bias is None, "a bias would be divided as well"
        for start in range(0, len(projection.weight), ROWS_AT_ONCE):
            rows = projection.weight[start : start + ROWS_AT_ONCE]
            rows.copy_(rows.float() * self.weight.float())
        self.weight.fill_(1.0)
        self.late_rows = late_rows

    def is_late(self, x: Tensor, residual: Tensor | None) -> bool:
        """Whether the norm comes late in a step of these rows. Never where it has something to add
        up first: a residual, or x as addends.
        """
        if residual is not None or self.late_rows is None:
            return False
        return x.dim() == 2 and x.shape[0] >= self.late_rows

    def forward(self, x: Tensor) -> Tensor:  # [T, E] -> [T, E]
        return kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + residual, and its norm: ([T, E] norm, [T, E] sum). The sum is the next residual;
        without a residual it is x. Here and below x may be addends, [S, T, E] float32: see
        `Linear.addends`.
        """
        if residual is None:
            x = self.group.all_reduce(x)
            return self(x), x
        found = self.group.add_rms_norm(x, residual, self.weight, self.eps)
        if found is not None:
            return found
        return kernels.add_rms_norm(self.group.all_reduce(x), residual, self.weight, self.eps)

    def project(
        self, x: Tensor, residual: Tensor | None, projection: Linear
    ) -> tuple[Tensor, Tensor]:
        """As `add`, with the projection of the norm in its place: ([T, out], [T, E] sum). Where the
        norm `is_late`, the caller still has to divide the projection's rows by the root mean square
        of the sum's.
        """
        if self.is_late(x, residual):
            return projection(x), x
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
        """As `add`, with silu(gate) * up of the norm in its place: ([T, F], [T, E] sum)."""
        if self.is_late(x, residual):
            return kernels.silu_and_mul(gate_up(x), x, self.eps), x
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
