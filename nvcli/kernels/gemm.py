"""Triton kernel: a matrix product whose rows do not depend on how many there are.

For `--deterministic`. A library takes another kernel for another number of rows, with another order
of summation, and so does the rest of this package. Here a row is multiplied in a tile of ROWS
whatever stands in the others, over all columns in order, and the tile's shape follows from W alone.
So a row's result is the same bits alone, in a batch, and in a prompt cut anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 64  # what one warp group multiplies at a time
COLUMNS = 64  # of x and W, held at a time
FEW_OUTPUTS = 4096  # under it, narrow tiles, so that there are programs enough


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, K]
    w_ptr,  # [N, K]
    bias_ptr,  # [N]
    y_ptr,  # [T, N]
    num_rows,
    x_row_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, COLUMNS)
    is_row = (row < num_rows)[:, None]
    is_n = (n < N)[:, None]
    x_ptrs = x_ptr + row[:, None].to(tl.int64) * x_row_stride + k[None, :]
    w_ptrs = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    y = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, K, COLUMNS):
        is_k = (start + k < K)[None, :]
        x = tl.load(x_ptrs + start, mask=is_row & is_k, other=0.0)
        w = tl.load(w_ptrs + start, mask=is_n & is_k, other=0.0)
        y = tl.dot(x, tl.trans(w), y, input_precision=PRECISION)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    to = y_ptr + row[:, None].to(tl.int64) * N + n[None, :]
    tl.store(to, y.to(y_ptr.dtype.element_ty), mask=is_row & (n < N)[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x W^T + b. Reference: `reference.linear`.

    x:       [T, K], any row stride
    weight:  [N, K]
    bias:    [N] or None
    out:     [T, N], contiguous; made where it is not given

    2 T N K operations, rounded up to ROWS rows.
    """
    num_rows, size = x.shape
    num_outputs = weight.shape[0]
    assert weight.shape[1] == size, "shapes differ"
    assert weight.is_contiguous(), "the weight must be contiguous"
    assert x.stride(1) == 1, "columns must be contiguous"
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device) if out is None else out
    assert y.is_contiguous(), "the output must be contiguous"
    assert y.shape == (num_rows, num_outputs), "the output has another shape"
    if num_rows == 0:
        return y
    outputs = 32 if num_outputs < FEW_OUTPUTS else 128
    _gemm_kernel[(triton.cdiv(num_rows, ROWS), triton.cdiv(num_outputs, outputs))](
        x,
        weight,
        weight if bias is None else bias,
        y,
        num_rows,
        x.stride(0),
        N=num_outputs,
        K=size,
        ROWS=ROWS,
        OUTPUTS=outputs,
        COLUMNS=COLUMNS,
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **launch_options(x.device, num_warps=4, num_stages=4),
    )
    return y
