"""Triton kernel: a matrix product in tiles, for rows that are too many for `gemv` and too few for a
library, and for rows that must not depend on how many they are (`--deterministic`).

Few rows. The weights decide the time, and a library waits for its predecessor to end before it asks
for the first of them. Here a program has `held` pieces of its tile of W in shared memory before it
waits for the activations, and reads the rest with them, in a pipelined loop. The product is
y^T = W x^T: a warp group multiplies 64 rows at a time, which the weights have and x has not. Where
there are few outputs the columns are cut into `splits`, so that all SMs read weights; every split
leaves its float32 addend, and the next kernel adds them up as it reads them, in order, so that
nothing waits for anything and the sum is the same bits each time.

    y = x W^T + b             linear
    addends of x W^T          linear_addends
    silu(gate) * up of x W^T  swiglu

Deterministic. A library takes another kernel for another number of rows, with another order of
summation. Here a row is multiplied in a tile of 64 whatever stands in the others, over all columns
in order, and the tile's shape follows from W alone. So a row's result is the same bits alone, in a
batch, and in a prompt cut anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels import cuts
from nvcli.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.kernels.cuts import Tiles


@triton.jit  # type: ignore[untyped-decorator]
def _load(pointers, is_row, k, K: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Those rows, at columns k; EVEN: all of them are columns."""
    mask = is_row[:, None]
    if not EVEN:
        mask = mask & (k < K)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _asked_for(x):  # type: ignore[no-untyped-def]
    """x, not before all loads so far are under way. Left to itself the assembler spares registers:
    it asks for some of a tile, waits until they are there, and asks for the rest.
    """
    if x.dtype != tl.float32:
        tl.debug_barrier()
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
        )
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _multiplied(x, w, y, FLIPPED: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """y + x W^T, or transposed y + W x^T."""
    if FLIPPED:
        y = tl.dot(w, tl.trans(x), y, input_precision=PRECISION)
    else:
        y = tl.dot(x, tl.trans(w), y, input_precision=PRECISION)
    return y


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, K]
    w_ptr,  # [N, K], or [2 N, K] with SwiGLU: gate, then up
    bias_ptr,  # [N]
    y_ptr,  # [T, N], or [SPLITS, T, N] float32
    num_rows,
    x_row_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HELD: tl.constexpr,
    SPLITS: tl.constexpr,
    SWIGLU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    # 1. The tile of W: OUTPUTS rows, with SwiGLU half of gate and the same of up; the columns of
    #    this split. Its first pieces are here before anything is waited for.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    SHARE: tl.constexpr = ((K + COLUMNS - 1) // COLUMNS + SPLITS - 1) // SPLITS * COLUMNS
    EVEN: tl.constexpr = SHARE * SPLITS == K
    WIDTH: tl.constexpr = OUTPUTS // 2 if SWIGLU else OUTPUTS
    FLIPPED: tl.constexpr = OUTPUTS >= 64
    output = tl.program_id(1) * WIDTH
    o = tl.arange(0, OUTPUTS)
    is_weight = output + o % WIDTH < N
    if N % WIDTH == 0:
        is_weight = tl.full((OUTPUTS,), True, tl.int1)
    k = tl.program_id(2) * SHARE + tl.arange(0, COLUMNS)
    w_row = output + o % WIDTH + o // WIDTH * N
    w_ptrs = w_ptr + w_row[:, None].to(tl.int64) * K + k[None, :]
    held = ()
    for piece in tl.static_range(HELD):
        at = piece * COLUMNS
        held += (_load(w_ptrs + at, is_weight, k + at, K, EVEN),)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()

    # 2. The rows of x against what is held, then against the rest of the columns.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    x_ptrs = x_ptr + row[:, None].to(tl.int64) * x_row_stride + k[None, :]
    if FLIPPED:
        y = tl.zeros((OUTPUTS, ROWS), tl.float32)
    else:
        y = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for piece in tl.static_range(HELD):
        at = piece * COLUMNS
        x = _asked_for(_load(x_ptrs + at, is_row, k + at, K, EVEN))
        y = _multiplied(x, held[piece], y, FLIPPED, PRECISION)
    for at in range(HELD * COLUMNS, SHARE, COLUMNS):
        x = _load(x_ptrs + at, is_row, k + at, K, EVEN)
        w = _load(w_ptrs + at, is_weight, k + at, K, EVEN)
        y = _multiplied(x, w, y, FLIPPED, PRECISION)

    # 3. Out, as [ROWS, WIDTH].
    if FLIPPED:
        y = tl.trans(y)
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(y, (ROWS, 2, WIDTH)), (0, 2, 1)))
        y = gate * tl.sigmoid(gate) * up
    n = output + tl.arange(0, WIDTH)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    to = y_ptr + (tl.program_id(2).to(tl.int64) * num_rows + row[:, None]) * N + n[None, :]
    tl.store(to, y.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & (n < N)[None, :])


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """x W^T + b. Reference: `reference.linear`.

    x:       [T, K], any row stride
    weight:  [N, K]
    bias:    [N] or None
    out:     [T, N], contiguous; made where it is not given
    tiles:   one split; None: those of the deterministic mode

    2 T N K operations, rounded up to whole tiles of rows; reads the weights once a tile of rows.
    """
    num_rows, num_outputs = x.shape[0], weight.shape[0]
    tiles = tiles or cuts.deterministic_tiles(num_outputs)
    assert tiles.splits == 1, "linear_addends takes splits"
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device) if out is None else out
    assert y.is_contiguous(), "the output must be contiguous"
    assert y.shape == (num_rows, num_outputs), "the output has another shape"
    _launch(x, weight, bias, y, num_outputs, tiles, is_swiglu=False)
    return y


