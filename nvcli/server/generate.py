"""Running engine requests for one HTTP request: to the end, or as a stream; never past the client.

Whatever happens - the client leaves, time runs out, an error, the end - what still runs is aborted
and the engine drops it within one step.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect

from nvcli.protocol import engine_request
from nvcli.server.errors import TimeoutExceededError
from nvcli.server.sse import wait_for_disconnect

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request as HTTPRequest

    from nvcli.engine.engine import Request
    from nvcli.protocol import ChatRequest, PreparedPrompt
    from nvcli.server.bridge import OutputGroups
    from nvcli.server.state import ServerState
    from nvcli.types import RequestOutput

T = TypeVar("T")

LARGE_TEXT = 16 * 1024  # bytes of body from which rendering and tokenizing are work for a thread


async def prepare(http: HTTPRequest, work: Callable[[], Any], *, is_slow: bool = False) -> Any:
    """Run `work`, which parses, renders and tokenizes, where it does not hold others up. The body
    has been read."""
    num_bytes = len(await http.body())
    if not is_slow and num_bytes < LARGE_TEXT:
        return work()
    state: ServerState = http.app.state
    return await state.in_thread(work, num_bytes=num_bytes)


def turn_request(
    state: ServerState, chat: ChatRequest, prompt: PreparedPrompt, num_spent: int = 0
) -> Request:
    """One turn of the model. `num_spent`: tokens of the limit that earlier turns have used."""
    sampling = dict(chat.sampling)
    if sampling.get("max_tokens") is not None:
        sampling["max_tokens"] -= num_spent
    request_id = state.bridge.new_id()
    return engine_request(
        state.llm, prompt, chat, request_id=request_id, is_streaming=True, sampling=sampling
    )


def start(
    state: ServerState, requests: Sequence[Request], *, is_admitted: bool = False
) -> OutputGroups:
    """Submit; the timeout begins now. Raises what `EngineBridge.submit` raises."""
    groups = state.bridge.submit(requests, is_admitted=is_admitted)
    timeout = state.config.request_timeout
    if timeout is not None:
        error = TimeoutExceededError(timeout)
        groups.timer = asyncio.get_running_loop().call_later(timeout, groups.fail, error)
    return groups


async def run_to_end(
    state: ServerState, http: HTTPRequest, requests: Sequence[Request]
) -> list[list[RequestOutput]]:
    """The outputs of each request, in order of their index. The requests do not stream.

    Raises `ClientDisconnect` when nobody waits any more, and what `start` and the engine raise.
    """
    groups = start(state, requests)

    async def collect() -> list[list[RequestOutput]]:
        found: list[list[RequestOutput]] = [[] for _ in requests]
        async for number, output in groups.outputs():
            found[number].append(output)
        return [sorted(outputs, key=lambda output: output.index) for outputs in found]

    with closing(groups):
        return await while_connected(http, collect())


async def while_connected(http: HTTPRequest, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(wait_for_disconnect(http.receive))
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
