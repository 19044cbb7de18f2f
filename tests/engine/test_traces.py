"""Random traces: whatever is scheduled, chunked, shared, preempted, gated, aborted or broken, each
sequence's output is what it would be alone.

A trace is drawn number by number, from `random` (fast, many) or from hypothesis (shrinks). The
oracle is a dozen lines without an engine. The second half breaks the engine in known ways and
asserts that the traces notice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvcli.engine.block_manager import BlockManager
from nvcli.engine.core import EngineCore, Update
from nvcli.engine.scheduler import Scheduler
from nvcli.engine.sequence import Sequence, Status
from nvcli.types import FinishReason
from tests import builders
from tests.builders import make_core, make_sequence
from tests.engine.simulated_device import (
    EOS,
    SimulatedDevice,
    SimulatedFault,
    expected_key,
    logprob_of,
    sample,
)

Draw = Callable[[int, int], int]  # an integer between two bounds, both included

FORCED = [3, 1, 4]  # what a gated request's consumer forces
STOP_PAIR = (2, 3)  # the "stop string" of requests that have one


@dataclass
class Request:
    seq: Sequence
    step: int  # when it arrives
    forces_at: int | None = None  # the consumer forces FORCED after so many outputs
    gates_all: bool = False  # the consumer must read each token before the next, as with grammars
    has_stop: bool = False
    is_quiet: bool = False  # from its first output on the consumer looks at its tokens itself
    wakes_at: int | None = None  # outputs after which it is told of them again
    abort_step: int | None = None
    abort_after: int | None = None  # outputs
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    end: Update | None = None


@dataclass
class Trace:
    core_options: dict[str, Any]
    requests: list[Request]


def draw_trace(draw: Draw) -> Trace:
    depth = draw(0, 2)
    block_size = draw(1, 4)
    can_fail = draw(0, 3) == 0
    is_long = draw(0, 1) == 1  # outputs outgrow the pool: preemption
    options = {
        "depth": depth,
        "budget": (1, 5, 64)[draw(0, 2)],
        "enable_prefix_caching": draw(0, 3) > 0,
        "watermark": (0.0, 0.1)[draw(0, 1)],
        "max_num_seqs": draw(1, 6),
        "num_blocks": -(-draw(16, 32 if is_long else 48) // block_size) if draw(0, 4) else 100,
        "block_size": block_size,
        "max_model_len": (24, 64)[draw(0, 1)],
        "ring": depth + 2,
        "eagerness": (0.0, 0.5, 1.0)[draw(0, 2)],
        "seed": draw(0, 1000),
        "failing_launches": frozenset(draw(1, 20) for _ in range(2)) if can_fail else frozenset(),
        "failing_reads": frozenset([draw(1, 30)]) if can_fail and draw(0, 1) else frozenset(),
    }
    prefixes = [[draw(0, 4) for _ in range(draw(1, 12))] for _ in range(2)]
    requests: list[Request] = []
    for seq_id in range(draw(1, 8)):
        kind = draw(0, 7)
        if requests and draw(0, 3) == 0:  # one of n: the same prompt, another seed, the same moment
            prompt, step = requests[-1].seq.prompt_token_ids, requests[-1].step
        else:
            prompt = prefixes[draw(0, 1)] + [draw(0, 4) for _ in range(draw(0, 5))]
            step = draw(0, 6)
        max_tokens = draw(8, 24) if is_long else draw(0, 12)
        seq = make_sequence(
            prompt,
            seq_id=seq_id,
            max_tokens=max_tokens,
            ignore_eos=is_long or draw(0, 1) == 0,
            seed=draw(0, 3),
            priority=draw(0, 1) * draw(0, 2),
            arrival=float(step),
            cache_salt=(None, None, "salt")[draw(0, 2)],
            logprobs=0,
            prompt_logprobs=0 if kind == 7 else None,
            stop_token_ids=(EOS,) if draw(0, 4) == 0 and not is_long else (),
            min_tokens=min(max_tokens, draw(0, 2)),
        )
        request = Request(seq, step)
        if kind in (0, 1):
            request.forces_at = seq.gate = draw(0, 5)
        elif kind == 2:
            request.gates_all, seq.gate = True, 0
        request.has_stop = draw(0, 3) == 0 and not is_long
        if draw(0, 4) == 0:
            request.abort_step = draw(0, 20)
        elif draw(0, 5) == 0:
            request.abort_after = draw(1, 6)
        if kind in (3, 4) and not request.has_stop and request.abort_after is None:
            request.is_quiet = True
            request.wakes_at = draw(2, 10) if draw(0, 2) == 0 else None
        requests.append(request)
    return Trace(options, requests)


# --- what each request gives alone ---------------------------------------------------------------


def keys_of(tokens: list[int]) -> list[int]:
    keys, previous = [], 0
    for position, token_id in enumerate(tokens):
        previous = expected_key(previous, token_id, position)
        keys.append(previous)
    return keys


def expected_output(request: Request, options: dict[str, Any]) -> tuple[list[int], FinishReason]:
    seq, prompt = request.seq, request.seq.prompt_token_ids.tolist()
    capacity = options["num_blocks"] * options["block_size"]
    assert seq.params.max_tokens is not None
    limit = min(
        seq.params.max_tokens,
        options["max_model_len"] - len(prompt),
        capacity - len(prompt) + 1,
    )
    outputs: list[int] = []
    while len(outputs) < limit:
        new = [sample(keys_of(prompt + outputs), seq.seed, len(outputs), seq.params.min_tokens)]
        outputs += new
        if new[0] in seq.eos_token_ids or new[0] in seq.params.stop_token_ids:
            return outputs, FinishReason.STOP
        if len(outputs) >= limit:
            break
        if request.has_stop and tuple(outputs[-2:]) == STOP_PAIR:
            return outputs, FinishReason.STOP
        if request.abort_after is not None and len(outputs) >= request.abort_after:
            return outputs, FinishReason.ABORT
        if len(outputs) == request.forces_at:
            outputs += FORCED[: limit - len(outputs)]
    return outputs, FinishReason.LENGTH


# --- running a trace -----------------------------------------------------------------------------


class Harness:
    """Feeds a trace to a core, plays its consumer, and checks every promise on the way."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.requests = {request.seq.seq_id: request for request in trace.requests}
        self.core, self.device, log = make_core(**trace.core_options)
        log.on_update = self.consume

    def run(self) -> None:
        builders.schedulers.clear()  # this one is checked after each step, and there are many
        last_arrival = max(request.step for request in self.trace.requests)
        for step in range(5000):
            for request in self.trace.requests:
                if request.step == step:
                    self.add(request)
                if request.abort_step == step and request.step <= step:
                    ended = request.seq.is_finished
                    assert self.core.abort(request.seq) is not ended
            if step > last_arrival and not self.core.has_unfinished:
                break
            self.step()
        else:
            raise AssertionError("a livelock")
        self.core.scheduler.check_idle()
        for request in self.trace.requests:
            self.judge(request)

    def add(self, request: Request) -> None:
        options, num_prompt = self.trace.core_options, request.seq.num_prompt_tokens
        capacity = options["num_blocks"] * options["block_size"]
        if num_prompt <= min(options["max_model_len"], capacity):
            self.core.add(request.seq)
        else:  # `Engine.validate` refuses it
            request.seq.status = Status.FINISHED

    def step(self) -> None:
        num_plans = len(self.device.plans)
        self.core.step()
        self.core.scheduler.check()
        for request in self.trace.requests:
            self.look(request)
        for plan in self.device.plans[num_plans:]:
            assert plan.num_tokens <= self.trace.core_options["budget"], "over the token budget"

    def look(self, request: Request) -> None:
        """At the tokens of a sequence that does not tell of them."""
        seq = request.seq
        if not seq.is_quiet or request.end is not None or seq.is_finished:
            return
        assert seq.num_unread_tokens == seq.num_inflight_tokens, "collected, and yet unread"
        request.tokens = seq.output_token_ids.copy()
        if request.wakes_at is not None and len(request.tokens) >= request.wakes_at:
            seq.is_quiet = False

    def consume(self, update: Update) -> None:
        seq, request = update.seq, self.requests[update.seq.seq_id]
        assert request.end is None, "an update after the last"
        assert len(update.logprobs) in (0, len(update.token_ids))
        if seq.is_quiet:
            assert update.finish_reason is not None, "it is quiet"
            request.tokens = seq.output_token_ids.copy()
        else:
            request.tokens += update.token_ids
        if request.is_quiet and update.token_ids:
            seq.is_quiet = len(request.tokens) < (request.wakes_at or math.inf)
        request.prompt_logprobs += update.prompt_logprobs
        if update.finish_reason is not None:
            request.end = update
            return
        if seq.is_finished or not update.token_ids:
            return
        # Forced tokens end nothing here, as in the oracle: they are recognised by their logprobs.
        is_forced = not update.logprobs
        count = len(request.tokens)
        if not is_forced and request.has_stop and tuple(request.tokens[-2:]) == STOP_PAIR:
            request.end = Update(seq, finish_reason=FinishReason.STOP)
            self.core.finish(seq, FinishReason.STOP, "pair")
        elif not is_forced and request.abort_after is not None and count >= request.abort_after:
            self.core.abort(seq)
        elif count == request.forces_at and not is_forced:
            assert seq.num_tokens == len(seq.prompt_token_ids) + count, "it ran ahead of its gate"
            self.core.force(seq, FORCED)
            seq.gate = None
        elif request.forces_at == 0:
            seq.gate = None  # passed before there was a token to force after

    def judge(self, request: Request) -> None:
        seq, end = request.seq, request.end
        if seq.finish_reason is None:
            return  # refused
        assert end is not None, "it never ended"
        assert seq.finish_reason is end.finish_reason
        assert request.tokens == seq.output_token_ids[: len(request.tokens)]
        expected, reason = expected_output(request, self.trace.core_options)
        if end.finish_reason is FinishReason.ERROR:
            assert end.error is not None
            assert isinstance(end.error.__cause__, SimulatedFault), f"a fault: {end.error!r}"
            assert "\n" not in end.error.message
        is_cut = end.finish_reason is FinishReason.ERROR or (
            end.finish_reason is FinishReason.ABORT and request.abort_step is not None
        )
        if is_cut:
            assert request.tokens == expected[: len(request.tokens)]
            return
        assert (request.tokens, end.finish_reason) == (expected, reason)
        assert request.tokens == seq.output_token_ids
        if seq.params.prompt_logprobs is not None:
            prompt = seq.prompt_token_ids.tolist()
            keys = keys_of(prompt)
            wanted = [logprob_of(keys[i - 1], prompt[i]) for i in range(1, len(prompt))]
            assert request.prompt_logprobs == wanted


