"""Products of two to sixteen rows: kernel source in the interpreter, bfloat16 on a GPU."""

from __future__ import annotations

import pytest
import torch

from nvcli.kernels import cuts
from tests.kernels.test_row_kernels import randn
from tests.kernels.triton_testing import assert_as_good_as_torch, needs_triton, run_in_interpreter

# rows, outputs, columns
SHAPES = [(9, 20, 128), (16, 33, 512), (3, 48, 1024), (2, 16, 192), (5, 70, 64)]
CUDA_SHAPES = [
    (8, 4096, 1024),
    (16, 1024, 2048),
    (7, 1024, 3072),
    (2, 6144, 1536),
    (9, 151_936, 1024),
]


def check(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    from nvcli.kernels import reference, skinny

    rows, outputs, size = shape
    x = randn(rows, size, dtype=dtype, device=device)
    weight = randn(2 * outputs, size, dtype=dtype, device=device, seed=1) / size**0.5
    half = weight[:outputs]
    exact = x.float() @ half.float().t()
    out = torch.full((rows, outputs), float("nan"), dtype=dtype, device=device)
    cut = cuts.skinny_cut(rows, size, outputs, is_swiglu=False)
    assert cut is not None
    assert skinny.linear(x, half, cut, out) is out
    assert_as_good_as_torch(out, reference.linear(x, half, None), exact)
    assert torch.equal(out, skinny.linear(x, half, cut)), "a race: two runs differ"
    cut = cuts.skinny_cut(rows, size, outputs, is_swiglu=True)
    if cut is None:
        return
    plain = reference.silu_and_mul(reference.linear(x, weight, None))
    exact = reference.silu_and_mul(x.float() @ weight.float().t())
    assert_as_good_as_torch(skinny.swiglu(x, weight, cut), plain, exact)


def check_all_in_float32() -> None:
    for shape in SHAPES:
        check(shape, torch.float32, "cpu")


@needs_triton
@pytest.mark.interpret
def test_kernel_sources_in_the_interpreter() -> None:
    run_in_interpreter("tests.kernels.test_skinny", "check_all_in_float32")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_cuda(dtype: torch.dtype) -> None:
    for shape in [*SHAPES, *CUDA_SHAPES]:
        check(shape, dtype, "cuda")
