"""`POST /v1/chat/completions`, streamed or not, and the completions that were stored."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nvcli.errors import NvcliError
from nvcli.protocol import (
    AnswerHead,
    ChatRequest,
    chat_body,
    engine_request,
    parse_chat,
    prepare_chat,
)
from nvcli.protocol.chat import read_metadata
from nvcli.protocol.chunks import ChatChunks
from nvcli.protocol.fields import Fields
from nvcli.protocol.structured import STRUCTURED_FIELDS
from nvcli.protocol.tools import Tools
from nvcli.server import chat_mcp
from nvcli.server.errors import NotFoundError, error_body
from nvcli.server.front import ignore_fields
from nvcli.server.generate import prepare, run_to_end, start, while_connected
from nvcli.server.json_io import JSONBody, dumps, read_object
from nvcli.server.sse import DONE, EventStream, data_event, data_events
from nvcli.server.store import Entry, page_of
from nvcli.types import RequestOutput, fold_outputs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from nvcli.engine.engine import Request
    from nvcli.protocol import PreparedPrompt
    from nvcli.server.bridge import OutputGroups
    from nvcli.server.state import ServerState

_GRAMMAR_FIELDS = (
    *STRUCTURED_FIELDS,
    *("response_format", "tools", "functions", "text", "output_config", "output_format"),
)
_NO_PARTS = {"name": None, "content": None, "content_parts": None, "refusal": None}


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A checked request, its prompt, and what the engine gets."""

    body: dict[str, Any]
    request: ChatRequest
    prompt: PreparedPrompt
    engine: Request
    head: AnswerHead

    def answer(self, state: ServerState, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        answer = chat_body(
            self.request,
            outputs,
            self.head,
            state.tokenizer,
            num_truncated_tokens=self.prompt.num_truncated_tokens,
        )
        if self.request.store:
            answer["metadata"] = self.request.metadata
            _remember(state, self, answer)
        return answer


def chat_job(state: ServerState, body: dict[str, Any]) -> ChatJob:
    """Check, render and tokenize. Raises every error that is the request's own fault."""
    config = state.config
    request = parse_chat(
        body, is_strict=config.is_strict, allow_template=config.allow_template, allow_mcp=True
    )
    model = state.check_model(request.model)
    for tools in request.mcp:
        state.mcp.check(tools)
    llm = state.llm
    without_servers = request
    if request.mcp and not request.tools.definitions:
        without_servers = replace(request, tools=Tools())  # what can be forced is not known yet
    prompt = prepare_chat(
        without_servers,
        llm.tokenizer,
        enable_thinking=config.enable_thinking,
        max_model_len=llm.max_model_len,
    )
    engine = engine_request(
        llm, prompt, request, request_id=state.bridge.new_id(), is_streaming=request.stream
    )
    return ChatJob(body, request, prompt, engine, AnswerHead.new("chatcmpl-", model))


async def create_chat_completion(state: ServerState, http: HTTPRequest) -> ASGIApp:
    state.check_accepting()
    body = await read_object(http)
    job: ChatJob = await prepare(http, lambda: chat_job(state, body), is_slow=needs_grammar(body))
    note_request(http, job.request.ignored_fields, job.prompt.num_truncated_tokens)
    close = None
    if job.request.mcp:
        state.bridge.check_room(1)
        deltas = chat_mcp.answer(state, job.request, job.engine)
        if not job.request.stream:
            return JSONBody(job.answer(state, [await while_connected(http, _folded(deltas))]))
    elif not job.request.stream:
        (outputs,) = await run_to_end(state, http, [job.engine])
        return JSONBody(job.answer(state, outputs))
    else:
        groups = start(state, [job.engine])
        deltas, close = _deltas(groups), groups.close
    events = _events(state, job, deltas)
    return EventStream(events, ping_interval=state.config.ping_interval, close=close)


async def _deltas(groups: OutputGroups) -> AsyncGenerator[RequestOutput, None]:
    with closing(groups):
        async for _, output in groups.outputs():
            yield output


async def _folded(deltas: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    try:
        return fold_outputs([output async for output in deltas])
    finally:
        await deltas.aclose()


def needs_grammar(body: dict[str, Any]) -> bool:
    """Whether a grammar may have to be compiled, which takes a while."""
    return any(body.get(name) for name in _GRAMMAR_FIELDS)


def note_request(http: HTTPRequest, ignored: tuple[str, ...], num_truncated: int) -> None:
    ignore_fields(http.scope, ignored)
    if num_truncated:
        header = (b"x-nvcli-truncated-prompt-tokens", str(num_truncated).encode())
        http.scope["extra_headers"].append(header)


async def _events(
    state: ServerState, job: ChatJob, outputs: AsyncGenerator[RequestOutput, None]
) -> AsyncGenerator[bytes, None]:
    chunks = ChatChunks(job.request, job.head, state.tokenizer)
    deltas: dict[int, list[RequestOutput]] = {}
    try:
        async for output in outputs:
            if job.request.store:
                deltas.setdefault(output.index, []).append(output)
            events = data_events(chunks.encode(output))
            if events:
                yield events
        if job.request.store:
            job.answer(state, [fold_outputs(deltas[index]) for index in sorted(deltas)])
        yield data_events(chunks.usage()) + DONE
    except NvcliError as error:
        yield data_event(error_body(error)) + DONE
    finally:
        await outputs.aclose()


# --- stored completions --------------------------------------------------------------------------


def _remember(state: ServerState, job: ChatJob, answer: dict[str, Any]) -> None:
    stored = {**answer, "request_id": job.head.id, "tool_choice": job.body.get("tool_choice")}
    stored["tools"] = job.body.get("tools")
    messages = [
        {"id": f"{job.head.id}-{i}", **_NO_PARTS, **message, **_parts(message)}
        for i, message in enumerate(job.body["messages"])
    ]
    size = len(dumps(stored)) + len(dumps(messages))
    state.completions.put(job.head.id, stored, size, messages=messages)


def _parts(message: dict[str, Any]) -> dict[str, Any]:
    """In a stored message `content` is text or null; a list of parts stands beside it."""
    content = message.get("content")
    return {"content": None, "content_parts": content} if isinstance(content, list) else {}


def _entry(state: ServerState, http: HTTPRequest) -> Entry:
    completion_id = http.path_params["completion_id"]
    entry = state.completions.get(completion_id)
    if entry is None:
        raise NotFoundError(
            f"there is no stored chat completion {completion_id[:100]!r}",
            hint="Only requests with store: true are kept.",
            param="completion_id",
        )
    return entry


async def list_chat_completions(state: ServerState, http: HTTPRequest) -> Response:
    wanted = {
        key.removeprefix("metadata[").removesuffix("]"): value
        for key, value in http.query_params.items()
        if key.startswith("metadata[")
    }
    model = http.query_params.get("model")
    items = [
        entry.body
        for entry in state.completions.entries()
        if (model is None or entry.body["model"] == model)
        and all(entry.body["metadata"].get(key) == value for key, value in wanted.items())
    ]
    return JSONBody(page_of(items, http, default_order="asc"))


async def get_chat_completion(state: ServerState, http: HTTPRequest) -> Response:
    return JSONBody(_entry(state, http).body)


async def list_chat_messages(state: ServerState, http: HTTPRequest) -> Response:
    messages = _entry(state, http).extra["messages"]
    return JSONBody(page_of(messages, http, default_order="asc"))


async def update_chat_completion(state: ServerState, http: HTTPRequest) -> Response:
    body = await read_object(http)
    entry = _entry(state, http)
    entry.body["metadata"] = read_metadata(Fields(body))
    return JSONBody(entry.body)


async def delete_chat_completion(state: ServerState, http: HTTPRequest) -> Response:
    entry = _entry(state, http)
    state.completions.delete(entry.id)
    return JSONBody({"object": "chat.completion.deleted", "id": entry.id, "deleted": True})
