"""Our attention kernels against the reference: source in the interpreter, bfloat16 on a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernels.paged_cases import make_case, make_strided_case, on_device, reference_of
from tests.kernels.triton_testing import assert_as_good_as_torch, needs_triton, run_in_interpreter

# rows as (tokens, keys)
CASES: dict[str, list[tuple[int, int]]] = {
    "first token": [(1, 1)],
    "one decoding, split": [(1, 600)],
    "ragged decoding": [(1, n) for n in (1, 64, 65, 700, 16, 15, 128)],
    "one prompt": [(70, 70)],
    "one chunk": [(5, 140)],
    "many decoding, sorted": [(1, 1 + (i * 37) % 90) for i in range(40)],
    "mixed": [(1, 9), (66, 66), (1, 300), (3, 210), (1, 64), (2, 2)],
}
# query heads, KV heads, head_dim, block size
HEADS = [
    (4, 2, 32, 4),
    (3, 3, 16, 16),
    (5, 1, 32, 64),
    (16, 1, 16, 16),
    (4, 2, 16, 128),
    (2, 1, 32, 256),
]
CUDA_CASES = CASES | {
    "long decoding": [(1, 33_000), (1, 5)],
    "many decoding": [(1, 1 + (i * 37) % 1500) for i in range(200)],
    "long prompt": [(3000, 3000)],
    "chunk after a long prefix": [(300, 9000), (1, 700), (1024, 4096)],
}
CUDA_HEADS = [
    (16, 8, 128, 16),
    (32, 8, 128, 64),
    (40, 8, 128, 256),
    (14, 2, 64, 16),
    (4, 2, 64, 32),
]


def check(
    rows: list[tuple[int, int]],
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    *,
    is_padded: bool = False,
) -> None:
    from nvcli.kernels.torch_attention import TorchAttention
    from nvcli.kernels.triton_attention import TritonAttention

    q, k, v, batch, _ = on_device(device, *make_strided_case(rows, heads, dtype))
    scale = heads[2] ** -0.5
    backend = TritonAttention()
    batch.is_padded = is_padded
    got = backend.forward(q, k, v, batch, scale)
    again = backend.forward(q, k, v, batch, scale)
    assert torch.equal(got, again), "a race: two runs differ"
    assert not any(counters.any() for counters in backend._counters)
    batch.plan, batch.is_padded = None, False
    plain = TorchAttention().forward(q, k, v, batch, scale)
    exact = reference_of(q.float(), k.float(), v.float(), batch, scale)
    assert_as_good_as_torch(got, plain, exact)


def check_padding(dtype: torch.dtype, device: str) -> None:
    """Rows without keys and tokens without a row come out as zeros, the others unchanged."""
    from nvcli.kernels.triton_attention import TritonAttention

    case = make_case([(1, 70), (1, 9)], head_dim=32, heads_first=True, dtype=dtype)
    q, k, v, batch, _ = on_device(device, *case)
    want = TritonAttention().forward(q, k, v, batch, 0.2)
    zeros = torch.zeros(2, dtype=torch.int32, device=device)
    padded = dataclasses.replace(
        batch,
        seq_lens=torch.cat([batch.seq_lens, zeros]),
        slots=torch.cat([batch.slots, zeros.long()]),
        cu_seqlens_q=torch.arange(5, dtype=torch.int32, device=device),
        is_padded=True,
        is_decode=True,
        plan=None,
    )
    noise = torch.full_like(q, float("nan"))
    got = TritonAttention().forward(torch.cat([q, noise]), k, v, padded, 0.2)
    assert torch.equal(got[:2], want)
    assert torch.equal(got[2:], torch.zeros_like(want))
    # a step of a token bucket: two rows, padding rows of no tokens, and tokens of no row
    padded.cu_seqlens_q = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32, device=device)
    padded.plan, padded.is_decode = None, False
    got = TritonAttention().forward(torch.cat([q, noise, noise, noise]), k, v, padded, 0.2)
    assert torch.equal(got[:2], want)
    assert torch.equal(got[2:], torch.zeros_like(got[2:]))
    # as many tokens as rows, and yet not all rows are one token
    case = make_case([(2, 70), (1, 9)], head_dim=32, heads_first=True, dtype=dtype)
    q, k, v, batch, _ = on_device(device, *case)
    want = TritonAttention().forward(q, k, v, batch, 0.2)
    padded = dataclasses.replace(
        batch,
        seq_lens=torch.cat([batch.seq_lens, zeros[:1]]),
        slots=torch.cat([batch.slots, zeros[:1].long()]),
        cu_seqlens_q=torch.tensor([0, 2, 3, 3], dtype=torch.int32, device=device),
        is_padded=True,
        plan=None,
    )
    assert torch.equal(TritonAttention().forward(q, k, v, padded, 0.2), want)


def check_all_in_float32() -> None:
    for rows in CASES.values():
        for heads in HEADS if len(rows) == 6 else HEADS[:1]:
            check(rows, heads, torch.float32, "cpu")
    check(CASES["mixed"], HEADS[0], torch.float32, "cpu", is_padded=True)
    check_padding(torch.float32, "cpu")


@needs_triton
@pytest.mark.interpret
def test_kernel_sources_in_the_interpreter() -> None:
    run_in_interpreter("tests.kernels.test_triton_attention", "check_all_in_float32")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("heads", CUDA_HEADS, ids=str)
@pytest.mark.parametrize("rows", CUDA_CASES.values(), ids=list(CUDA_CASES))
def test_on_cuda(rows: list[tuple[int, int]], heads: tuple[int, int, int, int]) -> None:
    if sum(keys for _, keys in rows) > 50_000 and heads != CUDA_HEADS[0]:
        pytest.skip("large cases once")
    check(rows, heads, torch.bfloat16, "cuda")


@needs_triton
@pytest.mark.gpu
def test_padding_on_cuda() -> None:
    check_padding(torch.bfloat16, "cuda")
