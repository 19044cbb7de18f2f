"""The values that cross module borders: requests in, outputs out. Frozen and torch-free.

`SamplingParams` checks itself against ranges that need no model; what needs the vocabulary or the
context length is checked by `Engine.add`. Token ids are plain ints everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Self

from nvcli.errors import InvalidParameterError

if TYPE_CHECKING:
    from collections.abc import Sequence

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]

MAX_LOGPROBS = 20  # OpenAI's limit for `top_logprobs`
MAX_N = 128  # OpenAI's limit for `n`
MAX_BAD_WORDS = 2048  # sequences; with their length they make a table on the device
MAX_BAD_WORD_TOKENS = 64
MAX_SEED = 2**63 - 1
MIN_REPETITION = 1e-20  # what a float32 logit may be divided by
MAX_INT = 2**31 - 1  # what the device's tables hold
FP8_BLOCK = 128  # rows and columns of an fp8 weight that share one scale


class FinishReason(StrEnum):
    """Why a sequence ended. `ABORT` and `ERROR` are the engine's own and never leave over HTTP."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One function call of the assistant; `arguments` is the JSON text exactly as generated.

    In a streamed `RequestOutput` the fields are deltas: `name` comes once, `arguments` in pieces
    that belong to the call at `index`.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `content` is text, or OpenAI content parts, or None."""

    role: Role
    content: str | Sequence[Mapping[str, Any]] | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


def _check(condition: bool, param: str, value: object, rule: str) -> None:
    if not condition:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise InvalidParameterError(f"{param} must be {rule}, got {shown}", param=param)


def _is_int(value: object, low: int, high: int = MAX_INT) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _between(low: int, high: int, value: object) -> str:
    """The range in words; an upper bound that only the machine sets is left out, unless the value
    is above it.
    """
    is_hit = isinstance(value, int) and value > high
    return f"from {low} to {high}" if is_hit or low < 0 or high < MAX_INT else f"of at least {low}"


def check_answer_limit(value: object, param: str = "max_tokens") -> None:
    """Check a `max_tokens` where an answer is asked for: `InvalidParameterError` below 1.

    `SamplingParams` itself takes 0 too: only the prompt is computed (echo, scoring, embeddings).
    """
    rule = f"a whole number {_between(1, MAX_SEED, value)}"
    _check(_is_int(value, 1, MAX_SEED), param, value, rule)


def _in_range(value: object, low: float, high: float) -> bool:
    """NaN is in no range."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _as_tuple(param: str, value: object, rule: str) -> tuple[Any, ...]:
    """A list, tuple or set as a tuple; text is no collection here."""
    _check(isinstance(value, list | tuple | set | frozenset), param, value, rule)
    return tuple(value)  # type: ignore[arg-type]


