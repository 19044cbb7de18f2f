"""Triton kernels: one token through its K experts, where reading their weights is all the time.

As in `gemv` a program has a few rows of W at a time, so that there are programs for every SM: with
so few tokens there is nothing to group, and nothing that a tensor core would be needed for.

    inner [K, F]:  silu(gate) * up, a program a slot and some rows
    out [1, E]:    the K experts' rows of one output, weighted and added up by one program, in order

Which weights to read depends on the routing, so nothing is read before the wait. A barrier stands
between the weights and the input: without it the compiler asks for a few weights at a time, as they
are needed. Sums are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

# Weights that a program reads, more where those of one output are more. With fewer it would read as
# many of its input, all of which it needs.
AT_ONCE = 16_384
MAX_AT_ONCE = 32_768


@triton.jit  # type: ignore[untyped-decorator]
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [E]
    w_ptr,  # [X, 2 F, E], gate above up
    expert_ids_ptr,  # [K] int32
    inner_ptr,  # [K, F]
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    F: tl.constexpr,
    X: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(1)
    expert = tl.load(expert_ids_ptr + slot).to(tl.int64)
    if expert >= X:
        return
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, E_POW2)
    at = w_ptr + (expert * (2 * F) + n)[:, None] * E + k[None, :]
    mask = (n < F)[:, None] & (k < E)[None, :]
    gate = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    up = tl.load(at + F * E, mask=mask, other=0.0, eviction_policy="evict_first")
    tl.debug_barrier()
    x = tl.load(x_ptr + k, mask=k < E, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(gate.to(tl.float32) * x, axis=1)
    y = y * tl.sigmoid(y) * tl.sum(up.to(tl.float32) * x, axis=1)
    tl.store(inner_ptr + slot * F + n, y.to(inner_ptr.dtype.element_ty), mask=n < F)


@triton.jit  # type: ignore[untyped-decorator]
def _down_kernel(  # type: ignore[no-untyped-def]
    inner_ptr,  # [K, F]
    w_ptr,  # [X, E, F]
    expert_ids_ptr,  # [K] int32
    weights_ptr,  # [K] float32
    out_ptr,  # [E]
    E: tl.constexpr,
    F: tl.constexpr,
    F_POW2: tl.constexpr,
    K: tl.constexpr,
    K_POW2: tl.constexpr,
    X: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.arange(0, K_POW2)
    expert = tl.load(expert_ids_ptr + slot, mask=slot < K, other=X).to(tl.int64)
    is_slot = expert < X
    weight = tl.load(weights_ptr + slot, mask=is_slot, other=0.0)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    f = tl.arange(0, F_POW2)
    at = (expert[:, None] * E + n[None, :])[:, :, None] * F + f[None, None, :]
    mask = (is_slot[:, None] & (n < E)[None, :])[:, :, None] & (f < F)[None, None, :]
    w = tl.load(w_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
    tl.debug_barrier()
    inner_at = inner_ptr + slot[:, None, None] * F + f[None, None, :]
    inner_mask = is_slot[:, None, None] & (f < F)[None, None, :]
    inner = tl.load(inner_at, mask=inner_mask, other=0.0).to(tl.float32)
    y = tl.sum(w.to(tl.float32) * inner, axis=2)  # [K, OUTPUTS]
    y = tl.sum(y * weight[:, None], axis=0)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < E)


def _at_once(rows: int, columns: int) -> int:
    """Weights of one output."""
    return int(triton.next_power_of_2(rows) * triton.next_power_of_2(columns))


def fits(x: Tensor, expert_ids: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Whether these kernels take it: one token, and rows of W that can be held whole."""
    return (
        x.shape[0] == 1
        and x.dtype == gate_up.dtype == down.dtype
        and _at_once(2, x.shape[1]) <= MAX_AT_ONCE
        and _at_once(expert_ids.shape[1], down.shape[2]) <= MAX_AT_ONCE
    )


def experts(
    x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """The weighted sum of a token's experts. Reference: `reference.experts`.

    x:           [1, E]
    expert_ids:  [1, K] int32; X: none
    weights:     [1, K] float32
    gate_up:     [X, 2F, E], gate above up
    down:        [X, E, F]
    returns      [1, E]

    Reads 3 K E F elements of weights once.
    """
    size, top_k = x.shape[1], expert_ids.shape[1]
    num_experts, inner_size = down.shape[0], down.shape[2]
    assert x.shape[0] == 1, "one token"
    assert gate_up.shape == (num_experts, 2 * inner_size, size), "gate and up have another shape"
    assert down.shape[1] == size, "down has another shape"
    for tensor in (x, expert_ids, weights, gate_up, down):
        assert tensor.is_contiguous(), "all must be contiguous"
    inner = torch.empty((top_k, inner_size), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    each = _at_once(2, size)
    outputs = max(1, AT_ONCE // each)
    _gate_up_kernel[(triton.cdiv(inner_size, outputs), top_k)](
        x,
        gate_up,
        expert_ids,
        inner,
        E=size,
        E_POW2=triton.next_power_of_2(size),
        F=inner_size,
        X=num_experts,
        OUTPUTS=outputs,
        **launch_options(x.device, num_warps=_num_warps(outputs * each)),
    )
    each = _at_once(top_k, inner_size)
    outputs = max(1, AT_ONCE // each)
    _down_kernel[(triton.cdiv(size, outputs),)](
        inner,
        down,
        expert_ids,
        weights,
        out,
        E=size,
        F=inner_size,
        F_POW2=triton.next_power_of_2(inner_size),
        K=top_k,
        K_POW2=triton.next_power_of_2(top_k),
        X=num_experts,
        OUTPUTS=outputs,
        **launch_options(x.device, num_warps=_num_warps(outputs * each)),
    )
    return out


def _num_warps(num_weights: int) -> int:
    """At most 64 weights a thread, so that they stay in registers."""
    return 4 if num_weights <= 8192 else 8 if num_weights <= 16_384 else 16
