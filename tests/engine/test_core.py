"""The loop on a simulated device: order, ends, gates, failures, counts. Both depths where it can
differ; what each sequence says is compared with what it says alone in `test_traces.py`.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

import pytest

from nvcli.engine.core import FEW_UPDATES, EngineCore, Update
from nvcli.engine.sequence import Status
from nvcli.engine.step import StepPlan, StepResult
from nvcli.errors import (
    EngineError,
    OutOfMemoryError,
)
from nvcli.types import FinishReason
from tests.builders import Log, make_core, make_sequence, run, schedulers
from tests.engine.simulated_device import EOS, SimulatedTicket

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.engine.sequence import Sequence

both_depths = pytest.mark.parametrize("depth", [0, 1])


class NullDevice:
    """Computes nothing: the k-th output is `token(k)`. Records the order of calls."""

    def __init__(
        self, *, max_num_seqs: int = 8, num_blocks: int = 64, token: Callable[[int], int]
    ) -> None:
        self.max_num_seqs, self.num_blocks = max_num_seqs, num_blocks
        self.block_size, self.max_model_len = 4, 4096
        self.token = token
        self.calls: list[str] = []

    def launch(self, plan: StepPlan) -> SimulatedTicket:
        self.calls.append(f"launch {plan.step_id}")
        return SimulatedTicket(plan, 0)

    def collect(self, ticket: SimulatedTicket) -> StepResult:
        self.calls.append(f"collect {ticket.plan.step_id}")
        return StepResult(
            [
                self.token(row.start + row.n - row.seq.num_prompt_tokens) if row.samples else -1
                for row in ticket.plan.rows
            ]
        )


@both_depths
def test_step_log_tells_each_collected_step_once(depth: int) -> None:
    """Intervals of a busy engine touch; idle time between two requests is in none of them."""
    core, _, _ = make_null_core(depth=depth)
    seen: list[tuple[int, float, float]] = []
    core.on_step = lambda plan, start, end: seen.append((plan.num_tokens, start, end))
    for first in (0, 50):
        core.add(make_sequence(range(first, first + 5), max_tokens=3))
        while core.has_unfinished:
            core.step()
    assert [tokens for tokens, _, _ in seen] == [5, 1, 1, 5, 1, 1]
    assert all(start <= end for _, start, end in seen)
    assert [a[2] == b[1] for a, b in itertools.pairwise(seen)] == [True, True, False, True, True]


def make_null_core(
    token: Callable[[int], int] = lambda k: 100 + k, *, depth: int = 1, **device: Any
) -> tuple[EngineCore, NullDevice, Log]:
    null, log = NullDevice(token=token, **device), Log()
    core = EngineCore(null, log, max_num_batched_tokens=4096, depth=depth)
    schedulers.append(core.scheduler)
    return core, null, log


def outputs_alone(seq: Sequence) -> list[int]:
    core, _, log = make_core(depth=0, enable_prefix_caching=False, num_blocks=200)
    core.add(seq)
    run(core)
    return log.tokens(seq)


# --- order ---------------------------------------------------------------------------------------


def test_depth_0_reads_each_step_before_the_next() -> None:
    core, device, log = make_null_core(depth=0)
    log.on_update = lambda update: device.calls.append(f"hand out {len(update.token_ids)}")
    core.add(make_sequence(max_tokens=2))
    run(core)
    assert device.calls == [
        *("launch 0", "collect 0", "hand out 1"),
        *("launch 1", "collect 1", "hand out 1"),
    ]


def hand_outs(num_rows: int) -> list[str]:
    core, device, log = make_null_core(depth=1)

    def consume(updates: list[Update]) -> None:
        device.calls.append(f"hand out {len(updates)} x {updates[0].token_ids[0]}")
        log(updates)

    core._consumer = consume
    for _ in range(num_rows):
        core.add(make_sequence(max_tokens=4))
    run(core)
    return device.calls


def test_depth_1_launches_the_next_step_before_it_reads_and_hands_out_after_it_launched() -> None:
    n = FEW_UPDATES + 1
    assert hand_outs(n) == [
        *("launch 0", "launch 1", "collect 0"),
        *("launch 2", f"hand out {n} x 100", "collect 1"),
        *("launch 3", f"hand out {n} x 101", "collect 2"),
        *(f"hand out {n} x 102", "collect 3", f"hand out {n} x 103"),  # nothing left to launch
    ]


def test_depth_1_hands_out_a_few_rows_as_soon_as_they_are_read() -> None:
    n = FEW_UPDATES
    assert hand_outs(n) == [
        *("launch 0", "launch 1", "collect 0", f"hand out {n} x 100"),
        *("launch 2", "collect 1", f"hand out {n} x 101"),
        *("launch 3", "collect 2", f"hand out {n} x 102"),
        *("collect 3", f"hand out {n} x 103"),
    ]


def test_the_consumer_is_called_once_a_step() -> None:
    core, _, log = make_null_core(depth=1)
    calls: list[int] = []

    def consume(updates: list[Update]) -> None:
        calls.append(len(updates))
        log(updates)

    core._consumer = consume
    for _ in range(3):
        core.add(make_sequence(max_tokens=2))
    run(core)
    assert calls == [3, 3]


@both_depths
def test_one_at_a_time_equals_all_together(depth: int) -> None:
    prompts = [[1, 2, 3], [1, 2, 3, 4, 0, 1, 2, 3], [1, 2, 3, 4], [4]]
    sequences = [make_sequence(p, max_tokens=9, seed=i) for i, p in enumerate(prompts)]
    core, _, log = make_core(depth=depth, num_blocks=9, budget=5)
    for seq in sequences:
        core.add(seq)
    run(core)
    for i, (seq, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        assert log.tokens(seq) == outputs_alone(make_sequence(prompt, max_tokens=9, seed=i))


# --- ends ----------------------------------------------------------------------------------------


@both_depths
@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_nothing_comes_after_eos(depth: int, k: int) -> None:
    """T7: EOS is the k-th token; the step launched after it is dropped."""
    core, _, log = make_null_core(lambda i: EOS if i == k - 1 else 7, depth=depth)
    seq = make_sequence(max_tokens=8, ignore_eos=False)
    core.add(seq)
    run(core)
    assert log.tokens(seq) == seq.output_token_ids == [7] * (k - 1) + [EOS]
    assert log.of(seq)[-1].finish_reason is FinishReason.STOP
    assert seq.stop_reason is None


@both_depths
def test_ignore_eos_gives_all_tokens_also_when_the_last_is_eos(depth: int) -> None:
    core, _, log = make_null_core(lambda i: EOS, depth=depth)
    seq = make_sequence(max_tokens=5, ignore_eos=True)
    core.add(seq)
    run(core)
    assert log.tokens(seq) == [EOS] * 5
    assert seq.finish_reason is FinishReason.LENGTH


@both_depths
def test_stop_token_ids_stop_although_eos_is_ignored(depth: int) -> None:
    """vllm#4589."""
    core, _, log = make_null_core(lambda i: i, depth=depth)
    seq = make_sequence(max_tokens=9, ignore_eos=True, stop_token_ids=(0, 3), min_tokens=2)
    core.add(seq)
    run(core)
    assert log.tokens(seq) == [0, 1, 2, 3]  # 0 came before min_tokens
    assert (seq.finish_reason, seq.stop_reason) == (FinishReason.STOP, 3)