def linear_addends(x: Tensor, weight: Tensor, tiles: Tiles) -> Tensor:
    """The addends of x W^T, one a split. Reference: `reference.linear` of each split's columns.

    x:       [T, K], any row stride
    weight:  [N, K]
    returns  [splits, T, N] float32
    """
    shape = (tiles.splits, x.shape[0], weight.shape[0])
    y = torch.empty(shape, dtype=torch.float32, device=x.device)
    _launch(x, weight, None, y, weight.shape[0], tiles, is_swiglu=False)
    return y


def swiglu(x: Tensor, weight: Tensor, tiles: Tiles) -> Tensor:
    """silu(gate) * up, both from x W^T. Reference: `reference.silu_and_mul` of `reference.linear`.

    x:        [T, K], any row stride
    weight:   [2F, K], gate above up
    tiles:    one split; half the outputs of a tile are gate's
    returns   [T, F]
    """
    assert tiles.splits == 1, "what is not added up has no SwiGLU"
    num_outputs = weight.shape[0] // 2
    y = torch.empty((x.shape[0], num_outputs), dtype=x.dtype, device=x.device)
    _launch(x, weight, None, y, num_outputs, tiles, is_swiglu=True)
    return y


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    num_outputs: int,
    tiles: Tiles,
    *,
    is_swiglu: bool,
) -> None:
    num_rows, size = x.shape
    assert weight.shape[1] == size, "shapes differ"
    assert weight.is_contiguous(), "the weight must be contiguous"
    assert x.stride(1) == 1, "columns must be contiguous"
    if num_rows == 0:
        return
    pieces = triton.cdiv(size, tiles.columns)
    assert tiles.held <= triton.cdiv(pieces, tiles.splits), "more is held than there is"
    width = tiles.outputs // 2 if is_swiglu else tiles.outputs
    grid = (triton.cdiv(num_rows, tiles.rows), triton.cdiv(num_outputs, width), tiles.splits)
    _gemm_kernel[grid](
        x,
        weight,
        weight if bias is None else bias,
        y,
        num_rows,
        x.stride(0),
        N=num_outputs,
        K=size,
        ROWS=tiles.rows,
        OUTPUTS=tiles.outputs,
        COLUMNS=tiles.columns,
        HELD=tiles.held,
        SPLITS=tiles.splits,
        SWIGLU=is_swiglu,
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **launch_options(x.device, num_warps=tiles.warps, num_stages=tiles.stages),
    )
