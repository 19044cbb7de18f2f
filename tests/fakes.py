"""`FakeLLM`: the `LLM` interface with scripted replies, for the command line and the REPL."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from nvcli.errors import NvcliError
from nvcli.types import (
    FinishReason,
    Message,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    ToolCall,
    Usage,
)


@dataclass
class Reply:
    """One scripted answer. `text` and `reasoning` arrive in the pieces given; a piece is a token.

    `before` runs ahead of each delta with its number (to sleep, to send a signal); `error` is
    raised after the pieces.
    """

    text: str | Sequence[str] = ""
    reasoning: str | Sequence[str] | None = None
    finish_reason: FinishReason = FinishReason.STOP
    tool_calls: tuple[ToolCall, ...] = ()
    error: NvcliError | None = None
    delay_s: float = 0.0
    prefill_s: float = 0.0
    before: Callable[[int], None] | None = None


@dataclass
class Request:
    """What `stream` was called with."""

    prompt: str | Sequence[Message]
    params: SamplingParams
    enable_thinking: bool
    raw: bool
    text: str
    was_closed_early: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    schema: Mapping[str, Any] | None = None
    answers_now: bool = False


class FakeStream(Iterator[RequestOutput]):
    """The deltas of a reply; `close_thinking` leaves out the rest of its reasoning."""

    def __init__(self, deltas: Generator[RequestOutput], request: Request) -> None:
        self._deltas = deltas
        self._request = request

    def __next__(self) -> RequestOutput:
        return next(self._deltas)

    def close(self) -> None:
        self._deltas.close()

    def close_thinking(self) -> None:
        self._request.answers_now = True


STARTUP = SimpleNamespace(
    device="cpu",
    tensor_parallel_size=1,
    all_reduce="",
    dtype="float32",
    weights_dtype="float32",
    kv_cache_dtype="float32",
    deterministic=False,
    attention_backend="torch",
    attention_reason="the only one here",
    num_blocks=100,
    block_size=16,
    pool_bytes=2**29,
    weights_bytes=2**30,
    num_kernels=0,
    num_graphs=0,
    graph_bytes=0,
    stage_s={"weights": 0.1, "KV cache": 0.25},
)


@dataclass
class FakeLLM:
    """Answers with `replies` in turn, then repeats the last one. A token is a word."""

    replies: Sequence[Reply | str] = ("Paris.",)
    model_name: str = "fake"
    is_demo: bool = False
    max_model_len: int = 32768
    supports_thinking: bool = True
    requests: list[Request] = field(default_factory=list)
    is_closed: bool = False
    startup: Any = field(default_factory=lambda: STARTUP)
    _seen: list[str] = field(default_factory=list)

    def sampling(self, *, enable_thinking: bool = True, **overrides: Any) -> SamplingParams:
        values: dict[str, Any] = {"temperature": 0.6 if enable_thinking else 0.7, "top_p": 0.95}
        values.update({k: v for k, v in overrides.items() if v is not None})
        return SamplingParams(**values)

    def render(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Like Qwen3's template: reasoning of earlier turns is dropped."""
        parts = [f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages]
        return "".join(parts)

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def stats(self) -> Any:
        return SimpleNamespace(
            num_blocks=100, num_free_blocks=90, num_named_blocks=40, block_size=16
        )

    def stream(
        self,
        prompt: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        enable_thinking: bool = True,
        raw: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        if isinstance(prompt, str):
            text = prompt if raw else self.render([Message("user", prompt)])
        else:
            text = self.render(prompt)
        params = params or self.sampling(enable_thinking=enable_thinking)
        request = Request(prompt, params, enable_thinking, raw, text, tools=tools, schema=schema)
        reply = self.replies[min(len(self.requests), len(self.replies) - 1)]
        self.requests.append(request)
        reply = Reply(reply) if isinstance(reply, str) else reply
        return FakeStream(self._run(request, reply), request)

    def _run(self, request: Request, reply: Reply) -> Generator[RequestOutput]:
        words = request.text.split()
        cached = max((_common(words, seen.split()) for seen in self._seen), default=0)
        reasoning = _pieces(reply.reasoning) if request.enable_thinking else []
        pieces = [(None, piece) for piece in _pieces(reply.text)]
        deltas = [(piece, "") for piece in reasoning] + pieces
        start = time.monotonic()
        first = None
        time.sleep(reply.prefill_s)
        done = False
        answer = ""
        num_reasoning = 0
        try:
            for number, (thought, text) in enumerate(deltas, start=1):
                if thought is not None and request.answers_now:
                    continue
                if reply.before is not None:
                    reply.before(number)
                time.sleep(reply.delay_s)
                first = first or time.monotonic()
                answer += text
                num_reasoning += thought is not None
                is_last = number == len(deltas) and reply.error is None
                yield RequestOutput(
                    request_id="r",
                    text=text,
                    reasoning=thought,
                    token_ids=(number,),
                    tool_calls=reply.tool_calls if is_last else (),
                    finish_reason=reply.finish_reason if is_last else None,
                    usage=Usage(len(words), number, cached, num_reasoning),
                    times=RequestTimes(start, start, first, time.monotonic()),
                )
            if reply.error is not None:
                raise reply.error
            if not deltas:
                yield RequestOutput(
                    request_id="r",
                    finish_reason=reply.finish_reason,
                    tool_calls=reply.tool_calls,
                    usage=Usage(len(words), 0, cached),
                    times=RequestTimes(start, start, None, time.monotonic()),
                )
            done = True
        finally:
            request.was_closed_early = not done
            self._seen.append(request.text + answer)

    def close(self) -> None:
        self.is_closed = True


def _pieces(text: str | Sequence[str] | None) -> list[str]:
    if text is None:
        return []
    if isinstance(text, str):
        return [w for w in text.replace(" ", " \0").replace("\n", "\n\0").split("\0") if w]
    return list(text)


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