def _token_ids(param: str, value: object) -> tuple[int, ...]:
    token_ids = _as_tuple(param, value, "a list of token ids")
    for token_id in token_ids:
        _check(_is_int(token_id, 0, MAX_SEED), param, token_id, "token ids, whole numbers from 0")
    return token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token and when to stop.

    The logits go through penalties and bias, allowed and bad tokens, and min_tokens; then through
    temperature, top_k, top_p and min_p, in this order, as in transformers and vLLM. From what is
    left a token is drawn by noise that depends on (seed, position) alone, so a seed gives the same
    text whatever else runs. `temperature=0` is greedy: the best token, the lowest id on a tie.

    Checks itself: a value out of range raises `InvalidParameterError`, which names the parameter.
    """

    temperature: float = 1.0  # 0..2
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # -2..2, over output ids
    frequency_penalty: float = 0.0  # -2..2, over output counts
    repetition_penalty: float = 1.0  # (0, 2], over prompt and output ids
    logit_bias: Mapping[int, float] | None = None  # id -> -100..100
    allowed_token_ids: tuple[int, ...] | None = None  # only these may be sampled
    bad_token_ids: tuple[int, ...] = ()  # never sampled
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that are never completed
    max_tokens: int | None = None  # None: the room left in the context; 0: only the prompt
    min_tokens: int = 0  # EOS and stop ids are masked until then
    stop: tuple[str, ...] = ()  # strings that end the text; never part of it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None  # None: one is drawn for the request
    n: int = 1
    best_of: int | None = None  # sample so many, return the n with the best mean logprob
    logprobs: int | None = None  # None: off; 0: the chosen token; k: and the k best
    prompt_logprobs: int | None = None
    thinking_budget: int | None = None  # reasoning tokens before thinking is closed by force

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            _check(isinstance(value, bool), name, value, "True or False")
        stop: object = self.stop  # a lone string is accepted, as in OpenAI's API
        stops = (stop,) if isinstance(stop, str) else _as_tuple("stop", stop, "a list of strings")
        for text in stops:
            _check(isinstance(text, str) and text != "", "stop", text, "strings that are not empty")
        words = _as_tuple("bad_words", self.bad_words, "a list of token sequences")
        words = tuple(_token_ids("bad_words", word) for word in words)
        _check(() not in words, "bad_words", (), "token sequences that are not empty")
        rule = f"at most {MAX_BAD_WORDS:,} token sequences"
        _check(len(words) <= MAX_BAD_WORDS, "bad_words", len(words), rule)
        longest = max(map(len, words), default=0)
        rule = f"token sequences of at most {MAX_BAD_WORD_TOKENS} tokens"
        _check(longest <= MAX_BAD_WORD_TOKENS, "bad_words", longest, rule)
        settled: dict[str, object] = {
            "stop": stops,
            "bad_words": words,
            "bad_token_ids": _token_ids("bad_token_ids", self.bad_token_ids),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
        }
        if self.allowed_token_ids is not None:
            settled["allowed_token_ids"] = _token_ids("allowed_token_ids", self.allowed_token_ids)
            _check(settled["allowed_token_ids"] != (), "allowed_token_ids", (), "not empty")
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        bias: object = self.logit_bias or {}
        _check(isinstance(bias, Mapping), "logit_bias", bias, "a mapping of token ids to numbers")
        for token_id, value in (self.logit_bias or {}).items():
            _check(_is_int(token_id, 0, MAX_SEED), "logit_bias", token_id, "of token ids from 0")
            _check(_in_range(value, -100, 100), "logit_bias", value, "from -100 to 100")

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("temperature", 0, 2),
            ("min_p", 0, 1),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
        ):
            value = getattr(self, name)
            _check(_in_range(value, low, high), name, value, f"from {low} to {high}")
        for name, least, high in (("top_p", 0, 1), ("repetition_penalty", MIN_REPETITION, 2)):
            value = getattr(self, name)
            is_above = _in_range(value, 0, high) and value > 0
            _check(is_above, name, value, f"over 0, at most {high}")
            _check(value >= least, name, value, f"at least {least}")
        rule = f"a whole number {_between(0, MAX_INT, self.top_k)}"
        _check(_is_int(self.top_k, -1), "top_k", self.top_k, rule)
        for name, low, high in (
            ("min_tokens", 0, MAX_INT),
            ("thinking_budget", 0, MAX_INT),
            ("seed", -MAX_SEED, MAX_SEED),
            ("n", 1, MAX_N),
            ("best_of", 1, MAX_N),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            value = getattr(self, name)
            is_off = value is None and name not in ("min_tokens", "n")
            ok = is_off or _is_int(value, low, high)
            _check(ok, name, value, f"a whole number {_between(low, high, value)}")
        if self.max_tokens is not None:  # the engine cuts it to the context
            if not _is_int(self.max_tokens, 0, 0):
                check_answer_limit(self.max_tokens)
            fits = self.min_tokens <= self.max_tokens
            rule = f"at most max_tokens ({self.max_tokens})"
            _check(fits, "min_tokens", self.min_tokens, rule)
        if self.best_of is not None:
            _check(self.n <= self.best_of, "best_of", self.best_of, f"at least n ({self.n})")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def num_sequences(self) -> int:
        """Sequences the engine runs for this request."""
        return self.best_of or self.n

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token, from the model's own distribution (before penalties,
    temperature and filters), with its rank (1 is the best) and the best alternatives, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one output; each of a request's n has its own."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens, how many came from the prefix cache
    reasoning_tokens: int = 0  # of the completion tokens, how many lie in the think block

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Moments of a request on one monotonic clock, in seconds; None until they happen."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def queue_s(self) -> float | None:
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def decode_s(self) -> float | None:
        if self.finished is None or self.first_token is None:
            return None
        return self.finished - self.first_token

    @property
    def total_s(self) -> float | None:
        return None if self.finished is None else self.finished - self.arrival

    def tokens_per_s(self, num_output_tokens: int) -> float | None:
        """Decode speed: tokens after the first over the time after the first."""
        if num_output_tokens < 2 or not self.decode_s:
            return None
        return (num_output_tokens - 1) / self.decode_s

    def as_json(self, num_output_tokens: int) -> dict[str, float | None]:
        """Milliseconds, and the decode speed; null for what did not happen."""
        values = {
            f"{name}_ms": None if seconds is None else seconds * 1e3
            for name, seconds in (
                ("queue", self.queue_s),
                ("ttft", self.ttft_s),
                ("decode", self.decode_s),
                ("total", self.total_s),
            )
        }
        values["tokens_per_s"] = self.tokens_per_s(num_output_tokens)
        return {name: None if v is None else round(v, 3) for name, v in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one sequence of a request produced.

    From `stream` each value is a delta: `text`, `reasoning`, `tool_calls`, `token_ids` and
    `logprobs` hold only what is new, and the last one has a `finish_reason`. From `generate` and
    `chat` the fields hold the whole output. Folding the deltas gives the whole (`fold_outputs`).
    """

    request_id: str
    index: int = 0  # which of the n
    text: str = ""
    reasoning: str | None = None  # None where no think block was opened
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    content_flags: tuple[bool, ...] | None = None  # with logprobs: which tokens belong to `text`
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # first entry None
    pooled: bytes | None = None  # of a pooling request: float32, little-endian
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    usage: Usage = field(default_factory=Usage)
    times: RequestTimes | None = None
    error: str | None = None  # with finish_reason ERROR
    error_code: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


