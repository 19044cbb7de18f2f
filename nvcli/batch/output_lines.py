"""Output lines: one JSON object a record, in ASCII, on one physical line.

Simple records are `{"index", "id", "text", "thinking"?, "finish_reason", "usage", "timings",
"error"}`; OpenAI's lines get OpenAI's envelope with `index` beside it. A failure has the same keys
with null where there is nothing. What `--echo` copies stands under `input`.
"""

from __future__ import annotations

import json
import math
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import orjson

from nvcli.batch.attached_outputs import HttpOutput
from nvcli.batch.endpoints import embeddings_body, responses_body
from nvcli.batch.options import OutputFormat
from nvcli.batch.records import Failure, Kind
from nvcli.protocol import (
    AnswerHead,
    ChatRequest,
    CompletionRequest,
    chat_body,
    completion_body,
    usage_body,
)
from nvcli.protocol.pooling import EmbeddingRequest, unit_vector
from nvcli.text import call_json, repair_surrogates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvcli.batch.records import Record
    from nvcli.protocol import PreparedPrompt
    from nvcli.text import Tokenizer
    from nvcli.types import RequestOutput, SamplingParams

_SURROGATE = re.compile(r"\\ud[89a-f]")
_CONTROL = re.compile(r"[\\\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True, slots=True)
class LineWriter:
    """Turns ended records into lines."""

    output_format: OutputFormat
    model: str
    include_thinking: bool = False
    tokenizer: Tokenizer | None = None
    is_attached: bool = False  # a server has the tokenizer

    def _is_openai(self, kind: Kind | None) -> bool:
        if self.output_format is OutputFormat.AUTO:
            return kind is Kind.OPENAI
        return self.output_format is OutputFormat.OPENAI

    def failure(self, failure: Failure) -> bytes:
        if self.output_format is OutputFormat.TEXT:
            return b"\n"
        error = {"code": failure.code, "message": failure.message, "line": failure.line}
        if not self._is_openai(failure.kind):
            return encode_line(
                {
                    "index": failure.index,
                    "id": failure.id,
                    "text": None,
                    "finish_reason": None,
                    "usage": None,
                    "timings": None,
                    "error": error,
                    **_input(failure),
                }
            )
        kind = "invalid_request_error" if failure.status < 500 else "server_error"
        body = {"message": failure.message, "type": kind, "param": failure.param}
        response = {
            "status_code": failure.status,
            "request_id": _short_id("req-", failure),
            "body": {"error": {**body, "code": failure.code}},
        }
        return encode_line(self._envelope(failure, response, error))

    def success(
        self,
        record: Record,
        prompts: Sequence[PreparedPrompt],
        outputs: Sequence[Sequence[RequestOutput]],
        params: SamplingParams,
    ) -> bytes:
        """The line of a record whose outputs are all there: for each prompt, the n in order.

        `params` are what the engine got; a response repeats them.
        """
        if self.output_format is OutputFormat.TEXT:
            return text_line(outputs[0][0].text)
        if not self._is_openai(record.kind):
            return encode_line(self._simple(record, outputs))
        body = self._body(record, prompts, outputs, params)
        response = {"status_code": 200, "request_id": _short_id("req-", record), "body": body}
        return encode_line(self._envelope(record, response, None))

    def _envelope(
        self, record: Record | Failure, response: dict[str, Any], error: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {
            "id": _short_id("batch_req-", record),
            "custom_id": record.id,
            "index": record.index,
            "response": response,
            "error": error,
            **_input(record),
        }

    def _head(self, prefix: str, record: Record) -> AnswerHead:
        return AnswerHead(_short_id(prefix, record), int(time.time()), self.model)

    def _body(
        self,
        record: Record,
        prompts: Sequence[PreparedPrompt],
        outputs: Sequence[Sequence[RequestOutput]],
        params: SamplingParams,
    ) -> dict[str, Any]:
        first = outputs[0][0]
        if isinstance(first, HttpOutput) and first.body is not None:
            return first.body  # as the server gave it
        if isinstance(record.request, EmbeddingRequest):
            return embeddings_body(record.request, outputs, model=self.model)
        if record.responses is not None:
            return responses_body(
                record.responses,
                outputs[0][0],
                self._head("resp_", record),
                params=params,
                tokenizer=self.tokenizer,
            )
        if isinstance(record.request, ChatRequest):
            return chat_body(
                record.request,
                outputs[0],
                self._head("chatcmpl-", record),
                self.tokenizer,
                num_truncated_tokens=prompts[0].num_truncated_tokens,
            )
        return completion_body(
            record.request,
            outputs,
            self._head("cmpl-", record),
            self.tokenizer,
            prompt_token_ids=[prompt.token_ids for prompt in prompts],
        )

    def _simple(self, record: Record, outputs: Sequence[Sequence[RequestOutput]]) -> dict[str, Any]:
        first = outputs[0][0]
        value: dict[str, Any] = {"index": record.index, "id": record.id}
        value |= self._answer(record, first)
        every = [output for group in outputs for output in group]
        if len(every) > 1:
            value["choices"] = [self._answer(record, output) for output in every]
        value["usage"] = usage_body(outputs)
        times, num_tokens = first.times, first.usage.completion_tokens
        value["timings"] = None if times is None else times.as_json(num_tokens)
        return {**value, "error": None, **_input(record)}

    def _answer(self, record: Record, output: RequestOutput) -> dict[str, Any]:
        answer: dict[str, Any] = {"text": output.text}
        if isinstance(record.request, EmbeddingRequest) and output.pooled is not None:
            vector = unit_vector(output.pooled, record.request.dimensions)
            answer["embedding"] = vector.tolist()
        if self.include_thinking:
            answer["thinking"] = output.reasoning
        if output.tool_calls:
            answer["tool_calls"] = [call_json(call) for call in output.tool_calls]
        if output.logprobs is not None:
            answer["logprobs"] = [
                {"id": lp.token_id, "logprob": lp.logprob, "top": [list(pair) for pair in lp.top]}
                for lp in output.logprobs
            ]
        request = record.request
        if (self.tokenizer is None and not self.is_attached) or (
            isinstance(request, CompletionRequest) and request.return_token_ids
        ):
            answer["token_ids"] = list(output.token_ids)
        answer["finish_reason"] = output.finish_reason
        return answer


def _input(record: Record | Failure) -> dict[str, Any]:
    """The fields that `--echo` copies, under one key: their names may be ours."""
    return {"input": record.echo} if record.echo else {}


def _short_id(prefix: str, record: Record | Failure) -> str:
    data = f"{record.index} {record.id}".encode("utf-8", "surrogatepass")
    return f"{prefix}{blake2b(data, digest_size=12).hexdigest()}"


# --- encoding ------------------------------------------------------------------------------------

_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def encode_line(value: dict[str, Any]) -> bytes:
    """ASCII JSON and LF. Lone surrogates become U+FFFD, infinities null: the line always reads."""
    with suppress(TypeError, ValueError):  # a surrogate, a huge number
        line = orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)  # several times as fast
        if line.isascii() and b"\x7f" not in line:
            return line
    try:
        text = _ENCODER.encode(value)
    except ValueError:
        text = _ENCODER.encode(_clean(value))
    if _SURROGATE.search(text):
        text = _ENCODER.encode(_clean(value))
    return text.encode("ascii") + b"\n"


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return repair_surrogates(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def text_line(text: str) -> bytes:
    """One answer as one line: backslashes and control characters are escaped as JSON does."""

    def escape(match: re.Match[str]) -> str:
        return json.dumps(match[0])[1:-1] if match[0] < "\x7f" else f"\\u{ord(match[0]):04x}"

    return _CONTROL.sub(escape, repair_surrogates(text)).encode("utf-8") + b"\n"
