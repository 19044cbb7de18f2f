"""Products of few rows: kernel source in the interpreter, bfloat16 on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_row_kernels import randn
from tests.kernels.triton_testing import assert_as_good_as_torch, needs_triton, run_in_interpreter

# rows, outputs, columns
SHAPES = [(1, 5, 16), (2, 96, 64), (3, 10, 100), (8, 24, 96), (5, 6, 8200)]
NORM_SHAPES = SHAPES[:4]
CUDA_SHAPES = [
    (1, 4096, 1024),
    (4, 1024, 2048),
    (8, 1024, 3072),
    (7, 4096, 12_288),
    (1, 5120, 17_408),
    (8, 6144, 4096),
    (2, 7168, 5120),
]


def check_linear(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    from nvcli.kernels import gemv, reference

    rows, outputs, size = shape
    x = randn(rows, size, dtype=dtype, device=device)
    weight = randn(outputs, size, dtype=dtype, device=device, seed=1) / size**0.5
    exact = x.float() @ weight.float().t()
    assert_as_good_as_torch(gemv.linear(x, weight), reference.linear(x, weight, None), exact)


def check_norm(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str, *, has_residual: bool
) -> None:
    from nvcli.kernels import gemv, reference

    rows, outputs, size = shape
    x = randn(rows, size, dtype=dtype, device=device)
    residual = randn(rows, size, dtype=dtype, device=device, seed=1) if has_residual else None
    norm_weight = 1 + 0.2 * randn(size, dtype=dtype, device=device, seed=2)
    weight = randn(2 * outputs, size, dtype=dtype, device=device, seed=3) / size**0.5
    plain_total = x if residual is None else x + residual
    for op, name in ((gemv.norm_linear, "norm_linear"), (gemv.norm_swiglu, "norm_swiglu")):
        meaning = getattr(reference, name)
        got, total = op(x, residual, norm_weight, 1e-6, weight)
        plain, _ = meaning(x, residual, norm_weight, 1e-6, weight)
        exact, _ = meaning(plain_total.float(), None, norm_weight.float(), 1e-6, weight.float())
        assert torch.equal(total, plain_total)
        assert_as_good_as_torch(got, plain, exact)


@needs_triton
@pytest.mark.torch
def test_what_fits() -> None:
    from nvcli.kernels import gemv

    def fits(rows: int, size: int, *, has_norm: bool = False) -> bool:
        return gemv.fits(torch.empty(rows, size), torch.empty(4, size), None, has_norm=has_norm)

    assert fits(8, 4096)
    assert not fits(9, 64)
    assert not fits(0, 64)
    assert not fits(8, 12_288)
    assert fits(1, 17_408)
    assert fits(8, 1024, has_norm=True)
    assert not fits(4, 4096, has_norm=True)
    assert fits(1, 5120, has_norm=True)
    wide = torch.empty(2, 8)
    assert not gemv.fits(wide[:, :4], torch.empty(4, 4), None, has_norm=False)
    assert not gemv.fits(wide, wide, torch.empty(2), has_norm=False)
    assert not gemv.fits(wide.bfloat16(), wide, None, has_norm=False)


def check_all_in_float32() -> None:
    for shape in SHAPES:
        check_linear(shape, torch.float32, "cpu")
    for i, shape in enumerate(NORM_SHAPES):
        check_norm(shape, torch.float32, "cpu", has_residual=i > 0)


@needs_triton
@pytest.mark.interpret
@pytest.mark.timeout(300)
def test_kernel_sources_in_the_interpreter() -> None:
    run_in_interpreter("tests.kernels.test_gemv", "check_all_in_float32")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_cuda(dtype: torch.dtype) -> None:
    for shape in [*SHAPES, *CUDA_SHAPES]:
        check_linear(shape, dtype, "cuda")
    for shape in [
        *NORM_SHAPES,
        (1, 3072, 1024),
        (8, 3072, 1024),
        (2, 12_288, 4096),
        (1, 17_408, 5120),
    ]:
        for has_residual in (False, True):
            check_norm(shape, dtype, "cuda", has_residual=has_residual)
