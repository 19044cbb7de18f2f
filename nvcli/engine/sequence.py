"""A sequence: the engine's state for one of the outputs a request asked for.

The one idea: a sequence has *known* tokens (prompt and collected output) and may have *in-flight*
tokens (sampled by a launched step, not yet read); `num_computed_tokens` says for how many of them
keys and values are computed. Scheduling is making that number catch up, whether the rest is a
decode, a part of a prompt, what a prefix hit left, or a history lost to preemption.

    prompt_token_ids | output_token_ids | in flight |
    |<--------------- num_tokens ------>|
    |<--------------- num_virtual_tokens ---------->|
    |<- num_computed_tokens ->|<- still to schedule->|

Invariants:
  * num_computed_tokens <= num_virtual_tokens, and counts tokens whose KV a *launched* step writes
  * block_table only grows at the end while the sequence runs
  * epoch changes exactly when results of launched steps must no longer reach the sequence: at its
    end, and when it is preempted with no sample in flight
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from array import array

    from nvcli.types import FinishReason, SamplingParams


class Status(Enum):
    WAITING = auto()  # never admitted, or admitted again after preemption
    RUNNING = auto()  # holds a slot and blocks
    PREEMPTED = auto()  # blocks and slot are gone, a launched step is still to be collected
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable on purpose: the scheduler is its only writer while it is not finished."""

    seq_id: int
    prompt_token_ids: array[int]  # of type "i": int32
    params: SamplingParams
    max_output_tokens: int  # max_tokens, or the room left in the context, whichever is less
    seed: int  # noise depends on (seed, position) only
    request_id: str = ""
    index: int = 0  # which of the request's n
    eos_token_ids: frozenset[int] = frozenset()  # empty under ignore_eos
    priority: int = 0  # lower runs first
    cache_salt: str | None = None
    arrival: float = 0.0

    output_token_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    slot: int = -1
    epoch: int = 0
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_inflight_tokens: int = 0  # sampled by launched steps, not collected
    num_unread_tokens: int = 0  # sampled by launched steps, not yet seen by the consumer
    # Set by a consumer that looks at `output_token_ids` when it needs to: tokens count as read when
    # they are collected, and only the last of them causes an update.
    is_quiet: bool = False
    end_ids: frozenset[int] = field(init=False)  # EOS and stop ids
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_hashed_blocks: int = 0  # leading blocks that carry a hash
    block_hashes: list[bytes] = field(default_factory=list)  # of leading full blocks, kept for good
    num_sent_blocks: int = 0  # leading entries of block_table that the device was told
    num_unsent_tokens: int = 0  # last output tokens, forced by the host, the device lacks them yet
    num_prompt_logprobs: int = 0  # prompt tokens whose log-probabilities were collected
    # Of a pooling request (embeddings, scores), what is read of its last prompt token instead of
    # sampling: (): the hidden state; ids: the logits of these. None: not a pooling request.
    pools: tuple[int, ...] | None = None
    has_grammar: bool = False  # its samples are masked; see `mask`
    mask: Any = None  # ids that may be sampled next, as bits in int32 words; None: any
    gate: int | None = None  # from this output on, one is sampled only when all before are read
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_preemptions: int = 0
    # Moments on the core's clock, as in `RequestTimes`.
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def __post_init__(self) -> None:
        self.end_ids = self.eos_token_ids.union(self.params.stop_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and collected output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_virtual_tokens(self) -> int:
        """Known and in-flight tokens."""
        return self.num_tokens + self.num_inflight_tokens

    @property
    def num_virtual_outputs(self) -> int:
        return len(self.output_token_ids) + self.num_inflight_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def is_gated(self) -> bool:
        """Whether its next token must wait until the consumer has read the earlier ones."""
        return (
            self.gate is not None
            and self.num_unread_tokens > 0
            and self.num_virtual_outputs >= self.gate
        )

    def known_tokens(self, start: int, end: int) -> array[int]:
        """Tokens start .. end - 1 of prompt and collected output, int32."""
        found, split = self.prompt_token_ids[start:end], len(self.prompt_token_ids)
        if end > split:
            found.extend(self.output_token_ids[max(0, start - split) : end - split])
        return found