def run_random_traces(num_traces: int, seed: int) -> None:
    for index in range(num_traces):
        trace_seed = seed + index
        try:
            Harness(draw_trace(random.Random(trace_seed).randint)).run()
        except Exception as error:
            error.add_note(f"trace seed {trace_seed}")
            raise


def test_random_traces_give_what_each_request_gives_alone() -> None:
    run_random_traces(1500, seed=0)


@settings(max_examples=60)
@given(st.data())
def test_hypothesis_traces(data: st.DataObject) -> None:
    Harness(draw_trace(lambda low, high: data.draw(st.integers(low, high)))).run()


# --- mutations: each of these must be noticed ----------------------------------------------------


def results_ignore_the_epoch(patch: pytest.MonkeyPatch) -> None:
    collect = EngineCore._collect

    def mutant(self: EngineCore, ticket: Any) -> None:
        for row in ticket.plan.rows:
            row.epoch = row.seq.epoch
        collect(self, ticket)

    patch.setattr(EngineCore, "_collect", mutant)


def victims_do_not_drain(patch: pytest.MonkeyPatch) -> None:
    """No drain rule: readmitted while its tokens are in flight."""
    preempt = Scheduler._preempt

    def mutant(self: Scheduler, seq: Sequence) -> None:
        preempt(self, seq)
        if seq.status is Status.PREEMPTED:
            self.draining.remove(seq)
            seq.status = Status.WAITING
            self.add(seq)

    patch.setattr(Scheduler, "_preempt", mutant)


