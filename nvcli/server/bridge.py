"""From the engine's thread to the event loop: outputs of many requests cross in one call a step.

The engine's thread calls a sink for each request that has something new. Waking an event loop costs
a system call, so sinks only queue what they got and wake the loop when nobody has yet.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import weakref
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from nvcli.server.errors import GenerationError, QueueFullError
from nvcli.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from nvcli.engine.engine import Request
    from nvcli.errors import NvcliError
    from nvcli.server.engine import ServerEngine
    from nvcli.types import RequestOutput, SamplingParams

_FAULTS = (FinishReason.ERROR, FinishReason.ABORT)
_MERGE_AT = 256  # outputs that wait for a reader
_CLIENT_ERRORS = {  # codes of the engine that are the request's own fault
    "context_length_exceeded",
    "invalid_parameter",
    "invalid_request",
    "invalid_messages",
    "unsupported_parameter",
}


class EngineBridge:
    """Submits requests and hands their outputs to the event loop it was made in."""

    def __init__(self, llm: ServerEngine, *, max_queue: int) -> None:
        self.llm = llm
        self.capacity = llm.max_num_seqs + max_queue
        self.num_open = 0  # sequences on their way
        self.num_aborted = 0
        self.on_hand_over: Callable[[int], None] = lambda _: None
        self.on_finished: Callable[[RequestOutput, SamplingParams], None] = lambda *_: None
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[OutputGroups, list[RequestOutput]]] = deque()
        self._is_waking = False
        self._ids = itertools.count()
        self._prefix = secrets.token_hex(4)
        self._groups: weakref.WeakSet[OutputGroups] = weakref.WeakSet()
        self._end: NvcliError | None = None

    def new_id(self) -> str:
        """An id for the engine, different from every other of this process."""
        return f"{self._prefix}-{next(self._ids)}"

    def check_room(self, count: int) -> None:
        """Raises `QueueFullError`."""
        if self.num_open and self.num_open + count > self.capacity:
            raise QueueFullError(
                f"{self.num_open:,} sequences are running or waiting, which is all the queue takes",
                hint="Try again in a moment.",
            )

    def submit(self, requests: Sequence[Request], *, is_admitted: bool = False) -> OutputGroups:
        """Queue requests whose outputs belong together; `is_admitted`: the queue may be full.

        Raises `QueueFullError`, and what `Engine.validate` raises; then none of them runs.
        """
        if self._end is not None:
            raise self._end
        count = sum(request.params.num_sequences for request in requests)
        if not is_admitted:
            self.check_room(count)
        groups = OutputGroups(self, requests)
        try:
            for request in requests:
                self.llm.submit(request, groups.sink)
                groups.submitted.append(request.request_id)
        except BaseException:
            groups.close()
            raise
        self.num_open += count
        groups.num_counted = count
        self._groups.add(groups)
        return groups

    def end(self, error: NvcliError) -> None:
        """What runs and whatever comes ends with this error, also where the engine hangs."""
        self._end = error
        for groups in list(self._groups):
            groups.fail(error)

    def arrive(self, groups: OutputGroups, outputs: list[RequestOutput]) -> None:
        """Called from the engine's thread."""
        self._arrived.append((groups, outputs))
        if not self._is_waking:
            self._is_waking = True
            try:
                self._loop.call_soon_threadsafe(self._hand_over)
            except RuntimeError:  # the loop is closed: nobody is left to read
                for request_id in groups.submitted:
                    self.llm.abort(request_id)

    def _hand_over(self) -> None:
        self._is_waking = False  # before the queue is emptied: what comes later wakes again
        count = 0
        while self._arrived:
            groups, outputs = self._arrived.popleft()
            count += len(outputs)
            groups.take(outputs)
        self.on_hand_over(count)


