"""What a plan changes in the device's tables, as arrays that travel there in one upload.

`DeviceState` applies them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Self

import numpy as np

from nvcli.engine.slot_features import MAX_MASKED, Features
from nvcli.kernels.noise import as_int64

if TYPE_CHECKING:
    from array import array

    from nvcli.engine.staging import Array
    from nvcli.engine.step import BlockWrite, StepPlan


@dataclass(slots=True)
class Deltas:
    """Arrays of a plan's deltas on their way to the device; the numbers are places among them."""

    arrays: list[Array] = field(default_factory=list)
    block_writes: int | None = None  # [3, n]: slots, entries, blocks
    inits: int | None = None  # slots; then floats, ints and masked ids
    token_ids: int | None = None  # int32, of all inits, then of all token writes

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        deltas = cls()
        if plan.block_writes:
            deltas.block_writes = deltas.add(_by_block(plan.block_writes))
        if plan.slot_inits:
            floats = np.zeros((len(plan.slot_inits), 8), np.float64)
            ints = np.zeros((len(plan.slot_inits), 8), np.int64)
            masked = np.zeros((len(plan.slot_inits), MAX_MASKED), np.int32)
            for i, init in enumerate(plan.slot_inits):
                p = init.params
                floats[i, :6] = (
                    *(p.temperature, p.top_p, p.min_p),
                    *(p.presence_penalty, p.frequency_penalty, p.repetition_penalty),
                )
                prompt_len = len(init.prompt_token_ids)
                ints[i, :4] = (p.top_k, as_int64(init.seed), p.min_tokens, prompt_len)
                features = Features.of(init)
                ids = features.kernel_masked_ids
                ints[i, 4:6] = (features.kernel_flags, len(ids))
                masked[i, : len(ids)] = ids
            deltas.inits = deltas.add(np.array([init.slot for init in plan.slot_inits], np.int64))
            deltas.add(floats)
            deltas.add(ints)
            deltas.add(masked)
        pieces: list[array[int] | list[int]] = []
        for init in plan.slot_inits:
            pieces += [init.prompt_token_ids, init.output_token_ids]
        pieces += [write.token_ids for write in plan.token_writes]
        if pieces:
            token_ids = np.concatenate([np.asarray(ids, np.int32) for ids in pieces])
            deltas.token_ids = deltas.add(token_ids)
        return deltas

    def add(self, array: Array) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1


def _by_block(writes: list[BlockWrite]) -> Array:
    """[3, n] int64: slots, entries and blocks, a column for each block."""
    heads = np.array([(slot, entry, len(blocks)) for slot, entry, blocks in writes], np.int64)
    slots, entries, counts = heads.T
    ends = counts.cumsum()
    found = np.empty((3, int(ends[-1])), np.int64)
    found[0] = slots.repeat(counts)
    found[1] = np.arange(found.shape[1]) + (entries + counts - ends).repeat(counts)
    found[2] = list(chain.from_iterable(write.blocks for write in writes))
    return found