def fold_tool_calls(deltas: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """Join tool-call deltas of one output by index, in order of first appearance."""
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        seen = calls.get(delta.index)
        calls[delta.index] = (
            delta
            if seen is None
            else replace(
                seen,
                id=seen.id or delta.id,
                name=seen.name + delta.name,
                arguments=seen.arguments + delta.arguments,
            )
        )
    return tuple(calls.values())


def fold_outputs(deltas: Sequence[RequestOutput]) -> RequestOutput:
    """Join the deltas of one (request, index), in order, into the whole output.

    Raises `ValueError` when `deltas` is empty.
    """
    if not deltas:
        raise ValueError("fold_outputs needs at least one delta")
    last = deltas[-1]
    reasoning = [d.reasoning for d in deltas if d.reasoning is not None]
    logprobs = [d.logprobs for d in deltas if d.logprobs is not None]
    flags = [d.content_flags for d in deltas if d.content_flags is not None]
    return replace(
        last,
        text="".join(d.text for d in deltas),
        reasoning="".join(reasoning) if reasoning else None,
        tool_calls=fold_tool_calls([call for d in deltas for call in d.tool_calls]),
        token_ids=tuple(token_id for d in deltas for token_id in d.token_ids),
        logprobs=tuple(lp for part in logprobs for lp in part) if logprobs else None,
        content_flags=tuple(flag for part in flags for flag in part) if flags else None,
        prompt_logprobs=next(
            (d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None
        ),
    )
