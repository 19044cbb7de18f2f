"""The engine core: one loop over schedule, launch, collect and hand out. Hot path: yes.

With depth 0 a step is read as soon as it is launched. With depth 1 (run-ahead) the next step is
launched first, so the device never waits for the host:

    iteration   schedule  launch   hand out          collect
        k          k        k      results of k-2    k-1
        k+1       k+1      k+1     results of k-1    k

Between collecting k-1 and launching k+1 only scheduling runs; handing out, which makes text, runs
while the device computes step k+1. Results of a few rows are an exception: they are handed out as
soon as they are collected, because that takes less time than step k, and their reader gets them a
launch earlier.

Both depths are the same code and give the same tokens, because launching a step needs no token that
the host has not read. Sequences with a gate need one (a grammar's next mask follows from the last
token): they sit out until their consumer has caught up.

The device runs all plans in launch order. So a sequence that ended gives its slot and blocks away
at once, although a launched step may still write there: whoever gets them runs later.

Errors end sequences, never the loop: when a step cannot be launched or read, its sequences finish
with `FinishReason.ERROR`, and so does one whose masks leave no token or whose logits are no
numbers. Only `EngineClosedError`, after which the device can run nothing, is raised. Not
thread-safe: one thread calls everything here.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvcli.engine.block_manager import BlockManager
from nvcli.engine.faults import (
    are_numbers,
    as_engine_error,
    have_numbers,
    no_numbers,
    why_nothing,
)
from nvcli.engine.scheduler import Scheduler
from nvcli.errors import EngineClosedError, NvcliError
from nvcli.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Seq

    from nvcli.engine.sequence import Sequence
    from nvcli.engine.step import Row, StepDevice, StepPlan, StepResult, Ticket
    from nvcli.types import TokenLogprob

FEW_UPDATES = 4  # so few results are handed out at once: their text is made within a step's time


@dataclass(slots=True)
class Update:
    """What is new about a sequence; a call of the consumer has at most one of each.

    The last one has a `finish_reason`; none follows it, nor the end of a sequence by its consumer.
    While a sequence is quiet (`Sequence.is_quiet`) its tokens cause no updates.
    """

    seq: Sequence
    token_ids: Seq[int] = ()  # the last of seq.output_token_ids
    logprobs: Seq[TokenLogprob] = ()  # of sampled tokens, when asked for
    prompt_logprobs: Seq[TokenLogprob] = ()  # of prompt[1:], in pieces
    pooled: bytes | None = None  # float32, as `Sequence.pools` asks
    finish_reason: FinishReason | None = None
    error: NvcliError | None = None  # with ERROR


class EngineCore:
    """Runs sequences on a device.

    `consumer` gets the updates of a step in one call, of quiet sequences an empty list. From inside
    it, or between steps, `add`, `abort`, `finish` and `force` may be called.
    """

    def __init__(
        self,
        device: StepDevice,
        consumer: Callable[[list[Update]], None],
        *,
        max_num_batched_tokens: int,
        depth: int = 1,
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
        vocab_size: int = 2**31,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            depth: steps launched ahead of the one that is read: 0 or 1.
            watermark: see `Scheduler`.
            vocab_size: ids that can be sampled; only the error of a sequence that could sample
                nothing depends on it.
        """
        assert depth >= 0, "steps launched ahead"
        blocks = BlockManager(device.num_blocks, device.block_size, enable_prefix_caching)
        self.scheduler = Scheduler(
            blocks,
            max_num_seqs=device.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            watermark=watermark,
        )
        self.depth = depth
        self.clock = clock
        self._device = device
        self._vocab_size = vocab_size
        self._consumer = consumer
        self._tickets: deque[Ticket] = deque()  # launched, not collected; oldest first
        self._updates: list[Update] = []  # collected, not handed out
        self._num_quiet_tokens = 0  # collected since the last hand-out, of quiet sequences
        # Called with each collected plan and its start and end: it was read at the end, and the
        # step before it at the start (or, after idling, it was scheduled then).
        self.on_step: Callable[[StepPlan, float, float], None] | None = None
        self._busy_since: float | None = None

    # --- requests --------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Its output is cut to the room left in the context and in the pool."""
        limit, num_prompt = self._device.max_model_len, seq.num_prompt_tokens
        capacity = self.scheduler.max_tokens_stored
        assert 0 < num_prompt <= min(limit, capacity), "see `Engine.validate`"
        # The last token of an output is never computed, so it needs no room in the pool.
        room = min(limit - num_prompt, capacity - num_prompt + 1)
        seq.max_output_tokens = min(seq.max_output_tokens, room)
        self.scheduler.add(seq)
        reads_prompt = seq.params.prompt_logprobs is not None or seq.pools is not None
        if seq.max_output_tokens <= 0 and not reads_prompt:
            self._end(Update(seq), FinishReason.LENGTH)

    def abort(self, seq: Sequence) -> bool:
        """End a sequence at any point; its last update says so. False when it ended before."""
        if seq.is_finished:
            return False
        self.finish(seq, FinishReason.ABORT)
        self._updates.append(Update(seq, finish_reason=FinishReason.ABORT))
        return True

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None = None
    ) -> None:
        """The consumer ends a sequence, at a stop string for example. No update follows."""
        self._updates = [update for update in self._updates if update.seq is not seq]
        if not seq.is_finished:
            self._finish(seq, reason, stop_reason)

    def force(self, seq: Sequence, token_ids: list[int]) -> None:
        """Append output the model did not choose, such as the end of a think block.

        It reaches the consumer in an update, like sampled tokens, and is computed in one chunk.
        Nothing of the sequence may be in flight, which its gate has to ensure.
        """
        assert not seq.is_quiet, f"sequence {seq.seq_id} would not tell of it"
        assert not seq.is_finished, f"sequence {seq.seq_id} has ended"
        assert seq.num_inflight_tokens == 0, f"sequence {seq.seq_id} has tokens in flight"
        room = seq.max_output_tokens - len(seq.output_token_ids)
        update = Update(seq, token_ids[:room])
        seq.output_token_ids += update.token_ids
        seq.num_unsent_tokens += len(update.token_ids)
        seq.num_unread_tokens += len(update.token_ids)
        if len(seq.output_token_ids) >= seq.max_output_tokens:
            self._end(update, FinishReason.LENGTH)
        else:
            self._updates.append(update)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._tickets or self._updates) or self.scheduler.has_unfinished

    # --- the loop --------------------------------------------------------------------------------

    def step(self) -> None:
        now = self.clock()
        if self._busy_since is None:
            self._busy_since = now
        plan = self.scheduler.schedule(now)
        launched = bool(plan.rows) and self._launch(plan)
        self._hand_out()
        if len(self._tickets) > self.depth or (self._tickets and not launched):
            self._collect(self._tickets.popleft())
        is_little = len(self._updates) + self._num_quiet_tokens <= FEW_UPDATES
        if self.depth == 0 or not launched or is_little:
            self._hand_out()
        if not self.has_unfinished:
            self._busy_since = None
            self.scheduler.check_idle()

    def _launch(self, plan: StepPlan) -> bool:
        try:
            ticket = self._device.launch(plan)
        except EngineClosedError:
            raise  # no later step can run either
        except Exception as error:  # noqa: BLE001 - ends the step's sequences, not the engine
            self._fail([plan], error)
            return False
        assert ticket.plan is plan, "a ticket belongs to its plan"
        self._tickets.append(ticket)
        return True

    def _collect(self, ticket: Ticket) -> None:
        """Read a step: the only place where the host waits for the device."""
        try:
            result = self._device.collect(ticket)
        except EngineClosedError:
            raise
        except Exception as error:  # noqa: BLE001 - ends the sequences it touched, not the engine
            # Later steps build on what this one computed, so they are lost as well.
            self._fail([ticket.plan, *(later.plan for later in self._tickets)], error)
            return
        now = self.clock()
        rows = ticket.plan.rows
        others = self.scheduler.settle_quiet(rows, result.token_ids)
        self._num_quiet_tokens += len(rows) - len(others)
        for index in others:
            if rows[index].epoch == rows[index].seq.epoch:  # else it ended, or computes this again
                self._settle(rows[index], index, result, now)
        if self.on_step is not None and self._busy_since is not None:
            self.on_step(ticket.plan, self._busy_since, now)
        self._busy_since = now

    def _settle(self, row: Row, index: int, result: StepResult, now: float) -> None:
        seq = row.seq
        token_id = result.token_ids[index]
        is_stuck = row.samples and token_id < 0
        if not is_stuck:
            self.scheduler.settle(row, token_id)
        update = Update(seq)
        if index in result.prompt_logprobs:
            # After preemption the prompt is computed again: hand out each position once.
            pieces = result.prompt_logprobs[index]
            update.prompt_logprobs = pieces[max(0, seq.num_prompt_logprobs - row.start) :]
            seq.num_prompt_logprobs += len(update.prompt_logprobs)
        update.pooled = result.pooled.get(index)
        logprobs = (result.logprobs[index],) if index in result.logprobs else ()
        if is_stuck:
            update.error = why_nothing(seq, self._vocab_size)
        elif update.pooled is not None and not are_numbers(update.pooled):
            update.error = no_numbers("hidden state or logits of this prompt")
        elif update.prompt_logprobs and not have_numbers(update.prompt_logprobs):
            update.error = no_numbers("logits of this prompt")
        elif logprobs and not have_numbers(logprobs):
            update.error = no_numbers(f"logits after {len(seq.output_token_ids) - 1} output tokens")
        if update.error is not None:
            update.prompt_logprobs, update.pooled = (), None
            self._end(update, FinishReason.ERROR)
        elif row.samples:
            update.token_ids = [token_id]
            update.logprobs = logprobs
            if seq.first_token is None:
                seq.first_token = now
            num_outputs = len(seq.output_token_ids)
            # Before min_tokens the sampler masks these ids.
            if token_id in seq.end_ids and num_outputs > seq.params.min_tokens:
                is_eos = token_id in seq.eos_token_ids
                self._end(update, FinishReason.STOP, None if is_eos else token_id)
            elif num_outputs >= seq.max_output_tokens:
                self._end(update, FinishReason.LENGTH)
            else:
                self._updates.append(update)
        elif seq.max_output_tokens <= 0 and row.start + row.n == seq.num_prompt_tokens:
            self._end(update, FinishReason.LENGTH)  # only the prompt's log-probabilities were asked
        elif update.prompt_logprobs:
            self._updates.append(update)

    def _hand_out(self) -> None:
        updates, self._updates = self._updates, []
        if updates or self._num_quiet_tokens:
            self._num_quiet_tokens = 0
            self._consumer(updates)
            for update in updates:
                update.seq.num_unread_tokens -= len(update.token_ids)

    # --- ends ------------------------------------------------------------------------------------

    def _finish(self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.scheduler.finish(seq, reason, stop_reason)
        seq.finished = self.clock()

    def _end(
        self, update: Update, reason: FinishReason, stop_reason: str | int | None = None
    ) -> None:
        """The sequence ends with this update."""
        self._finish(update.seq, reason, stop_reason)
        update.finish_reason = reason
        self._updates.append(update)

    def _fail(self, plans: Iterable[StepPlan], error: Exception) -> None:
        """These steps computed nothing that can be trusted: end what they carried."""
        pending = {update.seq.seq_id: update for update in self._updates}
        for plan in plans:
            self.scheduler.blocks.retract(plan.hashed_blocks)
            for row in plan.rows:
                seq = row.seq
                if row.epoch == seq.epoch:
                    update = pending.get(seq.seq_id) or Update(seq)  # tokens read before are good
                    self.finish(seq, FinishReason.ERROR)
                    update.finish_reason = FinishReason.ERROR
                    update.error = as_engine_error(error)
                    self._updates.append(update)
