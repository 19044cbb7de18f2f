"""A running request as an iterator, for whoever reads it where it was started."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from nvcli.types import RequestOutput

if TYPE_CHECKING:
    from nvcli.engine.engine import Request
    from nvcli.engine.engine_thread import Sink


class Requests(Protocol):
    """What a stream of outputs needs: an `LLM`, or its like in another process."""

    def submit(self, request: Request, sink: Sink) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def close_thinking(self, request_id: str) -> None: ...


class OutputStream(Iterator[RequestOutput]):
    """A running request's outputs as they come. `close`, or dropping it, aborts the request."""

    def __init__(self, llm: Requests, request: Request) -> None:
        self.request_id = request.request_id
        self._llm = llm
        self._num_open = 0  # outputs that have not finished; none before the request is accepted
        self._outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
        self._ready: deque[RequestOutput] = deque()
        llm.submit(request, self._outputs.put)
        self._num_open = request.params.n

    def __next__(self) -> RequestOutput:
        while not self._ready:
            if self._num_open == 0:
                raise StopIteration
            self._ready.extend(self._outputs.get())
        output = self._ready.popleft()
        self._num_open -= output.is_finished
        return output

    def close_thinking(self) -> None:
        """Answer now: the model's reasoning ends at its next token."""
        self._llm.close_thinking(self.request_id)

    def close(self) -> None:
        """Abort what still runs; the iterator ends."""
        if self._num_open > 0:
            self._num_open = 0
            self._ready.clear()
            self._llm.abort(self.request_id)

    def __del__(self) -> None:
        self.close()
