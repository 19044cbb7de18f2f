"""The fp8 KV cache: what is stored, bit by bit, and attention over it, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nvcli.engine.kv_cache import fp8_scales
from nvcli.kernels import cpu, reference
from nvcli.kernels.torch_attention import TorchAttention
from tests.kernels.paged_cases import (
    FP8,
    in_fp8,
    make_cache,
    make_case,
    make_scales,
    make_strided_case,
    on_device,
)
from tests.kernels.test_row_kernels import randn
from tests.kernels.test_triton_attention import CASES, CUDA_CASES, CUDA_HEADS, HEADS
from tests.kernels.triton_testing import assert_as_good_as_torch, needs_triton, run_in_interpreter


def values_of(cache: Tensor, scales: Tensor) -> Tensor:
    return reference.dequantise(cache.view(torch.uint8), scales, torch.float32)


# --- what is stored ------------------------------------------------------------------------------


def test_quantising_is_the_nearest_value_with_ties_to_even() -> None:
    grid = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()  # 0 to 448
    between = (grid[1:] + grid[:-1]) / 2
    x = torch.cat([grid, between, between * 1.001, between * 0.999, torch.rand(4096) * 448])
    x = torch.cat([x, -x]).view(-1, 1, 1)
    for scale in (2.0**-20, 1.0, 8.0):
        bits = reference.quantise(x * scale, torch.tensor([scale]))
        got = bits.view(FP8).float().flatten()
        distance = (x.flatten()[:, None].abs() - grid).abs()
        assert torch.equal((got - x.flatten()).abs(), distance.amin(1))
    ties = reference.quantise(between.view(-1, 1, 1), torch.ones(1)).flatten()
    assert torch.equal(ties & 1, torch.zeros_like(ties))
    beyond = torch.tensor([500.0, -1e30, 464.0]).view(-1, 1, 1)
    assert reference.quantise(beyond, torch.ones(1)).flatten().tolist() == [0x7E, 0xFE, 0x7E]


def test_scales_are_the_least_powers_of_two_that_hold_the_limits() -> None:
    limits = torch.tensor([448.0, 447.0, 449.0, 896.0, 1.75, 3.0, 1e4])
    assert fp8_scales(limits).tolist() == [1, 1, 2, 2, 2**-8, 2**-7, 32]
    assert fp8_scales(torch.zeros(1)).item() > 0


def check_stores(device: str, dtype: torch.dtype) -> None:
    """Both kernels leave the reference's values, from strided rows, in both layouts."""
    from nvcli.kernels import kv_store, rotary_store

    for tokens, heads, kv_heads, head_dim, block_size in (
        (5, 4, 2, 32, 4),
        (3, 3, 3, 16, 16),
        (9, 5, 1, 64, 8),
    ):
        scales = make_scales(kv_heads, device)
        shape = (3, kv_heads, block_size, head_dim)
        qkv = 5 * randn(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
        qkv[1] *= 1e3  # beyond what fp8 holds, and not what float16 does
        qkv[2] *= 2.0**-9
        slots = torch.randperm(2 * block_size)[:tokens].to(device)
        slots[0] = -1

        def caches(shape: tuple[int, ...] = shape) -> list[Tensor]:
            made = [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2)]
            return [cache.transpose(1, 2).view(FP8) for cache in made]

        k, v = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        ours, wanted = caches(), caches()
        kv_store.store_kv(k, v, *ours, slots, scales)
        reference.store_kv(k, v, *wanted, slots, scales)
        for got, want in zip(ours, wanted, strict=True):
            assert torch.equal(got.float(), want.float())
        angles = randn(tokens, head_dim // 2, dtype=torch.float32, device=device, seed=2)
        cos, sin = angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], 1)
        args = (qkv, None, cos, sin, 1e-6)
        hidden = 2 * randn(tokens, 24, dtype=dtype, device=device, seed=3)
        hidden[1] *= 1e3  # as qkv: divided by it, float32 differs in the last bits of small numbers
        for rms_of in (None, hidden):
            ours, wanted, best = caches(), caches(), caches()
            wide = None if rms_of is None else rms_of.float()
            q = rotary_store.rope_norm_store(*args, *ours, slots, scales, rms_of)
            plain = reference.rope_norm_store(*args, *wanted, slots, scales, rms_of)
            exact = reference.rope_norm_store(*(qkv.float(), *args[1:], *best, slots, scales, wide))
            assert_as_good_as_torch(q, plain, exact)
            if rms_of is None:
                assert torch.equal(ours[1].float(), wanted[1].float())
            else:  # the reference rounds between dividing and rotating, the kernel does not
                wanted = best
            # What is computed may be rounded differently just before, and then land a step away.
            for mine, theirs in zip(ours, wanted, strict=True):
                got, want = mine.float(), theirs.float()
                assert ((got - want).abs() <= 0.126 * want.abs() + 2.0**-9).all()
                assert (got != want).float().mean() < (1e-3 if dtype == torch.float32 else 0.05)


