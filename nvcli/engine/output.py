"""From sampled token ids to what a user reads.

The core hands over updates: a sequence and its new token ids. For each sequence a router (see
`nvcli.text.parsers`) turns ids into content, reasoning and tool calls, and finds stop strings;
this module joins its deltas with usage, logprobs and times into `RequestOutput`s.

What a request asks for decides how soon ids are routed. With stop strings, a grammar or a thinking
budget the text may end or change the sequence, so each id is routed as soon as it is read. Without
them the sequence is *quiet*: the core sends no update for its tokens, and its ids are routed when a
piece of it goes to a reader (`pacing` says when), or all at once at its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvcli.engine.pacing import Turns
from nvcli.errors import NvcliError
from nvcli.text import RouterState
from nvcli.types import (
    FinishReason,
    RequestOutput,
    RequestTimes,
    TokenLogprob,
    ToolCall,
    Usage,
    fold_tool_calls,
)

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from nvcli.engine.core import EngineCore, Update
    from nvcli.engine.grammar import Constraint, Grammar
    from nvcli.engine.sequence import Sequence
    from nvcli.text import OutputRouter, RouterDelta

# States in which a token may turn out to be text of the answer.
_MAY_BE_CONTENT = (RouterState.UNDECIDED, RouterState.CONTENT)


@dataclass(slots=True)
class OutputState:
    """What is still to be handed out for one sequence."""

    seq: Sequence
    router: OutputRouter | None  # None where no tokenizer is there: ids only
    is_streaming: bool
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    content_flags: list[bool] = field(default_factory=list)  # of the routed ids, with logprobs
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    has_given_prompt_logprobs: bool = False
    pooled: bytes | None = None
    constraint: Constraint | None = None
    num_read_tokens: int = 0  # output tokens that updates told of; out of date while quiet
    num_routed_tokens: int = 0
    num_given_tokens: int = 0
    thinking_budget: int | None = None
    times: RequestTimes | None = None  # made with the first piece, and again at the end

    @property
    def may_wait(self) -> bool:
        """Whether its ids may stay unrouted for a while: nothing depends on their text yet."""
        params = self.seq.params
        return not params.stop and self.thinking_budget is None and self.constraint is None

    def add(self, delta: RouterDelta) -> None:
        if delta.text:
            self.text.append(delta.text)
        if delta.reasoning is not None:
            self.reasoning.append(delta.reasoning)
        if delta.tool_calls:
            self.tool_calls.extend(delta.tool_calls)


class OutputProcessor:
    """Routes ids, ends sequences at stop strings, closes think blocks at their budget, and makes
    the outputs of the step.
    """

    def __init__(self) -> None:
        self._states: dict[int, OutputState] = {}
        self._outputs: list[RequestOutput] = []  # of the call of `consume` that runs
        self._turns = Turns()

    def attach(self, core: EngineCore) -> None:
        """The core whose updates come here, and whose sequences may be ended from here."""
        self._core = core

    def add(
        self,
        seq: Sequence,
        router: OutputRouter | None,
        *,
        is_streaming: bool,
        grammar: Grammar | None = None,
    ) -> None:
        """Take charge of a sequence. Raises `RequestError` for a grammar that is too complex; then
        the sequence is not known here.
        """
        state = OutputState(seq, router, is_streaming)
        state.thinking_budget = seq.params.thinking_budget
        if router is not None and _may_reason(router):
            seq.gate = state.thinking_budget
        if grammar is not None:
            assert router is not None, "a grammar needs a tokenizer, and so a router"
            state.constraint = grammar.start(router)
            seq.has_grammar = True
            seq.gate = 0
            seq.mask = state.constraint.mask()
        self._states[seq.seq_id] = state

    def close_thinking(self, seq: Sequence) -> None:
        """End the reasoning as soon as all that was sampled is read, as if its budget was spent."""
        state = self._states.get(seq.seq_id)
        if state is None or state.router is None or not _may_reason(state.router):
            return
        state.thinking_budget = 0
        state.num_read_tokens = _num_read(state)
        seq.gate = 0
        seq.is_quiet = False

    def consume(self, updates: Seq[Update]) -> list[RequestOutput]:
        """-> what goes out, in the order in which it came about."""
        for update in updates:
            seq = update.seq
            state = self._states[seq.seq_id]
            state.num_read_tokens += len(update.token_ids)
            if seq.params.logprobs is not None:
                state.logprobs.extend(update.logprobs or map(_certain, update.token_ids))
            state.prompt_logprobs.extend(update.prompt_logprobs)
            state.pooled = update.pooled or state.pooled
            if update.finish_reason is not None:
                self._end(state, update.finish_reason, update.error)
            elif update.token_ids:
                self._read(state)
        for seq_id in self._turns.take(self._core.clock):
            state = self._states[seq_id]
            if state.num_given_tokens < _num_read(state):
                self._give(state)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _read(self, state: OutputState) -> None:
        """There are new ids of a sequence that is not quiet."""
        seq = state.seq
        if not state.may_wait:
            if not self._route(state):
                return
        elif seq.params.logprobs is None:
            seq.is_quiet = True
        if state.is_streaming and seq.seq_id not in self._turns:
            self._turns.join(seq.seq_id)
            self._give(state)  # the first piece does not wait

    def _give(self, state: OutputState) -> None:
        if state.num_routed_tokens >= _num_read(state) or self._route(state):
            self._emit(state)

    def _route(self, state: OutputState) -> bool:
        """Turn the ids that are there into text, and do what follows from it: stop strings, the
        thinking budget, the grammar. False when that ended the sequence.
        """
        seq, router = state.seq, state.router
        if router is None:
            return True
        try:
            self._feed(state, len(seq.output_token_ids))
            if router.stop is not None:
                self._core.finish(seq, FinishReason.STOP, router.stop)
                self._end(state, FinishReason.STOP)
                return False
            if seq.gate is not None and state.thinking_budget is not None:
                self._close_thinking_at_budget(state, router)
            return state.constraint is None or self._constrain(state, state.constraint)
        except NvcliError as error:
            self._core.finish(seq, FinishReason.ERROR)
            self._end(state, FinishReason.ERROR, error)
            return False

    def _feed(self, state: OutputState, end: int) -> None:
        """Route output ids up to `end`; ids behind a stop string are cut off."""
        seq, router = state.seq, state.router
        assert router is not None
        if state.may_wait and seq.params.logprobs is None:
            delta = router.feed_run(seq.output_token_ids[state.num_routed_tokens : end])
            if delta is not None:
                state.num_routed_tokens = end
                state.add(delta)
                return
        while state.num_routed_tokens < end and router.stop is None:
            token_id = seq.output_token_ids[state.num_routed_tokens]
            state.num_routed_tokens += 1
            before = router.state
            state.add(router.feed(token_id))
            if seq.params.logprobs is not None:
                is_text = before in _MAY_BE_CONTENT and router.state is RouterState.CONTENT
                state.content_flags.append(is_text and not router.hides(token_id))
            if state.constraint is not None:
                state.constraint.follow(token_id, before)

    def _constrain(self, state: OutputState, constraint: Constraint) -> bool:
        """Set the mask of the next token, or force the tokens that must come. False when the
        grammar allows nothing more, which ended the sequence.
        """
        seq = state.seq
        if seq.is_finished:
            return True  # closing its think block took the last token it may have
        seq.gate = 0
        if constraint.is_finished:
            self._core.finish(seq, FinishReason.STOP)
            self._end(state, FinishReason.STOP, is_eos_hidden=False)
            return False
        if seq.num_unsent_tokens == 0 and constraint.forced_token_ids:
            self._core.force(seq, constraint.forced_token_ids)
            return True
        seq.mask = constraint.mask()
        return True

    def _close_thinking_at_budget(self, state: OutputState, router: OutputRouter) -> None:
        """Move the gate along with what was read; at the budget, force the end of thinking."""
        seq = state.seq
        budget = state.thinking_budget
        assert budget is not None
        if not _may_reason(router):
            seq.gate = None
            return
        left = budget - router.num_reasoning_tokens
        if left > 0 or not router.in_reasoning:
            seq.gate = len(seq.output_token_ids) + max(left, 0)
            return
        if seq.num_inflight_tokens > 0:  # launched before `close_thinking`: read it first
            seq.gate = 0
            return
        seq.gate = None
        self._core.force(seq, list(router.think_close_token_ids))

    def _end(
        self,
        state: OutputState,
        reason: FinishReason,
        error: NvcliError | None = None,
        *,
        is_eos_hidden: bool = True,
    ) -> None:
        seq, router = state.seq, state.router
        if router is not None:
            try:
                num_hidden = _num_hidden_tokens(seq, router) if is_eos_hidden else 0
                self._feed(state, len(seq.output_token_ids) - num_hidden)
                delta = router.finish(reason)
                state.add(delta)
                reason = delta.finish_reason or reason
            except NvcliError as text_error:
                reason, error = FinishReason.ERROR, text_error
        self._emit(state, reason, error)
        self._turns.leave(seq.seq_id)
        del self._states[seq.seq_id]

    def _emit(
        self,
        state: OutputState,
        finish_reason: FinishReason | None = None,
        error: NvcliError | None = None,
    ) -> None:
        seq, router = state.seq, state.router
        params = seq.params
        num_read = _num_read(state)
        token_ids = tuple(seq.output_token_ids[state.num_given_tokens : num_read])
        state.num_read_tokens = state.num_given_tokens = num_read
        prompt_logprobs = None
        num_prompt_logprobs = len(state.prompt_logprobs)
        if params.prompt_logprobs is not None and num_prompt_logprobs == seq.num_prompt_tokens - 1:
            if not state.has_given_prompt_logprobs:
                prompt_logprobs = (None, *state.prompt_logprobs)
            state.has_given_prompt_logprobs = True
        stop_reason = seq.stop_reason
        if router is not None and finish_reason is FinishReason.STOP and router.stop is not None:
            stop_reason = router.stop
        content_flags = None
        if params.logprobs is not None and router is not None:
            missing = len(token_ids) - len(state.content_flags)  # ids that were not routed
            content_flags = (*state.content_flags, *[False] * missing)
        if state.times is None or finish_reason is not None:  # else they are as they were
            state.times = RequestTimes(
                arrival=seq.arrival,
                first_scheduled=seq.first_scheduled,
                first_token=seq.first_token,
                finished=seq.finished,
            )
        calls = tuple(state.tool_calls)
        self._outputs.append(
            RequestOutput(
                request_id=seq.request_id,
                index=seq.index,
                text="".join(state.text),
                reasoning="".join(state.reasoning) if state.reasoning else None,
                tool_calls=calls if state.is_streaming else fold_tool_calls(calls),
                token_ids=token_ids,
                logprobs=tuple(state.logprobs) if params.logprobs is not None else None,
                content_flags=content_flags,
                prompt_logprobs=prompt_logprobs,
                pooled=state.pooled,
                finish_reason=finish_reason,
                stop_reason=stop_reason if finish_reason is not None else None,
                usage=Usage(
                    prompt_tokens=seq.num_prompt_tokens,
                    completion_tokens=len(seq.output_token_ids),
                    cached_tokens=seq.num_cached_tokens,
                    reasoning_tokens=router.num_reasoning_tokens if router is not None else 0,
                ),
                times=state.times,
                error=str(error) if error is not None else None,
                error_code=error.code if error is not None else None,
            )
        )
        state.text, state.reasoning, state.tool_calls = [], [], []
        state.logprobs, state.content_flags = [], []


def _num_read(state: OutputState) -> int:
    """Output tokens that are there to be given."""
    seq = state.seq
    return len(seq.output_token_ids) if seq.is_quiet else state.num_read_tokens


def _certain(token_id: int) -> TokenLogprob:
    """The log-probability of a token that the host forced: it had no alternative."""
    return TokenLogprob(token_id, 0.0, 1)


def _num_hidden_tokens(seq: Sequence, router: OutputRouter) -> int:
    """1 when the last id ended the sequence and is no text: EOS, or a stop id unless asked."""
    ended_by_id = seq.finish_reason is FinishReason.STOP and router.stop is None
    is_shown = seq.params.include_stop_str_in_output and isinstance(seq.stop_reason, int)
    return int(ended_by_id and not is_shown)


def _may_reason(router: OutputRouter) -> bool:
    return router.state in (RouterState.UNDECIDED, RouterState.REASONING)
