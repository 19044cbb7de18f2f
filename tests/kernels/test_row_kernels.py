"""Norms, SwiGLU and the fused rotary store: kernel source in the interpreter, bfloat16 on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_testing import (
    EPS,
    assert_as_good_as_torch,
    needs_triton,
    run_in_interpreter,
)

NORM_SHAPES = [(1, 8), (3, 64), (5, 100), (2, 1024), (7, 2560)]
LOOK_UP_SHAPES = [(1, 20, 64, 32), (9, 30, 100, 16), (0, 20, 64, 32)]  # tokens, ids, E, D
LATE_NORM_SIZES = (8, 100, 2560)
# 5,000 columns are five programs of a row and, late, five, three or two: the last is not full.
SWIGLU_SHAPES = [(1, 4), (3, 96), (2, 1024), (5, 3072), (1, 1500), (3, 5000)]
# (tokens, query heads, KV heads, head_dim, block size, has norm, heads first). 14B's 56 heads are
# seven programs of eight or, late, three and a half of 16; 30 fill the last of neither.
ROTARY_SHAPES = [
    (1, 2, 1, 2, 1, True, False),
    (5, 4, 2, 32, 4, True, True),
    (5, 4, 2, 32, 4, False, False),
    (3, 5, 5, 16, 16, True, True),
    (2, 16, 8, 128, 16, True, True),
    (9, 14, 2, 64, 256, False, True),
    (4, 40, 8, 16, 4, True, True),
    (4, 40, 8, 16, 4, False, False),
    (3, 20, 5, 32, 8, True, True),
]


def randn(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def check_norm(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    from nvcli.kernels import norm, reference

    rows, size = shape
    wide = randn(rows, size + 3, dtype=dtype, device=device)
    x, residual = wide[:, :size], randn(rows, size, dtype=dtype, device=device, seed=1)
    weight = 1 + 0.2 * randn(size, dtype=dtype, device=device, seed=2)
    args = (weight.float(), EPS)
    plain = reference.rms_norm(x, weight, EPS)
    assert_as_good_as_torch(
        norm.rms_norm(x, weight, EPS), plain, reference.rms_norm(x.float(), *args)
    )
    out, total = norm.add_rms_norm(x, residual, weight, EPS)
    plain, plain_total = reference.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, plain_total)
    exact = reference.rms_norm(plain_total.float(), *args)
    assert_as_good_as_torch(out, plain, exact)


def check_swiglu(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    from nvcli.kernels import norm, reference

    rows, size = shape
    x = 3 * randn(rows, 2 * size, dtype=dtype, device=device)
    exact = reference.silu_and_mul(x.float())
    assert_as_good_as_torch(norm.silu_and_mul(x), reference.silu_and_mul(x), exact)
    for hidden_size in LATE_NORM_SIZES:
        hidden = 2 * randn(rows, hidden_size, dtype=dtype, device=device, seed=1)
        plain = reference.silu_and_mul(x, hidden, EPS)
        exact = reference.silu_and_mul(x.float(), hidden.float(), EPS)
        for few in (norm.MANY_ROWS, 0):  # with 0 these are many, which are cut otherwise
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(norm, "MANY_ROWS", few)
                assert_as_good_as_torch(norm.silu_and_mul(x, hidden, EPS), plain, exact)


def check_rotary(
    shape: tuple[int, int, int, int, int, bool, bool], dtype: torch.dtype, device: str
) -> None:
    """Into caches full of NaN: what is not stored must stay untouched."""
    from nvcli.kernels import reference, rotary_store

    tokens, heads, kv_heads, head_dim, block_size, has_norm, heads_first = shape
    num_blocks = tokens + 2

    def cache(cache_dtype: torch.dtype) -> Tensor:
        axes = (kv_heads, block_size) if heads_first else (block_size, kv_heads)
        full = torch.full((num_blocks, *axes, head_dim), float("nan"), device=device)
        return (full.transpose(1, 2) if heads_first else full).to(cache_dtype)

    wide = randn(tokens, (heads + 2 * kv_heads) * head_dim + 8, dtype=dtype, device=device)
    qkv = wide[:, :-8].view(tokens, -1, head_dim)
    weight = 1 + 0.2 * randn(heads + kv_heads, head_dim, dtype=dtype, device=device, seed=1)
    angles = randn(tokens, head_dim // 2, dtype=torch.float32, device=device, seed=2)
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
    order = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(3))
    slots = order[:tokens].to(device)
    if tokens > 2:
        slots[1] = -1
    rotary = (table[:, 0], table[:, 1])

    def run(op: object, x: Tensor, w: Tensor, rms_of: Tensor | None) -> list[Tensor]:
        caches = (cache(x.dtype), cache(x.dtype))
        args = (x, w if has_norm else None, *rotary, EPS, *caches, slots, None, rms_of)
        q = op(*args)  # type: ignore[operator]
        return [q, *caches]

    hidden = (2 * randn(tokens, n, dtype=dtype, device=device, seed=4) for n in LATE_NORM_SIZES)
    for rms_of in (None, *hidden):
        ours = run(rotary_store.rope_norm_store, qkv, weight, rms_of)
        plain = run(reference.rope_norm_store, qkv, weight, rms_of)
        wide_rms = None if rms_of is None else rms_of.float()
        exact = run(reference.rope_norm_store, qkv.float(), weight.float(), wide_rms)
        for got, other, best in zip(ours, plain, exact, strict=True):
            assert torch.equal(got.isnan(), best.isnan())
            assert_as_good_as_torch(got.nan_to_num(), other.nan_to_num(), best.nan_to_num())


def check_look_up(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, share: tuple[int, int] | None
) -> None:
    """share: first id and number of ids of a rank that has not all of them."""
    from nvcli.kernels import input_rows, reference

    tokens, num_ids, size, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    ids, positions = (torch.randint(0, num_ids, (tokens,), generator=generator) for _ in range(2))
    first, count = share or (0, num_ids)
    padding = 0 if share is None else 3
    weight = randn(count + padding, size, dtype=dtype, device=device)
    table = randn(num_ids, 2 * head_dim, dtype=torch.float32, device=device, seed=1)
    args = (ids.to(device), positions.to(device), weight, table.view(num_ids, 2, head_dim))
    ours = input_rows.look_up(*args, first, count)
    plain = reference.look_up(*args, first, count)
    assert all(torch.equal(got, want) for got, want in zip(ours, plain, strict=True))
    assert ours[1].stride() == ours[2].stride()
    if share is not None and tokens > 5:
        is_zero = (ours[0] == 0).all(1)
        assert is_zero.any()
        assert not is_zero.all()


def check_all_in_float32() -> None:
    for look_up_shape in LOOK_UP_SHAPES:
        check_look_up(look_up_shape, torch.float32, "cpu", None)
        check_look_up(look_up_shape, torch.float32, "cpu", (7, 11))
    for shape in NORM_SHAPES:
        check_norm(shape, torch.float32, "cpu")
    for shape in SWIGLU_SHAPES:
        check_swiglu(shape, torch.float32, "cpu")
    for rotary in ROTARY_SHAPES:
        check_rotary(rotary, torch.float32, "cpu")


@needs_triton
@pytest.mark.interpret
def test_kernel_sources_in_the_interpreter() -> None:
    run_in_interpreter("tests.kernels.test_row_kernels", "check_all_in_float32")


@pytest.mark.torch
def test_ids_of_another_rank_are_zeros_by_hand() -> None:
    from nvcli.kernels import look_up

    table = torch.arange(8.0).view(4, 2, 1)
    ids, positions = torch.tensor([4, 5, 6, 3]), torch.tensor([3, 0, 1, 1])
    for weight in (torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.0], [9.0]])):  # padded
        x, cos, sin = look_up(ids, positions, weight, table, 4, 2)
        assert x.flatten().tolist() == [1, 2, 0, 0]
        assert cos.flatten().tolist() == [6, 0, 2, 2]
        assert sin.flatten().tolist() == [7, 1, 3, 3]
    x, _, _ = look_up(ids, positions, weight, table, 4, 0)  # more ranks than there are ids for
    assert not x.any()


CUDA_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CUDA_DTYPES)
def test_on_cuda(dtype: torch.dtype) -> None:
    for shape in [*NORM_SHAPES, (300, 5120)]:
        check_norm(shape, dtype, "cuda")
    for look_up_shape in LOOK_UP_SHAPES:
        check_look_up(look_up_shape, dtype, "cuda", None)
        check_look_up(look_up_shape, dtype, "cuda", (7, 11))
    many_ids = (2000, 151_936, 1024, 128)
    check_look_up(many_ids, dtype, "cuda", None)
    check_look_up(many_ids, dtype, "cuda", (75_968, 50_000))
    for shape in [*SWIGLU_SHAPES, (300, 12_288), (1100, 17_408)]:
        check_swiglu(shape, dtype, "cuda")
    large = [(1000, 32, 8, 128, 64, True, True), (300, 40, 8, 128, 16, True, True)]
    for rotary in [*ROTARY_SHAPES, *large]:
        check_rotary(rotary, dtype, "cuda")


@needs_triton
@pytest.mark.gpu
def test_dependent_launch_changes_nothing() -> None:
    from nvcli.kernels import launch, norm

    x, residual, weight = (
        randn(*shape, dtype=torch.bfloat16, device="cuda", seed=seed)
        for seed, shape in enumerate([(64, 2048), (64, 1024), (1024,)])
    )
    results = []
    for enabled in (False, True):
        launch.set_pdl(enabled)
        out = residual
        for _ in range(20):  # a chain, each reading what the one before wrote
            out, total = norm.add_rms_norm(norm.silu_and_mul(x), out, weight, EPS)
        results.append((out.clone(), total.clone()))
    launch.set_pdl(True)
    for off, on in itertools.pairwise(results):
        assert all(torch.equal(a, b) for a, b in zip(off, on, strict=True))
