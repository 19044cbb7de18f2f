"""A scripted engine behind the real `EngineThread`: `FakeLLM` has the interface of `nvcli.llm.LLM`.

An answer depends on the prompt's ids, the seed and the parameters only, as the real engine's does;
the tokenizer takes bytes. Text in a prompt steers it: `FAIL` ends with an engine error, `THINK` has
reasoning, `CALL` a tool call.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

from nvcli.config import EngineConfig
from nvcli.engine.engine_thread import EngineThread
from nvcli.engine.grammar import GrammarError
from nvcli.errors import ContextLengthError, InvalidParameterError, RequestError
from nvcli.types import (
    FinishReason,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    TokenLogprob,
    ToolCall,
    Usage,
)
from tests.fakes import STARTUP

VOCABULARY = 256


class ByteTokenizer:
    """One token a byte; a conversation is its turns with their roles."""

    size = VOCABULARY

    def id_of(self, token: str) -> int | None:
        return None

    supports_thinking = True
    tool_call_id = end_tool_call_id = None  # tool calls are scripted

    def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def render(self, messages: Any, *, tools: Any = None, **options: Any) -> str:
        head = "" if tools is None else f"[{len(tools)} tools]"
        return head + "".join(f"<{m.role}>{m.content}\n" for m in messages)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


@dataclass
class _Running:
    request: Any
    index: int
    tokens: list[int]
    done: int = 0
    started: float = field(default_factory=time.monotonic)


class FakeEngine:
    """What `EngineThread` drives: `max_num_seqs` sequences, one token each a step."""

    def __init__(self, *, max_num_seqs: int, delay_s: float, length: int, max_model_len: int):
        self.max_num_seqs = max_num_seqs
        self.delay_s = delay_s
        self.length = length
        self.max_model_len = max_model_len
        self.waiting: list[_Running] = []
        self.running: list[_Running] = []
        self.ended: list[RequestOutput] = []
        self.admitted: list[str] = []
        self.num_busy: list[int] = []  # sequences in each step
        self.keeps_log = True

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self.ended)

    def validate(self, request: Any) -> None:
        if not request.prompt_token_ids:
            raise RequestError("the prompt is empty")
        size = len(request.prompt_token_ids)
        if error := ContextLengthError.of_prompt(size, self.max_model_len):
            raise error
        params = request.params
        for name in ("prompt", "stop_token_ids", "logit_bias"):
            ids = request.prompt_token_ids if name == "prompt" else getattr(params, name) or ()
            for token_id in ids:
                if not 0 <= token_id < VOCABULARY:
                    raise InvalidParameterError(f"{name} holds token id {token_id}", param=name)

    def add(self, request: Any, *, is_valid: bool = False) -> None:
        if self.keeps_log:
            self.admitted.append(request.request_id)
        for index in range(request.params.n):
            tokens = answer_tokens(request, index, self.length)
            self.waiting.append(_Running(request, index, tokens))

    def abort(self, request_id: str) -> bool:
        for group in (self.waiting, self.running):
            for running in [r for r in group if r.request.request_id == request_id]:
                group.remove(running)
                self.ended.append(self._output(running, FinishReason.ABORT))
        return True

    def step(self, deliver: Callable[[list[RequestOutput]], None]) -> None:
        room = self.max_num_seqs - len(self.running)
        self.running += self.waiting[:room]
        self.waiting = self.waiting[room:]
        if self.keeps_log:
            self.num_busy.append(len(self.running))
        if self.delay_s:
            time.sleep(self.delay_s)
        outputs, self.ended = self.ended, []
        for running in list(self.running):
            running.done += 1
            if running.done >= len(running.tokens):
                self.running.remove(running)
                outputs.append(self._output(running, FinishReason.STOP))
        if outputs:
            deliver(outputs)

    def _output(self, running: _Running, reason: FinishReason) -> RequestOutput:
        request = running.request
        prompt = bytes(request.prompt_token_ids)
        now = time.monotonic()
        extra: dict[str, Any] = {}
        if b"FAIL" in prompt and reason is FinishReason.STOP:
            reason = FinishReason.ERROR
            extra = {"error": "a step failed", "error_code": "engine_error"}
        if request.pools is not None:
            reason, running.tokens = FinishReason.LENGTH, []
            state = blake2b(prompt, digest_size=64).digest()
            extra["pooled"] = struct.pack("<64f", *state)
        if b"THINK" in prompt and request.is_chat:
            extra["reasoning"] = "let me see"
        if b"CALL" in prompt and request.parse_tools:
            extra["tool_calls"] = (ToolCall(0, "call_0", "look", '{"at":"é"}'),)
            reason = FinishReason.TOOL_CALLS
        if request.params.logprobs is not None:
            entry = ((97, -0.5),) * bool(request.params.logprobs)
            extra["logprobs"] = tuple(TokenLogprob(t, -0.5, 1, entry) for t in running.tokens)
        return RequestOutput(
            request_id=request.request_id,
            index=running.index,
            text=bytes(running.tokens).decode("ascii"),
            token_ids=tuple(running.tokens),
            finish_reason=reason,
            usage=Usage(len(prompt), len(running.tokens)),
            times=RequestTimes(running.started, running.started, running.started, now),
            **extra,
        )


def answer_tokens(request: Any, index: int, length: int) -> list[int]:
    """Letters that depend on prompt, seed and index."""
    params = request.params
    data = repr((request.prompt_token_ids, params.seed, params.temperature, index)).encode()
    state = blake2b(data, digest_size=32).digest()
    count = 1 + state[0] % length
    if params.max_tokens is not None:
        count = min(count, max(1, params.max_tokens))
    return [97 + state[i % 32] % 26 for i in range(count)]


class FakeLLM:
    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        max_num_seqs: int = 4,
        delay_s: float = 0.0,
        length: int = 8,
        max_model_len: int = 1000,
        keeps_log: bool = True,
    ) -> None:
        self.config = config or EngineConfig()
        if self.config.max_num_seqs is None:
            self.config = self.config.replace(max_num_seqs=max_num_seqs)
        self.engine = FakeEngine(
            max_num_seqs=self.config.max_num_seqs or max_num_seqs,
            delay_s=delay_s,
            length=length,
            max_model_len=self.config.max_model_len or max_model_len,
        )
        self.engine.keeps_log = keeps_log
        self.tokenizer = ByteTokenizer()
        self.startup = STARTUP
        self.model_name = "fake"
        self.is_demo = False
        self.supports_thinking = True
        self.is_closed = False
        self.grammars: list[str] = []
        self._thread = EngineThread(self.engine)  # type: ignore[arg-type]

    hidden_size = 64

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    def sampling(self, *, enable_thinking: bool = True, **overrides: Any) -> SamplingParams:
        values: dict[str, Any] = {"temperature": 0.6 if enable_thinking else 0.7}
        return SamplingParams(**{**values, **overrides})

    def compile_grammar(self, spec: Any) -> Any:
        self.grammars.append(spec.source)  # the answers are scripted
        if "no such type" in spec.source:
            raise GrammarError(f"{spec.param}: no such type", param=spec.param)
        return None

    def submit(self, request: Any, sink: Any) -> None:
        self._thread.submit(request, sink)

    def abort(self, request_id: str) -> None:
        self._thread.abort(request_id)

    def stats(self) -> Any:
        return SimpleNamespace()

    def close(self) -> None:
        self.is_closed = True
        self._thread.close()
