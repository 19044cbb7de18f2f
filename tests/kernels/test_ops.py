"""Ops by hand-computed numbers and against formulas written another way; fast against reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nvcli import kernels
from nvcli.errors import UsageError
from nvcli.kernels import cpu, reference
from tests.kernels.triton_testing import EPS

pytestmark = pytest.mark.torch


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_rms_norm_by_hand() -> None:
    out = kernels.rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 3.5)
    rms = math.sqrt(12.5 + 3.5)
    torch.testing.assert_close(out, torch.tensor([[3 / rms, 8 / rms]]))


def test_rms_norm_rounds_as_transformers_does() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    x, weight = randn(7, 48, dtype=torch.bfloat16), randn(48, seed=1, dtype=torch.bfloat16)
    theirs = Qwen3RMSNorm(48, eps=EPS).to(torch.bfloat16)
    theirs.weight.data.copy_(weight)
    assert torch.equal(kernels.rms_norm(x, weight, EPS), theirs(x))


def test_add_rms_norm_returns_the_sum() -> None:
    x, residual, weight = randn(3, 8), randn(3, 8, seed=1), randn(8, seed=2)
    out, total = kernels.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, kernels.rms_norm(total, weight, EPS))


def test_silu_and_mul_by_hand() -> None:
    out = kernels.silu_and_mul(torch.tensor([[0.0, 1.0, 5.0, 2.0]]))
    torch.testing.assert_close(out, torch.tensor([[0.0, 2 / (1 + math.exp(-1))]]))


def test_rope_rotates_pairs_of_halves() -> None:
    angles = torch.tensor([0.3, 1.1])
    cos, sin = angles.cos().repeat(2)[None], torch.cat([-angles.sin(), angles.sin()])[None]
    x = randn(1, 3, 4)
    out = kernels.rope_norm(x, None, cos, sin, 1e-6)
    pairs = torch.complex(x[..., :2], x[..., 2:]) * torch.polar(torch.ones(2), angles)
    torch.testing.assert_close(out, torch.cat([pairs.real, pairs.imag], dim=-1))


def test_rope_norm_norms_each_head_with_its_weight_first() -> None:
    x, weight = randn(2, 3, 8), randn(3, 8, seed=1)
    zero, one = torch.zeros(2, 8), torch.ones(2, 8)
    out = kernels.rope_norm(x, weight, one, zero, EPS)
    for head in range(3):
        expected = kernels.rms_norm(x[:, head], weight[head], EPS)
        torch.testing.assert_close(out[:, head], expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 63, 64, 65])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_linear_is_linear(rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight = randn(rows, 37, dtype=dtype), randn(53, 37, seed=1, dtype=dtype)
    bias = randn(53, seed=2, dtype=dtype) if has_bias else None
    out = cpu.linear(x, weight, bias)
    assert out.is_contiguous()
    assert out.dtype == dtype
    torch.testing.assert_close(out, reference.linear(x, weight, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_cpu_rope_norm_equals_reference(has_weight: bool, tokens: int) -> None:
    x = randn(tokens, 7, 16)[:, 1:4]
    weight = randn(3, 16, seed=1) if has_weight else None
    cos, sin = randn(tokens, 16, seed=2), randn(tokens, 16, seed=3)
    out = cpu.rope_norm(x, weight, cos, sin, EPS)
    assert out.is_contiguous()
    want = reference.rope_norm(x, weight, cos, sin, EPS)
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-5)


def test_cpu_linear_of_no_rows() -> None:
    assert cpu.linear(torch.empty(0, 4), torch.ones(3, 4), None).shape == (0, 3)


# --- store_kv ------------------------------------------------------------------------------------


def stored_by_hand(k: Tensor, cache: Tensor, slots: list[int]) -> Tensor:
    out = cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            out[slot // cache.shape[1], slot % cache.shape[1]] = k[token]
    return out


@pytest.mark.parametrize("slots", [[0, 1, 2], [11, -1, 4], [-1, -1, -1], [7, 0, 9]])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_store_kv(slots: list[int], heads_first: bool, choice: str) -> None:
    kernels.set_kernels(choice)
    try:
        caches = [randn(3, 4, 2, 5, seed=i) for i in (1, 2)]
        if heads_first:
            caches = [c.transpose(1, 2).contiguous().transpose(1, 2) for c in caches]
        qkv = randn(3, 6, 5)
        k, v = qkv[:, 2:4], qkv[:, 4:]  # rows lie apart
        want = [stored_by_hand(x, c, slots) for x, c in zip((k, v), caches, strict=True)]
        kernels.store_kv(k, v, caches[0], caches[1], torch.tensor(slots))
    finally:
        kernels.set_kernels("auto")
    for cache, expected in zip(caches, want, strict=True):
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_store_kv_of_no_tokens(choice: str) -> None:
    kernels.set_kernels(choice)
    try:
        cache, none = torch.zeros(2, 4, 2, 5), torch.empty(0, 2, 5)
        kernels.store_kv(none, none, cache, cache.clone(), torch.empty(0, dtype=torch.int64))
    finally:
        kernels.set_kernels("auto")


def test_store_kv_rounds_to_the_caches_dtype() -> None:
    k, cache = randn(2, 2, 5), torch.zeros(1, 4, 2, 5, dtype=torch.bfloat16)
    kernels.store_kv(k, k, cache, cache.clone(), torch.tensor([3, 0]))
    assert torch.equal(cache[0, 3], k[0].bfloat16())


# --- the switch ----------------------------------------------------------------------------------


def test_unknown_choice() -> None:
    with pytest.raises(UsageError) as caught:
        kernels.set_kernels("fast")
    assert str(caught.value) == "NVCLI_KERNELS must be one of auto, reference, got 'fast'"
