"""`/v1/responses`: created, streamed, stored, followed, cancelled.

Each response runs as a task of its own that appends events to a record; a stream reads the record,
so that one response may be followed by several clients and, in the background, by none.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nvcli.errors import ContextLengthError, InvalidParameterError, NvcliError
from nvcli.protocol import engine_request, prepare_chat
from nvcli.protocol.response_events import Event, ResponseEvents
from nvcli.protocol.response_items import read_items, to_messages
from nvcli.protocol.responses import ResponsesRequest, parse_responses
from nvcli.server.chat import needs_grammar, note_request, read_page
from nvcli.server.errors import BadRequestError, GenerationError, NotFoundError
from nvcli.server.generate import outputs_of, prepare, start, while_connected
from nvcli.server.json_io import JSONBody, dumps, read_object
from nvcli.server.sse import EventStream, named_event
from nvcli.server.store import Entry, page

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from nvcli.engine.engine import Request
    from nvcli.protocol import PreparedPrompt
    from nvcli.server.bridge import OutputGroups
    from nvcli.server.state import ServerState


@dataclass(slots=True)
class Job:
    """A checked request and what the engine gets."""

    request: ResponsesRequest
    items: list[dict[str, Any]]  # the whole conversation before the answer
    prompt: PreparedPrompt
    engine: Request


@dataclass(slots=True)
class Record:
    """A response on its way: its events so far, and those who wait for the next."""

    events: ResponseEvents
    items: list[dict[str, Any]]
    stores: bool
    background: bool
    log: list[Event] = field(default_factory=list)
    is_ended: bool = False
    error: NvcliError | None = None
    task: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return str(self.events.response["id"])

    def add(self, events: Any) -> None:
        self.log.extend(events)
        self._changed.set()

    def end(self) -> None:
        self.is_ended = True
        self._changed.set()

    async def follow(self, position: int = 0) -> AsyncGenerator[Event, None]:
        """Events from a position on, to the end."""
        while True:
            while position < len(self.log):
                yield self.log[position]
                position += 1
            if self.is_ended:
                return
            self._changed.clear()
            await self._changed.wait()


# --- creating ------------------------------------------------------------------------------------


def _find_item(state: ServerState, item_id: str) -> dict[str, Any] | None:
    for entry in reversed(state.responses.entries()):
        for item in (*entry.extra["items"], *entry.body["output"]):
            if item["id"] == item_id:
                found: dict[str, Any] = item
                return found
    return None


def make_job(state: ServerState, body: dict[str, Any]) -> Job:
    """Check, join with what was stored, render, tokenize."""
    config = state.config
    request = parse_responses(body, is_strict=config.is_strict)
    state.check_model(request.chat.model)
    items: list[dict[str, Any]] = []
    if request.previous_response_id is not None:
        entry = state.responses.get(request.previous_response_id)
        if entry is None:
            raise NotFoundError(
                f"there is no response {request.previous_response_id[:100]!r}",
                param="previous_response_id",
            )
        items = [*entry.extra["items"], *entry.body["output"]]
    items += read_items(request.input, lambda item_id: _find_item(state, item_id))
    prompt = _render(state, request, items)
    llm = state.llm
    chat = request.chat
    engine = engine_request(
        llm,
        prompt,
        chat.sampling,
        request_id=state.bridge.new_id(),
        is_streaming=True,
        priority=chat.priority,
        cache_salt=chat.cache_salt,
    )
    return Job(request, items, prompt, engine)


def _render(
    state: ServerState, request: ResponsesRequest, items: list[dict[str, Any]]
) -> PreparedPrompt:
    """The prompt; with `truncation: auto` without the oldest items, as many as do not fit."""
    limit = state.llm.max_model_len
    items = list(items)
    while True:
        messages = to_messages(items, instructions=request.instructions, decrypt=state.sealer.open)
        if not messages:
            raise InvalidParameterError("input holds no message", param="input")
        is_last = len(items) <= 1 or not request.truncates
        prompt = None
        try:
            prompt = prepare_chat(
                replace(request.chat, messages=messages),
                state.tokenizer,
                enable_thinking=state.config.enable_thinking,
                max_model_len=limit,
            )
        except ContextLengthError:
            if is_last:
                raise
        if prompt is not None and (len(prompt.token_ids) < limit or is_last):
            return prompt
        del items[: max(1, len(items) // 16)]
        while len(items) > 1 and (items[0]["type"] != "message" or items[0]["role"] == "assistant"):
            del items[0]


def _open_record(state: ServerState, job: Job) -> Record:
    events = ResponseEvents(
        job.request,
        response_id=f"resp_{uuid.uuid4().hex}",
        model=job.request.chat.model or state.model,
        created=int(time.time()),
        params=job.engine.params,
        tokenizer=state.tokenizer,
        encrypt=state.sealer.seal,
    )
    return Record(events, job.items, job.request.store, job.request.background)


async def _run(state: ServerState, job: Job, record: Record, groups: OutputGroups) -> None:
    """Feed the record until the response has ended, however it does; then store it."""
    try:
        if record.background:
            state.live[record.id] = record
        async for _, output in outputs_of(state, groups, [job.engine]):
            record.add(record.events.feed(output))
    except NvcliError as error:
        record.error = error
        record.add(record.events.fail(error))
    except asyncio.CancelledError:
        record.add(record.events.cancel())
        raise
    finally:
        groups.close()
        state.live.pop(record.id, None)
        if record.stores and (record.background or record.events.response["status"] != "cancelled"):
            _store(state, record)
        record.end()
        if record.background:
            state.leave()


def _store(state: ServerState, record: Record) -> None:
    body = record.events.response
    size = len(dumps(body)) + len(dumps(record.items)) + len(dumps(record.log))
    state.responses.put(record.id, body, size, items=record.items, log=record.log)


async def create_response(http: HTTPRequest) -> ASGIApp:
    state: ServerState = http.app.state
    state.check_accepting()
    body = await read_object(http)
    job: Job = await prepare(http, lambda: make_job(state, body), is_slow=needs_grammar(body))
    note_request(http, job.request.chat.ignored_fields, job.prompt.num_truncated_tokens)
    record = _open_record(state, job)
    groups = start(state, [job.engine])
    if record.background:
        state.enter()
        queued = dict(record.events.response)
    record.add(record.events.start())
    record.task = asyncio.create_task(_run(state, job, record, groups))
    if job.request.chat.stream:
        events = _stream(record, 0)
        return EventStream(events, ping_interval=state.config.ping_interval)
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


def _entry(http: HTTPRequest) -> Entry:
    state: ServerState = http.app.state
    response_id = http.path_params["response_id"]
    entry = state.responses.get(response_id)
    if entry is None:
        raise _missing(response_id)
    return entry


async def get_response(http: HTTPRequest) -> ASGIApp:
    state: ServerState = http.app.state
    record = state.live.get(http.path_params["response_id"])
    query = http.query_params
    if query.get("stream", "false").lower() not in ("true", "1"):
        return JSONBody(record.events.response if record is not None else _entry(http).body)
    after = query.get("starting_after", "-1")
    if not after.lstrip("-").isdecimal() or len(after) > 9:
        raise InvalidParameterError("starting_after must be a number", param="starting_after")
    if record is None:
        entry = _entry(http)
        log = entry.extra["log"]

        async def replay() -> AsyncGenerator[bytes, None]:
            for event in log[max(0, int(after) + 1) :]:
                yield named_event(event["type"], event)

        return EventStream(replay())
    events = _stream(record, max(0, int(after) + 1))
    return EventStream(events, ping_interval=state.config.ping_interval)


async def delete_response(http: HTTPRequest) -> Response:
    state: ServerState = http.app.state
    response_id = http.path_params["response_id"]
    record = state.live.get(response_id)
    if record is not None and record.task is not None:
        record.stores = False
        record.task.cancel()
    elif not state.responses.delete(response_id):
        raise _missing(response_id)
    return JSONBody({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(http: HTTPRequest) -> Response:
    state: ServerState = http.app.state
    record = state.live.get(http.path_params["response_id"])
    if record is None:
        body = _entry(http).body
        if not body["background"]:
            raise BadRequestError("only a response in the background can be cancelled")
        return JSONBody(body)
    assert record.task is not None, "a live response has a task"
    record.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await record.task
    return JSONBody(record.events.response)


async def list_input_items(http: HTTPRequest) -> Response:
    state: ServerState = http.app.state
    record = state.live.get(http.path_params["response_id"])
    items = record.items if record is not None else _entry(http).extra["items"]
    return JSONBody(page(items, **read_page(http, default_order="desc")))


async def count_input_tokens(http: HTTPRequest) -> Response:
    state: ServerState = http.app.state
    body = await read_object(http)
    job: Job = await prepare(http, lambda: make_job(state, {"input": "", **body}))
    count = len(job.prompt.token_ids)
    return JSONBody({"object": "response.input_tokens", "input_tokens": count})


async def compact(http: HTTPRequest) -> Response:
    raise NotFoundError("/v1/responses/compact is not supported", hint="Use truncation: auto.")


async def finish_background(state: ServerState) -> None:
    """End what runs in the background; the server goes down."""
    for record in list(state.live.values()):
        record.error = GenerationError("the server is shutting down", "aborted", 503)
        if record.task is not None:
            record.task.cancel()
