"""Scheduler stories: who gets how many tokens, from whom a block is taken, what a plan tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nvcli.engine.sequence import Status
from nvcli.engine.step import BlockWrite
from nvcli.types import FinishReason
from tests.builders import make_scheduler, make_sequence

if TYPE_CHECKING:
    from nvcli.engine.scheduler import Scheduler
    from nvcli.engine.sequence import Sequence
    from nvcli.engine.step import StepPlan


def add(scheduler: Scheduler, *sequences: Sequence) -> None:
    for seq in sequences:
        scheduler.add(seq)


def settle(scheduler: Scheduler, plan: StepPlan, token_id: int = 9) -> None:
    """The step is read, and the consumer has seen it."""
    for row in plan.rows:
        if row.epoch == row.seq.epoch:
            scheduler.settle(row, token_id)
            row.seq.num_unread_tokens -= row.samples


def step(scheduler: Scheduler) -> StepPlan:
    """A whole step at depth 0."""
    plan = scheduler.schedule(now=0.0)
    settle(scheduler, plan)
    scheduler.check()
    return plan


def shares(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(seq_id, start, n) of each row."""
    return [(row.seq.seq_id, row.start, row.n) for row in plan.rows]


# --- the budget ----------------------------------------------------------------------------------


def test_a_prompt_is_computed_at_once_when_the_budget_allows() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_sequence(range(10), seq_id=1))
    plan = step(scheduler)
    assert shares(plan) == [(1, 0, 10)]
    assert plan.rows[0].samples
    assert shares(step(scheduler)) == [(1, 10, 1)]


def test_a_long_prompt_comes_in_chunks_and_only_the_last_samples() -> None:
    """nano-vllm #212, #213: a chunk ends where it ends, not at the prompt's end."""
    scheduler = make_scheduler(budget=4)
    add(scheduler, make_sequence(range(10), seq_id=1))
    plans = [step(scheduler) for _ in range(4)]
    assert [shares(plan) for plan in plans] == [[(1, 0, 4)], [(1, 4, 4)], [(1, 8, 2)], [(1, 10, 1)]]
    assert [plan.rows[0].samples for plan in plans] == [False, False, True, True]


def test_prompts_arrive_while_others_decode_and_both_progress() -> None:
    """nano-vllm #73; prefill-first engines starve decodes here."""
    scheduler = make_scheduler(budget=6, num_blocks=40)
    add(scheduler, make_sequence(range(4), seq_id=1, max_tokens=20))
    step(scheduler)
    for seq_id in range(2, 5):
        add(scheduler, make_sequence(range(100 * seq_id, 100 * seq_id + 10), seq_id=seq_id))
        assert shares(step(scheduler))[0][0] == 1
    assert shares(step(scheduler))[0] == (1, 7, 1)


def test_a_chunk_leaves_one_token_for_each_decode_behind_it() -> None:
    scheduler = make_scheduler(budget=8, num_blocks=40)
    add(scheduler, make_sequence(range(4), seq_id=1), make_sequence(range(4), seq_id=2))
    step(scheduler)
    add(scheduler, make_sequence(range(100, 130), seq_id=3, priority=-1))
    assert shares(step(scheduler)) == [(1, 4, 1), (2, 4, 1), (3, 0, 6)]
    assert shares(step(scheduler)) == [(3, 6, 6), (1, 5, 1), (2, 5, 1)]


def test_two_long_prompts_before_a_decode_do_not_hold_it_up() -> None:
    scheduler = make_scheduler(budget=3, num_blocks=40)
    add(scheduler, make_sequence(range(2), seq_id=3, priority=1))
    step(scheduler)
    add(scheduler, make_sequence(range(50, 59), seq_id=1), make_sequence([60, 61], seq_id=2))
    scheduler.max_num_batched_tokens = 4
    assert shares(step(scheduler)) == [(3, 2, 1), (1, 0, 3)]
    scheduler.max_num_batched_tokens = 12
    assert shares(step(scheduler)) == [(1, 3, 6), (3, 3, 1), (2, 0, 2)]


def test_a_decode_behind_two_chunks_gets_its_token() -> None:
    scheduler = make_scheduler(budget=7, num_blocks=40)
    add(scheduler, make_sequence(range(2), seq_id=3, priority=2))
    step(scheduler)
    add(scheduler, make_sequence(range(50, 60), seq_id=2, priority=1))
    step(scheduler)
    add(scheduler, make_sequence(range(20, 40), seq_id=1))
    assert shares(step(scheduler)) == [(2, 6, 4), (3, 3, 1), (1, 0, 2)]
    scheduler.running[1].num_computed_tokens -= 4  # as if it had more to catch up: forced output
    assert shares(scheduler.schedule(0.0)) == [(1, 2, 6), (3, 4, 1)]


