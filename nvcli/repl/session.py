"""A conversation without a terminal: turns, settings, the context meter.

A turn that brought no answer text (cancelled early, failed, cut while thinking) stays visible in
the transcript but is not sent again, so the next prompt never holds an unanswered question. The
messages of the other turns are sent unchanged each time: their keys and values are in the prefix
cache, and `undo` and `retry` cost no prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nvcli.errors import InvalidParameterError, NvcliError, UsageError
from nvcli.repl.screen import repair
from nvcli.types import FinishReason, Message, RequestOutput, SamplingParams, fold_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class Startup(Protocol):
    """How the model was loaded (`nvcli.engine.model_runner.StartupReport`)."""

    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def attention_backend(self) -> str: ...
    @property
    def attention_reason(self) -> str: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def pool_bytes(self) -> int: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def stage_s(self) -> Mapping[str, float]: ...


class ChatModel(Protocol):
    """What a conversation needs of `nvcli.llm.LLM`."""

    @property
    def model_name(self) -> str: ...
    @property
    def is_demo(self) -> bool: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def supports_thinking(self) -> bool: ...
    @property
    def startup(self) -> Startup: ...
    def sampling(self, *, enable_thinking: bool = True, **overrides: Any) -> SamplingParams: ...
    def render(self, messages: Sequence[Message], *, enable_thinking: bool = True) -> str: ...
    def count_tokens(self, text: str) -> int: ...
    def stream(
        self,
        prompt: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        enable_thinking: bool = True,
        raw: bool = False,
    ) -> Iterator[RequestOutput]: ...
    def stats(self) -> Any: ...
    def close(self) -> None: ...


SETTINGS: Mapping[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "presence_penalty": float,
    "repetition_penalty": float,
    "max_tokens": int,
    "stop": str,
    "seed": int,
    "think_budget": int,
}
_PARAMETER = {"think_budget": "thinking_budget"}


def parse_setting(key: str, value: str) -> tuple[str, Any]:
    """A setting as typed, as a sampling parameter's name and value; `default` gives None.

    Raises `UsageError` for an unknown key and `InvalidParameterError` for a bad value.
    """
    name = key.replace("-", "_")
    if name not in SETTINGS:
        raise UsageError(f"there is no setting {key!r}", hint=f"Known: {', '.join(SETTINGS)}.")
    if value == "default":
        return _PARAMETER.get(name, name), None
    kind = SETTINGS[name]
    try:
        parsed: Any = (value,) if kind is str else kind(value)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise InvalidParameterError(f"{key} must be {what}, got {value!r}", param=key) from None
    name = _PARAMETER.get(name, name)
    SamplingParams(**{name: parsed})
    return name, parsed


@dataclass
class Turn:
    """A question and what came of it."""

    user: str
    output: RequestOutput | None = None
    is_interrupted: bool = False

    @property
    def is_answered(self) -> bool:
        return self.output is not None and self.output.text.strip() != ""


@dataclass(frozen=True)
class ContextUse:
    """How full the context is, and what of it the engine holds."""

    used: int
    limit: int
    cached_blocks: int
    num_blocks: int
    block_size: int
    cached_tokens: int  # of the last prompt, found in the prefix cache


@dataclass
class Session:
    """Everything `/show` shows. `turn` is the only method that runs the model."""

    llm: ChatModel
    system: str | None = None
    think: bool = True
    overrides: dict[str, Any] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)

    def messages(self) -> list[Message]:
        """The conversation as the next prompt will hold it."""
        result = [Message("system", self.system)] if self.system else []
        for turn in self.turns:
            if turn.output is not None and turn.is_answered:
                result.append(Message("user", turn.user))
                reasoning = turn.output.reasoning
                result.append(Message("assistant", turn.output.text, reasoning=reasoning))
        return result

    def sampling(self, **overrides: Any) -> SamplingParams:
        return self.llm.sampling(enable_thinking=self.think, **{**self.overrides, **overrides})

    def turn(self, text: str, **overrides: Any) -> Iterator[RequestOutput]:
        """Ask, and yield the answer's deltas. Closing the iterator keeps what came so far.

        Raises `RequestError` (a prompt too long, for one); the turn is then not kept.
        """
        turn = Turn(repair(text))
        params = self.sampling(**overrides)
        prompt = [*self.messages(), Message("user", turn.user)]
        deltas: list[RequestOutput] = []
        stream = self.llm.stream(prompt, params, enable_thinking=self.think)
        self.turns.append(turn)
        turn.is_interrupted = True  # until the stream has ended
        try:
            for delta in stream:
                deltas.append(delta)
                yield delta
            turn.is_interrupted = False
        except NvcliError:
            if not deltas:
                self.turns.pop()
            raise
        finally:
            if deltas:
                turn.output = fold_outputs(deltas)
            close = getattr(stream, "close", None)
            if close is not None:
                close()

    def retry(self, **overrides: Any) -> Iterator[RequestOutput]:
        """Ask the last question again; the old answer comes back if the new one never starts.

        Raises `UsageError` when there is none.
        """
        if not self.turns:
            raise UsageError("there is nothing to retry")
        old = self.turns.pop()
        position = len(self.turns)
        try:
            yield from self.turn(old.user, **overrides)
        finally:
            if not self.turns[position:] or self.turns[position].output is None:
                self.turns[position:] = [old]

    def undo(self, count: int = 1) -> list[Turn]:
        """Take the last `count` turns back; returns them. Raises `UsageError` for too many."""
        if not 1 <= count <= len(self.turns):
            have = f"{len(self.turns)} turn{'' if len(self.turns) == 1 else 's'}"
            raise UsageError(f"cannot undo {count}: the conversation has {have}")
        taken = self.turns[-count:]
        del self.turns[-count:]
        return taken

    def clear(self) -> None:
        """Start over; the system prompt and the settings stay."""
        self.turns.clear()

    def set(self, key: str, value: str) -> None:
        """Raises `UsageError` for an unknown key or a value out of range."""
        name, parsed = parse_setting(key, value)
        if parsed is None:
            self.overrides.pop(name, None)
        else:
            self.overrides[name] = parsed

    def prompt_text(self) -> str:
        """The exact text of the conversation so far, as the model would read it."""
        return self.llm.render(self.messages(), enable_thinking=self.think)

    def context(self) -> ContextUse:
        """Tokens of the conversation against the limit, and the engine's cache."""
        messages = self.messages()
        used = self.llm.count_tokens(self.prompt_text()) if messages else 0
        stats = self.llm.stats()
        last = self.turns[-1].output if self.turns else None
        return ContextUse(
            used=used,
            limit=self.llm.max_model_len,
            cached_blocks=stats.num_named_blocks,
            num_blocks=stats.num_blocks,
            block_size=stats.block_size,
            cached_tokens=last.usage.cached_tokens if last else 0,
        )


