"""Sampling a step on CUDA: the kernel takes every row it can, the eager sampler the others.

Hot path: yes.

The kernel (`kernels.sampling`) runs inside a captured step or alone, on all rows at once. Rows with
a grammar or bad words of several tokens are then sampled again by `Sampler` from the same logits,
which nothing has written to, and that sample replaces the kernel's. A row's kind depends on its own
parameters alone, so its token does not depend on what else is in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nvcli.engine.device_state import StepInputs, masks_of
from nvcli.kernels.sampling import Tables, sample

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.engine.device_state import DeviceState
    from nvcli.engine.sampler import Sampler
    from nvcli.engine.step import StepPlan


class StepSampler:
    """Every method enqueues and none waits for the device."""

    def __init__(self, state: DeviceState, sampler: Sampler, vocab_size: int) -> None:
        self.state = state
        self.sampler = sampler
        self.vocab_size = vocab_size
        counts, prompt_seen, logit_bias = state.by_token.allocate()
        self._tables = Tables(counts, prompt_seen, logit_bias, state.masked_ids)
        self._counters = torch.zeros(len(state.slots), dtype=torch.int32, device=state.device)

    def admit(self, plan: StepPlan) -> None:
        """Before the kernel: it will count the samples of rows with penalties, and one that
        replaces another must not be counted beside it.
        """
        if not self.state.penalty_slots:
            return  # nearly always
        for row in plan.rows:
            info = self.state.slots[row.slot]
            assert info is not None, f"slot {row.slot} has no owner"
            features = info.features
            if row.samples and features.has_penalties and features.fits_kernel:
                position = row.start + row.n
                self.state.uncount(row.slot, position, position + 1)

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
            self._counters,
            self.vocab_size,
            self._tables,
        )

    def finish(
        self,
        plan: StepPlan,
        rows: list[int],
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        out: Tensor,
    ) -> bool:
        """After the kernel: sample the rows it does not know, and note on the host what is written.

        rows: rows of the plan behind logits [R, V], slots, positions and out [R].
        -> whether there were such rows, so that `out` has changed.
        """
        infos = self.state.slots
        others: list[int] = []  # indices into rows
        for index, i in enumerate(rows):
            row = plan.rows[i]
            if not row.samples:
                continue
            info = infos[row.slot]
            assert info is not None, f"slot {row.slot} has no owner"
            if not info.features.fits_kernel:
                others.append(index)
                continue
            info.length = max(info.length, row.start + row.n + 1)
        if not others:
            return False
        if len(others) < logits.shape[0]:
            index_of = self.state.staging.upload_index(others)
            logits, slots, positions = logits[index_of], slots[index_of], positions[index_of]
        sample_rows = [rows[index] for index in others]
        inputs = StepInputs(None, sample_rows, slots, positions, masks_of(plan, sample_rows))
        sampled = self.sampler.sample(logits, [plan.rows[i].slot for i in sample_rows], inputs)
        self.state.store_samples(plan, inputs, sampled)
        if len(others) < out.shape[0]:
            out[index_of] = sampled.to(torch.int32)
        else:
            out.copy_(sampled)
        return True
