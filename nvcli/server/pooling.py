"""`/v1/embeddings`, `/rerank` and `/score`: prompts through the engine, one vector or pair of
logits read from each."""

from __future__ import annotations

import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

from nvcli.protocol import AnswerHead
from nvcli.protocol.pooling import (
    EmbeddingRequest,
    PairRequest,
    answer_ids,
    check_ids,
    embedding_body,
    embedding_prompts,
    pair_prompts,
    parse_embedding,
    parse_rerank,
    parse_score,
    rerank_body,
    score_body,
)
from nvcli.protocol.prepare import pooling_request
from nvcli.server.front import ignore_fields
from nvcli.server.generate import prepare, run_to_end
from nvcli.server.json_io import JSONBody, read_object

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response

    from nvcli.server.state import ServerState


async def _pool(
    state: ServerState, http: HTTPRequest, prompts: list[list[int]], pools: tuple[int, ...]
) -> list[bytes]:
    requests = [pooling_request(state.bridge.new_id(), prompt, pools) for prompt in prompts]
    outputs = await run_to_end(state, http, requests)
    pooled = [group[0].pooled for group in outputs]
    assert all(data is not None for data in pooled), "a request that pools gives numbers"
    return [data for data in pooled if data is not None]


async def create_embeddings(state: ServerState, http: HTTPRequest) -> Response:
    state.check_accepting()
    body = await read_object(http)

    def work() -> tuple[EmbeddingRequest, list[list[int]]]:
        llm = state.llm
        strict = state.config.is_strict
        request = parse_embedding(body, hidden_size=llm.hidden_size, is_strict=strict)
        state.check_model(request.model)
        check_ids(request, llm.vocab_size)
        limit = llm.max_model_len
        return request, embedding_prompts(request, llm.tokenizer, max_model_len=limit)

    request, prompts = await prepare(http, work)
    ignore_fields(http.scope, request.ignored_fields)
    pooled = await _pool(state, http, prompts, ())
    num_tokens = sum(map(len, prompts))
    model = request.model or state.model
    return JSONBody(embedding_body(request, pooled, model=model, num_tokens=num_tokens))


async def _judge(
    state: ServerState, http: HTTPRequest, parse: Callable[[dict[str, Any]], PairRequest]
) -> tuple[PairRequest, list[bytes], int]:
    state.check_accepting()
    body = await read_object(http)

    def work() -> tuple[PairRequest, list[list[int]], tuple[int, int]]:
        request = parse(body)
        state.check_model(request.model, is_optional=True)
        llm = state.llm
        prompts = pair_prompts(request, llm.tokenizer, max_model_len=llm.max_model_len)
        return request, prompts, answer_ids(llm.tokenizer)

    request, prompts, ids = await prepare(http, work)
    ignore_fields(http.scope, request.ignored_fields)
    pooled = await _pool(state, http, prompts, ids)
    return request, pooled, sum(map(len, prompts))


async def rerank(state: ServerState, http: HTTPRequest) -> Response:
    """Jina's, and with /v2 Cohere's: there documents come back only when asked for."""
    gives = not http.url.path.startswith("/v2")
    parse = partial(parse_rerank, is_strict=state.config.is_strict, returns_documents=gives)
    request, pooled, num_tokens = await _judge(state, http, parse)
    return JSONBody(
        rerank_body(
            request,
            pooled,
            response_id=f"rerank-{uuid.uuid4().hex}",
            model=request.model or state.model,
            num_tokens=num_tokens,
        )
    )


async def score(state: ServerState, http: HTTPRequest) -> Response:
    parse = partial(parse_score, is_strict=state.config.is_strict)
    request, pooled, num_tokens = await _judge(state, http, parse)
    head = AnswerHead.new("score-", request.model or state.model)
    return JSONBody(score_body(pooled, head, num_tokens=num_tokens))
