"""The step protocol: what the host tells the device, and what it hears back.

A step's input is always `tokens[slot, start : start + n]` on the device, and the step writes its
sample to `tokens[slot, start + n]`. So nothing branches on a token that has not been read, and the
plain loop (depth 0) and run-ahead (depth 1) are the same code: `launch` a plan, keep its ticket,
`collect` the ticket later. A result belongs to the plan's (sequence, epoch), never to a slot.

All work of a device goes through one stream in launch order. That order is the fence: a plan may
reuse the slot or the blocks of a sequence that an earlier, unread plan still touches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from array import array

    from nvcli.engine.sequence import Sequence
    from nvcli.types import SamplingParams, TokenLogprob

HashedBlock = tuple[int, bytes]  # a block and the digest of its prefix


@dataclass(slots=True)
class Row:
    """One sequence's share of a step: tokens `start .. start + n - 1` of its slot."""

    seq: Sequence
    epoch: int  # the sequence's epoch when the plan was made
    slot: int
    start: int
    n: int  # tokens computed in this step
    samples: bool  # whether position start + n is sampled
    is_stored: bool = False  # KV of these tokens is already in a shared block: read, do not write


class SlotInit(NamedTuple):
    """A sequence takes a slot: its whole known history and how to sample from it."""

    slot: int
    prompt_token_ids: array[int]
    output_token_ids: list[int]  # not empty when it resumes after preemption
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]  # masked until min_tokens, like params.stop_token_ids
    has_grammar: bool = False  # each row that samples may have a mask of its own: `Sequence.mask`


class BlockWrite(NamedTuple):
    """`block_table[slot, entry : entry + len(blocks)] = blocks`; a plan has one a slot at most."""

    slot: int
    entry: int
    blocks: list[int]


class TokenWrite(NamedTuple):
    """`tokens[slot, start : start + len(token_ids)] = token_ids`: output forced by the host."""

    slot: int
    start: int
    token_ids: list[int]


@dataclass(slots=True)
class StepPlan:
    """Everything a device needs for one step. The deltas apply before the rows run, in the order
    of the fields, and concern only sequences that have a row.
    """

    step_id: int
    rows: list[Row] = field(default_factory=list)
    slot_inits: list[SlotInit] = field(default_factory=list)
    block_writes: list[BlockWrite] = field(default_factory=list)
    token_writes: list[TokenWrite] = field(default_factory=list)
    # Host only: the prefix-cache names this step's writes make true, taken back when it fails.
    hashed_blocks: list[HashedBlock] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.n for row in self.rows)

    @property
    def reads_hidden_states(self) -> bool:
        """Whether hidden states of tokens that do not sample are read: those of pooled rows, and
        for prompt log-probabilities all but the prompt's last.
        """
        return any(
            row.seq.pools is not None
            or (
                row.seq.params.prompt_logprobs is not None
                and row.start < row.seq.num_prompt_tokens - 1
            )
            for row in self.rows
        )


@dataclass(slots=True)
class StepResult:
    """What a step sampled, by row of its plan."""

    # -1 where the row does not sample. In a row that samples, -1 says that its masks forbid every
    # token: the sequence must end. Its slot holds id 0 there, so that a step launched before this
    # was read finds an id of the vocabulary; what that step makes of it is dropped by its epoch.
    token_ids: list[int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # row -> of its sample
    # row -> of prompt tokens start + 1 .. start + n, as far as they are prompt tokens
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    pooled: dict[int, bytes] = field(default_factory=dict)  # row -> float32 of `Sequence.pools`


class Ticket(Protocol):
    """A launched step. Devices attach what they need to find its result."""

    @property
    def plan(self) -> StepPlan: ...


class StepDevice(Protocol):
    """Runs plans in launch order. Implemented by `ModelRunner`, and simulated in the tests."""

    @property
    def max_num_seqs(self) -> int:
        """Slots a plan may use: 0 .. max_num_seqs - 1."""
        ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    def launch(self, plan: StepPlan) -> Ticket:
        """Enqueue the step. When it raises, none of the plan's rows have run."""
        ...

    def collect(self, ticket: Any) -> StepResult:  # a ticket of its own `launch`
        """Wait for the step and read it. Tickets are collected in launch order, each once."""
        ...
