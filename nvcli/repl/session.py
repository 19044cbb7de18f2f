"""A conversation without a terminal: turns, settings, tools, the file it is saved in.

A turn that brought no answer text (cancelled early, failed, cut while thinking) stays visible in
the transcript but is not sent again, so the next prompt never holds an unanswered question. The
messages of the other turns are sent unchanged each time: their keys and values are in the prefix
cache, and `undo` and `retry` cost no prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvcli.errors import NvcliError, UsageError
from nvcli.repl.model import TokenModel
from nvcli.repl.numbers import ended_now
from nvcli.repl.screen import repair
from nvcli.repl.settings import parse_setting
from nvcli.repl.store import SessionFile
from nvcli.text.words import counted
from nvcli.types import (
    FinishReason,
    Message,
    RequestOutput,
    SamplingParams,
    ToolCall,
    Usage,
    fold_outputs,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nvcli.repl.model import ChatModel
    from nvcli.tools import Toolbox

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}  # the schema of `--format json` and `/json on`


@dataclass
class Turn:
    """A question and what came of it; `steps` are tool calls and results before the answer."""

    user: str
    output: RequestOutput | None = None
    is_interrupted: bool = False
    steps: list[Message] = field(default_factory=list)
    model: str = ""  # whose tokens the output's are

    @property
    def is_answered(self) -> bool:
        return self.output is not None and self.output.text.strip() != ""

    def messages(self) -> list[Message]:
        result = [Message("user", self.user), *self.steps]
        if self.output is not None and self.is_answered:
            text, reasoning = self.output.text, self.output.reasoning
            result.append(Message("assistant", text, reasoning=reasoning))
        return result


@dataclass(frozen=True)
class ContextUse:
    """How full the context is, and what of it the engine holds."""

    used: int
    limit: int
    cached_blocks: int | None  # None: the engine is a server's
    num_blocks: int
    block_size: int
    cached_tokens: int  # of the last prompt, found in the prefix cache


@dataclass
class Session:
    """Everything `/show` shows. `turn`, `resume`, `retry` and `extend` run the model."""

    llm: ChatModel
    system: str | None = None
    think: bool = True
    overrides: dict[str, Any] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    tools: Toolbox | None = None
    schema: Mapping[str, Any] | None = None
    file: SessionFile | None = None  # None: nothing is saved
    running: Any = None  # the stream that is being read

    # --- what the model reads --------------------------------------------------------------------

    def messages(self) -> list[Message]:
        """The conversation as the next prompt will hold it."""
        return self._messages_of(self.turns)

    def _messages_of(self, turns: Sequence[Turn]) -> list[Message]:
        result = [Message("system", self.system)] if self.system else []
        for turn in turns:
            if turn.is_answered:
                result += turn.messages()
        return result

    def definitions(self) -> list[dict[str, Any]] | None:
        return self.tools.definitions() if self.tools is not None and self.tools.names else None

    def sampling(self, **overrides: Any) -> SamplingParams:
        return self.llm.sampling(enable_thinking=self.think, **{**self.overrides, **overrides})

    def prompt_text(self) -> str:
        """The exact text of the conversation so far, as the model would read it."""
        return self.llm.render(
            self.messages(), enable_thinking=self.think, tools=self.definitions()
        )

    # --- running the model -----------------------------------------------------------------------

    def turn(self, text: str, **overrides: Any) -> Iterator[RequestOutput]:
        """Ask, and yield the answer's deltas. Closing the iterator keeps what came so far.

        Raises `RequestError` (a prompt too long, for one); the turn is then not kept.
        """
        turn = Turn(repair(text))
        prompt = [*self.messages(), Message("user", turn.user)]
        stream = self._stream(prompt, overrides)
        self.turns.append(turn)
        yield from self._run(turn, stream)

    def resume(self) -> Iterator[RequestOutput]:
        """Go on after tool results (`answer_calls`)."""
        turn = self.turns[-1]
        prompt = [*self._messages_of(self.turns[:-1]), *turn.messages()]
        yield from self._run(turn, self._stream(prompt, {}))

    def _stream(
        self, prompt: Sequence[Message], overrides: Mapping[str, Any]
    ) -> Iterator[RequestOutput]:
        more: dict[str, Any] = {}
        if self.definitions() is not None:
            more["tools"] = self.definitions()
        if self.schema is not None:
            more["schema"] = self.schema
        params = self.sampling(**overrides)
        return self.llm.stream(prompt, params, enable_thinking=self.think, **more)

    def _run(
        self, turn: Turn, stream: Iterator[RequestOutput], start: RequestOutput | None = None
    ) -> Iterator[RequestOutput]:
        deltas: list[RequestOutput] = []
        turn.is_interrupted = True  # until the stream has ended
        turn.model = self.llm.model_name
        self.running = stream
        try:
            if start is not None:
                deltas.append(start)
                yield start
            for delta in stream:
                deltas.append(delta)
                yield delta
            turn.is_interrupted = False
        except NvcliError:
            if not deltas and not turn.steps and turn in self.turns:
                self.turns.remove(turn)
            raise
        finally:
            self.running = None
            if deltas:
                output = fold_outputs(deltas)
                turn.output = ended_now(output) if turn.is_interrupted else output
            close = getattr(stream, "close", None)
            if close is not None:
                close()

    def answer_now(self) -> bool:
        """End the reasoning of the running answer. False where the model cannot."""
        close = getattr(self.running, "close_thinking", None)
        if close is not None:
            close()
        return close is not None

    def pending_calls(self) -> tuple[ToolCall, ...]:
        """The calls that the last answer waits for."""
        output = self.turns[-1].output if self.turns else None
        if output is None or output.finish_reason is not FinishReason.TOOL_CALLS:
            return ()
        return output.tool_calls if self.definitions() is not None else ()

    def answer_calls(self, results: Sequence[str]) -> None:
        """The results of `pending_calls`, in order; `resume` goes on."""
        turn = self.turns[-1]
        output = turn.output
        assert output is not None, "there are pending calls"
        calls, text = output.tool_calls, output.text or None
        turn.steps.append(Message("assistant", text, reasoning=output.reasoning, tool_calls=calls))
        for call, result in zip(calls, results, strict=True):
            turn.steps.append(Message("tool", result, tool_call_id=call.id, name=call.name))
        turn.output = None

    def retry(self, **overrides: Any) -> Iterator[RequestOutput]:
        """Ask the last question again; the old answer comes back if the new one never starts.

        Raises `UsageError` when there is none.
        """
        if not self.turns:
            raise UsageError("there is nothing to retry")
        yield from self._again(self.turns[-1].user, 1, overrides)

    def edit(self, text: str, count: int = 1) -> Iterator[RequestOutput]:
        """Ask `text` in place of the last `count` turns; they come back if it never starts."""
        yield from self._again(text, count, {})

    def _again(
        self, text: str, count: int, overrides: Mapping[str, Any]
    ) -> Iterator[RequestOutput]:
        old = self.undo(count)
        position = len(self.turns)
        try:
            yield from self.turn(text, **overrides)
        finally:
            if not self.turns[position:] or self.turns[position].output is None:
                self.turns[position:] = old

    # --- the last answer, token by token ---------------------------------------------------------

    def answer_ids(self) -> tuple[TokenModel, list[int], list[int]]:
        """(the model, the prompt's ids, the last answer's ids). Raises `UsageError`."""
        if not isinstance(self.llm, TokenModel):
            raise UsageError(
                "the model runs in a server, which keeps its tokens", hint="Use --attach never."
            )
        turn = self.turns[-1] if self.turns else None
        if turn is None or turn.output is None or not turn.output.token_ids:
            raise UsageError("there is no answer of this run yet")
        if turn.model != self.llm.model_name:
            raise UsageError(f"the last answer is of another model, {turn.model}")
        before = [*self._messages_of(self.turns[:-1]), Message("user", turn.user), *turn.steps]
        prompt = self.llm.prompt_ids(before, enable_thinking=self.think, tools=self.definitions())
        ids = list(turn.output.token_ids)
        while ids and self.llm.is_end(ids[-1]):
            ids.pop()
        return self.llm, prompt, ids

    def extend(self, answer_ids: Sequence[int]) -> Iterator[RequestOutput]:
        """Go on from a beginning of the last answer, or from another one; the first delta is that
        beginning. Its keys and values come from the prefix cache."""
        model, prompt, _ = self.answer_ids()
        if self.schema is not None:
            raise UsageError("an answer in JSON cannot be continued", hint="/json off, /schema off")
        text, reasoning, is_text = model.split_answer(prompt, answer_ids)
        num_reasoning = is_text.count(False) if reasoning is not None else 0
        start = RequestOutput(
            request_id="start",
            text=text,
            reasoning=reasoning,
            token_ids=tuple(answer_ids),
            usage=Usage(len(prompt), len(answer_ids), 0, num_reasoning),
        )
        tools = self.definitions() is not None
        stream = model.extend([*prompt, *answer_ids], self.sampling(), parse_tools=tools)
        old = self.turns.pop()
        turn = Turn(old.user, steps=list(old.steps))
        self.turns.append(turn)
        try:
            yield from self._run(turn, stream, start)
        finally:
            if turn.output is None:
                self.turns[-1] = old

    # --- changing it -----------------------------------------------------------------------------

    def undo(self, count: int = 1) -> list[Turn]:
        """Take the last `count` turns back; returns them. Raises `UsageError` for too many."""
        if not 1 <= count <= len(self.turns):
            have = counted(len(self.turns), "turn")
            raise UsageError(f"cannot undo {count}: the conversation has {have}")
        taken = self.turns[-count:]
        del self.turns[-count:]
        return taken

    def clear(self) -> None:
        """Start over; the system prompt and the settings stay."""
        self.turns.clear()

    def drop_oldest(self, room: int) -> int:
        """Forget turns from the beginning until the prompt is at least `room` tokens below the
        limit; returns how many."""
        count = 0
        while self.turns and self.context().used + room > self.llm.max_model_len:
            del self.turns[0]
            count += 1
        return count

    def set(self, key: str, value: str) -> None:
        """Raises `UsageError` for an unknown key or a value out of range."""
        name, parsed = parse_setting(key, value)
        if parsed is None:
            self.overrides.pop(name, None)
        else:
            self.overrides[name] = parsed

    # --- saving it -------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the file, where there is one. Raises `OSError`."""
        if self.file is None:
            return
        messages = [Message("system", self.system)] if self.system else []
        prefixes = []
        for turn in self.turns:
            if turn.is_answered:
                messages = [*messages, *turn.messages()]
                prefixes.append(messages)
        self.file.save(prefixes)

    def restore(self, messages: Sequence[Message]) -> None:
        """Take over a saved conversation."""
        self.turns.clear()
        self.system = None
        for message in messages:
            text = message.content if isinstance(message.content, str) else ""
            if message.role == "system":
                self.system = text
            elif message.role == "user":
                self.turns.append(Turn(text))
            elif self.turns and (message.role == "tool" or message.tool_calls):
                self.turns[-1].steps.append(message)
            elif self.turns:
                self.turns[-1].output = RequestOutput(
                    request_id="saved",
                    text=text,
                    reasoning=message.reasoning,
                    finish_reason=FinishReason.STOP,
                )

    def load(self, name: str) -> None:
        """Raises `UsageError` where there is none of that name."""
        file, messages = SessionFile.load(name)
        self.restore(messages)
        if self.file is not None:
            self.file = file

    def context(self) -> ContextUse:
        """Tokens of the conversation against the limit, and the engine's cache."""
        messages = self.messages()
        used = self.llm.count_tokens(self.prompt_text()) if messages else 0
        stats = self.llm.stats()
        last = self.turns[-1].output if self.turns else None
        return ContextUse(
            used=used,
            limit=self.llm.max_model_len,
            cached_blocks=stats.num_named_blocks if stats is not None else None,
            num_blocks=stats.num_blocks if stats is not None else 0,
            block_size=stats.block_size if stats is not None else 0,
            cached_tokens=last.usage.cached_tokens if last else 0,
        )
