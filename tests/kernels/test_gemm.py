"""Products in tiles: kernel source in the interpreter, bfloat16 on a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from nvcli.kernels.cuts import Tiles
from tests.kernels.test_row_kernels import randn
from tests.kernels.triton_testing import assert_as_good_as_torch, needs_triton, run_in_interpreter

WHOLE = Tiles(rows=16, outputs=64, columns=64, held=2, splits=1, warps=4, stages=1)
SPLIT = Tiles(rows=16, outputs=64, columns=32, held=1, splits=4, warps=4, stages=1)
# rows, outputs (with SwiGLU half as many), columns, tiles
CASES = [
    (9, 128, 128, WHOLE),  # all of it held
    (16, 100, 320, WHOLE),  # the rest in the loop, outputs that fill no tile
    (5, 66, 100, WHOLE),  # columns that fill no piece
    (33, 64, 130, replace(WHOLE, held=0)),  # rows of three tiles
    (20, 96, 96, replace(WHOLE, rows=64, outputs=32, held=1)),  # x as the large operand
    (3, 70, 128, SPLIT),  # a piece a split
    (17, 64, 288, SPLIT),  # three pieces a split, the last of which is empty
    (2, 32, 64, replace(SPLIT, held=1, splits=2, columns=64)),  # nothing in the second split
    (130, 64, 128, replace(SPLIT, rows=128, splits=2, held=2)),
]
HELD = Tiles(rows=32, outputs=64, columns=512, held=1, splits=4, warps=4, stages=1)
LOOPED = Tiles(rows=64, outputs=128, columns=64, held=2, splits=1, warps=8, stages=4)
CUDA_CASES = [
    (32, 1024, 2048, HELD),
    (19, 1024, 3072, replace(HELD, columns=256, held=2, splits=6)),
    (64, 4096, 1024, replace(HELD, rows=64, columns=256, held=4, splits=1, warps=8)),
    (24, 4096, 1024, replace(HELD, rows=64, outputs=32, columns=256, held=4, splits=1)),
    (61, 6144, 1024, replace(LOOPED, rows=64)),
    (128, 6144, 1024, replace(LOOPED, rows=128, stages=3)),
    (200, 4096, 4096, replace(LOOPED, rows=128, outputs=64, splits=2, held=1, stages=3)),
    (31, 24_576, 4096, replace(LOOPED, rows=32)),
]


def check(case: tuple[int, int, int, Tiles], dtype: torch.dtype, device: str) -> None:
    from nvcli.kernels import gemm, reference

    rows, outputs, size, tiles = case
    # Rows beyond x, which lie behind it, must not matter.
    behind = randn(rows + 200, size, dtype=dtype, device=device)
    behind[rows:] = float("nan")
    x = behind[:rows]
    weight = randn(outputs, size, dtype=dtype, device=device, seed=1) / size**0.5
    plain, exact = reference.linear(x, weight, None), x.float() @ weight.float().t()
    if tiles.splits > 1:
        addends = gemm.linear_addends(x, weight, tiles)
        assert addends.shape == (tiles.splits, rows, outputs)
        assert addends.dtype == torch.float32
        assert torch.equal(addends, gemm.linear_addends(x, weight, tiles)), "two runs differ"
        share = -(-size // tiles.columns)
        share = -(-share // tiles.splits) * tiles.columns
        parts = [w.float() for w in weight.split(share, dim=1)]
        for got, x_part, w_part in zip(addends, x.float().split(share, dim=1), parts, strict=False):
            torch.testing.assert_close(got, x_part @ w_part.t(), rtol=1e-4, atol=1e-4)
        assert not addends[len(parts) :].any(), "splits without columns"
        assert_as_good_as_torch(reference.added_up(addends, dtype), plain, exact)
        return
    out = torch.full((rows, outputs), float("nan"), dtype=dtype, device=device)
    assert gemm.linear(x, weight, None, out, tiles) is out
    assert_as_good_as_torch(out, plain, exact)
    assert torch.equal(out, gemm.linear(x, weight, None, tiles=tiles)), "a race: two runs differ"
    plain = reference.silu_and_mul(plain)
    got = gemm.swiglu(x, weight, tiles)
    assert_as_good_as_torch(got, plain, reference.silu_and_mul(exact))
    assert torch.equal(got, gemm.swiglu(x, weight, tiles)), "a race: two runs differ"


def check_norm_of_addends(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str, seed: int = 0
) -> None:
    from nvcli.kernels import norm, reference

    splits, rows, size = shape
    addends = randn(splits, rows, size, dtype=torch.float32, device=device, seed=seed)
    residual = randn(rows, size, dtype=dtype, device=device, seed=1)
    weight = 1 + 0.2 * randn(size, dtype=dtype, device=device, seed=2)
    out, total = norm.add_rms_norm(addends, residual, weight, 1e-6)
    in_order = addends[0].clone()
    for addend in addends[1:]:
        in_order += addend
    summed = in_order.to(dtype)
    assert torch.equal(total, summed + residual), "added up in order, and rounded as a product"
    plain, _ = reference.add_rms_norm(summed, residual, weight, 1e-6)
    exact = reference.rms_norm(total.float(), weight.float(), 1e-6)
    assert_as_good_as_torch(out, plain, exact)


def check_all_in_float32() -> None:
    for case in CASES:
        check(case, torch.float32, "cpu")
    for shape in ((2, 3, 64), (6, 5, 100), (1, 2, 16)):
        check_norm_of_addends(shape, torch.float32, "cpu")
    x, weight, bias = (randn(*s, dtype=torch.float32, device="cpu") for s in ((5, 8), (6, 8), (6,)))
    with_bias(x, weight, bias)


def with_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    from nvcli.kernels import gemm

    wide = torch.cat([x, x], dim=1)[:, : x.shape[1]]  # rows that lie apart
    got = gemm.linear(wide, weight, bias, tiles=replace(WHOLE, held=0))
    torch.testing.assert_close(got, x @ weight.t() + bias)


@needs_triton
@pytest.mark.interpret
def test_kernel_sources_in_the_interpreter() -> None:
    run_in_interpreter("tests.kernels.test_gemm", "check_all_in_float32")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_cuda(dtype: torch.dtype) -> None:
    for case in [*CASES, *CUDA_CASES]:
        check(case, dtype, "cuda")
    for shape in ((4, 32, 1024), (6, 7, 1024), (2, 64, 4096), (3, 5, 100)):
        check_norm_of_addends(shape, dtype, "cuda")


@needs_triton
@pytest.mark.gpu
def test_dependent_launch_changes_nothing() -> None:
    """A chain in which every kernel reads what the one before wrote, weights held or not."""
    from nvcli.kernels import gemm, launch, norm

    bf16 = torch.bfloat16
    up, down = (
        randn(*shape, dtype=bf16, device="cuda", seed=seed) / shape[1] ** 0.5
        for seed, shape in enumerate([(6144, 1024), (1024, 3072)])
    )
    weight = torch.ones(1024, dtype=bf16, device="cuda")
    results = []
    for enabled in (False, True, True):
        launch.set_pdl(enabled)
        x = residual = randn(40, 1024, dtype=bf16, device="cuda", seed=3)
        for _ in range(20):
            inner = gemm.swiglu(x, up, replace(HELD, rows=64, held=2, splits=1))
            addends = gemm.linear_addends(inner, down, replace(HELD, rows=64, splits=6))
            x, residual = norm.add_rms_norm(addends, residual, weight, 1e-6)
        results.append((x.clone(), residual.clone()))
    launch.set_pdl(True)
    for off, on in itertools.pairwise(results):
        assert all(torch.equal(a, b) for a, b in zip(off, on, strict=True))