def test_no_more_run_than_the_budget_serves_in_a_step() -> None:
    scheduler = make_scheduler(budget=2, max_num_seqs=8)
    add(scheduler, *(make_sequence([i], seq_id=i, gate=0) for i in range(4)))
    scheduler.schedule(0.0)
    assert shares(scheduler.schedule(0.0)) == []  # the others do not overtake those that sit out
    assert scheduler.num_running == 2


def test_several_prompts_share_a_step_and_the_budget_is_spent() -> None:
    """nano-vllm chunks only the first and wastes the rest."""
    scheduler = make_scheduler(budget=16, num_blocks=40)
    for seq_id in range(3):
        add(scheduler, make_sequence(range(100 * seq_id, 100 * seq_id + 7), seq_id=seq_id))
    assert shares(step(scheduler)) == [(0, 0, 7), (1, 0, 7), (2, 0, 2)]


def test_order_is_priority_then_arrival_then_id() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(
        scheduler,
        make_sequence(seq_id=1, arrival=5.0),
        make_sequence(seq_id=2, arrival=3.0),
        make_sequence(seq_id=3, arrival=3.0),
        make_sequence(seq_id=4, arrival=9.0, priority=-1),
    )
    order = []
    while scheduler.has_unfinished:
        seq = step(scheduler).rows[0].seq
        scheduler.finish(seq, FinishReason.ABORT, None)
        order.append(seq.seq_id)
    assert order == [4, 2, 3, 1]


def test_a_length_end_is_known_beforehand() -> None:
    scheduler = make_scheduler()
    seq = make_sequence(max_tokens=2)
    add(scheduler, seq)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert (len(first.rows), len(second.rows)) == (1, 1)
    assert scheduler.schedule(0.0).rows == []  # both tokens are in flight
    settle(scheduler, first)
    assert scheduler.schedule(0.0).rows == []


def test_a_gated_sequence_sits_out_and_the_others_run_ahead() -> None:
    scheduler = make_scheduler()
    gated, free = make_sequence(range(4), seq_id=1, gate=1), make_sequence(range(50, 54), seq_id=2)
    add(scheduler, gated, free)
    first = scheduler.schedule(0.0)
    assert shares(first) == [(1, 0, 4), (2, 0, 4)]
    assert shares(scheduler.schedule(0.0)) == [(2, 4, 1)]
    for row in first.rows:
        scheduler.settle(row, 9)
    assert shares(scheduler.schedule(0.0)) == [(2, 5, 1)]  # collected is not yet read
    gated.num_unread_tokens = 0
    assert shares(scheduler.schedule(0.0)) == [(1, 4, 1), (2, 6, 1)]


# --- prefix hits ---------------------------------------------------------------------------------


def test_the_same_prompt_again_computes_one_token() -> None:
    """T1; nano-vllm #144, #114, #117, #199: a whole prompt of full blocks, twice."""
    scheduler = make_scheduler(num_blocks=20)
    first = make_sequence(range(8), max_tokens=1)
    add(scheduler, first)
    step(scheduler)
    scheduler.finish(first, FinishReason.LENGTH, None)
    for tokens, start, n, is_stored in ((8, 7, 1, True), (9, 8, 1, False), (7, 4, 3, False)):
        again = make_sequence(range(tokens), max_tokens=1)
        add(scheduler, again)
        (row,) = step(scheduler).rows
        assert (row.start, row.n, row.is_stored, row.samples) == (start, n, is_stored, True)
        assert again.num_cached_tokens == start
        scheduler.finish(again, FinishReason.LENGTH, None)
    blocks = scheduler.blocks
    assert (blocks.num_queried_tokens, blocks.num_hit_tokens) == (8 + 8 + 9 + 7, 7 + 8 + 4)


def test_a_full_hit_writes_its_next_token_into_a_block_of_its_own() -> None:
    scheduler = make_scheduler()
    first, second = make_sequence(range(8)), make_sequence(range(8))
    add(scheduler, first)
    step(scheduler)
    add(scheduler, second)
    step(scheduler)
    (_, row) = step(scheduler).rows
    assert (row.start, row.n, row.is_stored) == (8, 1, False)
    assert first.block_table == [0, 1, 2]
    assert second.block_table == [0, 1, 3]


def test_a_hit_in_the_same_step() -> None:
    """Each layer stores before it attends, so n sequences of one prompt compute it once."""
    scheduler = make_scheduler()
    add(scheduler, *(make_sequence(range(9), seq_id=i, seed=i) for i in range(3)))
    assert shares(step(scheduler)) == [(0, 0, 9), (1, 8, 1), (2, 8, 1)]


