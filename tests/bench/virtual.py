"""A device of known cost in virtual time, under the real scheduler, loop, log and summary.

Nothing is computed and nobody waits: a step takes what a law says. So a load of minutes takes
seconds, and is the same every time, however busy the machine. Two actors have a time of their own:
the engine, which moves from step to step, and the client, which reads what the engine has put down
and sends what the engine finds between its steps.
"""

from __future__ import annotations

import itertools
import queue
from array import array
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvcli.bench import engine_loop, offline, record
from nvcli.bench.engine_loop import EngineLoop
from nvcli.bench.engine_run import Bench, StepLog, step_record
from nvcli.bench.perf_model import Hardware, PerfModel
from nvcli.bench.record import Run
from nvcli.bench.summary import summarize
from nvcli.bench.workload import Lengths, Workload
from nvcli.config import EngineConfig
from nvcli.engine.buckets import Buckets
from nvcli.engine.core import EngineCore, Update
from nvcli.engine.engine import EngineStats, Request
from nvcli.engine.sequence import Sequence
from nvcli.engine.startup import StartupReport
from nvcli.engine.step import StepPlan, StepResult
from nvcli.types import RequestOutput, RequestTimes, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

    from nvcli.bench.record import StepRecord
    from nvcli.engine.engine_thread import Sink
    from nvcli.types import SamplingParams

    Law = Callable[[StepRecord], float]  # seconds of a step

_SALTS = itertools.count()  # a prefix cache remembers the loads before
H200 = Hardware("H200", 4.8e12, 989e12)


def law_of(model: PerfModel) -> Law:
    """What the physical model itself says."""
    return lambda s: model.step(s.b, s.S, s.p, s.pairs, s.heads)


@dataclass
class Ticket:
    plan: StepPlan
    ready: float


class Device:
    """Steps run one behind the other, each as long as the law says; launching takes the host, and
    what a step launches kernel by kernel runs no earlier than it is launched.
    """

    block_size, max_model_len = 16, 40_960

    def __init__(self, llm: VirtualLLM, law: Law, host: Law, num_blocks: int) -> None:
        self._llm, self._law, self._host = llm, law, host
        self.max_num_seqs, self.num_blocks = llm.max_num_seqs, num_blocks
        self._idle_at = 0.0

    def launch(self, plan: StepPlan) -> Ticket:
        step = step_record(plan, 0.0, 0.0)
        launched_from = self._llm.now
        self._llm.now += self._host(step)
        begin = max(launched_from, self._idle_at)
        self._idle_at = max(begin + self._law(step), self._llm.now)
        return Ticket(plan, self._idle_at)

    def collect(self, ticket: Ticket) -> StepResult:
        self._llm.now = max(self._llm.now, ticket.ready)
        return StepResult([7] * len(ticket.plan.rows))


class VirtualLLM:
    """What the loops of `bench` use of an `LLM`. A request is `way_s` on its way to the engine."""

    model_name, vocab_size, folder = "virtual", 50_000, Path("/nowhere")

    def __init__(
        self,
        law: Law,
        *,
        depth: int,
        budget: int = 16_384,
        slots: int = 256,
        num_blocks: int = 60_000,
        host_s: float | Law = 0.0,
        way_s: float = 1e-6,
        buckets: Buckets | None = None,
    ) -> None:
        self.now = 0.0  # the engine's time
        self.client_now = 0.0
        self.max_num_seqs = slots
        self._way_s = way_s
        host = host_s if callable(host_s) else lambda step: host_s
        device = Device(self, law, host, num_blocks)
        self.max_model_len = device.max_model_len
        self._core = EngineCore(
            device,
            self._consume,
            max_num_batched_tokens=budget,
            depth=depth,
            clock=lambda: self.now,
        )
        self.steps: list[StepRecord] = []  # all of them, whoever watches
        self._watcher: Callable[[StepPlan, float, float], None] | None = None
        self._core.on_step = self._on_step
        self._live: dict[str, tuple[Sequence, Sink]] = {}
        self._numbers = itertools.count()
        self._inbox: deque[tuple[float, Callable[[], object]]] = deque()
        self._is_stepping = False
        self.config = EngineConfig(
            model="virtual", max_num_batched_tokens=budget, run_ahead=bool(depth)
        )
        self.startup = StartupReport(
            device="H200",
            dtype="bfloat16",
            weights_dtype="bfloat16",
            kv_cache_dtype="bfloat16",
            attention_backend="none",
            attention_reason="",
            max_model_len=self.max_model_len,
            num_blocks=num_blocks,
            block_size=16,
            pool_bytes=0,
            weights_bytes=0,
            buckets=buckets,
        )

    def now_ns(self) -> int:
        return round((self.now if self._is_stepping else self.client_now) * 1e9)

    # --- the client's side -----------------------------------------------------------------------

    def request(self, prompt: list[int], params: SamplingParams, raw: bool) -> Request:
        name = f"v{next(self._numbers)}"
        arrival = self.client_now
        return Request(request_id=name, prompt_token_ids=prompt, params=params, arrival=arrival)

    def submit(self, request: Request, sink: Sink) -> None:
        seq = Sequence(
            next(self._numbers),
            array("i", request.prompt_token_ids),
            request.params,
            request.params.max_tokens or 1,
            0,
            request.request_id,
            arrival=request.arrival,
        )
        self._live[request.request_id] = (seq, sink)
        self._inbox.append((self.client_now + self._way_s, lambda: self._core.add(seq)))

    def abort(self, request_id: str) -> None:
        if request_id in self._live:
            seq = self._live[request_id][0]
            self._inbox.append((self.client_now + self._way_s, lambda: self._core.abort(seq)))

    def watch_steps(self, callback: Callable[[StepPlan, float, float], None] | None) -> None:
        self._watcher = callback

    def _on_step(self, plan: StepPlan, start: float, end: float) -> None:
        step = step_record(plan, start, end)
        self.steps.append(step)
        if self._watcher is not None:
            self._watcher(plan, start, end)

    def stats(self) -> EngineStats:
        scheduler = self._core.scheduler
        waiting, running = scheduler.num_waiting, scheduler.num_running
        return EngineStats(running, waiting, scheduler.num_preemptions, 0, 0, 0, 16, 0, 0)

    # --- the engine's side -----------------------------------------------------------------------

    def advance(self, until: float) -> None:
        """A step; where there is none to run, on to what comes next."""
        while self._inbox and self._inbox[0][0] <= self.now:
            self._inbox.popleft()[1]()
        if self._core.has_unfinished:
            self._is_stepping = True
            self._core.step()
            self._is_stepping = False
        else:
            self.now = min([until, *(moment for moment, _ in self._inbox)])

    def _consume(self, updates: list[Update]) -> None:
        for update in updates:
            seq, is_last = update.seq, update.finish_reason is not None
            sink = self._live[seq.request_id][1]
            if is_last:
                del self._live[seq.request_id]
            sink(
                [
                    RequestOutput(
                        request_id=seq.request_id,
                        token_ids=tuple(update.token_ids),
                        finish_reason=update.finish_reason,
                        times=RequestTimes(
                            seq.arrival, seq.first_scheduled, seq.first_token, seq.finished
                        ),
                        usage=Usage(
                            prompt_tokens=seq.num_prompt_tokens,
                            completion_tokens=len(seq.output_token_ids),
                            cached_tokens=seq.num_cached_tokens,
                        ),
                    )
                ]
            )