def unread_tokens_are_hashed(patch: pytest.MonkeyPatch) -> None:
    place = Scheduler._place

    def mutant(self: Scheduler, seq: Sequence, n: int, plan: Any) -> None:
        place(self, seq, n, plan)
        unread = seq.num_computed_tokens - seq.num_tokens
        if unread > 0:
            seq.output_token_ids += [2] * unread  # a guess
            plan.hashed_blocks += self.blocks.publish(seq, seq.num_tokens)
            del seq.output_token_ids[-unread:]

    patch.setattr(Scheduler, "_place", mutant)


def blocks_are_named_before_a_step_writes_them(patch: pytest.MonkeyPatch) -> None:
    settle = Scheduler.settle

    def mutant(self: Scheduler, row: Any, token_id: int) -> None:
        settle(self, row, token_id)
        if row.samples and row.seq.status is Status.RUNNING:
            end = min(row.start + row.n + 1, len(row.seq.block_table) * self.blocks.block_size)
            self.blocks.publish(row.seq, end)

    patch.setattr(Scheduler, "settle", mutant)


def shared_blocks_are_written(patch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler.schedule

    def mutant(self: Scheduler, now: float) -> Any:
        plan = schedule(self, now)
        for row in plan.rows:
            row.is_stored = False
        return plan

    patch.setattr(Scheduler, "schedule", mutant)


def failed_steps_keep_their_hashes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "retract", lambda self, named: None)


