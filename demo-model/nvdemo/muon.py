"""Muon for the matrices: momentum made orthogonal by Newton-Schulz steps, shape by shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """About the nearest orthogonal matrix to each matrix of the stack ``x``."""
    y = x.bfloat16()
    tall = y.shape[-2] > y.shape[-1]
    if tall:
        y = y.mT
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = _A * y + (_B * gram + _C * gram @ gram) @ y
    result: Tensor = y.mT if tall else y
    return result


class Muon:
    def __init__(
        self, weights: Sequence[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.01
    ) -> None:
        self.lr, self.momentum, self.decay = lr, momentum, decay
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for weight in weights:
            shapes.setdefault(tuple(weight.shape), []).append(weight)
        self.groups = [
            (group, torch.zeros_like(torch.stack(list(group)))) for group in shapes.values()
        ]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        lr = self.lr * scale
        for weights, momentum in self.groups:
            gradient = torch.stack([weight.grad for weight in weights if weight.grad is not None])
            momentum.lerp_(gradient, 1 - self.momentum)
            update = orthogonal(gradient.lerp(momentum, self.momentum))
            rows, columns = update.shape[-2:]
            update = update.float() * (lr * max(1.0, rows / columns) ** 0.5)
            torch._foreach_mul_(weights, 1 - lr * self.decay)
            torch._foreach_sub_(weights, list(update.unbind(0)))