@both_depths
def test_eos_before_min_tokens_does_not_end(depth: int) -> None:
    core, _, log = make_null_core(lambda i: EOS, depth=depth)
    seq = make_sequence(max_tokens=9, ignore_eos=False, min_tokens=3)
    core.add(seq)
    run(core)
    assert log.tokens(seq) == [EOS] * 4  # the sampler masks it; the core does not rely on that


@both_depths
def test_the_last_allowed_token_may_stop(depth: int) -> None:
    core, _, _ = make_null_core(lambda i: EOS if i == 2 else 7, depth=depth)
    seq = make_sequence(max_tokens=3, ignore_eos=False)
    core.add(seq)
    run(core)
    assert seq.finish_reason is FinishReason.STOP


@both_depths
def test_max_tokens_0_ends_without_a_step(depth: int) -> None:
    core, device, log = make_core(depth=depth)
    seq = make_sequence(max_tokens=0)
    core.add(seq)
    assert core.has_unfinished
    run(core)
    assert [update.finish_reason for update in log.of(seq)] == [FinishReason.LENGTH]
    assert (log.tokens(seq), device.plans) == ([], [])


@both_depths
def test_max_tokens_0_with_prompt_logprobs_computes_the_prompt_only(depth: int) -> None:
    core, device, log = make_core(depth=depth, budget=3)
    seq = make_sequence(range(8), max_tokens=0, prompt_logprobs=0)
    core.add(seq)
    run(core)
    assert sum(len(update.prompt_logprobs) for update in log.of(seq)) == 7
    assert (log.tokens(seq), seq.finish_reason) == ([], FinishReason.LENGTH)
    assert not any(row.samples for plan in device.plans for row in plan.rows)


