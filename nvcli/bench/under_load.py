"""What the costs of single steps mean under load: continuous batching as nvcli schedules it.

A step decodes every running sequence once and computes the prompts that wait. A request that
arrives while a step runs waits for its end, and with run-ahead (`depth` 1) for the one that is
launched already; the step after that computes its prompt. So of B requests in a closed loop each
stays q + m + O - 1 steps: q waiting (depth + 1; none for a lone request), m for its prompt, and
O - 1 for its other tokens. Every step holds k prompts of others, k binomial; each kind of step has
its mean time, and the stay is their sum. Little's law holds by construction, X = B / W.

Prompts may be of several lengths, equally likely ones (`lens`): a mean length says neither how far
steps are padded nor what attention costs, which grows with the square.

The way to the engine and back (`Cost.hand_over`) is added to a lone request. Beside others it takes
place while steps run: the answer before was told later by as much, so nothing is added, until it
is longer than the step that runs and the request misses the next one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvcli.bench import queueing
from nvcli.bench.shape import pairs_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nvcli.bench.perf_model import PerfModel

_REST = 1e-6  # of a distribution's mass, left out at its end


@dataclass(frozen=True, slots=True)
class Prediction:
    """A closed loop of B requests, or an open one at a rate."""

    concurrency: float
    requests_per_s: float
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    output_tokens_per_s: float
    wait_s: float = 0.0  # for a slot, an upper estimate near saturation
    wait_p99_s: float = 0.0
    bound: str = "memory"


@dataclass(frozen=True, slots=True)
class _Stay:
    """Mean seconds of a request's parts."""

    wait: float  # until the step that holds its prompt
    prompt: float  # of the steps that compute it
    step: float  # of a step that decodes it
    whole: float

    @property
    def ttft(self) -> float:
        return self.wait + self.prompt


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of one kind on a model: prompts of `n_in` tokens, of which `cached` are there, and
    answers of `n_out`. lens: of the prompts, equally likely; all are of `n_in` tokens where it is
    empty.
    """

    model: PerfModel
    n_in: int
    n_out: float
    cached: int = 0
    lens: Sequence[int] = ()

    def throughput(self, b: float) -> float:
        """X(B) = B / W, requests a second with B running."""
        return b / self.stay(b).whole

    def closed(self, b: int, slots: int | None = None) -> Prediction:
        """A closed loop of b requests, of which `slots` run at once."""
        running = min(b, slots) if slots else b
        stay = self.stay(running)
        rate = running / stay.whole
        queue = (b - running) / rate
        return Prediction(
            concurrency=b,
            requests_per_s=rate,
            ttft_s=stay.ttft + queue,
            tpot_s=stay.step if self.n_out > 1 else None,
            e2e_s=b / rate,
            output_tokens_per_s=rate * self.n_out,
            wait_s=queue,
            bound="compute" if self.model.is_compute_bound(running) else "memory",
        )

    def open(self, rate: float, slots: int, arrival_cv: float = 1.0) -> Prediction | None:
        """Arrivals at a rate; None where the queue would grow for ever.

        A birth-death chain with these X(n) gives the mean number and the wait for a slot. An
        arrival sees the rest of a step, longer than half a mean step because long steps catch more
        of them.
        """
        n_out = self.n_out
        queue = queueing.birth_death(rate, self.throughput, slots)
        if queue is None:
            return None
        wait = queue.W_q * queueing.burstiness(arrival_cv, 1.0)
        e2e = queue.W - queue.W_q + wait
        ttft = min(self.first_token(rate, min(queue.L, slots)), queue.W - queue.W_q) + wait
        return Prediction(
            concurrency=rate * e2e,
            requests_per_s=rate,
            ttft_s=ttft,
            tpot_s=max(e2e - ttft, 0.0) / (n_out - 1) if n_out > 1 else None,
            e2e_s=e2e,
            output_tokens_per_s=rate * n_out,
            wait_s=wait,
            wait_p99_s=queueing.wait_p99(queue.p_wait, self.throughput(slots), rate),
            bound="compute" if self.model.is_compute_bound(queue.L) else "memory",
        )

    # --- its steps --------------------------------------------------------------------------------

    @property
    def context(self) -> float:
        """Tokens of a sequence that decodes."""
        return self.n_in + self.n_out / 2

    @property
    def pieces(self) -> int:
        """Steps that a prompt takes."""
        return max(-(-(self.n_in - self.cached) // self.model.budget), 1)

    def stay(self, b: float) -> _Stay:
        """With b requests running."""
        more = max(self.n_out - 1, 0)
        if b <= 1:
            step, alone = self.model.decode(1, self.context), self.alone()
            wait = self.model.cost.hand_over
            return _Stay(wait, alone, step, wait + alone + more * step)
        steps, waits = self.steps_of_stay(b)
        others = (b - 1) * more / steps
        counts = list(binomial(b - 1, self.pieces / steps))
        step = self.mean(others + 1, counts)
        wait = waits * self.mean(others, counts)
        prompt = self.pieces * self.mean(others, counts, own=1)
        return _Stay(wait, prompt, step, wait + prompt + more * step)

    def steps_of_stay(self, b: float) -> tuple[float, float]:
        """(all, those that a request waits) of one of b > 1 requests."""
        model = self.model
        missed = model.cost.hand_over / model.decode(b, self.context)
        waits = model.depth + max(1.0, 0.5 + missed)
        steps = max(self.n_out - 1, 0) + self.pieces + waits
        # Where steps cannot hold all prompts of a stay, they take turns.
        turns = b * (self.n_in - self.cached) / model.budget
        return max(steps, turns), waits + max(turns - steps, 0.0)

    def first_token(self, rate: float, running: float) -> float:
        """TTFT of an arrival that finds a slot free."""
        mean = self.time(running, 0)
        square = mean**2
        for _ in range(20):  # the longer a step, the more prompts arrive in it
            counts = list(_poisson(rate * mean * self.pieces))
            mean = self.mean(running, counts)
            square = self.mean(running, counts, power=2)
        seen = square / mean  # the mean step that an arrival falls into
        busy = 1 - math.exp(-running)
        own = self.mean(running, list(_poisson(rate * seen * busy)), own=1)
        alone = self.alone()
        # Near the limit of prompts alone they queue behind one another over many steps.
        in_line = queueing.md1_wait(rate, alone)
        return self.model.cost.hand_over + max(
            busy * (seen / 2 + self.model.depth * mean) + self.pieces * own,
            alone + in_line if in_line is not None else 0.0,
        )

    def alone(self) -> float:
        """A prompt that shares its steps with nothing."""
        times = [self.model.prefill(n, self.cached) for n in self._prompts()]
        return math.fsum(times) / len(times)

    def time(self, b: float, prompts: int) -> float:
        """A step that decodes b sequences and holds so many prompts, or pieces of some."""
        step, S = self.model.step, b * self.context
        if not prompts:
            return step(b, S)
        share = prompts / self.pieces
        times = [
            step(b, S, p * share, pairs_of(p, self.cached) * share, heads=share)
            for p in (n - self.cached for n in self._prompts())
        ]
        return math.fsum(times) / len(times)

    def mean(
        self, b: float, counts: list[tuple[int, float]], *, own: int = 0, power: int = 1
    ) -> float:
        """Over the number of prompts of others. What a step cannot hold goes to the next: in the
        mean nothing changes."""
        return math.fsum(share * self.time(b, k + own) ** power for k, share in counts)

    def _prompts(self) -> Sequence[int]:
        return [max(n, self.cached + 1) for n in self.lens] or [self.n_in]


def binomial(n: float, p: float) -> Iterator[tuple[int, float]]:
    """(k, its chance) until nothing is left; n need not be whole, the chances add up to 1."""
    p = min(max(p, 0.0), 1 - 1e-9)
    value, found = (1 - p) ** n, []
    k, left = 0, 1.0
    while k <= n and left > _REST:
        found.append((k, value))
        left -= value
        value *= max(n - k, 0) / (k + 1) * p / (1 - p)
        k += 1
    return _whole(found)


def _poisson(mean: float) -> Iterator[tuple[int, float]]:
    if mean > 500:  # beyond what a float's exponent holds
        return iter([(round(mean), 1.0)])
    value, found = math.exp(-mean), []
    k, left = 0, 1.0
    while left > _REST and k < 2000:
        found.append((k, value))
        left -= value
        k += 1
        value *= mean / k
    return _whole(found)


def _whole(found: list[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    total = math.fsum(share for _, share in found)
    return ((k, share / total) for k, share in found)
