"""ForwardBatch: one step's tensors, as layers and kernels see them.

It is passed explicitly through the model. Tensors are written by the step's prepare stage on the
device; the host integers beside them come from the plan, so that no layer ever reads the device to
size a launch.

Dimension key: T tokens in the step, B rows in the step, S slots, M blocks per table row,
R rows that need logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.kernels.attention import AttentionBackend
    from nvcli.kernels.shared_prefix import SharedWork


@dataclass(slots=True)
class ForwardBatch:
    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64, block * P + offset; -1: do not store
    cu_seqlens_q: Tensor  # [B + 1] int32, cumulative tokens per row
    seq_lens: Tensor  # [B] int32, keys per row including this step; 0: padding
    slots: Tensor  # [B] int64, row -> block_table row
    block_table: Tensor  # [S, M] int32
    logits_indices: Tensor  # [R] int64, into T: each row's last token, where it samples
    kv_caches: list[tuple[Tensor, Tensor]]  # per layer: K and V, each [N, P, Hk, D]
    attention: AttentionBackend
    # host copies of what the plan knows
    query_lens: list[int]  # [B]
    key_lens: list[int]  # [B], host twin of seq_lens
    block_ids: list[list[int]]  # [B][ceil(key_len / P)], host twin of block_table rows
    # The model's last layer is asked for its keys and values alone, beyond the tokens that
    # `logits_indices` names. False: hidden states of all tokens are wanted.
    ends_early: bool = False
    # A captured step: rows and tokens are upper bounds, the host lists are empty, and `is_decode`
    # says whether its rows are at most one token each.
    is_padded: bool = False
    is_decode: bool = False
    # Of a captured decode step, [B, 4] int32: slot, start, n, flags. All else is derived from it.
    rows: Tensor | None = None
    kv_scales: list[Tensor] | None = None  # per layer [2, Hk] float32, with an fp8 cache
    # A captured step whose rows share keys: where the host leaves what to read once for many.
    shared: SharedWork | None = None
    plan: object = None  # what the attention backend works out once for all layers of the step
    _is_token: Tensor | None = None  # of a captured step, once it was asked for

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def max_seqlen_q(self) -> int:
        return max(self.query_lens, default=0)

    @property
    def max_seqlen_k(self) -> int:
        return max(self.key_lens, default=0)

    def is_token(self) -> Tensor | None:
        """[T] bool: which of a captured step's tokens are no padding; None: all are."""
        if self.is_padded and self._is_token is None:
            if self.is_decode:
                self._is_token = self.seq_lens > 0
            else:
                index = torch.arange(len(self.input_ids), device=self.input_ids.device)
                self._is_token = index < self.cu_seqlens_q[-1]
        return self._is_token

    def gather_block_tables(self) -> Tensor:
        """[B, M] int32: the rows' block tables, for libraries that take no slot index."""
        return self.block_table[self.slots]