@both_depths
def test_the_consumer_ends_a_sequence_at_a_stop_string(depth: int) -> None:
    core, _, log = make_null_core(depth=depth)
    seq = make_sequence(max_tokens=9)

    def stop(update: Update) -> None:
        if update.token_ids == [102]:
            core.finish(seq, FinishReason.STOP, "two")

    log.on_update = stop
    core.add(seq)
    run(core)
    assert log.tokens(seq) == seq.output_token_ids == [100, 101, 102]
    assert (seq.finish_reason, seq.stop_reason) == (FinishReason.STOP, "two")
    assert log.of(seq)[-1].finish_reason is None  # who ended it needs no telling


# --- limits --------------------------------------------------------------------------------------


@both_depths
def test_the_pool_limits_a_sequence_and_the_engine_lives(depth: int) -> None:
    """T4, nano-vllm #274: 2 blocks of 4, prompt 8: the 9th token is sampled and has no room."""
    core, _, log = make_core(depth=depth, num_blocks=2, block_size=4)
    first, second = make_sequence(range(8)), make_sequence(range(3), max_tokens=9)
    core.add(first)
    core.add(second)
    run(core)
    assert len(log.tokens(first)) == 1
    assert first.finish_reason is FinishReason.LENGTH
    assert len(log.tokens(second)) == 6


def test_a_prompt_that_can_never_fit_is_refused_and_others_are_served() -> None:
    core, _, log = make_core(num_blocks=8, block_size=4, max_model_len=64)
    for num_tokens in (0, 40, 65):  # `Engine.validate` tells the user
        with pytest.raises(AssertionError, match="validate"):
            core.add(make_sequence(range(num_tokens)))
    assert not core.has_unfinished
    seq = make_sequence(range(32))
    core.add(seq)
    run(core)
    assert len(log.tokens(seq)) == 1


@both_depths
def test_the_context_limits_a_sequence(depth: int) -> None:
    core, _, log = make_core(depth=depth, max_model_len=10)
    full, nearly = make_sequence(range(10)), make_sequence(range(8), max_tokens=9)
    core.add(full)
    core.add(nearly)
    run(core)
    assert (len(log.tokens(full)), len(log.tokens(nearly))) == (0, 2)
    assert full.finish_reason is nearly.finish_reason is FinishReason.LENGTH


@both_depths
def test_many_requests_with_a_pool_that_is_too_small_all_end(depth: int) -> None:
    """nano-vllm #211: full cache, preemption, hits on resume."""
    core, _, log = make_core(depth=depth, num_blocks=10, block_size=4, max_num_seqs=6)
    sequences = [
        make_sequence([i % 3, 1, 2, 3, i % 5], max_tokens=16, seed=i, ignore_eos=True)
        for i in range(24)
    ]
    for seq in sequences:
        core.add(seq)
    run(core)
    assert core.scheduler.num_preemptions > 0
    for i, seq in enumerate(sequences):
        alone = make_sequence(seq.prompt_token_ids, max_tokens=16, seed=i)
        assert log.tokens(seq) == outputs_alone(alone)


# --- abort ---------------------------------------------------------------------------------------


@both_depths
@pytest.mark.parametrize("when", range(12))
def test_abort_at_every_point(depth: int, when: int) -> None:
    """T6: queued, mid-chunk, decoding, in flight, finished, twice."""
    core, _, log = make_core(depth=depth, budget=4)
    seq, other = make_sequence(range(10), max_tokens=5), make_sequence([3, 3], max_tokens=5)
    core.add(seq)
    core.add(other)
    for _ in range(when):
        core.step()
    was_finished, num_seen = seq.is_finished, len(log.tokens(seq))
    assert core.abort(seq) is not was_finished
    assert core.abort(seq) is False
    run(core)
    if not was_finished:
        assert [u.finish_reason for u in log.of(seq)][-1] is FinishReason.ABORT
        assert len(log.tokens(seq)) == num_seen  # no later token
    assert sum(update.finish_reason is not None for update in log.of(seq)) == 1
    assert log.tokens(other) == outputs_alone(make_sequence([3, 3], max_tokens=5))


