"""The ops that layers are made of: signature, shape contract, and which version runs.

Every op has a plain version in `reference.py` that says what it means. Faster versions replace it
where they fit: Triton kernels for CUDA tensors, `cpu.py` for the CPU. `NVCLI_KERNELS=reference` in
the environment, or `set_kernels("reference")`, turns all of them off, to compare or to look for a
fault.

Attention is larger than an op and has its backends in `attention.py`.

Dimension key: T tokens, E hidden, F intermediate, H heads, Hk KV heads, D head_dim, N blocks,
P block size, X experts, K of them a token.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import torch

from nvcli.errors import UsageError
from nvcli.kernels import cpu, library, reference

if TYPE_CHECKING:
    from torch import Tensor

CHOICES = ("auto", "reference")
HAS_TRITON = importlib.util.find_spec("triton") is not None
_use_fast = True


def set_kernels(choice: str) -> None:
    """`auto`: the fastest version that fits; `reference`: plain PyTorch everywhere."""
    global _use_fast
    if choice not in CHOICES:
        raise UsageError(
            f"NVCLI_KERNELS must be one of {', '.join(CHOICES)}, got {choice!r}",
            param="NVCLI_KERNELS",
        )
    _use_fast = choice != "reference"


set_kernels(os.environ.get("NVCLI_KERNELS") or "auto")


def uses_triton() -> bool:
    """Whether our Triton kernels run for CUDA tensors."""
    return _use_fast and HAS_TRITON


def _use_triton(x: Tensor) -> bool:
    return x.device.type == "cuda" and uses_triton()


def look_up(
    ids: Tensor, positions: Tensor, weight: Tensor, cos_sin: Tensor, first_id: int, num_ids: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A step's rows of the embedding and of the rotary table.

    ids, positions:  [T] int64
    weight:          [V, E]; row i is of id first_id + i, for num_ids of them
    cos_sin:         [L, 2, D] float32
    returns          x [T, E], zeros for ids that have no row; cos and sin [T, D]
    """
    if _use_triton(weight):
        from nvcli.kernels import input_rows

        return input_rows.look_up(ids, positions, weight, cos_sin, first_id, num_ids)
    return reference.look_up(ids, positions, weight, cos_sin, first_id, num_ids)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    deterministic: bool = False,
    as_addends: bool = False,
) -> Tensor:
    """x W^T + b.

    x:       [T, in]
    weight:  [out, in], of x's type, or float8_e4m3fn
    bias:    [out] or None
    out:     [T, out] to write to, where there is no bias
    scales:  [out / 128, in / 128] float32, with an fp8 weight alone: what a block of it is times
    returns  [T, out], contiguous

    deterministic: on CUDA, no row's result depends on the others, nor on how many they are
    as_addends: the result may be its addends instead, [S, T, out] float32
    """
    if scales is not None and _use_triton(x):
        from nvcli.kernels import fp8_gemm

        op = "deterministic" if deterministic else "addends" if as_addends else "linear"
        done = fp8_gemm.product(op, x, weight, scales, bias, out)
        if done is not None:
            return done
        weight = fp8_gemm.dequantise(weight, scales, x.dtype)
    elif scales is not None:
        weight = reference.dequantise_weight(weight, scales, x.dtype)
    if deterministic and _use_triton(x):
        from nvcli.kernels import gemm

        return gemm.linear(x, weight, bias, out)
    if _use_triton(x) and _is_plain(x, weight, bias):
        from nvcli.kernels import cuts, gemm, gemv, skinny, tuned

        op = "addends" if as_addends and out is None else "linear"
        cut = tuned.choose(op, x.shape[0], x.shape[1], weight.shape[0], x.device, x.dtype)
        if isinstance(cut, cuts.Gemv):
            return gemv.linear(x, weight, cut, out)
        if isinstance(cut, cuts.Skinny):
            return skinny.linear(x, weight, cut, out)
        if isinstance(cut, cuts.Tiles) and cut.splits > 1:
            return gemm.linear_addends(x, weight, cut)
        if isinstance(cut, cuts.Tiles):
            return gemm.linear(x, weight, None, out, cut)
    assert out is None or bias is None, "a bias cannot be written to out"
    if out is not None or (bias is None and _use_triton(x)):
        return library.linear(x, weight, out)
    if _use_fast and x.device.type == "cpu":
        return cpu.linear(x, weight, bias)
    return reference.linear(x, weight, bias)


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> bool:
    """Whether the kernels for few rows may take the product."""
    is_dense = x.is_contiguous() and weight.is_contiguous()
    is_type = x.dtype == weight.dtype or scales is not None
    return bias is None and x.dim() == 2 and is_type and is_dense


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension.

    x:       [..., E]
    weight:  [E], or [H, E] for x of [T, H, E]
    """
    if _use_triton(x) and x.dim() == 2:
        from nvcli.kernels import norm

        return norm.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual).

    x:         [T, E], or addends of it, [S, T, E] float32
    residual:  [T, E]
    weight:    [E]
    """
    if _use_triton(x):
        from nvcli.kernels import norm

        return norm.add_rms_norm(x, residual, weight, eps)
    return reference.add_rms_norm(x, residual, weight, eps)


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    *,
    scales: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """(linear(rms_norm(x + residual)), x + residual).

    x:            [T, E], or addends of it, [S, T, E] float32
    residual:     [T, E]; without it the second result is x
    norm_weight:  [E]
    weight:       [out, E], and its `scales` as in `linear`
    bias:         [out] or None
    """
    if _use_triton(x) and _is_plain(x, weight, bias, scales) and not deterministic:
        from nvcli.kernels import gemv, tuned

        is_fp8 = scales is not None
        cut = tuned.choose_with_norm("linear", x.shape[0], x.shape[1], is_fp8=is_fp8)
        if cut is not None:
            return gemv.norm_linear(x, residual, norm_weight, eps, weight, cut, scales)
    normed, total = _norm_of_sum(x, residual, norm_weight, eps)
    return linear(normed, weight, bias, scales=scales, deterministic=deterministic), total


