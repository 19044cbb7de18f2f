"""Products with fp8 weights: kernel source in the interpreter, 16 bits on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from benchmarks.make_fp8 import quantise, spread
from nvcli.kernels import cuts, reference, tuned
from nvcli.kernels.cuts import Fp8Tiles, Gemv
from nvcli.types import FP8_BLOCK
from tests.kernels.test_row_kernels import randn
from tests.kernels.triton_testing import (
    EPS,
    assert_as_good_as_torch,
    needs_triton,
    run_in_interpreter,
)

GEMV_SHAPES = [(128, 128), (256, 384), (128, 2048), (128, 5120)]  # outputs, columns
CUDA_GEMV_SHAPES = [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 12_288), (5120, 17_408)]
ONE = Fp8Tiles(rows=16, outputs=64, splits=1, warps=4, stages=6)
# rows, outputs (with SwiGLU half as many), columns, tiles
CASES = [
    (2, 256, 128, replace(ONE, outputs=32)),
    (17, 512, 384, replace(ONE, rows=32)),
    (70, 256, 128, replace(ONE, rows=64, stages=4)),
    (20, 256, 256, replace(ONE, rows=128, outputs=128, warps=8, stages=3)),
    (3, 128, 512, replace(ONE, splits=4)),
    (33, 256, 384, replace(ONE, rows=32, splits=2)),
    (5, 128, 640, replace(ONE, splits=4)),  # nothing in the last split
]
CUDA_SHAPES = [(2, 4096, 1024), (16, 6144, 4096), (31, 4096, 12_288), (64, 5120, 5120)]
CUDA_SHAPES += [(256, 4096, 4096), (300, 12_288, 3072), (500, 1024, 2048)]


def make(
    rows: int, outputs: int, columns: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, fp8 weight, scales, what the weight means in float32); no two blocks are alike."""
    x = randn(rows, columns, dtype=dtype, device=device)
    weight = randn(outputs, columns, dtype=torch.float32, device=device, seed=1) / columns**0.5
    sizes = torch.arange(1, 1 + weight.numel() // FP8_BLOCK**2, device=device) % 7 + 1
    weight *= spread(sizes.view(outputs // FP8_BLOCK, -1) / 4)
    bits, scales = quantise(weight, torch.float32)
    return x, bits, scales, bits.float() * spread(scales)


# --- meaning -------------------------------------------------------------------------------------


@pytest.mark.torch
def test_the_reference_is_the_format() -> None:
    """As transformers reads such a weight."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    _, weight, scales, exact = make(1, 256, 384, torch.float32, "cpu")
    assert torch.equal(reference.dequantise_weight(weight, scales, torch.float32), exact)
    theirs = _dequantize_fp8_weight(weight, scales, [128, 128], torch.float32)
    assert torch.equal(theirs, exact)
    rounded = reference.dequantise_weight(weight, scales, torch.bfloat16)
    assert torch.equal(rounded, exact.bfloat16())


@pytest.mark.torch
@pytest.mark.parametrize("rows", [1, 5])
def test_without_a_gpu_the_ops_are_the_reference(rows: int) -> None:
    from nvcli import kernels

    x, weight, scales, exact = make(rows, 256, 128, torch.float32, "cpu")
    bias, norm = torch.randn(256), torch.rand(128)
    wanted = reference.linear(x, exact, bias)
    torch.testing.assert_close(kernels.linear(x, weight, bias, scales=scales), wanted)
    out = torch.empty(rows, 256)
    assert kernels.linear(x, weight, None, out, scales=scales) is out
    torch.testing.assert_close(out, wanted - bias)
    args = (x, x, norm, 1e-6)
    for op in (kernels.norm_linear, kernels.norm_swiglu):
        got, total = op(*args, weight, bias, scales=scales)
        plain, _ = getattr(reference, op.__name__)(*args, exact, bias)
        torch.testing.assert_close(got, plain)
        assert torch.equal(total, x + x)


# --- who takes a product -------------------------------------------------------------------------


@pytest.mark.torch
def test_what_is_multiplied_as_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(
        rows: int, op: str = "linear", dtype: torch.dtype = torch.bfloat16, *, is_plain: bool = True
    ) -> Gemv | Fp8Tiles | None:
        return tuned.choose_fp8(op, rows, 4096, 4096, dtype, is_plain=is_plain)

    tuned.forget()
    assert isinstance(choose(1), Gemv)
    assert isinstance(choose(1, is_plain=False), Fp8Tiles)  # a bias
    assert choose(1, "swiglu") is None  # GEMV, then SwiGLU
    assert isinstance(choose(512), Fp8Tiles)
    assert choose(513) is None
    assert isinstance(choose(64, "swiglu"), Fp8Tiles)
    assert choose(65, "swiglu") is None
    assert isinstance(choose(16, dtype=torch.float32), Fp8Tiles)
    assert choose(17, dtype=torch.float32) is None
    assert choose(3, "deterministic") == choose(5000, "deterministic")
    assert choose(1, "deterministic", torch.float32) is None
    monkeypatch.setenv("NVCLI_SKINNY_ROWS", "8")
    tuned.forget()
    assert choose(9) is None
    assert isinstance(choose(8), Fp8Tiles)
    tuned.forget()


@pytest.mark.torch
@pytest.mark.parametrize("shape", [(1024, 2048), (4096, 4096), (24_576, 4096), (4096, 12_288)])
@pytest.mark.parametrize("op", tuned.OPS)
def test_tiles_fit_the_blocks_and_fill_the_gpu(op: str, shape: tuple[int, int]) -> None:
    outputs, columns = shape
    for rows in (2, 16, 17, 33, 64, 65, 128, 256, 512):
        cut = tuned.choose_fp8(op, rows, columns, outputs, torch.bfloat16, is_plain=True)
        if cut is None:
            assert op == "swiglu"
            continue
        assert isinstance(cut, Fp8Tiles)
        assert FP8_BLOCK % cut.outputs == 0
        assert cut.splits <= columns // FP8_BLOCK
        assert cut.splits == 1 or op == "addends"
        programs = -(-rows // cut.rows) * (outputs // cut.outputs) * cut.splits
        if op == "addends":
            assert programs >= 128


@needs_triton
@pytest.mark.torch
@pytest.mark.parametrize(
    ("rows", "has_bias", "options", "wanted"),
    [
        (1, False, {}, "gemv.linear"),
        (1, True, {}, "fp8_gemm.linear"),
        (1, False, {"deterministic": True}, "fp8_gemm.linear"),
        (40, False, {}, "fp8_gemm.linear"),
        (40, False, {"as_addends": True}, "fp8_gemm.linear_addends"),
        (40, True, {"as_addends": True}, "fp8_gemm.linear"),
        (600, True, {}, "fp8_gemm.dequantise"),
        (600, False, {"deterministic": True}, "fp8_gemm.linear"),
    ],
)
def test_which_kernel_runs(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    has_bias: bool,
    options: dict[str, bool],
    wanted: str,
) -> None:
    from nvcli import kernels
    from nvcli.kernels import fp8_gemm, gemv

    x, weight, scales, _ = make(rows, 128, 512, torch.bfloat16, "cpu")
    ran: list[str] = []
    monkeypatch.setattr(kernels, "_use_triton", lambda x: True)
    for module, name in (
        (gemv, "linear"),
        (fp8_gemm, "linear"),
        (fp8_gemm, "linear_addends"),
        (fp8_gemm, "dequantise"),
    ):

        def run(*args: object, path: str = f"{module.__name__}.{name}") -> Tensor:
            ran.append(path.removeprefix("nvcli.kernels."))
            return torch.zeros(128, 512, dtype=x.dtype)

        monkeypatch.setattr(module, name, run)
    bias = torch.zeros(128, dtype=x.dtype) if has_bias else None
    kernels.linear(x, weight, bias, scales=scales, **options)
    assert ran == [wanted]


# --- kernels -------------------------------------------------------------------------------------


def check_gemv(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    from nvcli.kernels import gemv

    x, weight, scales, exact = make(1, 2 * shape[0], shape[1], dtype, device)
    out = torch.full((1, len(weight)), float("nan"), dtype=dtype, device=device)
    sizes = (1, shape[1], len(weight))
    cut = tuned.choose_fp8("linear", *sizes, dtype, is_plain=True)
    assert isinstance(cut, Gemv)
    assert gemv.linear(x, weight, cut, out, scales) is out
    plain = reference.linear(x, weight, None, scales)
    assert_as_good_as_torch(out, plain, reference.linear(x.float(), exact, None))
    residual = randn(1, shape[1], dtype=dtype, device=device, seed=2)
    norm = 1 + 0.2 * randn(shape[1], dtype=dtype, device=device, seed=3)
    for op, name in (("linear", "norm_linear"), ("swiglu", "norm_swiglu")):
        whole = tuned.choose_with_norm(op, 1, shape[1], is_fp8=True)
        for before in (None, residual) if whole is not None else ():
            assert whole is not None
            plain_total = x if before is None else x + before
            got, total = getattr(gemv, name)(x, before, norm, EPS, weight, whole, scales)
            meaning = getattr(reference, name)
            plain, _ = meaning(x, before, norm, EPS, weight, None, scales)
            wanted, _ = meaning(plain_total.float(), None, norm.float(), EPS, exact)
            assert torch.equal(total, plain_total)
            assert_as_good_as_torch(got, plain, wanted)


def check_gemm(
    rows: int, outputs: int, columns: int, tiles: Fp8Tiles, dtype: torch.dtype, device: str
) -> None:
    from nvcli.kernels import fp8_gemm

    x, weight, scales, exact = make(rows, outputs, columns, dtype, device)
    dense = fp8_gemm.dequantise(weight, scales, dtype)
    assert torch.equal(dense, reference.dequantise_weight(weight, scales, dtype))
    plain, wanted = reference.linear(x, weight, None, scales), x.float() @ exact.t()
    if tiles.splits > 1:
        addends = fp8_gemm.linear_addends(x, weight, scales, tiles)
        assert addends.shape == (tiles.splits, rows, outputs)
        assert torch.equal(addends, fp8_gemm.linear_addends(x, weight, scales, tiles)), "two runs"
        share = FP8_BLOCK * -(-(columns // FP8_BLOCK) // tiles.splits)
        parts = [
            x.float()[:, i : i + share] @ exact[:, i : i + share].t()
            for i in range(0, columns, share)
        ]
        for got, part in zip(addends, parts, strict=False):
            torch.testing.assert_close(got, part, rtol=1e-4, atol=1e-4)
        assert not addends[len(parts) :].any(), "splits without columns"
        assert_as_good_as_torch(reference.added_up(addends, dtype), plain, wanted)
        return
    bias = randn(outputs, dtype=dtype, device=device, seed=4)
    got = fp8_gemm.linear(x, weight, scales, None, tiles)
    assert_as_good_as_torch(got, plain, wanted)
    assert torch.equal(got, fp8_gemm.linear(x, weight, scales, None, tiles)), "two runs differ"
    wide = torch.cat([x, x], 1)[:, :columns]  # rows that lie apart
    out = torch.full_like(plain, float("nan"))
    assert fp8_gemm.linear(wide, weight, scales, bias, tiles, out) is out
    biased = reference.linear(x, weight, bias, scales)
    assert_as_good_as_torch(out, biased, wanted + bias.float())
    assert fp8_gemm.linear(x[:0], weight, scales, None, tiles).shape == (0, outputs)
    if rows <= cuts.FP8_SWIGLU_ROWS and outputs % 256 == 0:
        got = fp8_gemm.swiglu(x, weight, scales, tiles)
        assert_as_good_as_torch(got, reference.silu_and_mul(plain), reference.silu_and_mul(wanted))


def check_deterministic(
    rows: int, outputs: int, columns: int, dtype: torch.dtype, device: str
) -> None:
    """No row's bits depend on its place, nor on the other rows."""
    from nvcli.kernels import fp8_gemm

    x, weight, scales, _ = make(rows, outputs, columns, dtype, device)
    sizes = (rows, columns, outputs)
    tiles = tuned.choose_fp8("deterministic", *sizes, torch.bfloat16, is_plain=True)
    assert isinstance(tiles, Fp8Tiles)

    def run(x: Tensor) -> Tensor:
        return fp8_gemm.linear(x, weight, scales, None, tiles)

    whole = run(x)
    cuts = sorted({0, 1, rows // 3, rows})
    assert torch.equal(torch.cat([run(x[a:b]) for a, b in pairwise(cuts)]), whole)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(device)
    assert torch.equal(run(x[order]), whole[order])


def check_all_in_float32() -> None:
    for shape in GEMV_SHAPES:
        check_gemv(shape, torch.float32, "cpu")
    for case in CASES:
        check_gemm(*case, torch.float32, "cpu")
    for rows in (3, 70):
        check_deterministic(rows, 128, 256, torch.float32, "cpu")


@needs_triton
@pytest.mark.interpret
@pytest.mark.timeout(600)
def test_kernel_sources_in_the_interpreter() -> None:
    run_in_interpreter("tests.kernels.test_fp8_weights", "check_all_in_float32")


def check_on_cuda(dtype: torch.dtype) -> None:
    for shape in [*GEMV_SHAPES, *CUDA_GEMV_SHAPES]:
        check_gemv(shape, dtype, "cuda")
    if dtype != torch.float32:
        for case in CASES:
            check_gemm(*case, dtype, "cuda")
    for rows, outputs, columns in CUDA_SHAPES:
        for op in ("linear", "addends"):
            tiles = tuned.choose_fp8(op, rows, columns, outputs, dtype, is_plain=False)
            if isinstance(tiles, Fp8Tiles):
                check_gemm(rows, outputs, columns, tiles, dtype, "cuda")
        if dtype != torch.float32:
            check_deterministic(rows, outputs, columns, dtype, "cuda")


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_cuda(dtype: torch.dtype) -> None:
    check_on_cuda(dtype)
