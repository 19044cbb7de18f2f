"""A device without a model: a stream, a shadow KV cache, and text that shows every mistake.

A launched step is three closures on one queue: copy the pinned input, run, copy the output back.
They read their buffers when they execute, as early or as late as events allow (`eagerness`).

The shadow cache holds, for each slot of each block, the key of one token: a hash of the whole
prefix and its position. A row stores its keys, reads all keys up to its last token, and its sample
is a hash of what it read. So a wrong block, chunk, hit, slot or stale row changes the text, and
`expected_key` and `sample` say without any engine what the text must be.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from nvcli.engine.step import Row, SlotInit, StepPlan, StepResult
from nvcli.types import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.engine.block_manager import BlockManager

POISON = -99
VOCAB_SIZE = 5
EOS = 0


def expected_key(previous: int, token_id: int, position: int) -> int:
    return hash((previous, token_id, position))


def sample(keys: list[int], seed: int, num_outputs: int, min_tokens: int) -> int:
    """The next token. `num_outputs` stands for all per-slot state that a step advances."""
    value = hash((tuple(keys), seed, num_outputs))
    if num_outputs < min_tokens:
        return 1 + value % (VOCAB_SIZE - 1)  # EOS and stop ids (always 0 here) are masked
    return value % VOCAB_SIZE


def logprob_of(key: int, token_id: int) -> TokenLogprob:
    """Of a token, given the key of the token before it."""
    return TokenLogprob(token_id, -float(hash((key, token_id)) % 1000), 1)


class RowInput(NamedTuple):
    """What of a `Row` reaches the device."""

    slot: int
    start: int
    n: int
    samples: bool
    is_stored: bool


@dataclass
class Staging:
    """One entry of the pinned ring: a step's input and its output."""

    rows: list[RowInput] = field(default_factory=list)
    deltas: list[Callable[[], None]] = field(default_factory=list)
    result: StepResult | None = None


@dataclass
class SimulatedTicket:
    plan: StepPlan
    entry: int
    is_done: bool = False
    is_broken: bool = False


class SimulatedFault(RuntimeError):
    """A launch or a read that was told to fail."""


