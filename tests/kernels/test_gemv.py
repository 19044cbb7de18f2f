"""One row times a matrix: kernel source in the interpreter, bfloat16 on a GPU."""

from __future__ import annotations

import pytest
import torch

from nvcli.kernels import cuts
from tests.kernels.test_row_kernels import randn
from tests.kernels.triton_testing import (
    EPS,
    assert_as_good_as_torch,
    needs_triton,
    run_in_interpreter,
)

# outputs, columns
SHAPES = [(5, 16), (96, 64), (10, 100), (24, 96), (6, 8200), (4, 2600), (10, 5200)]
NORM_SHAPES = SHAPES[:4]
CUDA_SHAPES = [(4096, 1024), (1024, 2048), (1024, 3072), (4096, 12_288), (5120, 17_408)]
CUDA_SHAPES += [(6144, 4096), (7168, 5120), (151_936, 1024)]


def check_linear(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    from nvcli.kernels import gemv, reference

    outputs, size = shape
    x = randn(1, size, dtype=dtype, device=device)
    weight = randn(outputs, size, dtype=dtype, device=device, seed=1) / size**0.5
    exact = x.float() @ weight.float().t()
    cut = cuts.gemv_cut(size, outputs)
    plain = reference.linear(x, weight, None)
    assert_as_good_as_torch(gemv.linear(x, weight, cut), plain, exact)
    if outputs % 2 == 0:
        got, exact = gemv.swiglu(x, weight, cut), reference.silu_and_mul(exact)
        assert_as_good_as_torch(got, reference.silu_and_mul(plain), exact)


def check_norm(
    shape: tuple[int, int], dtype: torch.dtype, device: str, *, has_residual: bool
) -> None:
    from nvcli.kernels import gemv, reference

    outputs, size = shape
    x = randn(1, size, dtype=dtype, device=device)
    residual = randn(1, size, dtype=dtype, device=device, seed=1) if has_residual else None
    norm_weight = 1 + 0.2 * randn(size, dtype=dtype, device=device, seed=2)
    weight = randn(2 * outputs, size, dtype=dtype, device=device, seed=3) / size**0.5
    plain_total = x if residual is None else x + residual
    for op, name in ((gemv.norm_linear, "norm_linear"), (gemv.norm_swiglu, "norm_swiglu")):
        meaning = getattr(reference, name)
        cut = cuts.norm_gemv_cut(size, is_swiglu=name == "norm_swiglu")
        assert cut is not None
        got, total = op(x, residual, norm_weight, EPS, weight, cut)
        plain, _ = meaning(x, residual, norm_weight, EPS, weight)
        exact, _ = meaning(plain_total.float(), None, norm_weight.float(), EPS, weight.float())
        assert torch.equal(total, plain_total)
        assert_as_good_as_torch(got, plain, exact)


def check_all_in_float32() -> None:
    for shape in SHAPES:
        check_linear(shape, torch.float32, "cpu")
    for i, shape in enumerate(NORM_SHAPES):
        check_norm(shape, torch.float32, "cpu", has_residual=i > 0)


@needs_triton
@pytest.mark.interpret
def test_kernel_sources_in_the_interpreter() -> None:
    run_in_interpreter("tests.kernels.test_gemv", "check_all_in_float32")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_cuda(dtype: torch.dtype) -> None:
    # Both round the norm before the product, so either may be the luckier one: where outputs are
    # few, PyTorch's worst error is none to measure by. What rounds once, at its end, as the kernels
    # of `check_linear` do, cannot be behind.
    many = [(41 * outputs, size) for outputs, size in NORM_SHAPES]
    for shape in [*SHAPES, *CUDA_SHAPES]:
        check_linear(shape, dtype, "cuda")
    for shape in [*many, (3072, 1024), (6144, 2048)]:
        for has_residual in (False, True):
            check_norm(shape, dtype, "cuda", has_residual=has_residual)