class OutputGroups:
    """The outputs of one HTTP request's engine requests, in order of arrival.

    Iterate over `outputs`; `close` at any point aborts the rest.
    """

    def __init__(self, bridge: EngineBridge, requests: Sequence[Request]) -> None:
        self.submitted: list[str] = []
        self.num_counted = (
            0  # sequences in the bridge's `num_open`; 0 where not all could be submitted
        )
        self._requests = requests
        self._number_of = {request.request_id: i for i, request in enumerate(requests)}
        self._bridge = bridge
        self._num_open = sum(request.params.n for request in requests)
        self._ready: list[RequestOutput] = []
        self._merge_at = _MERGE_AT
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False
        self._error: NvcliError | None = None
        self.timer: asyncio.TimerHandle | None = None

    def fail(self, error: NvcliError) -> None:
        """End the iteration with an error."""
        self._error = error
        self._wake()

    def sink(self, outputs: list[RequestOutput]) -> None:
        self._bridge.arrive(self, outputs)

    def take(self, outputs: list[RequestOutput]) -> None:
        self._num_open -= sum(output.is_finished for output in outputs)
        if self._num_open == 0:
            self._bridge.num_open -= self.num_counted
            self.num_counted = 0
        if self._is_closed:
            return
        self._ready.extend(outputs)
        if len(self._ready) > self._merge_at:  # nobody reads: a token costs an object no longer
            self._ready = merge_deltas(self._ready)
            self._merge_at = max(_MERGE_AT, 2 * len(self._ready))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(number of the request, output) until all have ended. Raises as `next_outputs` does."""
        loop, tell = asyncio.get_running_loop(), self._bridge.on_finished
        while outputs := await self.next_outputs():
            for output in outputs:
                number = self._number_of[output.request_id]
                if output.is_finished:  # counted after what all others of this moment have to send
                    loop.call_soon(tell, output, self._requests[number].params)
                yield number, output

    async def next_outputs(self) -> list[RequestOutput]:
        """What is new since the last call; empty at the end.

        Raises `GenerationError` when the engine ended a sequence by itself.
        """
        if not self._ready and self._error is None:
            if self._num_open == 0:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error
        outputs, self._ready = merge_deltas(self._ready), []
        self._merge_at = _MERGE_AT
        for number, output in enumerate(outputs):
            if output.finish_reason in _FAULTS:
                self._error = failure_of(output)
                if number == 0:
                    raise self._error
                return outputs[:number]  # what came before is good; the error comes next
        return outputs

    def close(self) -> None:
        """Abort what still runs. The sequences count as open until the engine let go of them."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ready.clear()
        if self.timer is not None:
            self.timer.cancel()
        if self._num_open > 0:
            self._bridge.num_aborted += 1
            for request_id in self.submitted:
                self._bridge.llm.abort(request_id)


def merge_deltas(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Join plain deltas that wait together: a client that the loop has come late to gets its
    tokens in fewer events, and the loop catches up."""
    if len(outputs) < 2:
        return outputs
    runs: list[list[RequestOutput]] = []
    last_of: dict[tuple[str, int], list[RequestOutput]] = {}
    with_text: set[int] = set()  # runs, by their id, that have some
    for output in outputs:
        key = (output.request_id, output.index)
        run = last_of.get(key)
        if run is None or not _may_join(run[-1], output, has_text=id(run) in with_text):
            run = last_of[key] = []
            runs.append(run)
        run.append(output)
        if output.text:
            with_text.add(id(run))
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _may_join(before: RequestOutput, output: RequestOutput, *, has_text: bool) -> bool:
    """Whether nothing is told in another order: text comes after reasoning, calls after text."""
    return (
        not before.is_finished
        and not before.tool_calls
        and before.logprobs is None
        and output.logprobs is None
        and output.prompt_logprobs is None
        and output.finish_reason not in _FAULTS
        and not (has_text and output.reasoning)
    )


def _joined(run: list[RequestOutput]) -> RequestOutput:
    reasoning = [output.reasoning for output in run if output.reasoning is not None]
    return replace(
        run[-1],
        text="".join([output.text for output in run]),
        reasoning="".join(reasoning) if reasoning else None,
        token_ids=tuple([token_id for output in run for token_id in output.token_ids]),
        prompt_logprobs=run[0].prompt_logprobs,
    )


def failure_of(output: RequestOutput) -> GenerationError:
    """The error of a sequence that the engine ended."""
    if output.finish_reason is FinishReason.ABORT:
        return GenerationError("the request was aborted by the server", "aborted", 503)
    code = output.error_code or "engine_error"
    status = 400 if code in _CLIENT_ERRORS else 503 if code == "engine_closed" else 500
    return GenerationError(output.error or "the engine failed", code, status)