class SimulatedDevice:
    def __init__(
        self,
        *,
        max_num_seqs: int = 4,
        num_blocks: int = 16,
        block_size: int = 4,
        max_model_len: int = 256,
        ring: int = 4,
        eagerness: float = 0.5,  # 0: run only when waited for; 1: run at once
        failing_launches: frozenset[int] = frozenset(),  # by count of launches
        failing_reads: frozenset[int] = frozenset(),
        seed: int = 0,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.plans: list[StepPlan] = []  # launched, in order
        self.num_reads = 0
        self.blocks: BlockManager | None = None  # set to check writes against named blocks
        self._failing_launches, self._failing_reads = failing_launches, failing_reads
        self._num_launches = 0
        self._random = random.Random(seed)
        self._eagerness = eagerness
        self._queue: deque[Callable[[], None]] = deque()
        self._ring = [Staging() for _ in range(ring)]
        # device memory
        self._tokens = [[POISON] * max_model_len for _ in range(max_num_seqs)]
        self._block_table: list[dict[int, int]] = [{} for _ in range(max_num_seqs)]
        self._init: list[SlotInit | None] = [None] * max_num_seqs
        self._num_outputs = [POISON] * max_num_seqs
        self._cache = [[POISON] * block_size for _ in range(num_blocks)]

    # --- host side -------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> SimulatedTicket:
        self._num_launches += 1
        self._check(plan)
        staging = self._ring[plan.step_id % len(self._ring)]
        staging.deltas = self._deltas(plan)
        staging.rows = [RowInput(r.slot, r.start, r.n, r.samples, r.is_stored) for r in plan.rows]
        staging.result = None  # poisoned until this step's copy
        if self._num_launches in self._failing_launches:
            # As when memory runs out half-way: the deltas were applied, no row runs.
            deltas = staging.deltas
            self._queue.append(lambda: [delta() for delta in deltas] and None)
            raise SimulatedFault(f"launch {self._num_launches}\nhas a second line")
        ticket = SimulatedTicket(plan, plan.step_id % len(self._ring))
        ticket.is_broken = self._num_launches in self._failing_reads
        self.plans.append(plan)
        local = Staging()

        def copy_in() -> None:
            local.rows, local.deltas = staging.rows, staging.deltas
            staging.rows, staging.deltas = [], []  # the copy is done: the host may write here

        def run() -> None:
            local.result = self._run(local, ticket.is_broken)

        def copy_out() -> None:
            staging.result = local.result
            ticket.is_done = True

        self._queue += [copy_in, run, copy_out]
        self._advance()
        return ticket

    def collect(self, ticket: SimulatedTicket) -> StepResult:
        assert ticket.plan is self.plans[self.num_reads], "collected out of order, or twice"
        self.num_reads += 1
        while not ticket.is_done:
            self._queue.popleft()()
        if ticket.is_broken:
            raise SimulatedFault("read")
        result = self._ring[ticket.entry].result
        self._ring[ticket.entry].result = None
        assert result is not None, "the output was overwritten before it was read"
        assert len(result.token_ids) == len(ticket.plan.rows), "this is another step's output"
        self._advance()
        return result

    def _advance(self) -> None:
        while self._queue and self._random.random() < self._eagerness:
            self._queue.popleft()()

    def _check(self, plan: StepPlan) -> None:
        """What a plan promises, and that no write lands in a block that others may read."""
        slots = [row.slot for row in plan.rows]
        assert slots, "an empty plan was launched"
        assert len(set(slots)) == len(slots), "two rows in one slot"
        assert all(0 <= slot < self.max_num_seqs for slot in slots), "no such slot"
        for delta in (*plan.slot_inits, *plan.block_writes, *plan.token_writes):
            assert delta.slot in slots, "a delta without a row is lost when the launch fails"
        written = [write.slot for write in plan.block_writes]
        assert len(set(written)) == len(written), "two block writes of one slot"
        if self.blocks is None:
            return
        fresh = {block for block, _ in plan.hashed_blocks}
        for row in plan.rows:
            assert row.n > 0, "an empty row"
            for block in self._written(row):
                is_shared = self.blocks.is_named(block) or self.blocks.ref_counts[block] > 1
                assert not is_shared or block in fresh, f"a write into the shared block {block}"

    def _written(self, row: Row) -> set[int]:
        if row.is_stored:
            return set()
        size = self.block_size
        entries = range(row.start // size, (row.start + row.n - 1) // size + 1)
        return {row.seq.block_table[entry] for entry in entries}

    def _deltas(self, plan: StepPlan) -> list[Callable[[], None]]:
        def slot_init(init: SlotInit) -> Callable[[], None]:
            history = [*init.prompt_token_ids, *init.output_token_ids]
            num_outputs = len(init.output_token_ids)

            def apply() -> None:
                self._tokens[init.slot] = history + [POISON] * (self.max_model_len - len(history))
                self._num_outputs[init.slot] = num_outputs
                self._init[init.slot] = init
                self._block_table[init.slot] = {}

            return apply

        def block_write(slot: int, entry: int, blocks: list[int]) -> Callable[[], None]:
            written = dict(enumerate(blocks, entry))
            return lambda: self._block_table[slot].update(written)

        def token_write(slot: int, start: int, token_ids: list[int]) -> Callable[[], None]:
            def apply() -> None:
                self._tokens[slot][start : start + len(token_ids)] = token_ids
                self._num_outputs[slot] += len(token_ids)

            return apply

        return [
            *(slot_init(delta) for delta in plan.slot_inits),
            *(block_write(*delta) for delta in plan.block_writes),
            *(token_write(*delta) for delta in plan.token_writes),
        ]

    # --- device side -----------------------------------------------------------------------------

    def _run(self, step: Staging, is_broken: bool) -> StepResult:
        for delta in step.deltas:
            delta()
        # A layer stores all its keys before it attends. Rows store in order: a hit within the step
        # reads what an earlier row stored.
        for row in step.rows:
            if not row.is_stored:
                previous = self._key(row.slot, row.start - 1) if row.start else 0
                for position in range(row.start, row.start + row.n):
                    token_id = self._tokens[row.slot][position]
                    previous = expected_key(previous, token_id, position)
                    block = self._block_table[row.slot][position // self.block_size]
                    stored = POISON if is_broken else previous
                    self._cache[block][position % self.block_size] = stored
        result = StepResult([])
        for index, row in enumerate(step.rows):
            init = self._init[row.slot]
            assert init is not None, "a row in a slot nobody took"
            end = row.start + row.n
            keys = [self._key(row.slot, position) for position in range(end)]
            token_id = -1
            if row.samples:
                min_tokens = init.params.min_tokens
                token_id = sample(keys, init.seed, self._num_outputs[row.slot], min_tokens)
                self._tokens[row.slot][end] = token_id
                self._num_outputs[row.slot] += 1
                if init.params.logprobs is not None:
                    result.logprobs[index] = logprob_of(keys[-1], token_id)
            result.token_ids.append(token_id)
            if init.params.prompt_logprobs is not None:
                last = min(end + 1, len(init.prompt_token_ids))
                if row.start + 1 < last:
                    result.prompt_logprobs[index] = [
                        logprob_of(keys[position - 1], self._tokens[row.slot][position])
                        for position in range(row.start + 1, last)
                    ]
        return result

    def _key(self, slot: int, position: int) -> int:
        block = self._block_table[slot].get(position // self.block_size)
        if block is None:
            return POISON
        return self._cache[block][position % self.block_size]
