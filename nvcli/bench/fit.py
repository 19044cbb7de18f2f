"""Fits: throughput against concurrency (Amdahl, USL), non-negative least squares, and what a law
is off by near the points that were measured.

X(N) = X_1 N / (1 + sigma (N - 1) + kappa N (N - 1)). sigma is the share of a lone request's time
that batching cannot share; kappa over 0 means that work grows with the number of requests:
preemption, cache thrash, contention. N / X is linear in (1, N - 1, N (N - 1)), so the fit is a
non-negative least squares and needs no starting point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray


def nnls(
    rows: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float]
) -> NDArray[np.float64]:
    """Coefficients >= 0 that minimise sum w (row . x - value)^2. Columns are scaled inside."""
    from scipy.optimize import nnls as solve

    a = np.asarray(rows, dtype=float)
    y = np.asarray(values, dtype=float)
    w = np.sqrt(np.asarray(weights, dtype=float))
    a, y = a * w[:, None], y * w
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    solution, _ = solve(a / scale, y)
    return np.asarray(solution / scale, dtype=float)


def nearby(known: Iterable[tuple[Sequence[float], float]], at: Sequence[float]) -> float:
    """A factor at a place, from factors at others: their geometric mean with weights 1 / d^2, d
    between the logarithms of 1 + each coordinate (Shepard 1968). A known place gives its own
    factor; with no place known it is 1.
    """
    logs = [math.log1p(v) for v in at]
    total = weights = 0.0
    for place, factor in known:
        square = sum((math.log1p(v) - w) ** 2 for v, w in zip(place, logs, strict=True))
        weight = 1 / (square + 1e-9)
        weights += weight
        total += weight * math.log(factor)
    return math.exp(total / weights) if weights else 1.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """A fitted X(N). `kappa_interval` is None with fewer than 5 points."""

    x1: float
    sigma: float
    kappa: float
    kappa_interval: tuple[float, float] | None = None
    r2: float = 0.0

    def __call__(self, n: float) -> float:
        return self.x1 * n / (1 + self.sigma * (n - 1) + self.kappa * n * (n - 1))

    @property
    def ceiling(self) -> float | None:
        """X for endless N, without kappa; None where nothing bounds it."""
        return self.x1 / self.sigma if self.sigma > 0 else None

    @property
    def knee(self) -> float | None:
        """Kleinrock's: where X / W is largest, (1 - sigma) / sigma."""
        return (1 - self.sigma) / self.sigma if 0 < self.sigma < 1 else None

    @property
    def peak(self) -> float | None:
        """Where more requests give less, sqrt((1 - sigma) / kappa); None for kappa = 0."""
        return math.sqrt(max(1 - self.sigma, 0) / self.kappa) if self.kappa > 0 else None


def fit_scaling(points: Sequence[tuple[float, float]]) -> Scaling | None:
    """Fit (N, X) points; None with fewer than 2 of different N. kappa needs at least 4."""
    if len({n for n, _ in points}) < 2 or any(x <= 0 for _, x in points):
        return None
    with_kappa = len({n for n, _ in points}) >= 4
    n = np.array([p[0] for p in points], dtype=float)
    x = np.array([p[1] for p in points], dtype=float)
    y = n / x
    columns = [np.ones_like(n), n - 1] + ([n * (n - 1)] if with_kappa else [])
    a = np.stack(columns, axis=1)
    c = nnls(a.tolist(), y.tolist(), (1 / y**2).tolist())  # relative errors count alike
    if c[0] <= 0:
        return None
    kappa = _or_zero(float(c[2] / c[0])) if with_kappa else 0.0
    fitted = Scaling(float(1 / c[0]), _or_zero(float(c[1] / c[0])), kappa)
    predicted = np.array([fitted(v) for v in n])
    spread = float(((x - x.mean()) ** 2).sum())
    r2 = 1 - float(((x - predicted) ** 2).sum()) / spread if spread > 0 else 1.0
    interval = _kappa_interval(a / y[:, None], np.ones_like(y)) if with_kappa else None
    return replace(fitted, kappa_interval=interval, r2=r2)


def _or_zero(value: float) -> float:
    """Rounding errors of the solver are no serial share."""
    return value if value > 1e-9 else 0.0


def _kappa_interval(a: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float] | None:
    """95 % interval of kappa = c_2 / c_0 from the unconstrained fit (delta method)."""
    from scipy.stats import t

    dof = len(y) - a.shape[1]
    if dof < 2:
        return None
    c, _, rank, _ = np.linalg.lstsq(a, y, rcond=None)
    if rank < a.shape[1] or c[0] == 0:
        return None
    variance = float(((a @ c - y) ** 2).sum()) / dof
    covariance = variance * np.linalg.inv(a.T @ a)
    kappa = c[2] / c[0]
    gradient = np.array([-kappa / c[0], 0.0, 1 / c[0]])
    error = math.sqrt(max(float(gradient @ covariance @ gradient), 0.0))
    half = float(t.ppf(0.975, dof)) * error
    return float(kappa - half), float(kappa + half)
