"""Statistics of samples: intervals without assumptions, the warm-up cut, tests for a difference.

scipy and numpy do the arithmetic; what is ours is which question is asked.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

CONFIDENCE = 0.95


def order_interval(ordered: Sequence[float], p: float) -> tuple[float | None, float | None]:
    """Distribution-free interval of a percentile; None where the sample has no bound.

    Ranks l = q(alpha/2) and u = q(1 - alpha/2) + 1 of Binomial(N, p): the true percentile lies
    between those samples with at least 95 % confidence, whatever the distribution.
    """
    from scipy.stats import binom

    n = len(ordered)
    if n == 0:
        return None, None
    alpha = 1 - CONFIDENCE
    low = int(binom.ppf(alpha / 2, n, p))
    high = int(binom.ppf(1 - alpha / 2, n, p)) + 1
    return (ordered[low - 1] if low >= 1 else None, ordered[high - 1] if high <= n else None)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's interval of a mean of independent values, such as repeats; None below 3."""
    from scipy.stats import t

    n = len(values)
    if n < 3:
        return None
    mean = math.fsum(values) / n
    error = float(np.std(values, ddof=1)) / math.sqrt(n)
    half = float(t.ppf(0.5 + CONFIDENCE / 2, n - 1)) * error
    return mean - half, mean + half


def batch_means(
    times: Sequence[float], weights: Sequence[float], start: float, end: float, num_batches: int
) -> list[float]:
    """Rates of events in equal parts of (start, end]: nearly independent where events are not."""
    edges = np.linspace(start, end, num_batches + 1)
    place = np.searchsorted(edges, np.asarray(times), side="left") - 1
    inside = (np.asarray(times) > start) & (np.asarray(times) <= end)
    sums = np.bincount(
        place[inside].clip(0, num_batches - 1),
        weights=np.asarray(weights, dtype=float)[inside],
        minlength=num_batches,
    )
    return [float(s) for s in sums / ((end - start) / num_batches)]


# --- steady state --------------------------------------------------------------------------------


def mser5(values: Sequence[float]) -> int:
    """Samples to cut as warm-up: MSER over means of 5, at most half.

    The cut d minimises the squared standard error of what is left: variance / (m - d), up to 20 %.
    """
    m = len(values) // 5
    if m < 4 or not np.all(np.isfinite(values)):
        return 0
    means = np.asarray(values[: 5 * m], dtype=float).reshape(m, 5).mean(axis=1)
    scores = [float(np.var(means[d:])) / (m - d) for d in range(m // 2 + 1)]
    least = min(scores)
    # Scores of a steady run are flat: among those nearly as good, the one that cuts least.
    return 5 * next(d for d, score in enumerate(scores) if score <= 1.2 * least + 1e-15)


def slope_is_up(times: Sequence[float], values: Sequence[float]) -> bool:
    """Whether values rise with time (one-sided t-test of the least-squares slope, at 1 %)."""
    from scipy.stats import linregress

    if len(values) < 10 or np.ptp(values) == 0 or np.ptp(times) == 0:
        return False
    fit = linregress(times, values)
    return bool(fit.slope > 0 and fit.pvalue / 2 < 0.01)


# --- comparing two sets of samples ---------------------------------------------------------------


def bootstrap_ratio(
    a: Sequence[NDArray[np.float64]],
    b: Sequence[NDArray[np.float64]],
    statistic: Callable[[NDArray[np.float64]], float],
    *,
    num_resamples: int = 1000,
) -> tuple[float, float, float] | None:
    """(change, low, high) of statistic(B) / statistic(A) - 1; a and b hold one array a run.

    With at least 3 runs on both sides whole runs are drawn again, else requests inside the runs.
    None when a side is not finite and positive.
    """
    rng = np.random.default_rng(0)
    point = _ratio(statistic, a, b)
    if point is None:
        return None
    by_run = min(len(a), len(b)) >= 3
    ratios = []
    for _ in range(num_resamples):
        drawn = _ratio(statistic, _draw(a, rng, by_run), _draw(b, rng, by_run))
        if drawn is not None:
            ratios.append(drawn)
    if len(ratios) < num_resamples // 2:
        return None
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return point, float(low), float(high)


def _ratio(
    statistic: Callable[[NDArray[np.float64]], float],
    a: Sequence[NDArray[np.float64]],
    b: Sequence[NDArray[np.float64]],
) -> float | None:
    base, new = statistic(np.concatenate(a)), statistic(np.concatenate(b))
    if not (math.isfinite(base) and math.isfinite(new) and base > 0):
        return None
    return new / base - 1


def _draw(
    runs: Sequence[NDArray[np.float64]], rng: np.random.Generator, by_run: bool
) -> list[NDArray[np.float64]]:
    if by_run:
        return [runs[i] for i in rng.integers(0, len(runs), len(runs))]
    return [run[rng.integers(0, len(run), len(run))] for run in runs]


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p that both come from one distribution; +inf ranks as the slowest."""
    from scipy.stats import mannwhitneyu

    if len(a) < 3 or len(b) < 3:
        return None
    values = np.concatenate([np.asarray(a, float), np.asarray(b, float)])
    if np.ptp(np.nan_to_num(values, posinf=np.finfo(float).max)) == 0:
        return 1.0
    return float(mannwhitneyu(a, b, alternative="two-sided").pvalue)


def hodges_lehmann(a: Sequence[float], b: Sequence[float], limit: int = 2000) -> float | None:
    """Median of all differences b - a: the shift between two samples."""
    x, y = _thin(a, limit), _thin(b, limit)
    if not len(x) or not len(y):
        return None
    return float(np.median(np.subtract.outer(y, x)))


def _thin(values: Sequence[float], limit: int) -> NDArray[np.float64]:
    """The finite values, evenly spaced by rank when there are more than `limit`."""
    ordered = np.sort([v for v in values if math.isfinite(v)])
    if len(ordered) <= limit:
        return ordered
    places = np.linspace(0, len(ordered) - 1, limit).round().astype(np.intp)
    return np.take(ordered, places)


def welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float, float] | None:
    """Welch's t-test of two means: (change, low, high, p), the first three as shares of a's mean.
    None below 2 each."""
    from scipy.stats import ttest_ind

    if len(a) < 2 or len(b) < 2:
        return None
    base = math.fsum(a) / len(a)
    new = math.fsum(b) / len(b)
    if base <= 0:
        return None
    if np.ptp(a) == 0 and np.ptp(b) == 0:
        change = new / base - 1
        return change, change, change, 1.0 if new == base else 0.0
    test = ttest_ind(b, a, equal_var=False)
    interval = test.confidence_interval(CONFIDENCE)
    low, high = float(interval.low) / base, float(interval.high) / base
    return new / base - 1, low, high, float(test.pvalue)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction; None stays None."""
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    running = 0.0
    for position, (p, index) in enumerate(known):
        running = max(running, min(1.0, p * (len(known) - position)))
        adjusted[index] = running
    return adjusted


def equal_parts(values: Sequence[int], count: int = 8) -> list[int]:
    """The means of so many equal parts of the values in ascending order, rounded: a few values that
    stand for all, each as likely as the others.
    """
    ordered = sorted(values)
    count = min(count, len(ordered))
    cuts = [len(ordered) * i // count for i in range(count + 1)] if count else [0]
    return [round(math.fsum(ordered[a:b]) / (b - a)) for a, b in itertools.pairwise(cuts)]
