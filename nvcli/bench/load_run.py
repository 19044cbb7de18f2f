"""A load on a client: closed loop, or open loop on a schedule that was made before the start.

The sender sleeps to absolute moments of the monotonic clock, and how late it was is part of the
record. A closed loop of a given time keeps its places taken until all that was sent within it has
ended: see `EngineLoop.run_closed`, its counterpart in the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import resource
import signal
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from nvcli.bench.client import Client, Endpoint, new_record
from nvcli.bench.precision import Divergence
from nvcli.bench.record import ERROR, OK, RequestRecord, now_ns
from nvcli.bench.workload import Lengths, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from nvcli.bench.precision import Look
    from nvcli.bench.workload import Planned

_T = TypeVar("_T")

PAUSE_S = 0.01  # after a failure: a server that refuses at once is not hammered
SPIN_NS = 1_500_000  # a loop's sleep ends up to a millisecond late: the rest is polled


@dataclass(slots=True)
class Load:
    """Closed: `concurrency` places. Open: `times`, with `cap` places at most."""

    concurrency: int | None = None
    times: list[float] | None = None
    cap: int | None = None
    duration_s: float | None = None
    num_requests: int | None = None
    stagger_s: float = 0.0
    max_len: int | None = None  # of a conversation
    looks: list[Look] = field(default_factory=list)  # each may end the sending
    fills: bool = True  # keep places taken until all that counts has ended


@dataclass(slots=True)
class LoadResult:
    records: list[RequestRecord] = field(default_factory=list)
    num_planned: int = 0
    was_interrupted: bool = False
    is_overloaded: bool = False
    cpu_s: float = 0.0
    wall_s: float = 0.0


async def sleep_until(moment_ns: int) -> None:
    """To an absolute moment, within tens of microseconds."""
    while (left := moment_ns - now_ns()) > 0:
        await asyncio.sleep((left - SPIN_NS) / 1e9 if left > SPIN_NS else 0)


class LoadRun:
    """One load on one client. `on_record` gets each record as it ends."""

    def __init__(
        self, client: Client, load: Load, planned: Iterator[Planned],
        on_record: Callable[[RequestRecord], None],
    ) -> None:  # fmt: skip
        self._client = client
        self._load = load
        self._planned = planned
        self._on_record = on_record
        self._result = LoadResult()
        self._open: set[asyncio.Task[None]] = set()
        self._bug: BaseException | None = None
        self._is_over = False  # a look has ended it: nothing more is sent
        self._end: int | None = None  # of a closed loop
        self._filling: list[asyncio.Task[Any]] = []
        self._live: dict[int, RequestRecord] = {}

    async def run(self) -> LoadResult:
        """Until everything sent has ended. Cancelled (Ctrl-C): what runs is kept as unfinished."""
        result, load = self._result, self._load
        start, cpu = now_ns(), _cpu_s()
        watching = asyncio.create_task(self._watch(load.looks)) if load.looks else None
        try:
            if load.times is not None:
                await self._open_loop(start, load.times)
            else:
                await self._closed_loop(start)
            if self._open:
                await asyncio.wait(self._open)
            if self._bug is not None:
                raise self._bug
        except asyncio.CancelledError:
            result.was_interrupted = True
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)
        finally:
            if watching is not None:
                watching.cancel()
        result.cpu_s, result.wall_s = _cpu_s() - cpu, (now_ns() - start) / 1e9
        return result

    async def _open_loop(self, start: int, times: list[float]) -> None:
        start += 50_000_000  # the first moment must not be past already
        places = asyncio.Semaphore(self._load.cap) if self._load.cap else None
        moments = iter([start + int(at * 1e9) for at in times])
        s_star = None
        try:
            for s_star in moments:
                await sleep_until(s_star)
                if self._is_over:
                    return
                if places is not None:
                    await places.acquire()
                self._launch(next(self._planned), s_star, places)
                s_star = None
        except asyncio.CancelledError:
            self._keep_unsent([*([] if s_star is None else [s_star]), *moments])
            raise

    def _keep_unsent(self, moments: list[int]) -> None:
        """Ctrl-C while requests wait for a place: those that were due are samples as well."""
        now = now_ns()
        for s_star in itertools.takewhile(lambda moment: moment <= now, moments):
            record = new_record(next(self._planned), s_star)
            record.s_ns = record.end_ns = now
            self._result.num_planned += 1
            self._keep(record)

    def _launch(self, planned: Planned, s_star: int, places: asyncio.Semaphore | None) -> None:
        async def one() -> None:
            try:
                await self._talk(planned, s_star)
            finally:
                if places is not None:
                    places.release()

        task = asyncio.create_task(one())
        self._open.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._bug = task.exception()  # a request's failure is a record; this is ours

    async def _closed_loop(self, start: int) -> None:
        load = self._load
        assert load.concurrency is not None, "a closed loop has places"
        self._end = start + int(load.duration_s * 1e9) if load.duration_s is not None else None

        places = load.concurrency
        spread = int(min(load.stagger_s, (load.duration_s or math.inf) / 4) * 1e9)

        async def place(index: int) -> None:
            free = start + spread * index // places
            await sleep_until(free)
            while not self._is_over_at(free):
                free = await self._talk(next(self._planned), free)
            if load.fills and self._end is not None and self._has_more:
                await self._fill(free, 2 * self._end - start)

        tasks = [asyncio.create_task(place(i)) for i in range(places)]
        self._open.update(tasks)
        await asyncio.gather(*tasks)

    @property
    def _has_more(self) -> bool:
        most = self._load.num_requests
        return most is None or self._result.num_planned < most

    def _is_over_at(self, moment: int) -> bool:
        return (self._end is not None and moment >= self._end) or not self._has_more

    async def _talk(self, planned: Planned, s_star: int) -> int:
        """A request and its later turns, each when the one before has ended; when the last did."""
        later: Planned | None = planned
        while later is not None:
            planned = later
            record, answer, s_star = await self._one(planned, s_star)
            # An endpoint that tells no token ids gets the conversation without its answers.
            later = planned.next_turn(answer, self._load.max_len)
            if record.status != OK or self._is_over or self._is_over_at(s_star):
                break
        return s_star

    async def _one(self, planned: Planned, s_star: int) -> tuple[RequestRecord, list[int], int]:
        """The record, the answer's token ids, and the moment that the place is free again."""
        record = new_record(planned, s_star)
        self._result.num_planned += 1
        self._live[id(record)] = record
        answer: list[int] = []
        try:
            answer = await self._client.send(planned, record)
        finally:
            del self._live[id(record)]
            self._keep(record)
            if not self._live:
                for task in self._filling:
                    task.cancel()
        if record.status != ERROR:
            return record, answer, record.end_ns
        await asyncio.sleep(PAUSE_S)
        return record, answer, now_ns()  # the pause is ours: nobody was meant to be sent in it

    async def _fill(self, free: int, until: int) -> None:
        """Keep a place taken behind the end: no records, cut off when the last record is in, and
        no longer than the load was, lest one request that hangs goes on with it."""
        task = asyncio.current_task()
        assert task is not None, "places are tasks"
        self._filling.append(task)
        with contextlib.suppress(asyncio.CancelledError):
            while self._live and free < until:
                record = new_record(planned := next(self._planned), free)
                await self._client.send(planned, record)
                free = record.end_ns
                if record.status != OK:
                    await asyncio.sleep(PAUSE_S)

    async def _watch(self, looks: list[Look]) -> None:
        while not self._is_over:
            await asyncio.sleep(0.5)
            for look in looks:
                if not look.is_due:
                    continue
                now = now_ns()
                records = [*self._result.records]
                records += [replace(r, end_ns=max(now, r.s_star_ns)) for r in self._live.values()]
                if await asyncio.to_thread(look.is_reached, records):
                    self._is_over, self._end = True, now_ns()
                    self._result.is_overloaded |= isinstance(look, Divergence)

    def _keep(self, record: RequestRecord) -> None:
        self._result.records.append(record)
        self._on_record(record)


def run_on_stub(url: str, load: Load, *, in_len: int, out_len: int) -> LoadResult:
    """A load on a stub, which answers whatever it is asked."""

    async def run() -> LoadResult:
        workload = Workload(in_len=Lengths.parse(str(in_len)), out_len=Lengths.parse(str(out_len)))
        async with Client(Endpoint(url, "stub"), timeout_s=10) as client:
            planned = workload.requests(vocab_size=100)
            return await LoadRun(client, load, planned, lambda record: None).run()

    return run_cancellable(run())


def run_cancellable(work: Coroutine[Any, Any, _T]) -> _T:
    """`asyncio.run`, in which Ctrl-C cancels `work` whoever else handles it: asyncio takes it only
    from Python's own handler."""
    before = signal.getsignal(signal.SIGINT)
    is_ours = callable(before) and threading.current_thread() is threading.main_thread()
    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return asyncio.run(work)
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