def test_a_chunked_prompt_is_hit_as_far_as_it_is_scheduled() -> None:
    scheduler = make_scheduler(budget=6)
    add(scheduler, make_sequence(range(12), seq_id=1))
    step(scheduler)
    scheduler.max_num_batched_tokens = 64
    add(scheduler, make_sequence([*range(10), 90, 91], seq_id=2))
    assert shares(step(scheduler)) == [(1, 6, 6), (2, 8, 4)]


def test_prompt_logprobs_compute_every_prompt_token() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_sequence(range(8)))
    step(scheduler)
    seq = make_sequence(range(8), seq_id=77, prompt_logprobs=0)
    add(scheduler, seq)
    assert shares(step(scheduler))[1] == (77, 0, 8)
    assert (seq.num_cached_tokens, seq.block_table) == (0, [3, 4])


def test_sampled_tokens_are_hashed_once_they_are_read() -> None:
    scheduler = make_scheduler()
    seq = make_sequence(range(3), max_tokens=9)
    add(scheduler, seq)
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)  # computes the first output: block 0 is full, its end unread
    assert (first.hashed_blocks, second.hashed_blocks) == ([], [])
    settle(scheduler, first)
    assert scheduler.blocks.num_named == 0
    settle(scheduler, second)
    assert scheduler.blocks.match_prefix(make_sequence([0, 1, 2, 9])) == [0]


# --- admission -----------------------------------------------------------------------------------


