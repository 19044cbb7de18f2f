"""What every op means, in plain PyTorch. The fast versions are tested against these.

Each function has the signature of its op in `nvcli.kernels` and works on any device and dtype.
Norms and softmax follow transformers: computed in float32, rounded once where it rounds.

Dimension key: T tokens, B rows, E hidden, F intermediate, H heads, Hq/Hk query and KV heads,
D head_dim, N blocks, P block size, M blocks per table row, X experts, K of them a token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nvcli.types import FP8_BLOCK

FP8_MAX = 448.0  # of float8_e4m3fn


def look_up(
    ids: Tensor, positions: Tensor, weight: Tensor, cos_sin: Tensor, first_id: int, num_ids: int
) -> tuple[Tensor, Tensor, Tensor]:
    local = ids - first_id
    x = functional.embedding(local.clamp(0, weight.shape[0] - 1), weight)
    x = x.masked_fill_(((local < 0) | (local >= num_ids))[:, None], 0)
    rows = cos_sin[positions]
    return x, rows[:, 0], rows[:, 1]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> Tensor:
    if scales is not None:
        weight = dequantise_weight(weight, scales, x.dtype)
    return functional.linear(x, weight, bias)


def dequantise_weight(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """weight[n, k] * scales[n // 128, k // 128], multiplied in float32 and rounded once.

    weight:   [N, K] float8_e4m3fn, N and K multiples of FP8_BLOCK
    scales:   [N / 128, K / 128] float32
    returns   [N, K] of `dtype`
    """
    rows, columns = scales.shape
    blocks = weight.to(torch.float32).view(rows, FP8_BLOCK, columns, FP8_BLOCK)
    return blocks.mul_(scales[:, None, :, None]).view_as(weight).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = functional.rms_norm(x, (x.shape[-1],), None, eps)
    return normed * weight


def added_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, or the sum of its addends [S, T, E] float32, rounded as a product's result is."""
    return x if x.dim() == 2 else x.sum(0).to(dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = added_up(x, residual.dtype) + residual
    return rms_norm(total, weight, eps), total


def rms_divided(x: Tensor, rms_of: Tensor, eps: float) -> Tensor:
    """Each row of x over the root mean square of the same row of `rms_of`."""
    wide = rms_of.float()
    scale = torch.rsqrt(wide.square().mean(-1) + eps)
    return (x.float() * scale.view(-1, *[1] * (x.dim() - 1))).to(x.dtype)


def silu_and_mul(x: Tensor, rms_of: Tensor | None = None, eps: float = 0.0) -> Tensor:
    if rms_of is not None:
        x = rms_divided(x, rms_of, eps)
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else added_up(x, residual.dtype) + residual
    return linear(rms_norm(total, norm_weight, eps), weight, bias, scales), total


def norm_swiglu(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    gate_up, total = norm_linear(x, residual, norm_weight, eps, weight, bias, scales)
    return silu_and_mul(gate_up), total


def route(
    logits: Tensor, top_k: int, *, renormalise: bool, is_token: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    probabilities = logits.float().softmax(dim=-1)
    # Stable, so that of equal logits the lower id comes first.
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = probabilities.gather(1, order)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    expert_ids = order.to(torch.int32)
    if is_token is not None:
        expert_ids = expert_ids.masked_fill(~is_token[:, None], logits.shape[1])
        weights = weights.masked_fill(~is_token[:, None], 0.0)
    return expert_ids, weights


def experts(
    x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Every expert computes every token, so that no shape depends on the routing and no device is
    waited for; what was not asked for is left out.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        is_hit = expert_ids == expert  # [T, K]
        weight = (weights * is_hit).sum(dim=1, keepdim=True)
        y = linear(silu_and_mul(linear(x, gate_up[expert], None)), down[expert], None)
        out += (y * weight).masked_fill_(~is_hit.any(dim=1, keepdim=True), 0.0)
    return out.to(x.dtype)


def rope_norm(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    if weight is not None:
        x = rms_norm(x, weight, eps)
    # With the sign kept in sin's first half, rotating is a swap of halves.
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    rotated = torch.addcmul(x * cos[:, None], swapped, sin[:, None])
    return rotated.to(x.dtype)


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
    if rms_of is not None:
        qkv = rms_divided(qkv, rms_of, eps)
    num_kv_heads = k_cache.shape[2]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    qk = rope_norm(qkv[:, : num_heads + num_kv_heads], weight, cos, sin, eps)
    q, k = qk[:, :num_heads], qk[:, num_heads:]
    v = qkv[:, num_heads + num_kv_heads :]
    store_kv(k, v, k_cache, v_cache, slot_mapping, kv_scales)
    return q


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    keep = slot_mapping >= 0
    slots, k, v = slot_mapping[keep], k[keep], v[keep]
    block_size = k_cache.shape[1]
    block, offset = slots // block_size, slots % block_size
    if kv_scales is not None:
        k, v = quantise(k, kv_scales[0]), quantise(v, kv_scales[1])
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    k_cache[block, offset] = k.to(k_cache.dtype)
    v_cache[block, offset] = v.to(v_cache.dtype)


def gather_kv(k_cache: Tensor, v_cache: Tensor, block_ids: Tensor) -> tuple[Tensor, Tensor]:
    k, v = (cache[block_ids.long()].flatten(0, 1) for cache in (k_cache, v_cache))
    return k, v


def quantise(x: Tensor, scales: Tensor) -> Tensor:
    """The bits of x / scale in float8_e4m3fn, rounded to the nearest, ties to even.

    x: [T, Hk, D] any float type; scales: [Hk] float32, powers of two, so that dividing is exact
    -> [T, Hk, D] uint8, which every op on every device knows how to move
    """
    scaled = (x.float() / scales[:, None]).clamp_(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def dequantise(bits: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., Hk, D] uint8, [Hk] -> [..., Hk, D]: exact in every dtype that holds the values."""
    return bits.view(torch.float8_e4m3fn).to(dtype).mul_(scales[:, None].to(dtype))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    softmax_scale: float,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """One row at a time, in float32: gather its keys, mask the future, softmax, mix the values."""
    out = torch.zeros_like(q)
    block_size, num_kv_heads = k_cache.shape[1:3]
    group_size = q.shape[1] // num_kv_heads
    bounds = cu_seqlens_q.tolist()
    for row, num_keys in enumerate(seq_lens.tolist()):
        start, end = bounds[row], bounds[row + 1]
        if num_keys == 0:
            continue
        blocks = block_tables[row, : -(-num_keys // block_size)].long()
        if kv_scales is None:
            k_NPHD, v_NPHD = k_cache[blocks].float(), v_cache[blocks].float()
        else:
            k_NPHD, v_NPHD = (
                dequantise(cache.view(torch.uint8)[blocks], scales, torch.float32)
                for cache, scales in zip((k_cache, v_cache), kv_scales, strict=True)
            )
        k_KHD = k_NPHD.flatten(0, 1)[:num_keys]
        v_KHD = v_NPHD.flatten(0, 1)[:num_keys]
        q_THD = q[start:end].float()
        scores_HTK = softmax_scale * torch.einsum(
            "thd,khd->htk", q_THD, k_KHD.repeat_interleave(group_size, dim=1)
        )
        # The row's tokens are the last ones of its keys: token t sees keys up to its own.
        positions = torch.arange(num_keys - (end - start), num_keys, device=q.device)
        future = torch.arange(num_keys, device=q.device)[None, :] > positions[:, None]
        weights_HTK = scores_HTK.masked_fill(future, float("-inf")).softmax(dim=-1)
        mixed_THD = torch.einsum(
            "htk,khd->thd", weights_HTK, v_KHD.repeat_interleave(group_size, dim=1)
        )
        out[start:end] = mixed_THD.to(q.dtype)
    return out
