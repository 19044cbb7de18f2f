"""Kernels of the deterministic mode: right, and no row's bits depend on the others."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.paged_cases import make_strided_case, on_device
from tests.kernels.test_row_kernels import randn
from tests.kernels.test_triton_attention import CASES, CUDA_CASES, HEADS
from tests.kernels.triton_testing import assert_as_good_as_torch, needs_triton, run_in_interpreter

# rows, columns, outputs
PRODUCTS = [(1, 64, 300), (5, 100, 33), (64, 128, 64), (65, 64, 129), (130, 96, 20)]
CUDA_PRODUCTS = [(1, 1024, 4096), (300, 3072, 1024), (1000, 4096, 6144), (129, 5120, 151_936)]


def check_product(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str, *, has_bias: bool = False
) -> None:
    from nvcli.kernels import gemm, reference

    num_rows, size, num_outputs = shape
    x = randn(num_rows, size, dtype=dtype, device=device)
    weight = randn(num_outputs, size, dtype=dtype, device=device, seed=1) / size**0.5
    bias = randn(num_outputs, dtype=dtype, device=device, seed=2) if has_bias else None
    whole = gemm.linear(x, weight, bias)
    exact = reference.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert_as_good_as_torch(whole, reference.linear(x, weight, bias), exact)
    for first, last in ((0, 1), (num_rows - 1, num_rows), (num_rows // 3, num_rows // 3 + 2)):
        part = gemm.linear(x[first:last], weight, bias)
        assert torch.equal(part, whole[first:last]), "a row depends on its place"
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0)).to(device)
    assert torch.equal(gemm.linear(x[order], weight, bias), whole[order])


def check_attention(
    rows: list[tuple[int, int]],
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
) -> None:
    """Right; and every token alone, as a decoding row, has the bits it has in its chunk."""
    from nvcli.kernels import reference
    from nvcli.kernels.torch_attention import TorchAttention
    from nvcli.kernels.triton_attention import TritonAttention
    from nvcli.layers.forward_batch import ForwardBatch

    q, k, v, batch, _ = on_device(device, *make_strided_case(rows, heads, dtype))
    scale = heads[2] ** -0.5
    backend = TritonAttention(is_uniform=True)
    together = backend.forward(q, k, v, batch, scale)
    batch.plan = None
    plain = TorchAttention().forward(q, k, v, batch, scale)
    tables = batch.gather_block_tables()
    args = (batch.cu_seqlens_q, batch.seq_lens, tables, scale)
    exact = reference.paged_attention(q.float(), k.float(), v.float(), *args)
    assert_as_good_as_torch(together, plain, exact)

    def alone(tokens: slice, row: int, keys: int) -> ForwardBatch:
        count = tokens.stop - tokens.start
        return ForwardBatch(
            input_ids=batch.input_ids[tokens],
            positions=batch.positions[tokens],
            slot_mapping=batch.slot_mapping[tokens],
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([keys], dtype=torch.int32, device=device),
            slots=batch.slots[row : row + 1],
            block_table=batch.block_table,
            logits_indices=batch.logits_indices[:1],
            kv_caches=[],
            attention=backend,
            query_lens=[count],
            key_lens=[keys],
            block_ids=[],
        )

    at = 0
    for row, (num_tokens, num_keys) in enumerate(rows):
        prefix = num_keys - num_tokens
        cuts = [(i, i + 1) for i in {0, 1, num_tokens // 2, num_tokens - 1} if i < num_tokens]
        cuts += [(num_tokens // 3, num_tokens)] if num_tokens > 2 else []
        for first, last in cuts:
            tokens = slice(at + first, at + last)
            got = backend.forward(q[tokens], k, v, alone(tokens, row, prefix + last), scale)
            assert torch.equal(got, together[tokens]), (rows[row], first, last)
        at += num_tokens


def check_all_in_float32() -> None:
    for shape in PRODUCTS:
        check_product(shape, torch.float32, "cpu", has_bias=shape[0] == 5)
    for name in ("ragged decoding", "one prompt", "one chunk", "first token"):
        check_attention(CASES[name], HEADS[0], torch.float32, "cpu")
    check_attention(CASES["mixed"], HEADS[2], torch.float32, "cpu")


@needs_triton
@pytest.mark.interpret
def test_kernel_sources_in_the_interpreter() -> None:
    run_in_interpreter("tests.kernels.test_deterministic_kernels", "check_all_in_float32")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("shape", CUDA_PRODUCTS, ids=str)
def test_products_on_cuda(shape: tuple[int, int, int]) -> None:
    check_product(shape, torch.bfloat16, "cuda")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 8, 128, 16), (32, 8, 128, 64), (14, 2, 64, 16)], ids=str)
@pytest.mark.parametrize("rows", CUDA_CASES.values(), ids=list(CUDA_CASES))
def test_attention_on_cuda(rows: list[tuple[int, int]], heads: tuple[int, int, int, int]) -> None:
    check_attention(rows, heads, torch.bfloat16, "cuda")
