"""The scheduler: which sequences get how many tokens in the next step.

There is no prefill phase and no decode phase. Every sequence has tokens that it must still compute,
and each step computes some of them, until the token budget is spent: first those of the running
sequences, then those of the waiting ones, both in order of (priority, arrival). A decode asks for
one token, a new prompt for many, a prefix hit for fewer, a resume after preemption for its prompt
and output. A part of a prompt leaves one token of the budget for every decode behind it, so a long
prompt never holds decodes up.

    WAITING ---admit---> RUNNING ---preempt---> PREEMPTED (tokens in flight: it drains)
       ^                    |                       |
       |                    +--nothing in flight--> | collected
       +--------------------------------------------+

Blocks: a sequence is admitted when its whole known history fits and some blocks (the watermark)
stay free; later it takes a block at a time. When none is left, the last running sequence is
preempted: it gives up its slot and all its blocks, and computes its history again later. A victim
with tokens in flight drains: it waits for them to be collected, since they are part of its history.
Until then nobody else is preempted, and whoever lacks a block sits out. Slots and blocks may be
reused at once, because the device runs all steps in launch order.

Invariants (checked by `Scheduler.check`):
  * `running` and `waiting` are sorted, so a victim is never one that the plan already has
  * slots belong to running sequences only, each to one
  * no token past `max_output_tokens` is scheduled, and a sequence alone always fits the pool
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from nvcli.engine.sequence import Status
from nvcli.engine.step import BlockWrite, Row, SlotInit, StepPlan, TokenWrite

if TYPE_CHECKING:
    from nvcli.engine.block_manager import BlockManager
    from nvcli.engine.sequence import Sequence
    from nvcli.types import FinishReason


def queue_order(seq: Sequence) -> tuple[int, float, int]:
    return seq.priority, seq.arrival, seq.seq_id


def discard(queue: list[Sequence], seq: Sequence) -> None:
    """Remove the sequence from a queue sorted by `queue_order`."""
    index = bisect_left(queue, queue_order(seq), key=queue_order)
    assert queue[index] is seq, f"sequence {seq.seq_id} is not in its queue"
    del queue[index]


class Scheduler:
    """Owns the queues, the slots and the blocks; turns them into one `StepPlan` a step.

    `add` a sequence, call `schedule` for each step, and `settle` (or `settle_quiet`) the step's
    rows once their samples are read, in the order of the steps. `finish` ends a sequence at any
    time.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        watermark: float = 0.01,
    ) -> None:
        """
        Args:
            max_num_seqs: sequences that may run at once; each has a slot on the device.
            max_num_batched_tokens: token budget of a step.
            watermark: share of all blocks that an admission leaves free, so that the sequences
                that run can grow for a while before one has to be preempted.
        """
        assert max_num_seqs > 0, "no slots"
        assert max_num_batched_tokens > 0, "no token budget"
        self.blocks = blocks
        # At most the budget, so that all of them can decode in every step.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_watermark_blocks = int(watermark * blocks.num_blocks) + 1
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.draining: list[Sequence] = []  # preempted, with tokens in flight
        self.num_preemptions = 0
        self._free_slots = list(range(self.max_num_seqs))[::-1]  # the lowest is taken first
        self._next_step_id = 0
        # (seq_id of the sequence refused last, free blocks then): it need not be looked at again
        # before there are more.
        self._refused: tuple[int, int] = (-1, 0)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.draining)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting or self.draining)

    @property
    def max_tokens_stored(self) -> int:
        """Tokens that fit the pool when one sequence has all of it."""
        return self.blocks.num_blocks * self.blocks.block_size

    # --- one step --------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step, whose tokens count as computed from here on, its samples as in
        flight. The plan has no rows when nothing can run now.
        """
        plan = StepPlan(self._next_step_id)
        self._next_step_id += 1
        budget = self.max_num_batched_tokens
        num_preemptions = self.num_preemptions

        size, running = self.blocks.block_size, Status.RUNNING
        demand, num_decodes = [], 0  # what is not placed yet; how many of it are decodes
        for seq in self.running:
            n = self._num_to_schedule(seq)
            if n > 0:
                demand.append((seq, n))
                num_decodes += n == 1
        for seq, wanted in demand:
            if seq.status is not running:
                break  # it was preempted, and so were all behind it
            if wanted == 1:
                n, num_decodes = 1, num_decodes - 1
            else:
                n = min(wanted, budget - num_decodes)
            end = seq.num_computed_tokens + n
            if n > 0 and (end <= len(seq.block_table) * size or self._make_room(seq, end)):
                self._place(seq, n, plan)
                budget -= n

        if self.num_preemptions == num_preemptions:  # else blocks are short: admit nobody
            index = 0
            while budget > 0 and self._free_slots and index < len(self.waiting):
                seq = self.waiting[index]
                if seq.is_gated:
                    index += 1
                elif self._admit(seq, plan, now):
                    n = min(self._num_to_schedule(seq), budget)
                    self._place(seq, n, plan)
                    budget -= n
                else:
                    break  # in order, so that a long prompt is not overtaken for ever
        return plan

    def _num_to_schedule(self, seq: Sequence) -> int:
        """Tokens the sequence can compute now; 0 when it must wait or its end is in flight."""
        num_outputs = len(seq.output_token_ids) + seq.num_inflight_tokens
        if num_outputs >= seq.max_output_tokens > 0 or (seq.gate is not None and seq.is_gated):
            return 0
        return len(seq.prompt_token_ids) + num_outputs - seq.num_computed_tokens

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Blocks for the sequence's first `num_tokens`, at the cost of those behind it."""
        while not self.blocks.grow(seq, num_tokens):
            if self.draining:
                return False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _admit(self, seq: Sequence, plan: StepPlan, now: float) -> bool:
        """Give a waiting sequence a slot and blocks for its whole history, if there is room."""
        blocks = self.blocks
        refused_id, num_free = self._refused
        if seq.seq_id == refused_id and blocks.num_free <= num_free and self.running:
            return False
        # Log-probabilities of the prompt need the hidden states of all its positions.
        needs_all = seq.params.prompt_logprobs is not None
        matched = [] if needs_all else blocks.match_prefix(seq)
        spare = blocks.num_free - blocks.num_taken_by(matched, seq.num_tokens)
        if spare < (self.num_watermark_blocks if self.running else 0):
            self._refused = (seq.seq_id, blocks.num_free)
            return False
        blocks.share(seq, matched)
        has_room = blocks.grow(seq, seq.num_tokens)
        assert has_room, "admission counted wrongly"
        # When every token is found, the last one is computed again for its logits; its keys and
        # values are there and not written again (`Row.is_stored`).
        num_found = min(len(matched) * blocks.block_size, seq.num_tokens - 1)
        blocks.num_queried_tokens += seq.num_tokens
        blocks.num_hit_tokens += num_found
        seq.num_computed_tokens = num_found
        if seq.first_scheduled is None:
            seq.first_scheduled = now
            seq.num_cached_tokens = min(num_found, seq.num_prompt_tokens)

        discard(self.waiting, seq)
        insort(self.running, seq, key=queue_order)
        seq.status = Status.RUNNING
        seq.slot = self._free_slots.pop()
        seq.num_unsent_tokens = 0  # part of the history below
        outputs = seq.output_token_ids.copy()
        plan.slot_inits.append(
            SlotInit(
                seq.slot,
                seq.prompt_token_ids,
                outputs,
                seq.params,
                seq.seed,
                seq.eos_token_ids,
                seq.has_grammar,
            )
        )
        seq.num_sent_blocks = 0
        return True

    def _place(self, seq: Sequence, n: int, plan: StepPlan) -> None:
        """Add the sequence's next `n` tokens to the plan; their blocks are there."""
        start, table = seq.num_computed_tokens, seq.block_table
        end = start + n
        known = len(seq.prompt_token_ids) + len(seq.output_token_ids)
        sent = seq.num_sent_blocks
        if sent < len(table):
            plan.block_writes.append(BlockWrite(seq.slot, sent, table[sent:]))
            seq.num_sent_blocks = len(table)
        if seq.num_unsent_tokens:
            unsent = seq.output_token_ids[-seq.num_unsent_tokens :]
            plan.token_writes.append(TokenWrite(seq.slot, known - len(unsent), unsent))
            seq.num_unsent_tokens = 0

        samples = end == known + seq.num_inflight_tokens and seq.max_output_tokens > 0
        is_stored = start < seq.num_hashed_blocks * self.blocks.block_size
        plan.rows.append(Row(seq, seq.epoch, seq.slot, start, n, samples, is_stored))
        seq.num_computed_tokens = end
        if samples:
            seq.num_inflight_tokens += 1
            seq.num_unread_tokens += 1
        if end <= known:
            plan.hashed_blocks += self.blocks.publish(seq, end)
        # Else the last token is in flight: `settle` publishes its block once it is read.

    # --- what happens to a sequence --------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=queue_order)

    def settle_quiet(self, rows: list[Row], token_ids: list[int]) -> list[int]:
        """A step was read: settle every row whose sequence is quiet and does not end with this
        token. In a large step these are nearly all, so this does the work of `settle` in one loop.
        Returns the indices of the other rows.
        """
        size, running, others = self.blocks.block_size, Status.RUNNING, []
        for index, row in enumerate(rows):
            seq, token_id = row.seq, token_ids[index]
            outputs = seq.output_token_ids
            if (
                not seq.is_quiet
                or row.epoch != seq.epoch
                or token_id < 0
                or token_id in seq.end_ids
                or len(outputs) + 1 >= seq.max_output_tokens
            ):
                others.append(index)
                continue
            seq.num_unread_tokens -= 1
            if seq.status is not running:
                self.settle(row, token_id)
                continue
            outputs.append(token_id)
            seq.num_inflight_tokens -= 1
            end = row.start + row.n
            if end >= (seq.num_hashed_blocks + 1) * size:
                self.blocks.publish(seq, end)
        return others

    def settle(self, row: Row, token_id: int) -> None:
        """A step was read, and this row's result still concerns its sequence."""
        seq = row.seq
        if row.samples:
            seq.output_token_ids.append(token_id)
            seq.num_inflight_tokens -= 1
        if seq.status is Status.RUNNING:
            self.blocks.publish(seq, row.start + row.n)
        elif seq.num_inflight_tokens == 0:  # drained
            self.draining.remove(seq)
            seq.status = Status.WAITING
            self.add(seq)

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None) -> None:
        """End a sequence in whatever state it is; results still in flight will not reach it."""
        if seq.status is Status.RUNNING:
            discard(self.running, seq)
            self._release(seq)
        elif seq.status is Status.WAITING:
            discard(self.waiting, seq)
        else:
            self.draining.remove(seq)
        seq.status = Status.FINISHED
        seq.epoch += 1
        seq.finish_reason = reason
        seq.stop_reason = stop_reason

    def _preempt(self, seq: Sequence) -> None:
        assert len(self.running) > 1, "a sequence alone must fit: see `EngineCore.add`"
        discard(self.running, seq)
        self._release(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        if seq.num_inflight_tokens > 0:
            seq.status = Status.PREEMPTED
            self.draining.append(seq)
        else:
            seq.epoch += 1  # chunks still in flight are computed again
            seq.status = Status.WAITING
            self.add(seq)

    def _release(self, seq: Sequence) -> None:
        self.blocks.free(seq)
        self._free_slots.append(seq.slot)
        seq.slot = -1

    # --- integrity -------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant, those of the blocks included. O(pool), for tests."""
        for queue, status in (
            (self.running, Status.RUNNING),
            (self.waiting, Status.WAITING),
            (self.draining, Status.PREEMPTED),
        ):
            assert all(seq.status is status for seq in queue), f"status is not {status.name}"
        assert self.running == sorted(self.running, key=queue_order), "running is not sorted"
        assert self.waiting == sorted(self.waiting, key=queue_order), "waiting is not sorted"
        slots = [seq.slot for seq in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs)), "slots leaked"
        for seq in self.running:
            assert seq.num_computed_tokens <= seq.num_virtual_tokens, "computed what is unknown"
            assert seq.num_virtual_outputs <= seq.max_output_tokens, "scheduled past the end"
        for seq in self.waiting + self.draining:
            assert not seq.block_table, f"sequence {seq.seq_id} does not run but holds blocks"
        self.blocks.check(self.running)

    def check_idle(self) -> None:
        """Assert that nothing is held once nothing is left to do. O(1)."""
        assert not self.has_unfinished, "not idle"
        assert self.blocks.num_free == self.blocks.num_blocks, "blocks leaked"
        assert len(self._free_slots) == self.max_num_seqs, "slots leaked"
