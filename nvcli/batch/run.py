"""The run: records from the feed into the engine, answers from the engine into lines.

One queue carries what happens - outputs are there, a signal came, a record is ready that was waited
for - and this loop is its only reader, so nothing here needs a lock:

    feed thread --Prepared|Failed|FeedEnd--> fed --+
    engine thread -------outputs-----------+       +--> BatchRun --> LineSink
    signal handlers --------wish-----------+--> events

What the feed has ready lies in `fed` until something else happens, unless the engine has room: a
turn of this loop takes the interpreter from the engine, so there is none without need.

Every record of the feed leaves as exactly one line. In input order a line waits for those before
it; the window bounds how many wait, and so what a crash can cost.
"""

from __future__ import annotations

import queue
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvcli.batch.admission import Waves
from nvcli.batch.attached_outputs import HttpOutput
from nvcli.batch.engine import max_num_seqs
from nvcli.batch.feed import Failed, Fed, Feed, FeedEnd, Prepared, Preparer, Warned
from nvcli.batch.options import Order
from nvcli.batch.records import failed, failure_of
from nvcli.batch.signals import Wish, handle_signals
from nvcli.errors import (
    EngineClosedError,
    HungUpRunError,
    InterruptedRunError,
    NvcliError,
    RequestError,
    TerminatedRunError,
    UsageError,
)
from nvcli.heap import frozen_heap
from nvcli.types import FinishReason, RequestOutput

if TYPE_CHECKING:
    from nvcli.batch.engine import BatchEngine
    from nvcli.batch.existing import ExistingOutput
    from nvcli.batch.options import BatchOptions
    from nvcli.batch.output_lines import LineWriter
    from nvcli.batch.progress import Counts, ShowsProgress
    from nvcli.batch.records import Failure
    from nvcli.batch.sink import LineSink
    from nvcli.text import Tokenizer

WINDOW_PER_SEQUENCE = 4
_TURN_S = 0.2  # the longest sleep without a look at the clock

Event = Wish | list[RequestOutput] | None  # None: look at `fed`


class TooManyErrorsError(NvcliError):
    """`--max-errors` was passed."""

    code = "too_many_errors"


@dataclass(slots=True)
class Running:
    """A record in the engine: the outputs of each of its requests as they come."""

    item: Prepared
    outputs: list[list[RequestOutput]] = field(default_factory=list)
    num_open: int = 0

    @property
    def num_sequences(self) -> int:
        return sum(request.params.num_sequences for request in self.item.requests)

    def failure(self, output: RequestOutput) -> Failure:
        """What a record ends as when one of its outputs is an error."""
        code = output.error_code or str(output.finish_reason)
        message = output.error or "the request was aborted"
        status = output.status if isinstance(output, HttpOutput) else 500
        return failed(self.item.record, code, message, status=status)


