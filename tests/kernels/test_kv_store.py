"""The Triton KV store: its source in the interpreter, and in bfloat16 on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_testing import needs_triton, run_in_interpreter

# (tokens, KV heads, head_dim, block size, slots, heads first)
SHAPES = [
    (4, 2, 32, 4, [3, 0, -1, 9], False),
    (4, 2, 32, 4, [3, 0, -1, 9], True),
    (1, 1, 2, 1, [2], False),
    (3, 3, 20, 5, [-1, -1, -1], True),
    (5, 5, 96, 16, [47, 1, 31, 16, -1], True),
    (2, 8, 128, 16, [5, 33], True),
]


def check_shape(
    shape: tuple[int, int, int, int, list[int], bool], dtype: torch.dtype, device: str
) -> None:
    """Kernel against reference, from strided rows of a fused q|k|v, into NaN."""
    from nvcli.kernels import kv_store, reference

    tokens, heads, head_dim, block_size, slots, heads_first = shape

    def cache() -> Tensor:
        axes = (heads, block_size) if heads_first else (block_size, heads)
        out = torch.full((3, *axes, head_dim), float("nan"), dtype=dtype, device=device)
        return out.transpose(1, 2) if heads_first else out

    qkv = torch.randn(tokens, 3 * heads, head_dim).to(device, dtype)
    k, v = qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]
    slot_mapping = torch.tensor(slots, device=device)
    ours, wanted = (cache(), cache()), (cache(), cache())
    kv_store.store_kv(k, v, *ours, slot_mapping)
    reference.store_kv(k, v, *wanted, slot_mapping)
    for got, want in zip(ours, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)

    ours = tuple(torch.randn(got.shape).to(device, dtype) for got in ours)
    if heads_first:  # in memory, too
        ours = tuple(got.transpose(1, 2).contiguous().transpose(1, 2) for got in ours)
    ids = torch.tensor([2, 0, 2, 1], dtype=torch.int32, device=device)
    got, want = kv_store.gather_kv(*ours, ids), reference.gather_kv(*ours, ids)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def check_all_in_float32() -> None:
    for shape in SHAPES:
        check_shape(shape, torch.float32, "cpu")


@needs_triton
@pytest.mark.interpret
def test_kernel_source_in_the_interpreter() -> None:
    run_in_interpreter("tests.kernels.test_kv_store", "check_all_in_float32")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernel_on_cuda(
    shape: tuple[int, int, int, int, list[int], bool], dtype: torch.dtype
) -> None:
    check_shape(shape, dtype, "cuda")


@needs_triton
@pytest.mark.gpu
def test_slots_beyond_2_to_the_31_elements() -> None:
    """vllm#47671: block id times stride passes 2^31."""
    from nvcli.kernels import kv_store

    heads, head_dim, block_size = 8, 128, 16
    num_blocks = 2**31 // (heads * head_dim * block_size) + 2
    shape = (num_blocks, heads, block_size, head_dim)
    caches = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    k_cache, v_cache = (cache.transpose(1, 2) for cache in caches)
    k = torch.randn(2, heads, head_dim, device="cuda").bfloat16()
    slot = (num_blocks - 1) * block_size + 3
    kv_store.store_kv(k, -k, k_cache, v_cache, torch.tensor([slot, -1], device="cuda"))
    assert torch.equal(k_cache[num_blocks - 1, 3], k[0])
    assert torch.equal(v_cache[num_blocks - 1, 3], -k[0])
    assert int(k_cache[: num_blocks - 1].count_nonzero()) == 0