def norm_swiglu(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    *,
    scales: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """(silu_and_mul(linear(rms_norm(x + residual))), x + residual).

    weight: [2F, E], gate above up; the rest as in `norm_linear`; the first result is [T, F]
    """
    if _use_triton(x) and _is_plain(x, weight, bias, scales) and not deterministic:
        from nvcli.kernels import gemv, tuned

        is_fp8 = scales is not None
        whole = tuned.choose_with_norm("swiglu", x.shape[0], x.shape[1], is_fp8=is_fp8)
        if whole is not None:
            return gemv.norm_swiglu(x, residual, norm_weight, eps, weight, whole, scales)
    normed, total = _norm_of_sum(x, residual, norm_weight, eps)
    inner = linear_swiglu(normed, weight, bias, scales=scales, deterministic=deterministic)
    return inner, total


def linear_swiglu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    scales: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """silu_and_mul(linear(x)).

    x:       [T, E]
    weight:  [2F, E], gate above up, and its `scales` as in `linear`
    returns  [T, F]
    """
    if scales is not None and _use_triton(x) and not deterministic:
        from nvcli.kernels import fp8_gemm

        done = fp8_gemm.product("swiglu", x, weight, scales, bias, None)
        if done is not None:
            return done
    if _use_triton(x) and _is_plain(x, weight, bias) and not deterministic:
        from nvcli.kernels import cuts, gemm, gemv, skinny, tuned

        shape = (x.shape[0], x.shape[1], weight.shape[0] // 2)
        cut = tuned.choose("swiglu", *shape, x.device, x.dtype)
        if isinstance(cut, cuts.Gemv):
            return gemv.swiglu(x, weight, cut)
        if isinstance(cut, cuts.Skinny):
            return skinny.swiglu(x, weight, cut)
        if isinstance(cut, cuts.Tiles):
            return gemm.swiglu(x, weight, cut)
    gate_up = linear(x, weight, bias, scales=scales, deterministic=deterministic)
    return silu_and_mul(gate_up)


def _norm_of_sum(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if residual is None:
        return rms_norm(x, weight, eps), x
    return add_rms_norm(x, residual, weight, eps)


def silu_and_mul(x: Tensor, rms_of: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """silu(gate) * up, with x = gate | up.

    x:       [T, 2F]
    rms_of:  [T, E]: x is first divided by sqrt(eps + the mean square of its rows), which a late
             norm has left to do
    returns  [T, F]
    """
    if _use_triton(x):
        from nvcli.kernels import norm

        return norm.silu_and_mul(x, rms_of, eps)
    return reference.silu_and_mul(x, rms_of, eps)


def add_linear(x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
    """total + x W^T, in place of the total.

    x:       [T, in]
    weight:  [out, in]
    total:   [T, out], contiguous
    returns  total
    """
    return library.add_linear(x, weight, total)


def route(
    logits: Tensor, top_k: int, *, renormalise: bool, is_token: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The K likeliest experts of each token by the softmax over all, and how they are weighted.

    logits:    [T, X]; of equal ones the lower id counts as likelier
    is_token:  [T] bool; where it is false the token goes to no expert: ids are X and weights 0
    returns    [T, K] int32, the likeliest first, and [T, K] float32: the softmax, which is over
               these K alone with `renormalise`
    """
    if _use_triton(logits):
        from nvcli.kernels import moe_route

        return moe_route.route(logits, top_k, renormalise=renormalise, is_token=is_token)
    return reference.route(logits, top_k, renormalise=renormalise, is_token=is_token)


def experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    deterministic: bool = False,
    as_addends: bool = False,
) -> Tensor:
    """The weighted sum of each token's experts: W_down (silu(W_gate x) * W_up x).

    x:           [T, E]
    expert_ids:  [T, K] int32; X: none
    weights:     [T, K] float32
    gate_up:     [X, 2F, E], gate above up
    down:        [X, E, F]
    returns      [T, E]

    deterministic: on CUDA, no row's result depends on the others, nor on how many they are
    as_addends: the result may be its addends instead, [K, T, E] float32
    """
    if _use_triton(x):
        from nvcli.kernels import moe, moe_row

        if not deterministic and moe_row.fits(x, expert_ids, gate_up, down):
            return moe_row.experts(x, expert_ids, weights, gate_up, down)
        options = {"deterministic": deterministic, "as_addends": as_addends}
        return moe.experts(x, expert_ids, weights, gate_up, down, **options)
    if _use_fast and x.device.type == "cpu":
        return cpu.experts(x, expert_ids, weights, gate_up, down)
    return reference.experts(x, expert_ids, weights, gate_up, down)


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


def rope_norm_store(
    qkv: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
    rms_of: Tensor | None = None,
) -> Tensor:
    """`rope_norm` of queries and keys, and `store_kv` of the rotated keys and the values.

    qkv:               [T, Hq + 2 Hk, D]
    weight:            [Hq + Hk, D] or None
    cos, sin:          [T, D] float32; cos has two equal halves, sin's first is its second's
                                       negative; a kernel may read only one half
    k_cache, v_cache:  [N, P, Hk, D]  written in place
    slot_mapping:      [T] int64      block * P + offset; -1 skips the token
    kv_scales:         [2, Hk]        as in `store_kv`
    rms_of:            [T, E]         as in `silu_and_mul`, of qkv
    returns q          [T, Hq, D]
    """
    head_dim = qkv.shape[2]
    if _use_triton(qkv) and head_dim & (head_dim - 1) == 0 and _has_dtype(k_cache):
        from nvcli.kernels import rotary_store

        return rotary_store.rope_norm_store(
            qkv, weight, cos, sin, eps, k_cache, v_cache, slot_mapping, kv_scales, rms_of
        )
    if rms_of is not None:
        qkv = reference.rms_divided(qkv, rms_of, eps)
    num_qk = qkv.shape[1] - k_cache.shape[2]
    num_heads = num_qk - k_cache.shape[2]
    qk = rope_norm(qkv[:, :num_qk], weight, cos, sin, eps)
    k, v = qk[:, num_heads:], qkv[:, num_qk:]
    store_kv(k, v, k_cache, v_cache, slot_mapping, kv_scales)
    return qk[:, :num_heads]


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """Scatter this step's keys and values into the paged cache.

    k, v:              [T, Hk, D]     any row stride, unit stride in D
    k_cache, v_cache:  [N, P, Hk, D]  written in place; any strides, unit in D
    slot_mapping:      [T] int64      block * P + offset; -1 skips the row
    kv_scales:         [2, Hk] float32, powers of two, with an fp8 cache alone: what is stored is
                       k / kv_scales[0] and v / kv_scales[1]
    """
    assert (kv_scales is not None) == (k_cache.dtype == torch.float8_e4m3fn), "fp8 has scales"
    if _use_triton(k) and _has_dtype(k_cache):
        from nvcli.kernels import kv_store

        kv_store.store_kv(k, v, k_cache, v_cache, slot_mapping, kv_scales)
    elif _use_fast and k.device.type == "cpu" and k_cache.is_contiguous() and len(slot_mapping):
        cpu.store_kv(k, v, k_cache, v_cache, slot_mapping, kv_scales)
    else:
        reference.store_kv(k, v, k_cache, v_cache, slot_mapping, kv_scales)


def gather_kv(k_cache: Tensor, v_cache: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of some blocks, one behind the other.

    k_cache, v_cache:  [N, P, Hk, D]   any strides, unit in D
    block_ids:         [J] int32
    returns            [J P, Hk, D] twice, unit stride in D
    """
    if _use_triton(k_cache):
        from nvcli.kernels import kv_store

        return kv_store.gather_kv(k_cache, v_cache, block_ids)
    return reference.gather_kv(k_cache, v_cache, block_ids)


def _has_dtype(cache: Tensor) -> bool:
    """Whether kernels for this device know the cache's type."""
    is_fp8 = cache.dtype == torch.float8_e4m3fn
    return not is_fp8 or cache.device.type != "cuda" or _has_fp8(cache.device)


def _has_fp8(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


def keeps_fp8(device: torch.device) -> bool:
    """Whether fp8 weights stay what they are on this device. Where no kernel multiplies them as
    they are stored, they become the activations' type when they are loaded.
    """
    return device.type == "cuda" and HAS_TRITON and _has_fp8(device)