class BatchRun:
    """Runs once. `execute` returns when every record is written, and raises the reason otherwise:
    `InterruptedRunError`, `TerminatedRunError`, `HungUpRunError`, `ClosedPipeError`, `OutputError`,
    `InputError`, `UsageError` (`--strict`), `TooManyErrorsError`, `EngineClosedError`.
    """

    def __init__(
        self,
        options: BatchOptions,
        engine: BatchEngine,
        *,
        tokenizer: Tokenizer | None,
        sink: LineSink,
        lines: LineWriter,
        counts: Counts,
        progress: ShowsProgress,
        seed: int,
        existing: ExistingOutput | None,
    ) -> None:
        self._options = options
        self._engine = engine
        self._sink = sink
        self._lines = lines
        self._counts = counts
        self._progress = progress
        num_seqs = max_num_seqs(engine)
        window = options.window or WINDOW_PER_SEQUENCE * num_seqs
        self._max_running = min(window, 2 * num_seqs)  # sequences; a few wait in the engine
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._feed = Feed(
            options, existing, Preparer(options, engine, tokenizer, seed), self._receive, window
        )
        self._fed: deque[Fed] = deque()
        self._is_hungry = True  # the engine has room, and nothing is ready for it
        self._num_to_release = 0  # records written whose places the feed may fill
        is_ordered = options.order is Order.INPUT
        # In input order the first of a wave may run last: the other half keeps the engine full.
        self._waves = Waves(max(num_seqs, window // 2) if is_ordered else window)
        self._running: dict[int, Running] = {}  # position -> record
        self._num_sequences = 0
        self._is_ordered = is_ordered
        self._waiting: dict[int, bytes] = {}  # position -> line, until those before it are written
        self._next_position = 0
        self._is_fed = False  # nothing more comes from the feed
        self._error: NvcliError | None = None  # why the run ends early, once it is decided

    def execute(self) -> None:
        with handle_signals(self._events.put), frozen_heap():
            self._feed.start()
            try:
                self._loop()
                self._flush_waiting()
            finally:
                self._feed.stop()
                for running in self._running.values():
                    self._abort(running)
        if self._error is not None:
            raise self._error

    def _loop(self) -> None:
        while not self._is_done:
            self._handle_events()
            self._admit()
            if self._num_to_release:
                self._feed.release(self._num_to_release)
                self._num_to_release = 0
            self._counts.num_running = len(self._running)
            self._counts.num_held = len(self._waiting)
            self._counts.pace.note(self._counts.elapsed_s, self._counts.num_ended)
            self._progress.update(self._counts)

    @property
    def _is_done(self) -> bool:
        is_empty = not self._running and not len(self._waves)
        return is_empty and (self._is_fed or self._error is not None)

    def _receive(self, item: Fed) -> None:
        """Called by the feed's thread."""
        self._fed.append(item)
        if self._is_hungry:
            self._is_hungry = False
            self._events.put(None)

    def _handle_events(self) -> None:
        """Wait for something to happen, then take all that has happened."""
        self._is_hungry = not len(self._waves) and self._num_sequences < self._max_running
        with suppress(queue.Empty):
            if not self._fed:  # what came since then has left word
                self._handle(self._events.get(timeout=_TURN_S))
            while True:
                self._handle(self._events.get_nowait())
        while self._fed:
            self._take_fed(self._fed.popleft())

    def _handle(self, event: Event) -> None:
        match event:
            case list():
                self._take_outputs(event)
            case Wish():
                self._grant(event)

    def _take_fed(self, item: Fed) -> None:
        match item:
            case Prepared():
                if self._error is None:
                    self._waves.add(item)
            case Failed():
                if self._error is None:
                    self._fail(item.position, item.failure)
            case Warned():
                self._progress.warn(item.text)
            case FeedEnd():
                self._is_fed = True
                if self._error is None:  # what was read before is still answered
                    self._error = item.error

    # --- into the engine ----------------------------------------------------------------------

    def _admit(self) -> None:
        while len(self._waves) and self._num_sequences < self._max_running:
            self._submit(self._waves.take())

    def _submit(self, item: Prepared) -> None:
        running = Running(item, [[] for _ in item.requests])
        running.num_open = sum(request.params.n for request in item.requests)
        self._running[item.position] = running
        self._num_sequences += running.num_sequences
        try:
            for request in item.requests:
                self._engine.submit(request, self._events.put)
        except EngineClosedError as error:
            self._forget(running)
            self._stop_now(error)
        except (RequestError, UsageError) as error:
            self._abort(running)
            self._forget(running)
            self._fail(item.position, failure_of(item.record, error))

    def _abort(self, running: Running) -> None:
        for request in running.item.requests:
            self._engine.abort(request.request_id)

    def _forget(self, running: Running) -> None:
        if self._running.pop(running.item.position, None) is not None:
            self._num_sequences -= running.num_sequences

    # --- out of the engine --------------------------------------------------------------------

    def _take_outputs(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            _, position, number = output.request_id.split("-")
            running = self._running.get(int(position))
            if running is None or not output.is_finished:  # of a record that has ended already
                continue
            if output.error_code == EngineClosedError.code:
                self._forget(running)
                self._stop_now(EngineClosedError(output.error or "the engine was closed"))
                continue
            running.outputs[int(number)].append(output)
            running.num_open -= 1
            if running.num_open == 0:
                self._complete(running)

    def _complete(self, running: Running) -> None:
        self._forget(running)
        record = running.item.record
        for group in running.outputs:
            group.sort(key=lambda output: output.index)
            for output in group:
                if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    self._fail(running.item.position, running.failure(output))
                    return
            self._count(group)
        item = running.item
        params = item.requests[0].params
        line = self._lines.success(record, item.prompts, running.outputs, params)
        self._emit(running.item.position, line)

    def _count(self, group: list[RequestOutput]) -> None:
        self._counts.prompt_tokens += group[0].usage.prompt_tokens
        self._counts.cached_tokens += group[0].usage.cached_tokens
        self._counts.completion_tokens += sum(o.usage.completion_tokens for o in group)

    def _fail(self, position: int, failure: Failure) -> None:
        self._counts.add_failure(failure.line, failure.code, failure.message)
        self._emit(position, self._lines.failure(failure))
        limit = self._options.max_errors
        if limit is not None and self._counts.num_failed > limit and self._error is None:
            self._end(
                TooManyErrorsError(
                    f"more than {limit} records failed, the last at line {failure.line}: "
                    f"{failure.message}"
                )
            )

    # --- lines --------------------------------------------------------------------------------

    def _emit(self, position: int, line: bytes) -> None:
        if not self._is_ordered:
            self._write(line)
            return
        self._waiting[position] = line
        while (ready := self._waiting.pop(self._next_position, None)) is not None:
            self._next_position += 1
            self._write(ready)

    def _flush_waiting(self) -> None:
        """After an early end there are gaps; what is done is written all the same, in order."""
        for position in sorted(self._waiting):
            self._write(self._waiting.pop(position))

    def _write(self, line: bytes) -> None:
        self._sink.write(line)
        self._counts.num_written += 1
        self._num_to_release += 1

    # --- early ends ---------------------------------------------------------------------------

    def _end(self, error: NvcliError) -> None:
        """Admit nothing more; what runs is finished and written."""
        if self._error is None:
            self._error = error
        self._waves.clear()
        self._feed.stop()

    def _stop_now(self, error: NvcliError) -> None:
        """Admit nothing more and give up what runs."""
        self._end(error)
        for running in list(self._running.values()):
            self._abort(running)
            self._forget(running)

    def _grant(self, wish: Wish) -> None:
        match wish:
            case Wish.STATUS:
                self._progress.status(self._counts)
            case Wish.FINISH:
                if self._running:
                    self._progress.note(
                        f"stopping: {len(self._running)} running records are finished first; "
                        "interrupt again to stop now"
                    )
                self._end_by_signal(InterruptedRunError("interrupted"), stops_now=False)
            case Wish.STOP:
                self._end_by_signal(InterruptedRunError("interrupted"), stops_now=True)
            case Wish.TERMINATE:
                self._end_by_signal(TerminatedRunError("terminated"), stops_now=True)
            case Wish.HANG_UP:
                self._end_by_signal(HungUpRunError("hung up"), stops_now=True)

    def _end_by_signal(self, error: NvcliError, *, stops_now: bool) -> None:
        self._error = error  # a signal outranks what else went wrong
        if stops_now:
            self._stop_now(error)
        else:
            self._end(error)
