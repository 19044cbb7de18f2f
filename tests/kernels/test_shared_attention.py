"""Attention with keys that are read once for many rows, against the reference: the kernels' source
in the interpreter, bfloat16 on a GPU.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from nvcli.layers.forward_batch import ForwardBatch
from tests.builders_torch import Rows, make_forward_batch
from tests.kernels.paged_cases import in_fp8, on_device, reference_of
from tests.kernels.triton_testing import assert_as_good_as_torch, needs_triton, run_in_interpreter

# A row: the prefix it begins with ("" for none; "ab" begins with "a"), keys of its own, its tokens.
Row = tuple[str, int, int]


def rows_of(prefix: str, count: int, *, most: int = 70) -> list[Row]:
    return [(prefix, (i * 37 + 5) % most, 1) for i in range(count)]


def mixed_up(rows: list[Row]) -> list[Row]:
    random.Random(1).shuffle(rows)
    return rows


# prefixes, in keys, and rows
CASES: dict[str, tuple[dict[str, int], list[Row]]] = {
    "one group": ({"a": 128}, rows_of("a", 5)),
    "more than a tile of rows": ({"a": 192}, rows_of("a", 40, most=20)),
    "keys that fill no tile": ({"a": 150}, rows_of("a", 6, most=3)),
    "many pieces": ({"a": 1400}, rows_of("a", 4, most=300)),
    "nothing of its own": ({"a": 128}, [("a", 0, 1)] * 4 + [("a", 9, 1), ("", 200, 1)]),
    "groups and rows alone": (
        {"a": 128, "b": 320, "c": 140},
        mixed_up(rows_of("a", 7) + rows_of("b", 4) + rows_of("c", 3) + rows_of("", 5, most=200)),
    ),
    "prefixes within a prefix": (
        {"a": 128, "ab": 256, "ac": 192},
        mixed_up(rows_of("a", 6) + rows_of("ab", 5) + rows_of("ac", 8)),
    ),
    "a mixed step": (
        {"a": 192},
        [*rows_of("a", 2), ("a", 70, 66), *rows_of("a", 3), ("", 30, 30), ("a", 5, 3), ("a", 9, 1)],
    ),
}
# query heads, KV heads, head_dim, block size
HEADS = [(4, 2, 32, 4), (3, 3, 16, 16), (5, 1, 32, 64), (16, 1, 16, 4)]
CUDA_CASES = CASES | {
    "workload E": ({"a": 2048}, [("a", 64 + i % 64, 1) for i in range(256)]),
    "few rows, many keys": ({"a": 20_000}, rows_of("a", 4, most=900)),
    "documents": (
        {"a": 900, "ab": 3000, "ac": 1700, "ad": 5000},
        mixed_up([r for p in ("a", "ab", "ac", "ad", "") for r in rows_of(p, 23, most=400)]),
    ),
}
CUDA_HEADS = [(16, 8, 128, 16), (32, 8, 128, 64), (40, 8, 128, 256), (14, 2, 64, 16)]


def make_case(
    prefixes: dict[str, int], rows: list[Row], heads: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, ForwardBatch]:
    """A cache stored with heads first, whose unwritten slots hold NaN. A prefix is full blocks."""
    num_heads, kv_heads, head_dim, size = heads
    generator = torch.Generator().manual_seed(0)
    blocks_of: dict[str, list[int]] = {"": []}
    num_keys = sum(prefixes.values()) + sum(own + size for _, own, _ in rows)
    ids = list(range(num_keys // size + len(rows) + len(prefixes)))
    random.Random(0).shuffle(ids)
    num_blocks = len(ids)
    shape = (num_blocks, size, kv_heads, head_dim)
    k_cache, v_cache = (torch.full(shape, float("nan")) for _ in range(2))

    def write(blocks: list[int], keys: int) -> None:
        for index, block in enumerate(blocks):
            count = min(size, keys - index * size)
            for cache in (k_cache, v_cache):
                cache[block, :count] = torch.randn(count, kv_heads, head_dim, generator=generator)

    def take(count: int) -> list[int]:
        return [ids.pop() for _ in range(count)]

    for name, keys in prefixes.items():
        blocks = take(keys // size - len(blocks_of[name[:-1]]))
        write(blocks, len(blocks) * size)
        blocks_of[name] = blocks_of[name[:-1]] + blocks
    made: list[Rows] = []
    for name, own, tokens in rows:
        own = max(own, 0 if name and blocks_of[name] else 1)
        blocks = take(-(-own // size))
        write(blocks, own)
        blocks = blocks_of[name] + blocks
        made.append(Rows([0] * tokens, len(blocks_of[name]) * size + own - tokens, blocks))
    k, v = (c.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for c in (k_cache, v_cache))
    q = torch.randn(sum(n for _, _, n in rows), num_heads, head_dim, generator=generator)
    return q.to(dtype), k, v, make_forward_batch(made, [(k, v)])


@contextmanager
def small_savings() -> Iterator[None]:
    """As if everything that can be shared were worth it."""
    from nvcli.kernels import shared_prefix

    usual = shared_prefix.MIN_SPARED
    shared_prefix.MIN_SPARED = 1
    try:
        yield
    finally:
        shared_prefix.MIN_SPARED = usual


def backend_for(device: str) -> Any:
    from nvcli.kernels.triton_attention import TritonAttention

    backend = TritonAttention()
    if device == "cpu":
        backend._num_sms = 132  # so that keys come in more pieces than one
    return backend


def check(
    case: tuple[dict[str, int], list[Row]],
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    *,
    is_padded: bool = False,
    has_fp8: bool = False,
) -> None:
    from nvcli.kernels.torch_attention import TorchAttention

    q, k, v, batch = make_case(*case, heads, dtype)
    scales = None
    if has_fp8:
        k, v, scales = in_fp8(k, v)
    q, k, v, batch, scales = on_device(device, q, k, v, batch, scales)
    args = (0.3 if has_fp8 else heads[2] ** -0.5, scales)
    backend = backend_for(device)
    with small_savings():
        if is_padded:
            batch = as_captured(backend, batch, heads)
        got = backend.forward(q, k, v, batch, *args)
    plan: Any = batch.plan
    assert plan.shared is not None, "nothing was shared"
    if device == "cuda":
        again = backend.forward(q, k, v, batch, *args)
        assert torch.equal(got, again), "a race: two runs differ"
    assert not any(counters.any() for counters in backend._counters)
    # The rows of a group leave what they share: their items begin behind it.
    shared = plan.shared.rows.view(-1, 2)[:, 0]
    items = plan.items[: int(plan.sizes[0])].long()
    firsts = items[items[:, 4] == 0]
    assert torch.equal(firsts[:, 2], shared.long()[firsts[:, 0]])
    assert int(shared.sum()) > 0

    plain_batch = dataclasses.replace(batch, plan=None, is_padded=False)
    plain = TorchAttention().forward(q, k, v, plain_batch, *args)
    if has_fp8:
        from nvcli.kernels import reference

        tables = batch.gather_block_tables()
        bounds = (batch.cu_seqlens_q, batch.seq_lens, tables)
        exact = reference.paged_attention(q.float(), k, v, *bounds, *args)
    else:
        exact = reference_of(q.float(), k.float(), v.float(), batch, args[0])
    assert_as_good_as_torch(got, plain, exact)


def as_captured(
    backend: Any, batch: ForwardBatch, heads: tuple[int, int, int, int]
) -> ForwardBatch:
    """The batch as a captured step has it: the lists in a buffer for more rows, and grids that are
    bounds.
    """
    num_heads, kv_heads, _, block_size = heads
    device, num_rows = batch.seq_lens.device, len(batch.query_lens)
    prefixes = backend.shared_prefixes(num_heads, kv_heads, block_size, device)
    tables = [
        ids if n == 1 else [] for ids, n in zip(batch.block_ids, batch.query_lens, strict=True)
    ]
    groups = prefixes.find(tables, batch.key_lens)
    work = prefixes.allocate(num_rows + 7, device)
    work.buffer.fill_(-1)
    work.send(prefixes.fill(work, groups, batch.query_lens))
    return dataclasses.replace(
        batch,
        is_padded=True,
        is_decode=max(batch.query_lens) == 1,
        shared=work.cut(prefixes.max_items(num_rows), num_rows),
        plan=None,
    )


def check_padding(dtype: torch.dtype, device: str) -> None:
    """Rows without keys come out as zeros, the others as in a step without them."""
    heads = HEADS[0]
    q, k, v, batch = make_case(*CASES["groups and rows alone"], heads, dtype)
    q, k, v, batch, _ = on_device(device, q, k, v, batch)
    backend, num_rows = backend_for(device), len(batch.query_lens)
    with small_savings():
        captured = as_captured(backend, batch, heads)
        want = backend.forward(q, k, v, dataclasses.replace(captured), 0.2)
    zeros = torch.zeros(5, dtype=torch.int32, device=device)
    padded = dataclasses.replace(
        captured,
        seq_lens=torch.cat([batch.seq_lens, zeros]),
        slots=torch.cat([batch.slots, zeros.long()]),
        cu_seqlens_q=torch.arange(num_rows + 6, dtype=torch.int32, device=device),
        plan=None,
    )
    assert captured.shared is not None
    padded.shared = captured.shared.cut(captured.shared.num_items, num_rows + 5)
    noise = torch.full((5, *q.shape[1:]), float("nan"), dtype=dtype, device=device)
    got = backend.forward(torch.cat([q, noise]), k, v, padded, 0.2)
    assert torch.equal(got[num_rows:], torch.zeros_like(noise))
    assert_as_good_as_torch(got[:num_rows], want, want.float())


def check_all_in_float32() -> None:
    for name, case in CASES.items():
        for heads in HEADS if name == "groups and rows alone" else HEADS[:1]:
            check(case, heads, torch.float32, "cpu")
    for name in ("a mixed step", "groups and rows alone"):
        check(CASES[name], HEADS[0], torch.float32, "cpu", is_padded=True)
    for name in ("one group", "a mixed step"):
        check(CASES[name], HEADS[0], torch.float32, "cpu", has_fp8=True)
    check_padding(torch.float32, "cpu")


@needs_triton
@pytest.mark.interpret
def test_kernel_sources_in_the_interpreter() -> None:
    run_in_interpreter("tests.kernels.test_shared_attention", "check_all_in_float32")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("heads", CUDA_HEADS, ids=str)
@pytest.mark.parametrize("case", CUDA_CASES.values(), ids=list(CUDA_CASES))
@pytest.mark.parametrize("has_fp8", [False, True], ids=["bf16", "fp8"])
def test_on_cuda(
    case: tuple[dict[str, int], list[Row]], heads: tuple[int, int, int, int], has_fp8: bool
) -> None:
    num_keys = sum(case[0].get(name, 0) + own for name, own, _ in case[1])
    if num_keys > 50_000 and heads != CUDA_HEADS[0]:
        pytest.skip("large cases once")
    block_size = heads[3]
    if any(keys // block_size * block_size < 128 for keys in case[0].values()):
        pytest.skip("too short for such blocks")
    check(case, heads, torch.bfloat16, "cuda", has_fp8=has_fp8)
    if not has_fp8:
        check(case, heads, torch.bfloat16, "cuda", is_padded=True)


@needs_triton
@pytest.mark.gpu
def test_padding_on_cuda() -> None:
    check_padding(torch.bfloat16, "cuda")
