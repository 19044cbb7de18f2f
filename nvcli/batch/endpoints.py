"""OpenAI's batch lines by their `url`: the request of each endpoint, and the body of its answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from nvcli.errors import InvalidParameterError
from nvcli.protocol import UnsupportedEndpointError, UnsupportedFieldError
from nvcli.protocol.pooling import EmbeddingRequest, embedding_body, parse_embedding
from nvcli.protocol.response_events import ResponseEvents
from nvcli.protocol.response_items import read_items, to_messages
from nvcli.protocol.responses import ENCRYPTED, ResponsesRequest, parse_responses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nvcli.protocol import AnswerHead
    from nvcli.text import Tokenizer
    from nvcli.types import RequestOutput, SamplingParams

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
EMBEDDINGS_URL = "/v1/embeddings"
RESPONSES_URL = "/v1/responses"
URLS = (CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL, RESPONSES_URL)
_KNOWN_URLS = ("/v1/rerank", "/v1/score", "/v1/messages")


def endpoint_of(value: Mapping[str, Any]) -> str:
    """One of `URLS`. Raises `InvalidParameterError` and `UnsupportedEndpointError`."""
    method = value.get("method")
    if method is not None and (not isinstance(method, str) or method.upper() != "POST"):
        raise InvalidParameterError("method must be POST", param="method")
    url = value.get("url")
    if not isinstance(url, str):
        raise InvalidParameterError("url is missing", param="url")
    try:
        path = urlsplit(url).path.rstrip("/")
    except ValueError as error:
        raise InvalidParameterError("url cannot be read", param="url") from error
    if path in URLS:
        return path
    if path in _KNOWN_URLS:
        raise UnsupportedEndpointError(f"url: {path} is not supported in a batch", param="url")
    raise UnsupportedEndpointError(
        f"url: there is no endpoint {path[:80]!r}",
        hint=f"Use {', '.join(URLS[:-1])} or {URLS[-1]}.",
        param="url",
    )


def read_embedding(body: object) -> EmbeddingRequest:
    """Checked without a model; `dimensions` is checked against it when it is there."""
    return parse_embedding(body, hidden_size=None)


def read_responses(body: object) -> ResponsesRequest:
    """With its messages: in a batch nothing is stored, so there is nothing to refer to.

    Raises `InvalidParameterError` and `UnsupportedFieldError`.
    """
    request = parse_responses(body)
    for name, is_set in (
        ("previous_response_id", request.previous_response_id is not None),
        ("background", request.background),
        ("truncation", request.truncates),
        ("include", ENCRYPTED in request.include),
        ("tools", bool(request.mcp)),
    ):
        if is_set:
            raise UnsupportedFieldError(
                f"{name}: what it asks for is not supported in a batch", param=name
            )
    items = read_items(request.input, lambda _: None)
    messages = to_messages(items, instructions=request.instructions, decrypt=_refuse_sealed)
    if not messages:
        raise InvalidParameterError("input holds no message", param="input")
    return replace(request, chat=replace(request.chat, messages=messages))


def _refuse_sealed(_: str) -> NoReturn:
    raise UnsupportedFieldError(
        "encrypted_content: only the server that sealed it can open it", param="input"
    )


def responses_body(
    request: ResponsesRequest,
    output: RequestOutput,
    head: AnswerHead,
    *,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """The response that the events of a stream would fold to."""
    events = ResponseEvents(
        request, head, params=params, tokenizer=tokenizer, encrypt=_refuse_sealed
    )
    for _ in (*events.start(), *events.feed(output)):
        pass
    return {**events.response, "store": False}


def embeddings_body(
    request: EmbeddingRequest, outputs: Sequence[Sequence[RequestOutput]], *, model: str
) -> dict[str, Any]:
    pooled = [group[0].pooled or b"" for group in outputs]
    num_tokens = sum(group[0].usage.prompt_tokens for group in outputs)
    return embedding_body(request, pooled, model=model, num_tokens=num_tokens)
