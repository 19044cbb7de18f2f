"""OutputRouter: one token stream in, three channels out - content, reasoning, tool calls.

The channels are told apart by token id (`<think>`, `</think>` and the tool tags are single tokens),
so text that merely spells a tag changes nothing. Where the output starts is read from the end of
the rendered prompt, not from what the request asked for.

    UNDECIDED --<think>--> REASONING --</think>--> CONTENT <--end tag or malformed--+
        |                      |                      |                             |
        +--anything else-------|--------------------->+------start tag----------> CALL
                               +----------------------start tag------------------->+

Newlines next to a tag belong to the markup: they are held back while a tag may follow and dropped
when it does. Stop strings are looked for in content only. What was emitted is never taken back, so
the deltas folded are the whole output by construction.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from nvcli.errors import RequestError
from nvcli.text.detokenizer import IncrementalDetokenizer, StopMatcher
from nvcli.text.messages import THINK_END, THINK_START
from nvcli.text.tool_formats import TOOL_FORMATS, CallStatus
from nvcli.text.trimmers import ContentTrimmer, NewlineTrimmer
from nvcli.types import FinishReason, ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nvcli.text.detokenizer import Vocabulary
    from nvcli.text.tool_formats import CallPiece, ToolCallParser

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
AFTER_THINKING = "\n\n"  # what Qwen3 writes between `</think>` and its answer
_MAX_HEADER = 32  # bytes of "assistant" and newlines


class RouterState(Enum):
    UNDECIDED = auto()  # the first token says whether there is reasoning
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


@dataclass(frozen=True, slots=True)
class RouterDelta:
    """What one token, or the end, added. `tool_calls` holds deltas as in a streamed response:
    the first of a call has id and name and no arguments, the others have arguments only."""

    text: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason | None = None  # from `finish` only


_NOTHING = RouterDelta()


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def start_state(vocabulary: Vocabulary, prompt_token_ids: Sequence[int]) -> RouterState:
    """Where the output begins, judged by the prompt's last turn.

    `<think>` still open: reasoning. A bare assistant header: undecided. An empty think block, text
    to be continued or another role's turn: content. Earlier turns, and so anything a user wrote,
    are not looked at.
    """
    think, end_think = vocabulary.id_of(THINK_START), vocabulary.id_of(THINK_END)
    turn, end_turn = vocabulary.id_of(TURN_START), vocabulary.id_of(TURN_END)
    tail = b""  # what follows in the last turn; of a long one, only that it is long
    for token_id in reversed(prompt_token_ids):
        if token_id == think:
            return RouterState.REASONING
        if token_id in (end_think, end_turn):
            return RouterState.CONTENT
        if token_id == turn:
            is_bare = len(tail) <= _MAX_HEADER and tail.rstrip(b"\n") == b"assistant"
            return RouterState.UNDECIDED if is_bare else RouterState.CONTENT
        tail = (vocabulary.token_bytes(token_id) + tail)[: _MAX_HEADER + 1]
        if turn is None and tail.strip():  # no turn token to stop at: only the very end counts
            break
    return RouterState.UNDECIDED


class OutputRouter:
    """Turns the ids of one sequence into channel deltas: `feed` each id, then `finish` once.

    `feed` raises `RequestError` for an id outside the tokenizer: that request has to end. The
    engine need not feed the end-of-sequence token; where it does, `skip_special_tokens` hides it.
    Without `parse_reasoning` (raw completions) think tags are text; tool calls are looked for only
    with `parse_tools`, and only if the vocabulary has the format's tags.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_token_ids: Sequence[int] = (),
        *,
        parse_reasoning: bool = True,
        parse_tools: bool = False,
        tool_format: str = "hermes",
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        make_call_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._vocabulary = vocabulary
        self._detokenizer = IncrementalDetokenizer(
            vocabulary, skip_special_tokens=skip_special_tokens
        )
        self._skip_special_tokens = skip_special_tokens
        self.think_id = vocabulary.id_of(THINK_START)
        self._end_think_id = vocabulary.id_of(THINK_END)
        has_think = self.think_id is not None and self._end_think_id is not None
        self._format = TOOL_FORMATS[tool_format]
        call_start_id = vocabulary.id_of(self._format.start_tag)
        self._call_end_id = vocabulary.id_of(self._format.end_tag)
        parse_tools = parse_tools and None not in (call_start_id, self._call_end_id)
        self.call_start_id = call_start_id if parse_tools else None  # None: calls are text
        self._tags = {  # the ids that are markup in each state
            RouterState.UNDECIDED: {self.think_id, self.call_start_id},
            RouterState.REASONING: {self._end_think_id, self.call_start_id},
            RouterState.CONTENT: {self.call_start_id},
            RouterState.CALL: {self.call_start_id, self._call_end_id},
        }
        self.state = RouterState.CONTENT
        if parse_reasoning and has_think:
            self.state = start_state(vocabulary, prompt_token_ids)
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self._min_tokens = min_tokens  # stop strings are not looked for in these first tokens
        self._reasoning = NewlineTrimmer()
        self._content = ContentTrimmer(
            StopMatcher(stop, include=include_stop_str_in_output), hold_newlines=parse_tools
        )
        self._make_call_id = make_call_id
        self._calls: list[CallStatus] = []  # of every announced call
        self._parser: ToolCallParser | None = None
        self._is_announced = False  # the open call has a name
        self._raw_call: list[str] = []  # the open call's text with its start tag
        self._delta = _DeltaBuilder()

    @property
    def in_reasoning(self) -> bool:
        return self.state is RouterState.REASONING

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, None while there is none. What is fed after it is
        ignored.
        """
        return self._content.stop

    def hides(self, token_id: int) -> bool:
        """Whether this id is left out of the text because it is special."""
        return self._skip_special_tokens and self._vocabulary.is_special(token_id)

    @property
    def think_close_token_ids(self) -> tuple[int, ...]:
        """The ids that end a think block: `</think>` and the newlines after it."""
        if self._end_think_id is None:
            return ()
        return (self._end_think_id, *self._vocabulary.encode(AFTER_THINKING))

    # --- in ---------------------------------------------------------------------------------

    def feed(self, token_id: int) -> RouterDelta:
        if self._content.stop is not None:
            return _NOTHING
        if self._is_tag(token_id):
            self.num_tokens += 1
            self._text(self._detokenizer.finish())
            self._tag(token_id)
            return self._delta.take()
        text = self._detokenizer.feed(token_id)  # may raise; nothing has changed yet
        self.num_tokens += 1
        if self.state is RouterState.UNDECIDED:
            self.state = RouterState.CONTENT
        elif self.state is RouterState.REASONING:
            self.num_reasoning_tokens += 1
        if not text:
            return _NOTHING
        self._text(text)
        return self._delta.take()

    def feed_run(self, token_ids: Sequence[int]) -> RouterDelta | None:
        """What `feed` of each, joined, would give, for a fraction of the time; None, and nothing
        done, where it takes `feed`: markup, calls, stop strings of the answer, or an unknown id.
        """
        in_reasoning = self.state is RouterState.REASONING
        is_plain = self.state is RouterState.CONTENT and self._content.is_plain
        if not (is_plain or in_reasoning) or not self._tags[self.state].isdisjoint(token_ids):
            return None
        try:
            text = self._detokenizer.feed_run(token_ids)
        except RequestError:
            return None
        self.num_tokens += len(token_ids)
        if in_reasoning:
            self.num_reasoning_tokens += len(token_ids)
        if not text:
            return _NOTHING
        self._text(text)
        return self._delta.take()

    def finish(self, reason: FinishReason = FinishReason.STOP) -> RouterDelta:
        """The held rest. `finish_reason` is `reason`, or TOOL_CALLS where the output stopped by
        itself and every call in it is complete."""
        if self.stop is None:
            self._text(self._detokenizer.finish())
            if self._parser is not None:
                self._end_unclosed_call(reason)
        self._delta.text += self._content.finish()
        if reason is FinishReason.STOP and self._calls:
            complete = all(status is CallStatus.COMPLETE for status in self._calls)
            reason = FinishReason.TOOL_CALLS if complete else FinishReason.STOP
        return self._delta.take(reason)

    # --- tags -------------------------------------------------------------------------------

    def _is_tag(self, token_id: int) -> bool:
        """Whether this id is markup where the output stands now; everywhere else it is text."""
        if token_id not in self._tags[self.state]:
            return False
        return self._parser is None or not self._parser.in_string

    def _tag(self, token_id: int) -> None:
        if token_id == self.think_id:
            self.state = RouterState.REASONING
        elif token_id == self._end_think_id:
            self.state = RouterState.CONTENT
            self._content.drop_leading_newlines()
        elif token_id == self._call_end_id:
            self._end_call(self._format.end_tag)
        else:
            if self._parser is not None:  # the end tag was forgotten
                self._end_call("")
            if self.stop is None:
                self._begin_call()

    # --- channels ---------------------------------------------------------------------------

    def _text(self, text: str) -> None:
        if not text:
            return
        if self.state is RouterState.REASONING:
            self._delta.reasoning += self._reasoning.feed(text)
        elif self.state is RouterState.CALL:
            self._call_text(text)
        else:
            self._content_text(text)

    def _content_text(self, text: str) -> None:
        may_stop = self.num_tokens > self._min_tokens
        self._delta.text += self._content.feed(text, may_stop=may_stop)

    def _begin_call(self) -> None:
        self._delta.text += self._content.end_before_tag()
        self.state = RouterState.CALL
        self._parser = self._format.parser()
        self._is_announced = False
        self._raw_call = [self._format.start_tag]

    def _call_text(self, text: str) -> None:
        assert self._parser is not None, "a call has a parser"
        self._raw_call.append(text)
        self._emit(self._parser.feed(text))
        if self._parser.status is CallStatus.MALFORMED:
            self._call_to_content()

    def _end_call(self, end_tag: str) -> None:
        assert self._parser is not None, "a call has a parser"
        self._emit(self._parser.close())
        if self._parser.status is CallStatus.MALFORMED:
            self._raw_call.append(end_tag)
            self._call_to_content()
            return
        self._calls[-1] = CallStatus.COMPLETE
        self._parser = None
        self.state = RouterState.CONTENT
        self._content.drop_leading_newlines()

    def _end_unclosed_call(self, reason: FinishReason) -> None:
        """The output ended inside a call. One that was cut is left as it is; what was held of it
        is a piece of markup and not shown."""
        assert self._parser is not None, "a call has a parser"
        if reason is FinishReason.STOP:
            self._end_call("")
        elif self._is_announced:
            self._calls[-1] = self._parser.status

    def _emit(self, piece: CallPiece) -> None:
        if piece.name is not None:
            index = len(self._calls)
            self._calls.append(CallStatus.OPEN)
            self._is_announced = True
            self._delta.calls.append(ToolCall(index, self._make_call_id(), piece.name, ""))
        if piece.arguments:
            self._delta.calls.append(ToolCall(len(self._calls) - 1, "", "", piece.arguments))

    def _call_to_content(self) -> None:
        """A malformed call becomes text, tags and all, so that nothing the model said is lost. If
        its name is already out, the call stays broken and the output does not end with TOOL_CALLS.
        """
        if self._is_announced:
            self._calls[-1] = CallStatus.MALFORMED
        self._parser = None
        self.state = RouterState.CONTENT
        self._content_text("".join(self._raw_call))


class _DeltaBuilder:
    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.calls: list[ToolCall] = []

    def take(self, reason: FinishReason | None = None) -> RouterDelta:
        if not (self.text or self.reasoning or self.calls or reason):
            return _NOTHING
        delta = RouterDelta(self.text, self.reasoning or None, tuple(self.calls), reason)
        self.text = self.reasoning = ""
        self.calls = []
        return delta