def reused_blocks_keep_their_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "_forget", lambda self, block, digest: None)


def duplicates_overwrite_names(patch: pytest.MonkeyPatch) -> None:
    publish = BlockManager.publish

    def mutant(self: BlockManager, seq: Sequence, num_tokens: int) -> Any:
        start = seq.num_hashed_blocks
        named = publish(self, seq, num_tokens)
        for index in range(start, seq.num_hashed_blocks):
            self._block_of[self._digest(seq, index)] = seq.block_table[index]
        return named

    patch.setattr(BlockManager, "publish", mutant)


def blocks_stay_in_ended_tables(patch: pytest.MonkeyPatch) -> None:
    free = BlockManager.free

    def mutant(self: BlockManager, seq: Sequence) -> None:
        table = seq.block_table.copy()
        free(self, seq)
        seq.block_table += table

    patch.setattr(BlockManager, "free", mutant)


def matched_blocks_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    share = BlockManager.share

    def mutant(self: BlockManager, seq: Sequence, matched: list[int]) -> None:
        share(self, seq, matched)
        for block in matched:
            self.ref_counts[block] = 1

    patch.setattr(BlockManager, "share", mutant)


def gates_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "is_gated", property(lambda self: False))


def unread_tokens_are_forgotten_early(patch: pytest.MonkeyPatch) -> None:
    """Decremented when collected, not when the consumer has read them."""
    settle = Scheduler.settle

    def mutant(self: Scheduler, row: Any, token_id: int) -> None:
        settle(self, row, token_id)
        row.seq.num_unread_tokens = row.seq.num_inflight_tokens

    patch.setattr(Scheduler, "settle", mutant)


def quiet_tokens_stay_unread(patch: pytest.MonkeyPatch) -> None:
    settle = Scheduler.settle_quiet

    def mutant(self: Scheduler, rows: list[Any], token_ids: list[int]) -> list[int]:
        others = settle(self, rows, token_ids)
        for index in set(range(len(rows))).difference(others):
            rows[index].seq.num_unread_tokens += 1
        return others

    patch.setattr(Scheduler, "settle_quiet", mutant)


