"""Queries, paged caches and batches for the tests of attention, on the CPU or a GPU, in fp8 too."""

from __future__ import annotations

import dataclasses
import random

import torch
from torch import Tensor

from nvcli.kernels import reference
from nvcli.layers.forward_batch import ForwardBatch
from tests.builders_torch import Rows, make_forward_batch

FP8 = torch.float8_e4m3fn
Heads = tuple[int, int, int, int]  # query heads, KV heads, head_dim, block size


def make_case(
    rows: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    block_size: int = 4,
    is_consecutive: bool = False,
    heads_first: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, ForwardBatch]:
    """rows: (tokens, keys). Slots that no row has written hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    widths = [-(-keys // block_size) for _, keys in rows]
    num_blocks = sum(widths) + 3
    ids = list(range(num_blocks))
    if not is_consecutive:
        random.Random(seed).shuffle(ids)
    shape = (num_blocks, block_size, kv_heads, head_dim)
    k_cache, v_cache = (torch.full(shape, float("nan")) for _ in range(2))
    made = []
    for (tokens, keys), width in zip(rows, widths, strict=True):
        blocks, ids = ids[:width], ids[width:]
        for position in range(keys):
            at = blocks[position // block_size], position % block_size
            k_cache[at] = torch.randn(kv_heads, head_dim, generator=generator)
            v_cache[at] = torch.randn(kv_heads, head_dim, generator=generator)
        made.append(Rows([0] * tokens, keys - tokens, blocks))
    total = sum(tokens for tokens, _ in rows)
    q = torch.randn(total, heads, head_dim, generator=generator).to(dtype)
    k_cache, v_cache = k_cache.to(dtype), v_cache.to(dtype)
    if heads_first:
        k_cache, v_cache = (
            cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (k_cache, v_cache)
        )
    return q, k_cache, v_cache, make_forward_batch(made, [(k_cache, v_cache)])


def reference_of(q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, scale: float) -> Tensor:
    tables = batch.gather_block_tables()
    return reference.paged_attention(q, k, v, batch.cu_seqlens_q, batch.seq_lens, tables, scale)


def make_strided_case(
    rows: list[tuple[int, int]], heads: Heads, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, ForwardBatch]:
    """As `make_case`, with the caches stored heads first."""
    num_heads, kv_heads, head_dim, block_size = heads
    return make_case(
        rows,
        heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        heads_first=True,
        dtype=dtype,
    )


def make_scales(kv_heads: int, device: str = "cpu") -> Tensor:
    """[2, Hk]: powers of two, each its own, some of which leave values below 2**-6."""
    exponents = torch.arange(2 * kv_heads, device=device).view(2, kv_heads) % 9 - 6
    return torch.exp2(exponents.float())


def make_cache(cache: Tensor, scales: Tensor) -> Tensor:
    """A cache [N, P, Hk, D] in fp8, in the same layout; NaN stays NaN."""
    bits = reference.quantise(cache.transpose(1, 2).transpose(1, 2), scales)
    out = torch.empty_like(cache, dtype=torch.uint8)
    return out.copy_(torch.where(cache.isnan(), 0x7F, bits)).view(FP8)


def in_fp8(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both caches in fp8, and their scales."""
    scales = make_scales(k.shape[2])
    return make_cache(k, scales[0]), make_cache(v, scales[1]), scales


def to_cuda(batch: ForwardBatch) -> ForwardBatch:
    tensors = {
        field.name: value.cuda()
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    return dataclasses.replace(batch, **tensors)


def on_device(
    device: str, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, scales: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, ForwardBatch, Tensor | None]:
    """The same there; the caches stay stored heads first."""
    if device == "cuda":
        q, batch = q.cuda(), to_cuda(batch)
        k, v = (c.transpose(1, 2).contiguous().cuda().transpose(1, 2) for c in (k, v))
        scales = None if scales is None else scales.cuda()
    return q, k, v, batch, scales
