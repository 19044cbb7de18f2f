"""Triton kernels over rows: RMSNorm, the same after a residual addition, and SwiGLU.

Each reads its inputs once and writes its outputs once; sums are float32. Where a norm comes late
(see `layers.norm`), SwiGLU divides by the root mean square on its way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

SWIGLU_COLUMNS = 1024
LONG_ROW = 2048
MANY_ROWS = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, E], or [ADDENDS, T, E] float32
    residual_ptr,  # [T, E]
    weight_ptr,  # [E]
    out_ptr,  # [T, E]
    total_ptr,  # [T, E]
    x_row_stride,
    x_addend_stride,
    residual_row_stride,
    eps,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    ADDENDS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, E_POW2)
    mask = columns < E
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x_ptr += row * x_row_stride
    x = tl.load(x_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    for addend in tl.static_range(1, ADDENDS):
        x += tl.load(x_ptr + addend * x_addend_stride + columns, mask=mask, other=0.0)
    x = x.to(out_ptr.dtype.element_ty).to(tl.float32)  # as a product rounds its result
    if HAS_RESIDUAL:
        other = tl.load(residual_ptr + row * residual_row_stride + columns, mask=mask, other=0.0)
        # The sum is rounded before it is normed, as it is where the two are separate.
        total = (x + other.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * E + columns, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / E + eps)
    tl.store(out_ptr + row * E + columns, x * scale * weight, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight. Reference: `reference.rms_norm`.

    x:       [T, E], any row stride
    weight:  [E]

    Moves 2 T E elements; one program a row.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x[None], x, weight, eps, out, out, has_residual=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual). Reference: `reference.add_rms_norm`.

    x:         [T, E], any row stride, or addends [S, T, E] float32, added up in order
    residual:  [T, E], any row stride
    weight:    [E]

    Moves 4 T E elements, or 3 and 4 S T E bytes; one program a row.
    """
    assert residual.shape == x.shape[-2:], "x and residual differ in shape"
    out = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    total = torch.empty_like(out)
    addends = x[None] if x.dim() == 2 else x
    _launch_norm(addends, residual, weight, eps, out, total, has_residual=True)
    return out, total


def _launch_norm(
    addends: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    total: Tensor,
    *,
    has_residual: bool,
) -> None:
    num_addends, num_rows, size = addends.shape
    assert weight.shape == (size,), "one weight a column"
    assert addends.stride(2) == residual.stride(1) == weight.stride(0) == 1, "E must be contiguous"
    if num_rows == 0:
        return
    _rms_norm_kernel[(num_rows,)](
        addends,
        residual,
        weight,
        out,
        total,
        addends.stride(1),
        addends.stride(0),
        residual.stride(0),
        eps,
        E=size,
        E_POW2=triton.next_power_of_2(size),
        ADDENDS=num_addends,
        HAS_RESIDUAL=has_residual,
        **launch_options(residual.device, num_warps=4 if size <= 2048 else 8),
    )


@triton.jit  # type: ignore[untyped-decorator]
def load_row(row_ptr, E: tl.constexpr, E_POW2: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row [E], zeros up to [E_POW2]."""
    columns = tl.arange(0, E_POW2)
    return tl.load(row_ptr + columns, mask=columns < E, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def inverse_rms(row, eps, E: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 over the root mean square of what `load_row` gave."""
    x = row.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=0) / E + eps)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_and_mul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, 2F]
    rms_of_ptr,  # IS_LATE: [T, E]
    out_ptr,  # [T, F]
    x_row_stride,
    eps,
    F: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_LATE: tl.constexpr,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    # The programs of a row are neighbours, so that they run at once and the row of `rms_of` comes
    # from memory once. All is asked for before the sum, which waits for its part.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    PROGRAMS: tl.constexpr = (F + COLUMNS - 1) // COLUMNS  # of a row
    row = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    columns = tl.program_id(0) % PROGRAMS * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < F
    if IS_LATE:
        whole = load_row(rms_of_ptr + row * E, E, E_POW2)
    gate = tl.load(x_ptr + row * x_row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_row_stride + F + columns, mask=mask, other=0.0).to(tl.float32)
    if IS_LATE:
        scale = inverse_rms(whole, eps, E)
        gate *= scale
        up *= scale
    tl.store(out_ptr + row * F + columns, gate * tl.sigmoid(gate) * up, mask=mask)


def _late_cut(num_rows: int, hidden_size: int) -> tuple[int, int]:
    """Columns and warps of a program that reads a whole row of so many columns beside its own. A
    long row is to be read by few programs; where rows are short and few, programs are short.
    """
    if hidden_size > LONG_ROW:
        return 4096, 8
    return 1024 if num_rows <= MANY_ROWS else 2048, 4


def silu_and_mul(x: Tensor, rms_of: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """silu(gate) * up, with x = gate | up. Reference: `reference.silu_and_mul`.

    x:       [T, 2F], any row stride
    rms_of:  [T, E], contiguous: x is first divided by the root mean square of its rows
    returns  [T, F]

    Moves 3 T F elements, and T E; one program for 1,024 columns of a row, or more.
    """
    num_rows, size = x.shape[0], x.shape[1] // 2
    assert x.stride(1) == 1, "columns must be contiguous"
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    columns, num_warps, hidden_size = SWIGLU_COLUMNS, 4, 1
    if rms_of is not None:
        assert rms_of.shape[0] == num_rows, "a row for each of x"
        assert rms_of.is_contiguous(), "rows must be contiguous"
        hidden_size = rms_of.shape[1]
        columns, num_warps = _late_cut(num_rows, hidden_size)
    _silu_and_mul_kernel[(num_rows * triton.cdiv(size, columns),)](
        x,
        x if rms_of is None else rms_of,
        out,
        x.stride(0),
        eps,
        F=size,
        COLUMNS=columns,
        IS_LATE=rms_of is not None,
        E=hidden_size,
        E_POW2=triton.next_power_of_2(hidden_size),
        **launch_options(x.device, num_warps=num_warps),
    )
    return out
