"""The ops that layers are made of: signature, shape contract, and which version runs.

Every op has a plain version in `reference.py` that says what it means. Faster versions replace it
where they fit: Triton kernels for CUDA tensors, `cpu.py` for the CPU. `NVCLI_KERNELS=reference` in
the environment, or `set_kernels("reference")`, turns all of them off, to compare or to look for a
fault.

Attention is larger than an op and has its backends in `attention.py`.

Dimension key: T tokens, E hidden, F intermediate, H heads, Hk KV heads, D head_dim, N blocks,
P block size.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import torch

from nvcli.errors import UsageError
from nvcli.kernels import cpu, reference

if TYPE_CHECKING:
    from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
_use_fast = True


def set_kernels(choice: str) -> None:
    """`auto`: the fastest version that fits; `reference`: plain PyTorch everywhere."""
    global _use_fast
    if choice not in ("auto", "reference"):
        raise UsageError(
            f"NVCLI_KERNELS must be auto or reference, got {choice!r}", param="NVCLI_KERNELS"
        )
    _use_fast = choice == "auto"


set_kernels(os.environ.get("NVCLI_KERNELS") or "auto")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b.

    x:       [T, in]
    weight:  [out, in]
    bias:    [out] or None
    returns  [T, out], contiguous
    """
    if _use_fast and x.device.type == "cpu":
        return cpu.linear(x, weight, bias)
    return reference.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension.

    x:       [..., E]
    weight:  [E], or [H, E] for x of [T, H, E]
    """
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual).

    x, residual:  [T, E]
    weight:       [E]
    """
    return reference.add_rms_norm(x, residual, weight, eps)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up, with x = gate | up.

    x:       [T, 2F]
    returns  [T, F]
    """
    return reference.silu_and_mul(x)


def rope_norm(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Per-head RMSNorm, where weight is given, then rotary embedding (NeoX halves).

    x:         [T, H, D]    any row stride; query and key heads together
    weight:    [H, D] or None
    cos, sin:  [T, D] float32; sin is negative in its first half
    returns    [T, H, D], contiguous
    """
    if _use_fast and x.device.type == "cpu" and x.dtype == torch.float32:
        return cpu.rope_norm(x, weight, cos, sin, eps)
    return reference.rope_norm(x, weight, cos, sin, eps)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Scatter this step's keys and values into the paged cache.

    k, v:              [T, Hk, D]     any row stride, unit stride in D
    k_cache, v_cache:  [N, P, Hk, D]  written in place; any strides, unit in D
    slot_mapping:      [T] int64      block * P + offset; -1 skips the row
    """
    if _use_fast and k.device.type == "cuda" and HAS_TRITON:
        from nvcli.kernels import kv_store

        kv_store.store_kv(k, v, k_cache, v_cache, slot_mapping)
    elif _use_fast and k.device.type == "cpu" and k_cache.is_contiguous() and len(slot_mapping):
        cpu.store_kv(k, v, k_cache, v_cache, slot_mapping)
    else:
        reference.store_kv(k, v, k_cache, v_cache, slot_mapping)
