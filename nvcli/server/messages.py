"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API over the same engine."""

from __future__ import annotations

import uuid
from contextlib import closing
from typing import TYPE_CHECKING, Any

from nvcli.errors import NvcliError
from nvcli.protocol import ChatRequest, PreparedPrompt, prepare_chat
from nvcli.protocol.message_events import MessageEvents
from nvcli.protocol.messages import parse_messages_request
from nvcli.server.chat import needs_grammar, note_request
from nvcli.server.errors import anthropic_error_body
from nvcli.server.generate import prepare, start, turn_request, while_connected
from nvcli.server.json_io import JSONBody, read_object
from nvcli.server.sse import EventStream, named_event

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from nvcli.engine.engine import Request
    from nvcli.server.bridge import OutputGroups
    from nvcli.server.state import ServerState


def _prompt(
    state: ServerState, body: dict[str, Any], *, needs_limit: bool
) -> tuple[ChatRequest, PreparedPrompt]:
    """Check, render and tokenize. Raises every error that is the request's own fault."""
    request = parse_messages_request(
        body, is_strict=state.config.is_strict, needs_limit=needs_limit
    )
    state.check_model(request.model)
    limit = state.llm.max_model_len
    return request, prepare_chat(request, state.tokenizer, max_model_len=limit)


async def create_message(state: ServerState, http: HTTPRequest) -> ASGIApp:
    state.check_accepting()
    body = await read_object(http)

    def work() -> tuple[ChatRequest, Request]:
        request, prompt = _prompt(state, body, needs_limit=True)
        return request, turn_request(state, request, prompt)

    request, engine = await prepare(http, work, is_slow=needs_grammar(body))
    note_request(http, request.ignored_fields, 0)
    events = MessageEvents(
        request,
        message_id=f"msg_{uuid.uuid4().hex}",
        model=request.model or state.model,
        sign=state.sealer.sign,
    )
    groups = start(state, [engine])
    if request.stream:
        stream = _stream(events, groups, http.scope["request_id"])
        ping_interval = state.config.ping_interval
        return EventStream(stream, ping_interval=ping_interval, close=groups.close)

    async def run() -> None:
        async for _, output in groups.outputs():
            for _ in events.feed(output):
                pass

    with closing(groups):
        await while_connected(http, run())
    return JSONBody(events.message)


async def _stream(
    events: MessageEvents, groups: OutputGroups, request_id: str
) -> AsyncGenerator[bytes, None]:
    try:
        async for _, output in groups.outputs():
            data = b"".join(named_event(event["type"], event) for event in events.feed(output))
            if data:
                yield data
    except NvcliError as error:
        yield named_event("error", anthropic_error_body(error, request_id))
    finally:
        groups.close()


async def count_tokens(state: ServerState, http: HTTPRequest) -> Response:
    body = await read_object(http)
    _, prompt = await prepare(http, lambda: _prompt(state, body, needs_limit=False))
    return JSONBody({"input_tokens": len(prompt.token_ids)})
