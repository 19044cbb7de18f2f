"""Blocks 2**31 elements into the cache and beyond, for every kernel that touches it: in the
interpreter, over memory of which only the pages in use exist.

The cache is fp8, so 4 GiB of addresses each for keys and values do. What is computed there has to
be, bit for bit, what it is where blocks stand together. An offset of 32 bits would be negative.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.paged_cases import FP8, in_fp8, make_scales, make_strided_case
from tests.kernels.triton_testing import needs_triton, run_in_interpreter

HEADS = (4, 2, 32, 16)
MIXED = [(1, 9), (20, 166), (1, 150), (1, 64)]
DECODE = [(1, 9), (1, 150)]
BITS = torch.uint8


def apart(cache: Tensor) -> Tensor:
    """The same cache [N, P, Hk, D], with the second half of its blocks beyond 2**31 elements."""
    from nvcli.engine.kv_cache import _lazy_zeros

    last, size = len(cache) - 1, cache[0].numel()
    stride = -(-(1 << 32) // last // size) * size
    flat = _lazy_zeros(stride * last + size).view(FP8)
    out = flat.as_strided(cache.shape, (stride, *cache.stride()[1:]))
    out.view(BITS).copy_(cache.view(BITS))
    return out


def check_attention() -> None:
    from nvcli.kernels.triton_attention import TritonAttention
    from tests.kernels import test_early_keys as early
    from tests.kernels import test_shared_attention as shared

    def same(backend: Any, q: Tensor, k: Tensor, v: Tensor, batch: Any, scales: Tensor) -> None:
        near, far = (
            backend.forward(q, *caches, dataclasses.replace(batch, plan=None), 0.3, scales)
            for caches in ((k, v), (apart(k), apart(v)))
        )
        is_far = batch.block_table >= len(k) // 2
        assert is_far.any(1).sum() > len(is_far) // 2, "most rows have such blocks"
        assert near.isfinite().all()
        assert torch.equal(near, far)

    q, k, v, batch = make_strided_case(MIXED, HEADS, torch.float32)
    k, v, scales = in_fp8(k, v)
    same(TritonAttention(), q, k, v, batch, scales)
    same(TritonAttention(is_uniform=True), q, k, v, batch, scales)

    case = early.make([keys for _, keys in DECODE], HEADS, has_fp8=True)
    near = case.run(early=True)
    far = dataclasses.replace(case, k=apart(case.k), v=apart(case.v)).run(early=True)
    assert torch.equal(near, far)

    q, k, v, batch = shared.make_case(*shared.CASES["one group"], HEADS, torch.float32)
    k, v, scales = in_fp8(k, v)
    backend = shared.backend_for("cpu")
    with shared.small_savings():
        captured = shared.as_captured(backend, batch, HEADS)
        same(backend, q, k, v, captured, scales)


def check_stores() -> None:
    from nvcli.kernels import kv_store, rotary_store

    num_heads, kv_heads, head_dim, block_size = HEADS
    slots = torch.tensor([3 * block_size + 3, -1, 2 * block_size])
    num_tokens, scales = len(slots), make_scales(kv_heads)
    qkv = torch.randn(num_tokens, num_heads + 2 * kv_heads, head_dim)
    angles = torch.randn(num_tokens, head_dim // 2)
    cos = angles.cos().repeat(1, 2)
    sin = torch.cat([-angles.sin(), angles.sin()], 1)
    weight = torch.ones(num_heads + kv_heads, head_dim)
    k, v = qkv[:, num_heads : num_heads + kv_heads], qkv[:, num_heads + kv_heads :]

    def caches() -> list[Tensor]:
        shape = (4, kv_heads, block_size, head_dim)
        return [torch.zeros(shape, dtype=BITS).view(FP8).transpose(1, 2) for _ in range(2)]

    near, far = caches(), [apart(cache) for cache in caches()]
    for to in (near, far):
        rotary_store.rope_norm_store(qkv, weight, cos, sin, 1e-6, *to, slots, scales)
    assert_same(near, far)
    ids = torch.tensor([3, 0, 2], dtype=torch.int32)
    bits = [[cache.view(BITS) for cache in pair] for pair in (near, far)]
    gathered = [kv_store.gather_kv(*pair, ids) for pair in bits]
    assert all(torch.equal(one, other) for one, other in zip(*gathered, strict=True))
    for to in (near, far):
        kv_store.store_kv(k, v, *to, slots, scales)
    assert_same(near, far)


def assert_same(near: list[Tensor], far: list[Tensor]) -> None:
    for one, other in zip(near, far, strict=True):
        assert torch.equal(one.view(BITS), other.view(BITS))
        assert all(block.count_nonzero() > 0 for block in one.view(BITS)[2:])


@needs_triton
@pytest.mark.interpret
@pytest.mark.parametrize("check", ["check_attention", "check_stores"])
def test_offsets_have_64_bits(check: str) -> None:
    run_in_interpreter("tests.kernels.test_far_blocks", check)