def quiet_sequences_run_on(patch: pytest.MonkeyPatch) -> None:
    """Past an id that ends them."""
    settle = Scheduler.settle_quiet

    def mutant(self: Scheduler, rows: list[Any], token_ids: list[int]) -> list[int]:
        for row in rows:
            row.seq.end_ids = frozenset() if row.seq.is_quiet else row.seq.end_ids
        return settle(self, rows, token_ids)

    patch.setattr(Scheduler, "settle_quiet", mutant)


def forced_tokens_stay_on_the_host(patch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler.schedule

    def mutant(self: Scheduler, now: float) -> Any:
        plan = schedule(self, now)
        plan.token_writes.clear()
        return plan

    patch.setattr(Scheduler, "schedule", mutant)


def resumes_forget_their_output(patch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler.schedule

    def mutant(self: Scheduler, now: float) -> Any:
        plan = schedule(self, now)
        plan.slot_inits = [init._replace(output_token_ids=[]) for init in plan.slot_inits]
        return plan

    patch.setattr(Scheduler, "schedule", mutant)


def lengths_are_scheduled_past(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Scheduler,
        "_num_to_schedule",
        lambda self, seq: 0 if seq.is_gated else seq.num_virtual_tokens - seq.num_computed_tokens,
    )


def prompt_logprobs_use_hits(patch: pytest.MonkeyPatch) -> None:
    admit = Scheduler._admit

    def mutant(self: Scheduler, seq: Sequence, *rest: Any) -> bool:
        params, seq.params = seq.params, seq.params.replace(prompt_logprobs=None)
        try:
            return admit(self, seq, *rest)
        finally:
            seq.params = params

    patch.setattr(Scheduler, "_admit", mutant)


def capacity_is_not_a_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "max_tokens_stored", property(lambda self: 10**6))


def half_the_ring(patch: pytest.MonkeyPatch) -> None:
    init = SimulatedDevice.__init__

    def mutant(self: SimulatedDevice, *, ring: int, **options: Any) -> None:
        init(self, ring=ring // 2, **options)

    patch.setattr(SimulatedDevice, "__init__", mutant)


def a_second_stream(patch: pytest.MonkeyPatch) -> None:
    """Steps run in any order."""
    advance = SimulatedDevice._advance

    def mutant(self: SimulatedDevice) -> None:
        if len(self._queue) >= 6:  # two whole steps are queued: swap them
            self._queue.rotate(3)
        advance(self)

    patch.setattr(SimulatedDevice, "_advance", mutant)


MUTATIONS = [
    results_ignore_the_epoch,
    quiet_tokens_stay_unread,
    quiet_sequences_run_on,
    victims_do_not_drain,
    unread_tokens_are_hashed,
    blocks_are_named_before_a_step_writes_them,
    shared_blocks_are_written,
    failed_steps_keep_their_hashes,
    reused_blocks_keep_their_names,
    duplicates_overwrite_names,
    blocks_stay_in_ended_tables,
    matched_blocks_are_not_counted,
    gates_are_ignored,
    unread_tokens_are_forgotten_early,
    forced_tokens_stay_on_the_host,
    resumes_forget_their_output,
    lengths_are_scheduled_past,
    prompt_logprobs_use_hits,
    capacity_is_not_a_limit,
    half_the_ring,
    a_second_stream,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_the_traces_notice(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    for seed in range(3000):
        trace = draw_trace(random.Random(seed).randint)
        harness = Harness(trace)
        try:
            harness.run()
        except Exception as error:  # noqa: BLE001 - how it shows is not the point
            print(f"trace {seed}: {error!r}")
            return
    pytest.fail("not noticed")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_traces() -> None:
    seed = random.SystemRandom().randrange(10**9)
    print(f"seed {seed}")
    run_random_traces(200_000, seed)
