"""A scheduler as nvcli's, on paper: steps cost what the physical model says, nothing else is there.

It stands for the engine in tests of the formulas: exact steps, random lengths, no noise.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from nvcli.bench.perf_model import PerfModel, pairs_of


@dataclass(order=True)
class Job:
    arrival: float
    index: int
    n_in: int = field(compare=False)
    n_out: int = field(compare=False)
    prompt_done: int = field(default=0, compare=False)
    planned: int = field(default=0, compare=False)  # output tokens in steps that were planned
    got: int = field(default=0, compare=False)  # of them in steps that ended
    first: float = field(default=0.0, compare=False)
    last: float = field(default=0.0, compare=False)


@dataclass
class Row:
    job: Job
    size: int  # prompt tokens; 0 for a decode
    context: int  # tokens behind them
    has_token: bool


@dataclass
class Means:
    rate: float
    ttft: float
    tpot: float
    e2e: float


class Simulation:
    def __init__(self, model: PerfModel, slots: int, n_in: int, n_out: int, seed: int = 1) -> None:
        self._model, self._slots = model, slots
        self._mean_in, self._mean_out = n_in, n_out
        self._rng = random.Random(seed)
        self._arrivals: list[Job] = []
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._ended: list[Job] = []
        self._count = 0

    def _around(self, mean: int) -> int:
        return self._rng.randint(max(mean // 2, 1), mean + mean // 2)

    def _arrive(self, at: float) -> None:
        job = Job(at, self._count, self._around(self._mean_in), self._around(self._mean_out))
        self._count += 1
        heapq.heappush(self._arrivals, job)

    def closed(self, clients: int, num: int) -> Means:
        for i in range(clients):
            self._arrive(1e-3 * i)
        return self._run(num, rate=None)

    def open(self, rate: float, num: int) -> Means:
        self._arrive(0.0)
        return self._run(num, rate=rate)

    def _run(self, num: int, rate: float | None) -> Means:
        now, planned = 0.0, deque[list[Row]]()
        while len(self._ended) < num:
            while self._arrivals and self._arrivals[0].arrival <= now:
                job = heapq.heappop(self._arrivals)
                self._waiting.append(job)
                if rate is not None:
                    self._arrive(job.arrival + self._rng.expovariate(rate))
            rows = self._plan()
            if rows:
                planned.append(rows)
            if len(planned) > self._model.depth or (planned and not rows):
                now = self._finish(planned.popleft(), now, is_closed=rate is None)
            elif not rows:
                now = self._arrivals[0].arrival
        done = sorted(self._ended, key=lambda j: j.last)[num // 5 :]
        span = done[-1].last - done[0].last
        many = [j for j in done if j.n_out > 1]
        return Means(
            rate=(len(done) - 1) / span,
            ttft=sum(j.first - j.arrival for j in done) / len(done),
            tpot=sum((j.last - j.first) / (j.n_out - 1) for j in many) / max(len(many), 1),
            e2e=sum(j.last - j.arrival for j in done) / len(done),
        )

    def _plan(self) -> list[Row]:
        rows, left = [], self._model.budget
        for job in self._running:
            if job.prompt_done == job.n_in and job.planned < job.n_out and left:
                rows.append(Row(job, 0, job.n_in + job.planned, True))
                job.planned += 1
                left -= 1
        while self._waiting and len(self._running) < self._slots:
            self._running.append(self._waiting.popleft())
        for job in self._running:
            if job.prompt_done < job.n_in and left:
                size = min(job.n_in - job.prompt_done, left)
                is_last = job.prompt_done + size == job.n_in
                rows.append(Row(job, size, job.prompt_done, is_last))
                left -= size
                job.prompt_done += size
                job.planned += is_last
        return rows

    def _finish(self, rows: list[Row], now: float, *, is_closed: bool) -> float:
        b = S = p = pairs = heads = 0
        for row in rows:
            if row.size:
                p += row.size
                pairs += pairs_of(row.size, row.context)
                heads += row.has_token
            else:
                b += 1
                S += row.context
        now += self._model.step(b, S, p, pairs, heads)
        for row in rows:
            job = row.job
            if row.has_token:
                job.got += 1
                job.first = job.first or now
                job.last = now
            if job.got == job.n_out:
                self._running.remove(job)
                self._ended.append(job)
                if is_closed:
                    self._arrive(now + 1e-9)  # the engine has planned its next step by then
        return now
