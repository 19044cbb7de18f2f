"""Settings of decode attention reach its launch, and change no result beyond rounding."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nvcli.kernels import reference, tuned
from nvcli.kernels.cuts import ATTENTION, Attention, Split
from nvcli.kernels.torch_attention import TorchAttention
from tests.kernels.paged_cases import in_fp8, make_strided_case, on_device, reference_of
from tests.kernels.test_early_keys import make
from tests.kernels.triton_testing import assert_as_good_as_torch, needs_triton, run_in_interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

KEYS = (1, 15, 16, 17, 31, 33, 63, 64, 65, 129, 300)
# query heads, KV heads, head_dim, block size
HEADS = [(4, 2, 32, 16), (3, 1, 16, 64), (5, 1, 32, 256), (14, 2, 16, 32)]
CUDA_HEADS = [(16, 8, 128, 16), (32, 8, 128, 64), (40, 8, 128, 256), (14, 2, 64, 16)]
LAUNCHES = [  # tile, warps, stages, registers
    (64, 2, 3, 0),
    (64, 1, 3, 128),
    (32, 1, 5, 0),
    (16, 4, 2, 0),
]


def settings(tile: int, warps: int = 2, stages: int = 3, registers: int = 0) -> Attention:
    """Of both kinds of cache."""
    return replace(
        ATTENTION,
        decode_tile=tile,
        decode_warps=warps,
        decode_stages=stages,
        many_tile=tile,
        many_warps=warps,
        many_stages=stages,
        fp8_tile=tile,
        fp8_warps=warps,
        fp8_stages=stages,
        fp8_registers=registers,
    )


@contextmanager
def used(attention: Attention) -> Iterator[None]:
    usual = tuned.attention
    tuned.attention = lambda device: attention
    try:
        yield
    finally:
        tuned.attention = usual


# --- what is launched ----------------------------------------------------------------------------


class Recorder:
    """Stands in for a kernel."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.options.update(options)


@needs_triton
@pytest.mark.torch
@pytest.mark.parametrize("has_fp8", [False, True])
def test_each_kind_of_cache_has_its_own_launch_and_cut(
    monkeypatch: pytest.MonkeyPatch, has_fp8: bool
) -> None:
    from nvcli.kernels import attention_plan, decode_attention
    from nvcli.kernels.triton_attention import TritonAttention

    launched = Recorder()
    monkeypatch.setattr(decode_attention, "_decode_kernel", launched)
    monkeypatch.setattr(attention_plan, "_plan_kernel", Recorder())
    own = replace(
        settings(32, 4, 5),
        splits=((64, Split(2, 8)),),
        fp8_tile=16,
        fp8_warps=1,
        fp8_stages=2,
        fp8_registers=96,
        fp8_splits=((64, Split(20, 28)),),
        early_rows=2,
        early_warps=8,
    )
    usual = {"TILE": 32, "num_warps": 4, "num_stages": 5}
    if has_fp8:
        usual = {"TILE": 16, "num_warps": 1, "num_stages": 2, "maxnreg": 96}
    early = {"TILE": 64, "num_warps": 8, "num_stages": usual["num_stages"]}  # a whole chunk
    for num_rows, want in ((2, early), (3, usual)):
        case = make([70] * num_rows, HEADS[0], has_fp8=has_fp8)
        launched.options.clear()
        with used(own):
            TritonAttention().forward(case.q, case.k, case.v, case.batch, 0.2, case.scales)
        plan = case.batch.plan
        assert isinstance(plan, attention_plan.RowPlan) == (want is early)
        assert plan is not None
        assert plan.num_items == 6 * (28 if has_fp8 else 8) // 2, "6 SMs, 2 KV heads"
        names = ("TILE", "num_warps", "num_stages", "maxnreg")
        assert {n: launched.options[n] for n in names if n in launched.options} == want


