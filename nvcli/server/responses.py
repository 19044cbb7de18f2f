"""`/v1/responses`: created, streamed, stored, followed, cancelled.

Each response runs as a task of its own that appends events to a record (`response_run`); a stream
reads the record, so that one response may be followed by several clients and, in the background, by
none.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING

from nvcli.errors import InvalidParameterError
from nvcli.server.chat import needs_grammar, note_request
from nvcli.server.errors import BadRequestError, NotFoundError
from nvcli.server.generate import prepare, start, while_connected
from nvcli.server.json_io import JSONBody, read_object
from nvcli.server.response_run import Job, Record, make_job, open_record, run
from nvcli.server.sse import EventStream, named_event
from nvcli.server.store import Entry, page_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from nvcli.server.state import ServerState


# --- creating ------------------------------------------------------------------------------------


async def create_response(state: ServerState, http: HTTPRequest) -> ASGIApp:
    state.check_accepting()
    body = await read_object(http)
    job: Job = await prepare(http, lambda: make_job(state, body), is_slow=needs_grammar(body))
    note_request(http, job.request.chat.ignored_fields, job.prompt.num_truncated_tokens)
    record = open_record(state, job)
    groups = None
    if job.request.mcp:
        state.bridge.check_room(1)
    else:
        groups = start(state, [job.engine])
    if record.background:
        state.enter()
        queued = dict(record.events.response)
    record.add(record.events.start())
    record.task = asyncio.create_task(run(state, job, record, groups))
    if job.request.chat.stream:
        events = _stream(record, 0)
        close = None if record.background else record.task.cancel
        return EventStream(events, ping_interval=state.config.ping_interval, close=close)
    if record.background:
        return JSONBody(queued)
    try:
        await while_connected(http, asyncio.shield(record.task))
    finally:
        record.task.cancel()
    if record.error is not None:
        raise record.error
    return JSONBody(record.events.response)


async def _stream(record: Record, position: int) -> AsyncGenerator[bytes, None]:
    """A client that leaves ends its response, unless that runs in the background."""
    try:
        async for event in record.follow(position):
            yield named_event(event["type"], event)
    finally:
        if not record.background and record.task is not None:
            record.task.cancel()


# --- stored responses ----------------------------------------------------------------------------


def _missing(response_id: str) -> NotFoundError:
    return NotFoundError(f"there is no response {response_id[:100]!r}", param="response_id")


def _entry(state: ServerState, http: HTTPRequest) -> Entry:
    response_id = http.path_params["response_id"]
    entry = state.responses.get(response_id)
    if entry is None:
        raise _missing(response_id)
    return entry


def _position(starting_after: str | None) -> int:
    """Of the first event to send. Raises `InvalidParameterError`."""
    if starting_after is None:
        return 0
    if re.fullmatch(r"-?[0-9]{1,9}", starting_after) is None:
        raise InvalidParameterError("starting_after must be a number", param="starting_after")
    return max(0, int(starting_after) + 1)


async def get_response(state: ServerState, http: HTTPRequest) -> ASGIApp:
    record = state.live.get(http.path_params["response_id"])
    query = http.query_params
    if query.get("stream", "false").lower() not in ("true", "1"):
        return JSONBody(record.events.response if record is not None else _entry(state, http).body)
    position = _position(query.get("starting_after"))
    if record is None:
        entry = _entry(state, http)
        log = entry.extra["log"]

        async def replay() -> AsyncGenerator[bytes, None]:
            for event in log[position:]:
                yield named_event(event["type"], event)

        return EventStream(replay())
    events = _stream(record, position)
    return EventStream(events, ping_interval=state.config.ping_interval)


async def delete_response(state: ServerState, http: HTTPRequest) -> Response:
    response_id = http.path_params["response_id"]
    record = state.live.get(response_id)
    if record is not None and record.task is not None:
        record.stores = False
        record.task.cancel()
    elif not state.responses.delete(response_id):
        raise _missing(response_id)
    return JSONBody({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(state: ServerState, http: HTTPRequest) -> Response:
    record = state.live.get(http.path_params["response_id"])
    if record is None:
        body = _entry(state, http).body
        if not body["background"]:
            raise BadRequestError("only a response in the background can be cancelled")
        return JSONBody(body)
    assert record.task is not None, "a live response has a task"
    record.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await record.task
    return JSONBody(record.events.response)


async def list_input_items(state: ServerState, http: HTTPRequest) -> Response:
    record = state.live.get(http.path_params["response_id"])
    items = record.items if record is not None else _entry(state, http).extra["items"]
    return JSONBody(page_of(items, http, default_order="desc"))


async def count_input_tokens(state: ServerState, http: HTTPRequest) -> Response:
    body = await read_object(http)
    if body.get("model") is None:
        body["model"] = state.model
    job: Job = await prepare(http, lambda: make_job(state, body))
    count = len(job.prompt.token_ids)
    return JSONBody({"object": "response.input_tokens", "input_tokens": count})


async def compact(state: ServerState, http: HTTPRequest) -> Response:
    raise NotFoundError("/v1/responses/compact is not supported", hint="Use truncation: auto.")
