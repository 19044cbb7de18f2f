"""Products that are the library's: cuBLAS.

For products that were measured, the table names the algorithm (see `cublaslt`): of bfloat16, with
the version of the library that it was measured with. All others go through PyTorch, and there
cuBLAS has two doors. Through the older one a product of some dozens of rows often has its columns
cut into splits, which a second kernel adds up; cublasLt chooses others, that end in one kernel. So
products of LT_ROWS and of LT_COLUMNS or more go through it, and all others through the usual door:
shorter rows are as fast either way. `NVCLI_CUBLASLT=0` in the environment turns both off.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from nvcli.kernels import cublaslt, switches, tuned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

LT_ROWS = range(33, 193)
LT_COLUMNS = 4096
_use_lt = switches.is_on("NVCLI_CUBLASLT")


def linear(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x W^T.  x: [T, in]; weight: [out, in]; out: [T, out] to write to"""
    algorithm = _named(x, weight, adds=False)
    if algorithm is not None:
        if out is None:
            out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
        if cublaslt.multiply(x, weight, out, algorithm, adds=False):
            return out
    with _door(x):
        return torch.mm(x, weight.t(), out=out)


def add_linear(x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
    """total + x W^T, in place of the total [T, out], rounded once."""
    algorithm = _named(x, weight, adds=True)
    if algorithm is not None and cublaslt.multiply(x, weight, total, algorithm, adds=True):
        return total
    with _door(x):
        return total.addmm_(x, weight.t())


def _named(x: Tensor, weight: Tensor, *, adds: bool) -> cublaslt.Algorithm | None:
    """The table's algorithm for this product."""
    if not _use_lt or x.device.type != "cuda" or cublaslt.version() is None:
        return None
    return tuned.algorithm(x.shape[0], x.shape[1], weight.shape[0], x.device, adds=adds)


@contextmanager
def _door(x: Tensor) -> Iterator[None]:
    """The choice is the process's, made anew for each product: two engines on two threads may take
    each other's door, and neither keeps it.
    """
    is_lt = x.shape[0] in LT_ROWS and x.shape[1] >= LT_COLUMNS
    if not _use_lt or not is_lt or x.device.type != "cuda":
        yield
        return
    usual = _usual_door()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(usual)


@cache
def _usual_door() -> Any:
    """What was chosen before the first product."""
    return torch.backends.cuda.preferred_blas_library()
