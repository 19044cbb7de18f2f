"""`POST /v1/completions`: prompts continued, one choice for each of their outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvcli.errors import InvalidParameterError, NvcliError
from nvcli.protocol import (
    DEFAULT_MAX_TOKENS,
    AnswerHead,
    CompletionRequest,
    completion_body,
    engine_request,
    parse_completion,
    prepare_completion,
)
from nvcli.protocol.chunks import CompletionChunks
from nvcli.server.chat import needs_grammar, note_request
from nvcli.server.errors import error_body
from nvcli.server.generate import prepare, run_to_end, start
from nvcli.server.json_io import JSONBody, read_object
from nvcli.server.sse import DONE, EventStream, data_event, data_events

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request as HTTPRequest
    from starlette.types import ASGIApp

    from nvcli.engine.engine import Request
    from nvcli.server.bridge import OutputGroups
    from nvcli.server.state import ServerState

MAX_SEQUENCES = 2048  # prompts times outputs of one request


@dataclass(frozen=True, slots=True)
class CompletionJob:
    request: CompletionRequest
    engine: list[Request]
    num_truncated: int
    head: AnswerHead

    @property
    def prompt_token_ids(self) -> list[list[int]]:
        return [request.prompt_token_ids for request in self.engine]


def completion_job(state: ServerState, body: dict[str, Any]) -> CompletionJob:
    """Check and tokenize. Raises every error that is the request's own fault."""
    request = parse_completion(body, is_strict=state.config.is_strict)
    model = state.check_model(request.model)
    llm = state.llm
    sampling = {"max_tokens": DEFAULT_MAX_TOKENS, **request.sampling}
    count = len(request.prompts) * (sampling.get("best_of") or sampling.get("n", 1))
    if count > MAX_SEQUENCES:
        raise InvalidParameterError(
            f"prompt times n asks for {count:,} outputs, at most {MAX_SEQUENCES:,}", param="n"
        )
    prompts = prepare_completion(request, llm.tokenizer, max_model_len=llm.max_model_len)
    engine = [
        engine_request(
            llm,
            prompt,
            request,
            request_id=state.bridge.new_id(),
            is_streaming=request.stream,
            sampling=sampling,
        )
        for prompt in prompts
    ]
    num_truncated = sum(prompt.num_truncated_tokens for prompt in prompts)
    return CompletionJob(request, engine, num_truncated, AnswerHead.new("cmpl-", model))


async def create_completion(state: ServerState, http: HTTPRequest) -> ASGIApp:
    state.check_accepting()
    body = await read_object(http)
    job: CompletionJob = await prepare(
        http, lambda: completion_job(state, body), is_slow=needs_grammar(body)
    )
    note_request(http, job.request.ignored_fields, job.num_truncated)
    if job.request.stream:
        groups = start(state, job.engine)
        events = _events(state, job, groups)
        ping_interval = state.config.ping_interval
        return EventStream(events, ping_interval=ping_interval, close=groups.close)
    outputs = await run_to_end(state, http, job.engine)
    return JSONBody(
        completion_body(
            job.request, outputs, job.head, state.tokenizer, prompt_token_ids=job.prompt_token_ids
        )
    )


async def _events(
    state: ServerState, job: CompletionJob, groups: OutputGroups
) -> AsyncGenerator[bytes, None]:
    chunks = CompletionChunks(
        job.request, job.head, state.tokenizer, prompt_token_ids=job.prompt_token_ids
    )
    try:
        async for number, output in groups.outputs():
            events = data_events(chunks.encode(number, output))
            if events:
                yield events
        yield data_events(chunks.usage()) + DONE
    except NvcliError as error:
        yield data_event(error_body(error)) + DONE
    finally:
        groups.close()
