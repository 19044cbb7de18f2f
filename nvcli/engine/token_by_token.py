"""A model that computes each token of a step alone, in order: `--deterministic` on the CPU.

PyTorch's products and its attention take other ways for other numbers of rows, and differ in the
last bit. Here every token goes through the same operations on the same shapes, whatever else the
step holds; its prompt is as slow as its output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from nvcli.engine.step_runner import Model
    from nvcli.layers.forward_batch import ForwardBatch


class TokenByToken:
    """Implements `Model` with another one."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def forward(self, batch: ForwardBatch) -> Tensor:  # [T, E] or [R, E]
        hidden = torch.cat([self.model.forward(token) for token in tokens_of(batch)])
        return hidden[batch.logits_indices] if batch.ends_early else hidden

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        rows = [self.model.compute_logits(hidden[i : i + 1]) for i in range(hidden.shape[0])]
        logits = torch.cat(rows)
        return logits if out is None else out.copy_(logits)

    def kv_limits(self) -> Tensor:
        return self.model.kv_limits()


def tokens_of(batch: ForwardBatch) -> Iterator[ForwardBatch]:
    """Steps of one token each, which together are the step; each stores its key first."""
    block_size = batch.kv_caches[0][0].shape[1]
    device = batch.input_ids.device
    at = 0
    for row, (num_tokens, num_keys) in enumerate(
        zip(batch.query_lens, batch.key_lens, strict=True)
    ):
        for keys in range(num_keys - num_tokens + 1, num_keys + 1):
            yield replace(
                batch,
                input_ids=batch.input_ids[at : at + 1],
                positions=batch.positions[at : at + 1],
                slot_mapping=batch.slot_mapping[at : at + 1],
                cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32, device=device),
                seq_lens=torch.tensor([keys], dtype=torch.int32, device=device),
                slots=batch.slots[row : row + 1],
                logits_indices=torch.zeros(1, dtype=torch.int64, device=device),
                query_lens=[1],
                key_lens=[keys],
                block_ids=[batch.block_ids[row][: -(-keys // block_size)]],
                plan=None,
                ends_early=False,
            )
            at += 1