def test_a_sequence_that_ends_gives_its_blocks_away_while_a_step_still_writes_them() -> None:
    """vllm#45357: the stale write lands before the new owner's, and never in a named block."""
    core, _, log = make_core(depth=1, num_blocks=3, block_size=4, eagerness=0.0)
    first = make_sequence(range(8), max_tokens=5)
    core.add(first)
    core.step()
    core.step()
    assert first.num_inflight_tokens > 0
    core.abort(first)
    second = make_sequence(range(20, 29), max_tokens=3)
    core.add(second)
    core.step()
    assert sorted(second.block_table) == [0, 1, 2]
    run(core)
    assert log.tokens(second) == outputs_alone(make_sequence(range(20, 29), max_tokens=3))


# --- gates and forced tokens ---------------------------------------------------------------------


@both_depths
def test_forced_tokens_close_a_block_and_the_model_goes_on_from_them(depth: int) -> None:
    core, device, log = make_core(depth=depth)
    seq, other = make_sequence(max_tokens=9, gate=3), make_sequence([2, 2], max_tokens=9)

    def force(update: Update) -> None:
        if update.seq is seq and len(log.tokens(seq)) == 3:
            seq.gate = None
            core.force(seq, [41, 42])

    log.on_update = force
    core.add(seq)
    core.add(other)
    run(core)
    outputs = log.tokens(seq)
    assert outputs[:3] == outputs_alone(make_sequence(max_tokens=3))
    assert outputs[3:5] == [41, 42]
    assert (len(outputs), seq.output_token_ids) == (9, outputs)
    chunks = [row.n for plan in device.plans for row in plan.rows if row.seq is seq]
    assert chunks == [
        4,
        1,
        1,
        3,
        1,
        1,
        1,
    ]  # the unread token's successor and both forced: one chunk
    assert log.tokens(other) == outputs_alone(make_sequence([2, 2], max_tokens=9))


def test_forcing_past_the_length_ends_the_sequence() -> None:
    core, _, log = make_core(depth=1)
    seq = make_sequence(max_tokens=4, gate=3)
    log.on_update = lambda update: len(log.tokens(seq)) == 3 and core.force(seq, [41, 42, 43])
    core.add(seq)
    run(core)
    assert log.tokens(seq)[3:] == [41]
    assert log.of(seq)[-1].finish_reason is FinishReason.LENGTH


def test_forcing_a_sequence_with_tokens_in_flight_is_our_own_mistake() -> None:
    core, _, _ = make_core(depth=1)
    seq = make_sequence(max_tokens=4)
    core.add(seq)
    core.step()
    with pytest.raises(AssertionError, match="in flight"):
        core.force(seq, [41])
    run(core)


@pytest.mark.parametrize(("few", "in_flight"), [(1, [2, 2, 1]), (0, [3, 2, 1])])
def test_tokens_are_unread_until_the_consumer_returned(
    monkeypatch: pytest.MonkeyPatch, few: int, in_flight: list[int]
) -> None:
    monkeypatch.setattr("nvcli.engine.core.FEW_UPDATES", few)
    core, _, log = make_core(depth=1)
    seq = make_sequence(max_tokens=3)
    unread: list[int] = []
    log.on_update = lambda _: unread.append(seq.num_unread_tokens)
    core.add(seq)
    run(core)
    assert unread == in_flight
    assert seq.num_unread_tokens == 0


# --- failures ------------------------------------------------------------------------------------


@both_depths
def test_a_launch_that_fails_ends_its_sequences_and_the_engine_goes_on(depth: int) -> None:
    core, _, log = make_core(depth=depth, failing_launches=frozenset([3]))
    first, second = make_sequence(range(8), max_tokens=9), make_sequence(range(8), max_tokens=9)
    core.add(first)
    core.add(second)
    run(core)
    for seq in (first, second):
        last = log.of(seq)[-1]
        assert last.finish_reason is FinishReason.ERROR
        assert isinstance(last.error, EngineError)
        assert str(last.error) == "the step failed: launch 3"  # the first line, no traceback
        assert seq.status is Status.FINISHED
    third = make_sequence(range(8), max_tokens=9)
    core.add(third)
    run(core)
    assert log.tokens(third) == outputs_alone(make_sequence(range(8), max_tokens=9))


