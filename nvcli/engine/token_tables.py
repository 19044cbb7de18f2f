"""What sampling keeps for every slot and every token id: counts for penalties, and biases.

Hot path: yes.

    counts       [S, V] int32     output tokens
    prompt_seen  [S, V] bool
    logit_bias   [S, V] float32   -inf where a token is forbidden

They are large, so they are allocated when the first sequence needs them, or at once where a
captured step must know where they are. A new owner's rows are rewritten if it uses them, and else
not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from nvcli.engine.kv_cache import reserving

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.engine.staging import Array
    from nvcli.types import SamplingParams


class TokenTables:
    """Every method enqueues and none waits for the device."""

    def __init__(self, num_slots: int, width: int, device: torch.device) -> None:
        """num_slots: S; width: V, that of the logits."""
        self.shape = (num_slots, width)
        self.device = device
        self.counts: Tensor | None = None
        self.prompt_seen: Tensor | None = None
        self.logit_bias: Tensor | None = None

    def allocate(self) -> tuple[Tensor, Tensor, Tensor]:
        """counts, prompt_seen and logit_bias, now: a captured step has their addresses."""
        return (*self.count_tables(), self.bias_table())

    def count_tables(self) -> tuple[Tensor, Tensor]:
        """counts and prompt_seen. Raises `OutOfMemoryError`."""
        if self.counts is None or self.prompt_seen is None:
            self.counts = self._zeros(torch.int32)
            self.prompt_seen = self._zeros(torch.bool)
        return self.counts, self.prompt_seen

    def bias_table(self) -> Tensor:
        """logit_bias. Raises `OutOfMemoryError`."""
        if self.logit_bias is None:
            self.logit_bias = self._zeros(torch.float32)
        return self.logit_bias

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        num_slots, width = self.shape
        with reserving(
            num_slots * width * dtype.itemsize,
            f"penalties or biases of {num_slots - 1} sequences over {width} token ids",
            self.device,
            hint="Lower --max-num-seqs or --gpu-memory-utilization.",
        ):
            return torch.zeros(self.shape, dtype=dtype, device=self.device)

    def begin_counts(self, slot: int, token_ids: Tensor, prompt_len: int) -> None:
        """Those of a new owner.  token_ids: [n] int64, prompt and output."""
        counts, seen = self.count_tables()
        counts[slot] = 0
        seen[slot] = False
        seen[slot].index_fill_(0, token_ids[:prompt_len], True)
        self.count(slot, token_ids[prompt_len:], 1)

    def count(self, slot: int, token_ids: Tensor, change: int) -> None:
        """Count output tokens.  token_ids: [n] int64."""
        counts, _ = self.count_tables()
        ones = torch.ones_like(token_ids, dtype=torch.int32)
        counts[slot].index_add_(0, token_ids, ones, alpha=change)

    def bias_row(self, params: SamplingParams, bad_tokens: tuple[int, ...]) -> Array:
        """Bias, allowed and bad tokens as one row of numbers to add to the logits, [V] float32."""
        width = self.shape[1]
        row = np.zeros(width, np.float32)
        for token_id, bias in (params.logit_bias or {}).items():
            row[token_id] = bias
        if params.allowed_token_ids is not None:
            is_forbidden = np.ones(width, np.bool_)
            is_forbidden[list(params.allowed_token_ids)] = False
            row[is_forbidden] = -np.inf
        row[list(bad_tokens)] = -np.inf
        return row
