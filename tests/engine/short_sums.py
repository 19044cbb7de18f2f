"""Sums of few rows without a GPU: what `nvcli.kernels.all_reduce` does, by way of the library."""

from __future__ import annotations

from torch import Tensor

from nvcli.kernels import reference
from nvcli.parallel import TPGroup


class LibrarySums:
    """Implements `nvcli.parallel.ShortSums`, and counts the calls."""

    gave_up = False

    def __init__(self, group: TPGroup, rows: int, *, fuses_norm: bool) -> None:
        self.group = group
        self.rows = rows
        self.fuses_norm = fuses_norm
        self.calls: list[str] = []

    def fits(self, x: Tensor) -> bool:
        return x.shape[0] <= self.rows

    def fits_norm(self, x: Tensor) -> bool:
        return self.fuses_norm and self.fits(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls.append("sum")
        return self.group.library_sum(x)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        self.calls.append("norm")
        total = self.group.library_sum(x.clone())
        if residual is not None:
            total = total + residual
        return reference.rms_norm(total, weight, eps), total

    def stop(self) -> None:
        self.calls.append("stop")

    def close(self) -> None:
        self.calls.append("close")
