"""Sampling a step on CUDA: the kernel takes every row it can, the eager sampler the others.

Hot path: yes.

The kernel (`kernels.sampling`) runs inside a captured step or alone, on all rows at once. Rows with
penalties, biases, masks, or filters it does not know are then sampled again by `Sampler` from the
same logits, which nothing has written to, and that sample replaces the kernel's. A row's kind
depends on its own parameters alone, so its token does not depend on what else is in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nvcli.engine.device_state import StepInputs
from nvcli.kernels.sampling import MAX_TOP_K, sample

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.engine.device_state import DeviceState, SlotInfo
    from nvcli.engine.sampler import Sampler
    from nvcli.engine.step import StepPlan


def fits_kernel(info: SlotInfo, vocab_size: int) -> bool:
    """Whether the kernel knows everything that this slot's sampling needs."""
    params = info.params
    if info.has_penalties or info.has_bias or info.masked_ids or info.has_grammar:
        return False
    if info.bad_words is not None:
        return False
    if params.is_greedy:
        return True
    if params.top_k > 0:
        return params.top_k <= min(MAX_TOP_K, vocab_size)
    return params.top_p >= 1 and params.min_p <= 0


class StepSampler:
    """Every method enqueues and none waits for the device."""

    def __init__(self, state: DeviceState, sampler: Sampler, vocab_size: int) -> None:
        self.state = state
        self.sampler = sampler
        self.vocab_size = vocab_size
        self._fits = [True] * len(state.slots)  # by slot

    def admit(self, plan: StepPlan) -> None:
        """Note how the plan's new owners of slots are sampled."""
        for init in plan.slot_inits:
            info = self.state.slots[init.slot]
            assert info is not None, f"slot {init.slot} has no owner"
            self._fits[init.slot] = fits_kernel(info, self.vocab_size)

    def run_kernel(self, logits: Tensor, slots: Tensor, positions: Tensor, out: Tensor) -> None:
        """logits: [R, V]; slots, positions: [R] int64, slot -1 not sampled; out: [R] int32."""
        state = self.state
        sample(
            logits,
            slots,
            positions,
            state.params_f,
            state.params_i,
            state.tokens,
            out,
            self.vocab_size,
        )

    def finish(
        self,
        plan: StepPlan,
        rows: list[int],
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        out: Tensor,
    ) -> None:
        """After the kernel: sample the rows it does not know, and note on the host what is written.

        rows: rows of the plan behind logits [R, V], slots, positions and out [R].
        """
        fits, infos = self._fits, self.state.slots
        others: list[int] = []  # indices into rows
        for index, i in enumerate(rows):
            row = plan.rows[i]
            if not row.samples:
                continue
            if not fits[row.slot]:
                others.append(index)
                continue
            info = infos[row.slot]
            assert info is not None, f"slot {row.slot} has no owner"
            info.length = max(info.length, row.start + row.n + 1)
        if not others:
            return
        if len(others) < logits.shape[0]:
            index_of = self.state.upload_index(others)
            logits, slots, positions = logits[index_of], slots[index_of], positions[index_of]
        sample_rows = [rows[index] for index in others]
        masks = [plan.rows[i].seq.mask for i in sample_rows]
        inputs = StepInputs(None, sample_rows, slots, positions, masks)
        sampled = self.sampler.sample(logits, [plan.rows[i].slot for i in sample_rows], inputs)
        self.state.store_samples(plan, inputs, sampled)
        if len(others) < out.shape[0]:
            out[index_of] = sampled.to(torch.int32)
        else:
            out.copy_(sampled)
