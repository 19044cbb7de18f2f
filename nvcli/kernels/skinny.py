"""Triton kernels: matrix products of 9 to 64 rows, between `gemv` and what a library is made for.

Still the weights decide: a tile of W is multiplied with all rows of x at once on the tensor cores,
so W is read once. Under programmatic dependent launch a program asks for all its weights while its
predecessor still runs: the first tile into registers, the rest into the L2 cache. Where there are
few outputs, the columns are split over several programs; they leave float32 parts, and the one that
finishes last adds them up in order, as in `decode_attention`.

    y = x W^T               linear
    silu(gate) * up of it   swiglu

`NVCLI_SKINNY_ROWS` says up to how many rows they are taken; 0, the default until a GPU has shown
where they are ahead of cuBLAS, leaves them off.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels.gemv import MAX_ROWS as MAX_GEMV_ROWS
from nvcli.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROWS = 64  # that fit one tile
PIECE = 128  # columns multiplied at a time
MIN_PROGRAMS = 128  # aimed at by splitting the columns
MAX_SPLITS = 4
LINE = 64  # elements of two bytes in a cache line
_enabled_rows = int(os.environ.get("NVCLI_SKINNY_ROWS") or 0)
_counters: dict[torch.device, Tensor] = {}


def set_rows(limit: int) -> None:
    """Up to how many rows these kernels are taken; 0: never."""
    global _enabled_rows
    _enabled_rows = min(limit, MAX_ROWS)


@triton.jit
def _prefetch(pointers, mask):  # type: ignore[no-untyped-def]
    """Ask for these cache lines; nothing waits for them. Masked lanes repeat the first one."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [tl.where(mask, pointers.to(tl.int64), tl.min(pointers.to(tl.int64)))],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _finish(y_ptr, gate, up, row, n, mask, N: tl.constexpr, SWIGLU: tl.constexpr):  # type: ignore[no-untyped-def]
    y = gate
    if SWIGLU:
        y = gate * tl.sigmoid(gate) * up
    to = y_ptr + row[:, None].to(tl.int64) * N + n[None, :]
    tl.store(to, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _skinny_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, K]
    w_ptr,  # [N, K], or [2 N, K] with SwiGLU: gate, then up
    y_ptr,  # [T, N]
    parts_ptr,  # [SPLITS, T, N] float32
    counters_ptr,  # [programs] int32, zero before and after
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    PIECE: tl.constexpr,
    LINE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SWIGLU: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    # 1. The first piece of the weights into registers, all lines of the others into the L2 cache.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    SHARE: tl.constexpr = (K // PIECE + SPLITS - 1) // SPLITS * PIECE
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    first = tl.program_id(1) * SHARE
    end = tl.minimum(first + SHARE, K)
    k = first + tl.arange(0, PIECE)
    is_n = n < N
    at = n[:, None].to(tl.int64) * K + k[None, :]
    w = tl.load(w_ptr + at, mask=is_n[:, None], other=0.0)
    up_w = w
    if SWIGLU:
        up_w = tl.load(w_ptr + N * K + at, mask=is_n[:, None], other=0.0)
    if PDL:
        line = tl.arange(0, PIECE // LINE) * LINE
        for start in range(first + PIECE, end, PIECE):
            lines = w_ptr + n[:, None].to(tl.int64) * K + start + line[None, :]
            _prefetch(lines, is_n[:, None] & (line[None, :] < PIECE))
            if SWIGLU:
                _prefetch(lines + N * K, is_n[:, None] & (line[None, :] < PIECE))
        tl.extra.cuda.gdc_wait()

    # 2. All rows of x against them, piece by piece.
    is_row = row < num_rows
    x_rows = x_ptr + row[:, None].to(tl.int64) * K
    x = tl.load(x_rows + k[None, :], mask=is_row[:, None], other=0.0)
    y = tl.dot(x, tl.trans(w), input_precision=PRECISION)
    up = y
    if SWIGLU:
        up = tl.dot(x, tl.trans(up_w), input_precision=PRECISION)
    for start in range(first + PIECE, end, PIECE):
        k = start + tl.arange(0, PIECE)
        at = n[:, None].to(tl.int64) * K + k[None, :]
        x = tl.load(x_rows + k[None, :], mask=is_row[:, None], other=0.0)
        w = tl.load(w_ptr + at, mask=is_n[:, None], other=0.0)
        y = tl.dot(x, tl.trans(w), y, input_precision=PRECISION)
        if SWIGLU:
            up_w = tl.load(w_ptr + N * K + at, mask=is_n[:, None], other=0.0)
            up = tl.dot(x, tl.trans(up_w), up, input_precision=PRECISION)
    mask = is_row[:, None] & is_n[None, :]
    if SPLITS == 1:
        _finish(y_ptr, y, up, row, n, mask, N, SWIGLU)
    else:
        # 3. Leave the part; the last one adds all of them, in order, and clears the count.
        tl.static_assert(not SWIGLU, "SwiGLU is not split")
        part = parts_ptr + row[:, None].to(tl.int64) * N + n[None, :]
        size = num_rows.to(tl.int64) * N
        tl.store(part + tl.program_id(1) * size, y, mask=mask)
        tl.debug_barrier()
        counter = counters_ptr + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(counter, 0)
            total = tl.zeros((ROWS, OUTPUTS), tl.float32)
            for split in tl.static_range(SPLITS):
                total += tl.load(part + split * size, mask=mask, other=0.0, cache_modifier=".cg")
            _finish(y_ptr, total, total, row, n, mask, N, False)


def fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these kernels take the product: 16 bits, no bias, switched on for so many rows."""
    return (
        bias is None
        and MAX_GEMV_ROWS < x.shape[0] <= _enabled_rows
        and x.shape[1] % PIECE == 0
        and x.is_contiguous()
        and weight.is_contiguous()
        and x.dtype == weight.dtype
    )


def linear(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x W^T. Reference: `reference.linear`.

    x:       [T, K], T at most MAX_ROWS, K a multiple of PIECE
    weight:  [N, K]
    out:     [T, N], contiguous; made where it is not given

    Reads N K elements of weights once.
    """
    return _launch(x, weight, weight.shape[0], out, is_swiglu=False)


def swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up, both from x W^T. Reference: `reference.silu_and_mul` of `reference.linear`.

    x:        [T, K], as in `linear`
    weight:   [2F, K], gate above up
    returns   [T, F]
    """
    return _launch(x, weight, weight.shape[0] // 2, None, is_swiglu=True)


def _launch(
    x: Tensor, weight: Tensor, num_outputs: int, out: Tensor | None, *, is_swiglu: bool
) -> Tensor:
    num_rows, size = x.shape
    assert num_rows <= MAX_ROWS, "few rows"
    assert size % PIECE == 0 == weight.shape[1] - size, "columns in whole pieces"
    device = x.device
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=device) if out is None else out
    assert y.is_contiguous(), "the output must be contiguous"
    assert y.shape == (num_rows, num_outputs), "the output has another shape"
    outputs = 16 if num_outputs <= 2048 or is_swiglu else 32
    programs = triton.cdiv(num_outputs, outputs)
    splits = 1
    while not is_swiglu and splits < MAX_SPLITS and programs * splits < MIN_PROGRAMS:
        splits *= 2
    if size // PIECE < 2 * splits:
        splits = 1
    parts = y
    if splits > 1:
        parts = torch.empty((splits, num_rows, num_outputs), dtype=torch.float32, device=device)
    _skinny_kernel[(programs, splits)](
        x,
        weight,
        y,
        parts,
        _counters_on(device),
        num_rows,
        N=num_outputs,
        K=size,
        PIECE=PIECE,
        LINE=LINE,
        ROWS=max(16, triton.next_power_of_2(num_rows)),
        OUTPUTS=outputs,
        SPLITS=splits,
        SWIGLU=is_swiglu,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **launch_options(device, num_warps=4, num_stages=4),
    )
    return y


def _counters_on(device: torch.device) -> Tensor:
    if device not in _counters:
        _counters[device] = torch.zeros(4096, dtype=torch.int32, device=device)
    return _counters[device]