def install(llm: VirtualLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that wait let the engine go on, and everybody reads its clock."""

    class Queue:
        def __init__(self) -> None:
            self._values: deque[tuple[float, Any]] = deque()

        def put(self, value: Any) -> None:
            self._values.append((llm.now, value))

        def get(self, timeout: float) -> Any:
            end = llm.client_now + timeout
            while not self._values and llm.now < end:
                llm.advance(end)
            if not self._values or self._values[0][0] > end:
                llm.client_now = end
                raise queue.Empty
            moment, value = self._values.popleft()
            llm.client_now = max(llm.client_now, moment)
            return value

    class Module:
        SimpleQueue, Empty = Queue, queue.Empty

    monkeypatch.setattr(engine_loop, "queue", Module)
    for module in (engine_loop, offline, record):
        monkeypatch.setattr(module, "now_ns", llm.now_ns)


def bench_of(llm: VirtualLLM, model: PerfModel, hardware: Hardware = H200) -> Bench:
    device = "cuda" if model.depth else "cpu"
    assert llm.config.max_num_batched_tokens == model.budget, "the model is the device's"
    return Bench(llm, model.shape, hardware, model.budget, model.depth, device, "virtual")  # type: ignore[arg-type]


def spread(n_in: int, n_out: int) -> Workload:
    """Lengths half to one and a half times the mean: equal ones would run in lock-step."""
    around = [Lengths.parse(f"{max(n // 2, 1)}:{n + n // 2}") for n in (n_in, n_out)]
    return Workload(in_len=around[0], out_len=around[1])


def closed(
    llm: VirtualLLM,
    workload: Workload,
    *,
    clients: int,
    duration_s: float,
    stagger_s: float,
    model: PerfModel | None = None,
) -> dict[str, Any]:
    """A closed loop's numbers, as `bench report --json` names them, with its steps.

    model: what `model_rows` predicts with, for the lengths that were counted
    """
    loop = EngineLoop(llm)  # type: ignore[arg-type]
    requests = workload.requests(vocab_size=llm.vocab_size, salt=next(_SALTS))
    with StepLog(llm) as log:  # type: ignore[arg-type]
        loop.run_closed(requests, concurrency=clients, duration_s=duration_s, stagger_s=stagger_s)
    header: dict[str, Any] = {"load": {"mode": "closed", "concurrency": clients}}
    if model is not None:
        header |= {"perf_model": model.as_json(H200), "slots": llm.max_num_seqs}
    return summarize(Run(header, loop.records, log.steps)).json


def open_loop(llm: VirtualLLM, workload: Workload, *, times: Iterator[float]) -> dict[str, Any]:
    """The same of arrivals at given moments."""
    loop = EngineLoop(llm)  # type: ignore[arg-type]
    requests = workload.requests(vocab_size=llm.vocab_size, salt=next(_SALTS))
    for moment in times:
        while llm.now < moment:
            llm.advance(moment)
        llm.client_now = moment
        loop.send(next(requests), round(moment * 1e9))
    while (ended := loop.wait(1e6)) is not None:
        loop.records.append(ended.record)
    return summarize(Run({"load": {"mode": "open"}}, loop.records)).json
