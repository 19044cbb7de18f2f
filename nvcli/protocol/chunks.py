"""Streams of chat and completions: from the engine's deltas to OpenAI's chunks.

Deltas folded are the whole output (`nvcli.text.parsers`), so the chunks folded are the body that
the same request gets without a stream. Each encoder gives lists of JSON values; who sends them
frames them as events.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from nvcli.protocol.bodies import SYSTEM_FINGERPRINT, finish_reason, prompt_text, usage_body
from nvcli.protocol.logprobs import (
    LegacyLogprobs,
    TextLogprobs,
    chat_logprob,
    prompt_logprobs_body,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nvcli.protocol.bodies import AnswerHead
    from nvcli.protocol.chat import ChatRequest
    from nvcli.protocol.completions import CompletionRequest
    from nvcli.text import Tokenizer
    from nvcli.types import RequestOutput, ToolCall

_PAD_TO = 16  # characters; lengths of single tokens do not show through an obfuscated stream


class ChatChunks:
    """One `chat.completion.chunk` stream, with its n choices."""

    def __init__(self, request: ChatRequest, head: AnswerHead, tokenizer: Tokenizer | None) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._head: dict[str, Any] = {
            **head.json("chat.completion.chunk"),
            "service_tier": "default",
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }
        self._started: set[int] = set()
        self._logprobs: dict[int, TextLogprobs] = {}
        self._last: dict[int, RequestOutput] = {}

    def encode(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The chunks of one delta: role first, then each channel on its own, the end by itself."""
        index, request = output.index, self._request
        if index not in self._started:
            self._started.add(index)
            yield self._first(output)
        chunks = []
        if output.reasoning and request.thinking.is_shown:
            both = {"reasoning": output.reasoning, "reasoning_content": output.reasoning}
            chunks.append(self._chunk(output, both, size=len(output.reasoning)))
        logprobs = self._take_logprobs(output)
        if output.text or logprobs is not None:
            delta: dict[str, Any] = {"content": output.text}
            chunks.append(self._chunk(output, delta, logprobs=logprobs, size=len(output.text)))
        for call in output.tool_calls:
            delta = {"tool_calls": [_call_delta(call)]}
            chunks.append(self._chunk(output, delta, size=len(call.arguments)))
        if output.is_finished:
            self._last[index] = output
            chunks.append(self._chunk(output, {}, reason=finish_reason(output)))
        if request.return_token_ids and output.token_ids:
            if not chunks:
                chunks.append(self._chunk(output, {}))
            chunks[0]["choices"][0]["token_ids"] = list(output.token_ids)
        yield from chunks

    def usage(self) -> list[dict[str, Any]]:
        """The one chunk after the last choice has ended, where it was asked for."""
        if not self._request.include_usage:
            return []
        outputs = [self._last[index] for index in sorted(self._last)]
        return [{**self._head, "choices": [], "usage": usage_body([outputs])}]

    def _first(self, output: RequestOutput) -> dict[str, Any]:
        request = self._request
        text = request.messages[-1].content if request.echo else None
        content = text if isinstance(text, str) else ""
        chunk = self._chunk(
            output, {"role": "assistant", "content": content, "refusal": None}, size=len(content)
        )
        if request.sampling.get("prompt_logprobs") is not None and output.prompt_logprobs:
            chunk["prompt_logprobs"] = prompt_logprobs_body(output.prompt_logprobs, self._tokenizer)
        return chunk

    def _take_logprobs(self, output: RequestOutput) -> dict[str, Any] | None:
        if not self._request.has_logprobs or output.logprobs is None:
            return None
        aligner = self._logprobs.get(output.index)
        if aligner is None:
            aligner = self._logprobs[output.index] = TextLogprobs(self._tokenizer)
        as_ids = self._request.return_tokens_as_token_ids
        entries = [
            chat_logprob(entry, self._tokenizer, as_ids=as_ids) for entry in aligner.feed(output)
        ]
        return {"content": entries, "refusal": None} if entries else None

    def _chunk(
        self,
        output: RequestOutput,
        delta: dict[str, Any],
        *,
        size: int = 0,
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": output.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        if reason is not None:
            choice["stop_reason"] = output.stop_reason
        chunk = {**self._head, "choices": [choice]}
        if self._request.include_usage:
            chunk["usage"] = None
        if self._request.include_obfuscation:
            chunk["obfuscation"] = secrets.token_urlsafe(_PAD_TO)[: _PAD_TO - size % _PAD_TO]
        return chunk


def _call_delta(call: ToolCall) -> dict[str, Any]:
    """The first delta of a call has id and name, the others only arguments."""
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


class CompletionChunks:
    """One stream of `text_completion` objects; choice `index` is prompt * n + i."""

    def __init__(
        self,
        request: CompletionRequest,
        head: AnswerHead,
        tokenizer: Tokenizer | None,
        *,
        prompt_token_ids: Sequence[Sequence[int]],
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._prompts = prompt_token_ids
        self._n = request.sampling.get("n", 1)
        self._head: dict[str, Any] = {
            **head.json("text_completion"),
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }
        self._started: set[int] = set()
        self._logprobs: dict[int, tuple[TextLogprobs, LegacyLogprobs]] = {}
        self._last: dict[int, RequestOutput] = {}

    def encode(self, number: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The chunks of one delta of prompt `number`."""
        index = number * self._n + output.index
        if index not in self._started:
            self._started.add(index)
            yield from self._echo(number, index, output)
        logprobs = self._take_logprobs(index, output)
        token_ids = output.token_ids if self._request.return_token_ids else ()
        if output.text or logprobs is not None or (token_ids and not output.is_finished):
            yield self._chunk(index, output.text, logprobs, token_ids=token_ids)
            token_ids = ()
        if output.is_finished:
            self._last[index] = output
            yield self._chunk(index, "", None, output, token_ids=token_ids)

    def usage(self) -> list[dict[str, Any]]:
        if not self._request.include_usage:
            return []
        groups = [
            [self._last[number * self._n + i] for i in range(self._n)]
            for number in range(len(self._prompts))
        ]
        return [{**self._head, "choices": [], "usage": usage_body(groups)}]

    def _echo(self, number: int, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        if not self._request.echo:
            if self._request.has_prompt_logprobs:
                chunk = self._chunk(index, "", None)
                entries = output.prompt_logprobs or ()
                body = prompt_logprobs_body(entries, self._tokenizer)
                chunk["choices"][0]["prompt_logprobs"] = body
                yield chunk
            return
        token_ids = self._prompts[number]
        logprobs = None
        if self._request.logprobs is not None:
            _, legacy = self._logprobs_of(index)
            legacy.add(token_ids, output.prompt_logprobs or [None] * len(token_ids))
            logprobs = legacy.take()
        text = prompt_text(self._request.prompts[number], token_ids, self._tokenizer)
        yield self._chunk(index, text, logprobs)

    def _logprobs_of(self, index: int) -> tuple[TextLogprobs, LegacyLogprobs]:
        if index not in self._logprobs:
            as_ids = self._request.return_tokens_as_token_ids
            legacy = LegacyLogprobs(self._tokenizer, as_ids=as_ids)
            self._logprobs[index] = TextLogprobs(self._tokenizer), legacy
        return self._logprobs[index]

    def _take_logprobs(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        aligner, legacy = self._logprobs_of(index)
        entries = aligner.feed(output)
        if not entries:
            return None
        legacy.add([entry.token_id for entry in entries], entries)
        return legacy.take()

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        ended: RequestOutput | None = None,
        *,
        token_ids: Sequence[int] = (),
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None if ended is None else finish_reason(ended),
        }
        if ended is not None:
            choice["stop_reason"] = ended.stop_reason
        if token_ids:
            choice["token_ids"] = list(token_ids)
        chunk = {**self._head, "choices": [choice]}
        if self._request.include_usage:
            chunk["usage"] = None
        return chunk
