"""Answers of a server as the engine's outputs: what `nvcli.batch.attached` reads."""

from __future__ import annotations

import base64
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvcli.batch.endpoints import CHAT_URL, COMPLETIONS_URL, EMBEDDINGS_URL
from nvcli.client import read_usage
from nvcli.types import FinishReason, RequestOutput, RequestTimes, ToolCall, Usage

if TYPE_CHECKING:
    from nvcli.errors import NvcliError


@dataclass(slots=True)
class HttpRequest:
    """Stands where the engine's `Request` does."""

    request_id: str
    url: str
    body: dict[str, Any]
    num_outputs: int

    @property
    def params(self) -> _Count:
        return _Count(self.num_outputs)


@dataclass(frozen=True, slots=True)
class _Count:
    """What the run asks of sampling parameters."""

    n: int

    @property
    def num_sequences(self) -> int:
        return self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOutput(RequestOutput):
    """The first of a request's outputs brings the whole answer, for lines in OpenAI's envelope."""

    body: dict[str, Any] | None = None
    status: int = 500


def failed_outputs(
    request: HttpRequest, error: NvcliError, *, code: str | None = None, status: int = 500
) -> list[HttpOutput]:
    return [
        HttpOutput(
            request_id=request.request_id,
            index=index,
            finish_reason=FinishReason.ERROR,
            error=str(error),
            error_code=code or error.code,
            status=status,
        )
        for index in range(request.num_outputs)
    ]


def read_outputs(request: HttpRequest, status: int, value: Any, began: float) -> list[HttpOutput]:
    """Raises `KeyError` and its like for what is no answer."""
    if status != 200:
        from nvcli.errors import RequestError

        error = value.get("error") if isinstance(value, dict) else None
        given = error if isinstance(error, dict) else {}
        message = str(given.get("message") or f"the server answered {status}")
        code = str(given.get("code") or "request_error")
        return failed_outputs(request, RequestError(message), code=code, status=status)
    times = RequestTimes(began, None, None, time.monotonic())
    answers = _answers(request.url, value)
    outputs = []
    for index in range(request.num_outputs):
        answer = answers[index]
        outputs.append(
            HttpOutput(
                request_id=request.request_id,
                index=index,
                usage=read_usage(value.get("usage") or {}) if index == 0 else Usage(),
                times=times,
                body=value if index == 0 else None,
                **answer,
            )
        )
    return outputs


def _answers(url: str, value: dict[str, Any]) -> list[dict[str, Any]]:
    if url == CHAT_URL:
        return [_chat_answer(choice) for choice in value["choices"]]
    if url == COMPLETIONS_URL:
        return [
            {"text": choice["text"] or "", "finish_reason": _reason(choice)}
            for choice in value["choices"]
        ]
    if url == EMBEDDINGS_URL:
        return [
            {"finish_reason": FinishReason.LENGTH, "pooled": _floats(item["embedding"])}
            for item in value["data"]
        ]
    return [_response_answer(value)]


def _chat_answer(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    calls = tuple(
        ToolCall(i, call["id"], call["function"]["name"], call["function"]["arguments"])
        for i, call in enumerate(message.get("tool_calls") or ())
    )
    return {
        "text": message.get("content") or "",
        "reasoning": message.get("reasoning_content") or message.get("reasoning"),
        "tool_calls": calls,
        "finish_reason": _reason(choice),
    }


def _response_answer(value: dict[str, Any]) -> dict[str, Any]:
    parts = [
        part["text"]
        for item in value["output"]
        if item["type"] == "message"
        for part in item["content"]
        if part["type"] == "output_text"
    ]
    is_cut = value.get("status") == "incomplete"
    reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
    return {"text": "".join(parts), "finish_reason": reason}


def _floats(embedding: Any) -> bytes:
    if isinstance(embedding, str):
        return base64.b64decode(embedding)
    return struct.pack(f"<{len(embedding)}f", *embedding)


def _reason(choice: dict[str, Any]) -> FinishReason:
    try:
        return FinishReason(choice["finish_reason"])
    except ValueError:  # a word of another server's
        return FinishReason.STOP
