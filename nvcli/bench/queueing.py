"""Queues: what waiting costs at a given load.

A birth-death chain whose completion rate depends on how many are there contains the textbook's
M/M/1, M/M/c, M/M/inf and processor sharing, which tests hold it to. Rates are a second, times
seconds. A queue that cannot keep up gives None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Queue:
    """Means in the steady state."""

    L: float  # in the system
    W: float  # time in the system
    p_wait: float  # chance to wait for a slot
    W_q: float  # mean wait for a slot, over all


def birth_death(rate: float, completion: Callable[[int], float], slots: int) -> Queue | None:
    """Poisson arrivals; `completion(n)` is the rate with n in service, n at most `slots`.

    pi_n is proportional to the product of rate / mu(i), mu(i) = completion(min(i, slots)).
    """
    assert rate > 0, "no arrivals"
    assert slots > 0, "no slots"
    top = completion(slots)
    if rate >= top:
        return None
    log_weight, weights = 0.0, [0.0]
    for n in range(1, slots + 1):
        log_weight += math.log(rate / completion(n))
        weights.append(log_weight)
    high = max(weights)
    shares = [math.exp(w - high) for w in weights]
    # Beyond the slots the weights fall geometrically, so the tail has closed sums.
    rho = rate / top
    last = shares[-1]
    tail = last * rho / (1 - rho)  # sum of n > slots
    total = math.fsum(shares) + tail
    waiting = last * rho / (1 - rho) ** 2  # sum of (n - slots) over n > slots
    mean = math.fsum(n * s for n, s in enumerate(shares)) + slots * tail + waiting
    p_wait = (last + tail) / total
    return Queue(mean / total, mean / total / rate, p_wait, waiting / total / rate)


def md1_wait(rate: float, service: float) -> float | None:
    """Mean wait before one server of fixed service time: rho S / (2 (1 - rho))."""
    rho = rate * service
    return rho * service / (2 * (1 - rho)) if rho < 1 else None


def burstiness(arrival_cv: float, service_cv: float) -> float:
    """Factor on a mean wait for arrivals and service that are not Poisson: (c_a^2 + c_s^2) / 2."""
    return (arrival_cv**2 + service_cv**2) / 2


def wait_p99(p_wait: float, top: float, rate: float) -> float:
    """99th percentile of the wait for a slot; 0 where fewer than one in a hundred wait."""
    return math.log(p_wait / 0.01) / (top - rate) if p_wait > 0.01 else 0.0