def test_a_sequence_that_does_not_fit_waits_and_nothing_is_held_for_it() -> None:
    scheduler = make_scheduler(num_blocks=5)
    add(scheduler, make_sequence(range(12), seq_id=1))
    step(scheduler)
    blocks = scheduler.blocks
    before = (blocks.ref_counts.copy(), list(blocks._queue), blocks.num_queried_tokens)
    waiting = make_sequence([*range(4), *range(50, 62)], seq_id=2)  # its first block is a hit
    add(scheduler, waiting)
    assert shares(scheduler.schedule(0.0)) == [(1, 12, 1)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    after = (blocks.ref_counts.copy(), list(blocks._queue), blocks.num_queried_tokens)
    assert after[0][:3] == before[0][:3]  # only sequence 1 took its next block
    assert after[2] == before[2]
    scheduler.finish(waiting, FinishReason.ABORT, None)


def test_the_watermark_stays_free_unless_nothing_runs() -> None:
    scheduler = make_scheduler(num_blocks=6, watermark=0.2)  # 2 blocks
    add(scheduler, make_sequence(range(8), seq_id=1), make_sequence(range(50, 60), seq_id=2))
    assert shares(step(scheduler)) == [(1, 0, 8)]
    alone = make_scheduler(num_blocks=3, watermark=0.2)
    add(alone, make_sequence(range(12), seq_id=3))
    assert shares(step(alone)) == [(3, 0, 12)]


def test_the_head_that_was_refused_is_not_matched_again_until_blocks_come_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make_scheduler(num_blocks=8)
    running = make_sequence(range(8), max_tokens=30)
    add(scheduler, running)
    step(scheduler)
    add(scheduler, make_sequence(range(50, 78)))
    count = 0
    match_prefix = scheduler.blocks.match_prefix

    def counting(seq: Sequence) -> list[int]:
        nonlocal count
        count += 1
        return match_prefix(seq)

    monkeypatch.setattr(scheduler.blocks, "match_prefix", counting)
    for _ in range(10):
        assert len(step(scheduler).rows) == 1
    assert count == 1
    scheduler.finish(running, FinishReason.ABORT, None)
    assert len(step(scheduler).rows) == 1
    assert count == 2


def test_slots_are_taken_on_admission_and_come_back() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    first, second, third = (make_sequence(range(i * 10, i * 10 + 4)) for i in range(3))
    add(scheduler, first, second, third)
    step(scheduler)
    assert (first.slot, second.slot, third.slot) == (0, 1, -1)
    scheduler.finish(first, FinishReason.ABORT, None)
    assert first.slot == -1
    plan = step(scheduler)
    assert third.slot == 0
    assert [init.slot for init in plan.slot_inits] == [0]


# --- preemption ----------------------------------------------------------------------------------


def make_full_pool() -> tuple[Scheduler, Sequence, Sequence]:
    """Two sequences of 8 tokens in a pool of 4 blocks: both need a block, there is none."""
    scheduler = make_scheduler(num_blocks=4, watermark=0.0)
    first = make_sequence(range(8), seq_id=1, max_tokens=6)
    second = make_sequence(range(50, 57), seq_id=2, max_tokens=6)
    scheduler.num_watermark_blocks = 0
    add(scheduler, first, second)
    return scheduler, first, second


def test_the_last_one_is_preempted_and_resumes_with_prompt_and_output() -> None:
    """vllm#16832, vllm-gaudi#524."""
    scheduler, first, second = make_full_pool()
    step(scheduler)
    plan = step(scheduler)
    assert shares(plan) == [(1, 8, 1)]
    assert (second.status, second.block_table, second.slot) == (Status.WAITING, [], -1)
    assert (scheduler.num_preemptions, second.num_preemptions) == (1, 1)
    while not scheduler.blocks.num_free >= 3:
        step(scheduler)
        if len(first.output_token_ids) == 6:
            scheduler.finish(first, FinishReason.LENGTH, None)
    plan = step(scheduler)
    (init,) = plan.slot_inits
    assert (init.prompt_token_ids.tolist(), init.output_token_ids) == ([*range(50, 57)], [9])
    (row,) = plan.rows
    assert row.start + row.n == 8
    assert row.samples
    assert second.output_token_ids == [9, 9]


def test_on_resume_tokens_are_counted_after_the_hit() -> None:
    """nano-vllm #211, #233, #207."""
    scheduler, first, second = make_full_pool()
    step(scheduler)
    step(scheduler)  # takes one of the victim's blocks
    scheduler.finish(first, FinishReason.ABORT, None)
    (row,) = step(scheduler).rows
    assert (row.seq, row.start, row.n) == (second, 4, 4)
    assert second.num_cached_tokens == 0  # its own earlier work is not a prompt hit


def test_a_victim_with_tokens_in_flight_drains_before_it_waits() -> None:
    scheduler, first, second = make_full_pool()
    flying = scheduler.schedule(0.0)
    plan = scheduler.schedule(0.0)
    assert shares(plan) == [(1, 8, 1)]
    assert (second.status, second.num_inflight_tokens) == (Status.PREEMPTED, 1)
    assert scheduler.num_waiting == 1
    scheduler.finish(first, FinishReason.ABORT, None)
    assert scheduler.schedule(0.0).rows == []  # room enough, but it still drains
    settle(scheduler, flying)
    assert (second.status, second.output_token_ids) == (Status.WAITING, [9])
    scheduler.check()
    assert len(scheduler.schedule(0.0).rows) == 1


def test_while_one_drains_nobody_else_is_preempted() -> None:
    """vllm-ascend#16315: no preemption loop."""
    scheduler = make_scheduler(num_blocks=3)
    scheduler.num_watermark_blocks = 0
    sequences = [make_sequence(range(i * 10, i * 10 + 4), seq_id=i) for i in range(3)]
    add(scheduler, *sequences)
    flying = scheduler.schedule(0.0)
    assert shares(scheduler.schedule(0.0)) == [(0, 4, 1)]  # 1 finds no block either, and sits out
    assert [seq.status for seq in sequences] == [
        Status.RUNNING,
        Status.RUNNING,
        Status.PREEMPTED,
    ]
    settle(scheduler, flying)
    assert scheduler.num_preemptions == 1


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    scheduler, _, _ = make_full_pool()
    step(scheduler)
    add(scheduler, make_sequence([7], seq_id=3))
    assert shares(step(scheduler)) == [(1, 8, 1)]


def test_the_lowest_priority_is_preempted_although_it_came_first() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.num_watermark_blocks = 0
    low = make_sequence(range(8), seq_id=1, priority=5)
    high = make_sequence(range(50, 58), seq_id=2)
    add(scheduler, low, high)
    step(scheduler)
    assert shares(step(scheduler)) == [(2, 8, 1)]
    assert low.status is Status.WAITING


def test_a_victim_whose_last_token_is_in_flight_ends_without_running_again() -> None:
    scheduler, _, second = make_full_pool()
    second.max_output_tokens = 1
    flying = scheduler.schedule(0.0)
    scheduler.schedule(0.0)
    assert second.status is Status.PREEMPTED
    settle(scheduler, flying)
    assert second.output_token_ids == [9]
    scheduler.finish(second, FinishReason.LENGTH, None)
    scheduler.check()


# --- what a plan tells the device ----------------------------------------------------------------


def test_deltas_are_told_once() -> None:
    scheduler = make_scheduler()
    seq = make_sequence(range(7), seed=3)
    add(scheduler, seq)
    plan = step(scheduler)
    assert [(init.slot, init.seed) for init in plan.slot_inits] == [(0, 3)]
    assert plan.block_writes == [BlockWrite(0, 0, [0, 1])]
    assert plan.token_writes == []
    plan = step(scheduler)
    assert (plan.slot_inits, plan.block_writes) == ([], [])
    plan = step(scheduler)
    assert plan.block_writes == [BlockWrite(0, 2, [2])]


def test_counts() -> None:
    scheduler = make_scheduler(num_blocks=10, max_num_seqs=1)
    add(scheduler, make_sequence(range(8)), make_sequence(range(4)))
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 2)
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert scheduler.blocks.num_free == 8