@both_depths
def test_a_failed_launch_takes_its_hashes_back(depth: int) -> None:
    core, _, log = make_core(depth=depth, failing_launches=frozenset([1]))
    core.add(make_sequence(range(8)))
    run(core)
    assert core.scheduler.blocks.num_named == 0
    again = make_sequence(range(8))
    core.add(again)
    run(core)
    assert again.num_cached_tokens == 0
    assert log.tokens(again) == outputs_alone(make_sequence(range(8)))


@both_depths
def test_a_read_that_fails_ends_what_was_built_on_it(depth: int) -> None:
    core, _, log = make_core(depth=depth, failing_reads=frozenset([1]))
    first = make_sequence(range(8), max_tokens=9)
    core.add(first)
    core.step()
    hits_it = make_sequence(range(9), max_tokens=2)  # at depth 1 it shares unread blocks
    core.add(hits_it)
    run(core)
    assert first.finish_reason is FinishReason.ERROR
    if depth == 1:
        assert hits_it.finish_reason is FinishReason.ERROR
    later = make_sequence(range(9), max_tokens=2)
    core.add(later)
    run(core)
    assert log.tokens(later) == outputs_alone(make_sequence(range(9), max_tokens=2))


def test_our_own_errors_keep_their_class_and_hint() -> None:
    core, device, log = make_null_core()
    error = OutOfMemoryError("no room", hint="Lower max_num_batched_tokens")

    def launch(plan: StepPlan) -> SimulatedTicket:
        raise error

    device.launch = launch  # type: ignore[method-assign]
    seq = make_sequence()
    core.add(seq)
    run(core)
    assert log.of(seq)[-1].error is error


def test_tokens_read_before_a_failure_come_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvcli.engine.core.FEW_UPDATES", 0)  # else it is handed out at once
    core, _, log = make_core(depth=1, failing_launches=frozenset([3]))
    seq = make_sequence(max_tokens=9)
    core.add(seq)
    run(core)
    (last,) = log.of(seq)
    assert len(last.token_ids) == 1
    assert last.finish_reason is FinishReason.ERROR


# --- moments and counts --------------------------------------------------------------------------


@both_depths
def test_moments_of_a_sequence_are_in_order(depth: int) -> None:
    core, _, _ = make_core(depth=depth, budget=3)
    seq = make_sequence(range(8), max_tokens=3)
    core.add(seq)
    assert (seq.first_scheduled, seq.first_token, seq.finished) == (None, None, None)
    run(core)
    assert seq.first_scheduled is not None
    assert seq.first_token is not None
    assert seq.finished is not None
    assert seq.first_scheduled < seq.first_token < seq.finished


def test_logprobs_come_with_their_tokens() -> None:
    core, _, log = make_core(depth=1)
    seq = make_sequence(max_tokens=4, logprobs=0)
    core.add(seq)
    run(core)
    told = [(update.token_ids, [lp.token_id for lp in update.logprobs]) for update in log.of(seq)]
    assert all(token_ids == of for token_ids, of in told)
    assert len(told) == 4


def test_idle_costs_nothing_and_checks_itself() -> None:
    core, _, _ = make_core()
    core.step()
    assert not core.has_unfinished
    core.scheduler.blocks.grow(make_sequence(), 4)  # leaked
    with pytest.raises(AssertionError, match="blocks leaked"):
        core.step()
    schedulers.clear()


def count_calls(batch: int) -> float:
    """Python and C function calls of one decode step, in the steady state."""
    core, _, _ = make_null_core(max_num_seqs=batch, num_blocks=batch * 30)
    for i in range(batch):
        core.add(make_sequence(range(i, i + 8), max_tokens=100))
    for _ in range(4):
        core.step()
    count, num_steps = 0, 16  # four block boundaries

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        for _ in range(num_steps):
            core.step()
    finally:
        sys.setprofile(None)
    for seq in core.scheduler.running.copy():
        core.abort(seq)
    run(core)
    return count / num_steps


def test_host_work_of_a_step_is_bounded_and_linear() -> None:
    """Counted, not timed: 0.2 ms at batch 1 and 1.5 ms at 256 are a few thousand calls a ms."""
    one, many = count_calls(1), count_calls(256)
    print(f"calls a step: {one:.0f} at batch 1, {many:.0f} at 256 ({many / 256:.1f} a row)")
    assert one < 90
    assert many / 256 < 40