@needs_triton
@pytest.mark.torch
@pytest.mark.parametrize("num_rows", [2, 3])  # found by each program, and listed
def test_heads_of_many_queries_have_a_cut_of_their_own(
    monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    from nvcli.kernels import attention_plan
    from nvcli.kernels.triton_attention import TritonAttention

    monkeypatch.setattr(attention_plan, "_plan_kernel", Recorder())
    own = replace(settings(64), splits=((64, Split(2, 8, wide=4)),), early_rows=2)
    for heads, want in ((HEADS[0], 8), (HEADS[1], 4)):  # two and three query heads a KV head
        case = make([70] * num_rows, heads)
        with used(own):
            plan = TritonAttention()._make_plan(case.q, case.k, case.batch)
        assert isinstance(plan, attention_plan.RowPlan) == (num_rows == 2)
        assert plan.num_items == 6 * want // heads[1], "6 SMs"


@needs_triton
@pytest.mark.torch
def test_many_rows_have_their_own_launch_unless_they_share_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nvcli.kernels import attention_plan, decode_attention, shared_attention
    from nvcli.kernels.triton_attention import TritonAttention

    launched = Recorder()
    monkeypatch.setattr(decode_attention, "_decode_kernel", launched)
    monkeypatch.setattr(attention_plan, "_plan_kernel", Recorder())
    monkeypatch.setattr(shared_attention, "shared_attention", lambda *args: None)
    own = replace(settings(64, 2, 3), many_tile=32, many_warps=1, many_stages=5)
    few = {"TILE": 64, "num_warps": 2, "num_stages": 3, "MERGE": 16}
    many = {"TILE": 32, "num_warps": 1, "num_stages": 5, "MERGE": 8}
    for num_rows, shares, want in ((192, False, few), (193, False, many), (193, True, few)):
        case = make([2] * num_rows, HEADS[0])
        with used(own):
            plan: Any = TritonAttention()._make_plan(case.q, case.k, case.batch)
            case.batch.plan = replace(plan, shared=SimpleNamespace(num_rows=0) if shares else None)
            TritonAttention().forward(case.q, case.k, case.v, case.batch, 0.2)
        assert {name: launched.options[name] for name in want} == want


@pytest.mark.torch
def test_an_fp8_cache_is_cut_as_any_other_unless_the_table_says() -> None:
    other = replace(ATTENTION, fp8_splits=((8, Split(5, 6)),))
    for rows in (1, 64, 300):
        assert ATTENTION.split(rows, is_fp8=True) == ATTENTION.split(rows)
        assert other.split(rows, is_fp8=True) == Split(5, 6)
        assert other.split(rows) == ATTENTION.split(rows)


# --- results -------------------------------------------------------------------------------------


def check(
    attention: Attention,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    *,
    has_fp8: bool,
    keys: tuple[int, ...] = KEYS,
) -> Tensor:
    """Rows of these keys and two empty ones, many splits. Returns the result."""
    from nvcli.kernels.triton_attention import TritonAttention

    rows = [(1, n) for n in keys]
    q, k, v, batch = make_strided_case(rows, heads, torch.float32 if has_fp8 else dtype)
    scales = None
    if has_fp8:
        k, v, scales = in_fp8(k, v)
    q, k, v, batch, scales = on_device(device, q.to(dtype), k, v, batch, scales)
    scale = heads[2] ** -0.5
    plain = TorchAttention().forward(q, k, v, batch, scale, scales)
    tables = batch.gather_block_tables()
    if has_fp8:
        exact = reference.paged_attention(
            q.float(), k, v, batch.cu_seqlens_q, batch.seq_lens, tables, scale, scales
        )
    else:
        exact = reference_of(q.float(), k.float(), v.float(), batch, scale)
    num_rows = len(keys)
    zeros = torch.zeros(2, dtype=torch.int32, device=device)
    padded = replace(
        batch,
        seq_lens=torch.cat([batch.seq_lens, zeros]),
        slots=torch.cat([batch.slots, zeros.long()]),
        cu_seqlens_q=torch.arange(num_rows + 3, dtype=torch.int32, device=device),
        is_padded=True,
        is_decode=True,
        plan=None,
    )
    noise = torch.full_like(q[:2], float("nan"))
    backend = TritonAttention()
    with used(attention):
        args = (torch.cat([q, noise]), k, v, padded, scale, scales)
        got = backend.forward(*args)
        assert torch.equal(got, backend.forward(*args)), "a race: two runs differ"
    assert not any(counters.any() for counters in backend._counters)
    assert torch.equal(got[num_rows:], torch.zeros_like(got[num_rows:]))
    assert_as_good_as_torch(got[:num_rows], plain, exact)
    return got


def check_all_in_the_interpreter() -> None:
    for heads in HEADS:
        for tile in (16, 32, 64):
            check(settings(tile), heads, torch.float32, "cpu", has_fp8=True)
    for tile in (16, 32, 64):
        check(settings(tile), HEADS[0], torch.float32, "cpu", has_fp8=False)
        check(settings(tile), HEADS[2], torch.float16, "cpu", has_fp8=False)
    few, many = (
        replace(settings(32), fp8_splits=((64, Split(n, n)),), splits=((64, Split(9, 9)),))
        for n in (1, 40)
    )
    for one in (few, many):
        check(one, HEADS[1], torch.float32, "cpu", has_fp8=True, keys=(700, 3, 64))


@needs_triton
@pytest.mark.interpret
def test_tiles_in_the_interpreter() -> None:
    run_in_interpreter("tests.kernels.test_decode_settings", "check_all_in_the_interpreter")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("has_fp8", [False, True])
@pytest.mark.parametrize("heads", CUDA_HEADS, ids=str)
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_launches_on_cuda(
    launch: tuple[int, int, int, int], heads: tuple[int, int, int, int], has_fp8: bool
) -> None:
    check(settings(*launch), heads, torch.bfloat16, "cuda", has_fp8=has_fp8)
