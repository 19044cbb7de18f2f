"""Torch-backed builders: a paged cache, and forward batches over it that read as stories."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from nvcli.kernels.attention import AttentionBackend
from nvcli.kernels.torch_attention import TorchAttention
from nvcli.layers.forward_batch import ForwardBatch
from nvcli.models import load_model
from nvcli.models.config import ModelConfig
from nvcli.models.qwen3 import Qwen3ForCausalLM

BLOCK_SIZE = 4


@dataclass
class Rows:
    """What a row computes: its tokens, where they start, and the sequence's blocks."""

    token_ids: list[int]
    start: int
    blocks: list[int]
    is_stored: bool = False  # the KV is in a shared block already


def load_tiny(
    folder: Path, *, dtype: torch.dtype = torch.float32, load_format: str = "auto"
) -> Qwen3ForCausalLM:
    config = ModelConfig.from_hf(folder)
    device = torch.device("cpu")
    return load_model(folder, config, device=device, dtype=dtype, load_format=load_format)


def make_kv_caches(
    config: ModelConfig,
    *,
    num_blocks: int = 64,
    block_size: int = BLOCK_SIZE,
    dtype: torch.dtype = torch.float32,
    heads_first: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """Per layer K and V [N, P, Hk, D] full of NaN, which must not reach any result.

    heads_first: stored as [N, Hk, P, D], as on CUDA.
    """
    shape = [num_blocks, block_size, config.num_kv_heads, config.head_dim]

    def cache() -> Tensor:
        if heads_first:
            n, p, h, d = shape
            return torch.full((n, h, p, d), float("nan"), dtype=dtype).transpose(1, 2)
        return torch.full(shape, float("nan"), dtype=dtype)

    return [(cache(), cache()) for _ in range(config.num_layers)]


def make_forward_batch(
    rows: list[Rows],
    kv_caches: list[tuple[Tensor, Tensor]],
    attention: AttentionBackend | None = None,
) -> ForwardBatch:
    block_size = kv_caches[0][0].shape[1]
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    bounds = [0]
    for row in rows:
        end = row.start + len(row.token_ids)
        input_ids += row.token_ids
        positions += range(row.start, end)
        for i in range(row.start, end):
            slot = row.blocks[i // block_size] * block_size + i % block_size
            slots.append(-1 if row.is_stored else slot)
        bounds.append(bounds[-1] + len(row.token_ids))
    key_lens = [row.start + len(row.token_ids) for row in rows]
    width = max(len(row.blocks) for row in rows)
    tables = [row.blocks + [0] * (width - len(row.blocks)) for row in rows]
    return ForwardBatch(
        input_ids=torch.tensor(input_ids),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32),
        seq_lens=torch.tensor(key_lens, dtype=torch.int32),
        slots=torch.arange(len(rows)),
        block_table=torch.tensor(tables, dtype=torch.int32),
        logits_indices=torch.tensor(bounds[1:]) - 1,
        kv_caches=kv_caches,
        attention=attention or TorchAttention(),
        query_lens=[len(row.token_ids) for row in rows],
        key_lens=key_lens,
        block_ids=[
            row.blocks[: -(-length // block_size)]
            for row, length in zip(rows, key_lens, strict=True)
        ],
    )


@dataclass
class PagedModel:
    """A model with its cache: `compute` runs one step and gives each row's logits."""

    model: Qwen3ForCausalLM
    heads_first: bool = False
    kv_caches: list[tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.kv_caches = make_kv_caches(self.model.config, heads_first=self.heads_first)

    def compute(self, *rows: Rows) -> list[Tensor]:
        """Logits [n, V] of every token of every row."""
        batch = make_forward_batch(list(rows), self.kv_caches)
        with torch.inference_mode():
            logits = self.model.compute_logits(self.model(batch))
        return list(logits.split(batch.query_lens))
