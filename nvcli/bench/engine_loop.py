"""Planned requests into an engine in this process; every request becomes a record.

Moments are taken on the engine's thread when a token is handed out. Lengths are exact: prompts are
token ids and `ignore_eos` makes every answer as long as planned.
"""

from __future__ import annotations

import math
import queue
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from nvcli.bench.record import ERROR, OK, UNFINISHED, RequestRecord, RunWriter, now_ns
from nvcli.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvcli.bench.precision import Precision
    from nvcli.bench.workload import Planned
    from nvcli.llm import LLM
    from nvcli.types import RequestOutput


@dataclass(slots=True)
class _Open:
    record: RequestRecord
    planned: Planned
    counts: bool  # False: sent behind the end, to keep its place taken
    answer: list[int] = field(default_factory=list)
    moment: int = 0  # when it ended

    def next_turn(self, max_len: int) -> Planned | None:
        return self.planned.next_turn(self.answer, max_len) if self.record.status == OK else None


class EngineLoop:
    """Drives an engine with planned requests; every request becomes a record."""

    def __init__(self, llm: LLM, run: RunWriter | None = None) -> None:
        self._llm = llm
        self._run = run
        self._done: queue.SimpleQueue[tuple[str, RequestOutput, int]] = queue.SimpleQueue()
        self._open: dict[str, _Open] = {}
        self.num_sent = 0
        self._ended: _Open | None = None  # and not kept yet
        self._num_counting = 0  # of those that run, the ones that are records
        self.records: list[RequestRecord] = []

    def run_closed(
        self,
        planned: Iterator[Planned],
        *,
        concurrency: int,
        duration_s: float | None = None,
        num_requests: int | None = None,
        stagger_s: float = 0.0,
        precision: Precision | None = None,
        fills: bool = True,
    ) -> None:
        """Keep `concurrency` requests running until the time or the number is reached, then let
        the rest end. The first sends are spread over `stagger_s` (a quarter of the time at most),
        against lock-step.

        Places stay taken until all that counts has ended, or the load's time is over again: a loop
        that empties gets faster and faster, which is no part of the load. What is sent for that is
        no record, and is cut off. `fills` False: it empties.
        """
        start = now_ns()
        end = start + int(duration_s * 1e9) if duration_s is not None else None
        # The moment each place became or becomes free; a heap, and rising from the start.
        spread = int(min(stagger_s, (duration_s or math.inf) / 4) * 1e9)
        free = [start + spread * i // concurrency for i in range(concurrency)]
        upcoming: Planned | None = None
        while True:
            if precision is not None and precision.is_due and precision.is_reached(self.records):
                end = min(end or now_ns(), now_ns())
            if self._ended is not None:
                is_over = end is not None and now_ns() >= end
                later = None if is_over else self._ended.next_turn(self._llm.max_model_len)
                if later is not None:
                    self.send(later, self._ended.moment)
                else:
                    heappush(free, self._ended.moment)
            while True:
                if self.num_sent == num_requests:
                    end = min(end or now_ns(), now_ns())
                now = now_ns()
                is_over = end is not None and now >= end
                has_company = end is not None and now < 2 * end - start and self._num_counting > 0
                sends = not is_over or (fills and has_company)
                if not (sends and free and free[0] <= now):
                    break
                drawn, upcoming = upcoming or next(planned), None
                self.send(drawn, heappop(free), counts=not is_over)
            self._keep_ended()  # when its place is taken again
            if is_over and not self._num_counting:
                break
            if upcoming is None and sends:
                upcoming = next(planned, None)
            self._ended = self.wait(max(free[0] - now_ns(), 0) / 1e9 if free and sends else 0.5)
        for request_id in self._open:
            self._llm.abort(request_id)
        self._open.clear()

    def send(self, planned: Planned, s_star: int, *, counts: bool = True) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=planned.n_out, min_tokens=planned.n_out, ignore_eos=True
        )
        request = self._llm.request(_as_prompt(planned.prompt), params, raw=True)
        s_ns = now_ns()
        record = RequestRecord(planned.id, s_star, s_ns, s_ns, UNFINISHED, turn=planned.turn)
        record.n_in = len(request.prompt_token_ids)
        opened = _Open(record, planned, counts)
        self._open[request.request_id] = opened
        self.num_sent += counts
        self._num_counting += counts
        done = self._done

        def sink(outputs: list[RequestOutput]) -> None:
            moment = now_ns()
            for output in outputs:
                if output.token_ids:
                    record.chunks.append((moment, len(output.token_ids)))
                    if planned.later:
                        opened.answer += output.token_ids
                if output.is_finished:
                    done.put((request.request_id, output, moment))

        self._llm.submit(request, sink)

    def wait(self, timeout: float) -> _Open | None:
        """Wait for one request to end."""
        try:
            request_id, output, moment = self._done.get(timeout=max(timeout, 1e-4))
        except queue.Empty:
            return None
        ended = self._open.pop(request_id)
        self._num_counting -= ended.counts
        record, ended.moment = ended.record, moment
        record.status = ERROR if output.finish_reason is FinishReason.ERROR else OK
        record.error = output.error
        record.n_out = output.usage.completion_tokens
        record.cached = output.usage.cached_tokens
        record.end_ns = record.chunks[-1][0] if record.chunks and record.status == OK else moment
        times = output.times
        if times is not None and times.first_scheduled is not None:
            moments = {
                "arrive": times.arrival,
                "sched": times.first_scheduled,
                "first": times.first_token,
                "done": times.finished,
            }
            record.server = {k: int(v * 1e9) for k, v in moments.items() if v is not None}
        return ended

    def abandon(self) -> None:
        """Ctrl-C: end what runs, and keep what there is of it."""
        moment = now_ns()
        self._keep_ended()
        for request_id, entry in self._open.items():
            self._llm.abort(request_id)
            entry.record.end_ns = moment
            if entry.counts:
                self._keep(entry.record)
        self._open.clear()

    def _keep_ended(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None and ended.counts:
            self._keep(ended.record)

    def _keep(self, record: RequestRecord) -> None:
        self.records.append(record)
        if self._run is not None:
            self._run.request(record)


def _as_prompt(prompt: Any) -> Any:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        from nvcli.types import Message

        return [Message(m["role"], m["content"]) for m in prompt]
    return prompt