@pytest.mark.torch
def test_the_cpu_stores_the_reference() -> None:
    scales = make_scales(2)
    k, v = torch.randn(2, 5, 2, 8).unbind(0)
    slots = torch.tensor([3, -1, 0, 9, 11])
    ours, wanted = ([torch.zeros(3, 4, 2, 8).to(FP8) for _ in range(2)] for _ in range(2))
    cpu.store_kv(k, v, *ours, slots, scales)
    reference.store_kv(k, v, *wanted, slots, scales)
    for got, want in zip(ours, wanted, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


# --- attention -----------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("rows", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("heads_first", [False, True])
def test_torch_backend_equals_reference(rows: list[tuple[int, int]], heads_first: bool) -> None:
    q, k, v, batch = make_case(rows, heads_first=heads_first)
    scales = make_scales(2)
    k8, v8 = make_cache(k, scales[0]), make_cache(v, scales[1])
    args = (batch.cu_seqlens_q, batch.seq_lens, batch.gather_block_tables(), 0.3)
    exact = reference.paged_attention(q, values_of(k8, scales[0]), values_of(v8, scales[1]), *args)
    assert torch.equal(reference.paged_attention(q, k8, v8, *args, scales), exact)
    got = TorchAttention().forward(q, k8, v8, batch, 0.3, scales)
    torch.testing.assert_close(got, exact, atol=2e-6, rtol=1e-5)


def check_attention(
    rows: list[tuple[int, int]],
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
) -> None:
    from nvcli.kernels.triton_attention import TritonAttention

    q, k, v, batch = make_strided_case(rows, heads, torch.float32)
    k8, v8, scales = in_fp8(k, v)
    q, k8, v8, batch, scales = on_device(device, q.to(dtype), k8, v8, batch, scales)
    scale = heads[2] ** -0.5
    backend = TritonAttention()
    got = backend.forward(q, k8, v8, batch, scale, scales)
    again = backend.forward(q, k8, v8, batch, scale, scales)
    assert torch.equal(got, again), "a race: two runs differ"
    batch.plan = None
    plain = TorchAttention().forward(q, k8, v8, batch, scale, scales)
    tables = batch.gather_block_tables()
    exact = reference.paged_attention(
        q.float(), k8, v8, batch.cu_seqlens_q, batch.seq_lens, tables, scale, scales
    )
    assert_as_good_as_torch(got, plain, exact)


def check_all_in_float32() -> None:
    check_stores("cpu", torch.float32)
    for name in ("ragged decoding", "one chunk", "mixed", "first token"):
        for heads in HEADS if name == "mixed" else HEADS[:1]:
            check_attention(CASES[name], heads, torch.float32, "cpu")


@needs_triton
@pytest.mark.interpret
def test_kernel_sources_in_the_interpreter() -> None:
    run_in_interpreter("tests.kernels.test_fp8_cache", "check_all_in_float32")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stores_on_cuda(dtype: torch.dtype) -> None:
    check_stores("cuda", dtype)


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("heads", CUDA_HEADS, ids=str)
@pytest.mark.parametrize("rows", CUDA_CASES.values(), ids=list(CUDA_CASES))
def test_attention_on_cuda(rows: list[tuple[int, int]], heads: tuple[int, int, int, int]) -> None:
    if sum(keys for _, keys in rows) > 50_000 and heads != CUDA_HEADS[0]:
        pytest.skip("large cases once")
    check_attention(rows, heads, torch.bfloat16, "cuda")


@needs_triton
@pytest.mark.gpu
def test_slots_beyond_2_to_the_31_elements() -> None:
    """A pool of bytes passes 2**31 elements at 2 GiB, well inside one layer of a small model."""
    from nvcli.kernels import kv_store

    heads, head_dim, block_size = 8, 128, 16
    num_blocks = 2**31 // (heads * head_dim * block_size) + 2
    shape = (num_blocks, heads, block_size, head_dim)
    caches = [torch.zeros(shape, dtype=torch.uint8, device="cuda").view(FP8) for _ in range(2)]
    k_cache, v_cache = (cache.transpose(1, 2) for cache in caches)
    k = torch.randn(2, heads, head_dim, device="cuda").bfloat16()
    slot = (num_blocks - 1) * block_size + 3
    scales = make_scales(heads, "cuda")
    slots = torch.tensor([slot, -1], device="cuda")
    kv_store.store_kv(k, -k, k_cache, v_cache, slots, scales)
    want = reference.quantise(k, scales[0])[0].view(FP8)
    assert torch.equal(k_cache[num_blocks - 1, 3].float(), want.float())
    assert int(k_cache.view(torch.uint8)[: num_blocks - 1].count_nonzero()) == 0