# --- numbers as the status line prints them ------------------------------------------------------


def short_count(count: int) -> str:
    """A token count in few characters, in the units limits come in: 812, 2.1k, 32k."""
    if count < 1024:
        return str(count)
    thousands = count / 1024
    return f"{thousands:.1f}k" if thousands < 9.95 and count % 1024 else f"{thousands:.0f}k"


def spaced(count: int) -> str:
    return f"{count:,}".replace(",", " ")


def startup_lines(report: Startup) -> list[str]:
    """What `-v` and `/show model` tell: where it runs, what it holds, what took how long."""
    tokens = report.num_blocks * report.block_size
    lines = [
        f"{report.device}, {report.dtype}, attention {report.attention_backend}"
        f" ({report.attention_reason})",
        f"weights {report.weights_bytes / 2**30:.2f} GiB, KV cache {report.pool_bytes / 2**30:.2f}"
        f" GiB for {spaced(tokens)} tokens",
    ]
    stages = [f"{name} {seconds:.2f} s" for name, seconds in report.stage_s.items()]
    return [*lines, ", ".join(stages)] if stages else lines


def context_meter(used: int, limit: int) -> str:
    return f"ctx {short_count(used)}/{short_count(limit)} ({100 * used / max(limit, 1):.0f} %)"


def statistics_line(output: RequestOutput, limit: int, *, is_interrupted: bool = False) -> str:
    """`412 tok · 96.1 tok/s · TTFT 38 ms · ctx 2.1k/32k (6 %) · cached 1 830 tok · stop`."""
    usage, times = output.usage, output.times
    parts = [f"{spaced(usage.completion_tokens)} tok"]
    speed = times.tokens_per_s(usage.completion_tokens) if times else None
    if speed is not None:
        parts.append(f"{speed:.1f} tok/s")
    if times is not None and times.ttft_s is not None:
        parts.append(f"TTFT {times.ttft_s * 1e3:.0f} ms")
    parts.append(context_meter(usage.total_tokens, limit))
    if usage.cached_tokens:
        parts.append(f"cached {spaced(usage.cached_tokens)} tok")
    reason = output.finish_reason
    parts.append("interrupted" if is_interrupted else str(reason or FinishReason.ABORT))
    return " · ".join(parts)
