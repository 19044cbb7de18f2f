"""One response from request to end: its prompt, its turns, and the record others follow.

prompt -> engine -> calls of MCP tools? -> prompt with their results -> engine -> ... -> end
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool

from nvcli.errors import ContextLengthError, InvalidParameterError, NvcliError
from nvcli.protocol import AnswerHead, prepare_chat
from nvcli.protocol.response_events import ResponseEvents
from nvcli.protocol.response_items import check_outputs, read_items, to_messages
from nvcli.protocol.responses import ResponsesRequest, parse_responses
from nvcli.protocol.tools import Tools
from nvcli.server.errors import PreviousResponseError, TimeoutExceededError, as_error
from nvcli.server.generate import start, turn_request
from nvcli.server.json_io import dumps
from nvcli.server.response_mcp import McpSession, check_approvals

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from nvcli.engine.engine import Request
    from nvcli.protocol import ChatRequest, PreparedPrompt
    from nvcli.protocol.response_frame import Event
    from nvcli.server.bridge import OutputGroups
    from nvcli.server.state import ServerState

logger = logging.getLogger("nvcli")


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

    async def follow(self, position: int) -> AsyncGenerator[Event, None]:
        """Events from a position on, to the end."""
        while True:
            while position < len(self.log):
                yield self.log[position]
                position += 1
            if self.is_ended:
                return
            self._changed.clear()
            await self._changed.wait()


# --- the prompt ----------------------------------------------------------------------------------


class _StoredItems:
    """Items of all stored responses by id; looked for only when a request refers to one."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._items: dict[str, dict[str, Any]] | None = None

    def find(self, item_id: str) -> dict[str, Any] | None:
        if self._items is None:
            self._items = {
                item["id"]: item
                for entry in self._state.responses.entries()
                for item in (*entry.extra["items"], *entry.body["output"])
            }
        return self._items.get(item_id)


def make_job(state: ServerState, body: dict[str, Any]) -> Job:
    """Check, join with what was stored, render, tokenize. Tools of MCP servers come later."""
    request = parse_responses(body, is_strict=state.config.is_strict)
    state.check_model(request.chat.model)
    for tools in request.mcp:
        state.mcp.check(tools)
    items: list[dict[str, Any]] = []
    if request.previous_response_id is not None:
        entry = state.responses.get(request.previous_response_id)
        if entry is None:
            raise PreviousResponseError(
                f"there is no stored response {request.previous_response_id[:100]!r}",
                hint="Only responses with store: true are kept, the newest of them.",
                param="previous_response_id",
            )
        items = [*entry.extra["items"], *entry.body["output"]]
    num_before = len(items)
    items += read_items(request.input, _StoredItems(state).find)
    check_outputs(items, num_before)
    check_approvals(request, items, num_before)
    chat = request.chat
    if request.mcp and not chat.tools.definitions:
        chat = replace(chat, tools=Tools())  # what can be forced is not known yet
    prompt = _render(state, request, chat, items)
    return Job(request, items, prompt, turn_request(state, request.chat, prompt))


def _render(
    state: ServerState,
    request: ResponsesRequest,
    chat: ChatRequest,
    items: list[dict[str, Any]],
    names: Mapping[tuple[str, str], str] | None = None,
) -> PreparedPrompt:
    """The prompt; with `truncation: auto` without the oldest items, as many as do not fit."""
    limit = state.llm.max_model_len
    items = list(items)
    while True:
        messages = to_messages(
            items, instructions=request.instructions, decrypt=state.sealer.open, names=names
        )
        if not messages:
            raise InvalidParameterError("input holds no message", param="input")
        is_last = len(items) <= 1 or not request.truncates
        prompt = None
        try:
            prompt = prepare_chat(
                replace(chat, messages=messages),
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


# --- the run -------------------------------------------------------------------------------------


def open_record(state: ServerState, job: Job) -> Record:
    events = ResponseEvents(
        job.request,
        AnswerHead.new("resp_", job.request.chat.model or state.model),
        params=job.engine.params,
        tokenizer=state.tokenizer,
        encrypt=state.sealer.seal,
    )
    return Record(events, job.items, job.request.store, job.request.background)


async def run(state: ServerState, job: Job, record: Record, groups: OutputGroups | None) -> None:
    """Feed the record until the response has ended, however it does; then store it.

    `groups` is what `start` gave; None with MCP tools, whose prompt is not known before.
    """
    try:
        if record.background:
            state.live[record.id] = record
        if groups is not None:
            await _turn(record, groups)
        else:
            await _run_with_tools(state, job, record)
    except NvcliError as error:
        record.error = error
        record.add(record.events.fail(error))
    except asyncio.CancelledError:
        record.add(record.events.cancel())
        raise
    except Exception as error:  # a fault of ours; whoever follows must still see an end
        record.error = as_error(error)
        record.add(record.events.fail(record.error))
        logger.exception("response %s failed", record.id)
    finally:
        if groups is not None:
            groups.close()
        state.live.pop(record.id, None)
        if record.stores and (record.background or record.events.response["status"] != "cancelled"):
            _store(state, record)
        record.end()
        if record.background:
            state.leave()


async def _turn(record: Record, groups: OutputGroups) -> None:
    async for _, output in groups.outputs():
        record.add(record.events.feed(output))


async def _run_with_tools(state: ServerState, job: Job, record: Record) -> None:
    session = McpSession(state.mcp, job.request, job.items, record.events, record.add)
    timeout = state.config.request_timeout
    try:
        async with asyncio.timeout(timeout):
            await session.open()
            await session.run_approved()
            await _turns(state, job, record, session)
    except TimeoutError:
        raise TimeoutExceededError(timeout) from None
    finally:
        session.close()


async def _turns(state: ServerState, job: Job, record: Record, session: McpSession) -> None:
    """The model speaks and its calls are made, until it makes none that a server can answer."""
    request, events = job.request, record.events
    limit = request.chat.sampling.get("max_tokens")
    while True:
        chat = replace(request.chat, tools=session.next_tools())
        items = [*job.items, *events.response["output"]]

        def prepare(chat: ChatRequest = chat, items: list[dict[str, Any]] = items) -> Request:
            prompt = _render(state, request, chat, items, session.names)
            return turn_request(state, chat, prompt, events.num_output_tokens)

        engine = await run_in_threadpool(prepare)
        events.begin_turn()
        with closing(start(state, [engine], is_admitted=True)) as groups:
            await _turn(record, groups)
        if not events.pending:
            return
        await session.run_pending()
        is_spent = limit is not None and events.num_output_tokens >= limit
        if is_spent or events.asks_client():
            record.add(events.complete(is_cut=is_spent))
            return


def _store(state: ServerState, record: Record) -> None:
    body = record.events.response
    size = len(dumps(body)) + len(dumps(record.items)) + len(dumps(record.log))
    state.responses.put(record.id, body, size, items=record.items, log=record.log)
