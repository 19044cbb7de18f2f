"""Products of 9 to 64 rows: kernel source in the interpreter, bfloat16 on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_row_kernels import randn
from tests.kernels.triton_testing import assert_as_good_as_torch, needs_triton, run_in_interpreter

# rows, outputs, columns
SHAPES = [(9, 20, 128), (16, 33, 512), (33, 48, 1024), (2, 16, 640)]
CUDA_SHAPES = [
    (32, 4096, 1024),
    (64, 1024, 2048),
    (17, 1024, 3072),
    (40, 6144, 4096),
    (64, 4096, 12_288),
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
    for _ in range(2):  # the counts of the first run must be gone
        assert skinny.linear(x, half, out) is out
        assert_as_good_as_torch(out, reference.linear(x, half, None), exact)
    again = skinny.linear(x, half)
    assert torch.equal(out, again), "a race: two runs differ"
    plain = reference.silu_and_mul(reference.linear(x, weight, None))
    exact = reference.silu_and_mul(x.float() @ weight.float().t())
    assert_as_good_as_torch(skinny.swiglu(x, weight), plain, exact)


def check_all_in_float32() -> None:
    for shape in SHAPES:
        check(shape, torch.float32, "cpu")


@needs_triton
@pytest.mark.interpret
@pytest.mark.timeout(300)
def test_kernel_sources_in_the_interpreter() -> None:
    run_in_interpreter("tests.kernels.test_skinny", "check_all_in_float32")


@needs_triton
@pytest.mark.torch
def test_they_are_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvcli.kernels import skinny

    x, weight = torch.empty(32, 256), torch.empty(8, 256)
    assert not skinny.fits(x, weight, None)
    monkeypatch.setattr(skinny, "_enabled_rows", 32)
    assert skinny.fits(x, weight, None)
    assert not skinny.fits(x[:8], weight, None)  # gemv's
    assert not skinny.fits(torch.empty(33, 256), weight, None)
    assert not skinny.fits(torch.empty(32, 200), torch.empty(8, 200), None)
    assert not skinny.fits(x, weight, torch.empty(8))


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_cuda(dtype: torch.dtype) -> None:
    for shape in [*SHAPES, *CUDA_SHAPES]:
        check(shape, dtype, "cuda")
