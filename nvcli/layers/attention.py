"""Self-attention: project, norm and rotate q and k, store k and v, attend over the cache.

Keys are stored before the backend runs and the backend reads the cache alone, so a chunk, a prefix
hit and a decode step are the same computation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from nvcli.kernels.attention import attend_qkv
from nvcli.layers.linear import Linear
from nvcli.layers.norm import RMSNorm
from nvcli.parallel import Share, TPGroup

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.layers.forward_batch import ForwardBatch
    from nvcli.models.config import ModelConfig


class Attention(nn.Module):
    """Parameters: qkv_proj (q, k and v fused), o_proj, q_norm, k_norm, of this rank's heads."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: TPGroup,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.softmax_scale = config.head_dim**-0.5
        q = group.share_of_heads(config.num_heads, config.head_dim)
        kv = group.share_of_heads(config.num_kv_heads, config.head_dim)
        self.num_heads = q.count // config.head_dim
        self.num_kv_heads = kv.count // config.head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            {"q_proj": q, "k_proj": kv, "v_proj": kv},
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
            is_fp8=config.is_fp8,
        )
        self.o_proj = Linear(
            q,
            {"o_proj": Share.all_of(config.hidden_size)},
            bias=config.output_bias,
            dtype=dtype,
            device=device,
            group=group,
            is_fp8=config.is_fp8,
        )
        self.eps = config.rms_norm_eps
        self.rotary_factor = config.rope.attention_factor
        self.qk_weight: Tensor | None = None  # [Hq + Hk, D], one row a head
        if config.has_qk_norm:
            self.q_norm = RMSNorm(config.head_dim, self.eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(config.head_dim, self.eps, dtype=dtype, device=device)
        self.has_qk_norm = config.has_qk_norm

    def after_load(self) -> None:
        """Lay the two norms' weights out by head, so that q and k are normed in one go."""
        if self.has_qk_norm:
            q = self.q_norm.weight.expand(self.num_heads, -1)
            k = self.k_norm.weight.expand(self.num_kv_heads, -1)
            self.qk_weight = torch.cat([q, k])

    def kv_limits(self, norm: RMSNorm) -> Tensor:
        """[2, Hk] float32: no key or value of a head is larger than this, whatever the input.

        norm: before the projection. A vector of RMSNorm is no longer than sqrt(E) times its weight,
        so a row w of the projection gives at most sqrt(E) |w * weight| (Cauchy-Schwarz) and a bias.
        """
        D, first = self.head_dim, self.num_heads * self.head_dim
        weight = self.qkv_proj.dense_weight(torch.float32, first) * norm.weight.float()
        spread = torch.linalg.vector_norm(weight, dim=1) * weight.shape[1] ** 0.5
        bias = torch.zeros_like(spread)
        if self.qkv_proj.bias is not None:
            bias = self.qkv_proj.bias[first:].float().abs()
        keys, values = (spread + bias).view(2, self.num_kv_heads, D)
        largest = torch.full((D // 2,), torch.inf, device=keys.device)
        if self.has_qk_norm:
            # A normed key is at most sqrt(D) times the weight, and its projection times the weight
            # over the least root mean square, which only a bias keeps from 0.
            scale = self.k_norm.weight.float().abs()
            least = (bias - spread).clamp_(min=0).view(2, self.num_kv_heads, D)[0]
            least = least.square().mean(1, keepdim=True).sqrt()
            keys = (keys * scale / least).nan_to_num(0.0, torch.inf)
            largest = scale.view(2, -1).amax(0) * D**0.5
        pairs = keys.view(self.num_kv_heads, 2, D // 2)  # rotating keeps a pair's length
        keys = torch.minimum(torch.linalg.vector_norm(pairs, dim=1), largest)
        return torch.stack([keys.amax(1) * self.rotary_factor, values.amax(1)])

    def forward(
        self,
        x: Tensor,  # [T, E] or addends, what the layer before adds to the residual, or a part of it
        residual: Tensor | None,  # [T, E]; None where x is the sum already
        norm: RMSNorm,  # of their sum, before the projection
        rotary: tuple[Tensor, Tensor],  # [T, D] each
        batch: ForwardBatch,
        wanted: Tensor | None = None,  # [R] int64, into T: the tokens that go on
    ) -> tuple[Tensor, Tensor | None]:  # of those: what to add next, as x, and the new residual
        is_late = norm.is_late(x, residual)
        qkv, total = norm.project(x, residual, self.qkv_proj)
        qkv = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        k_cache, v_cache = batch.kv_caches[self.layer]
        kv_scales = None if batch.kv_scales is None else batch.kv_scales[self.layer]
        out = attend_qkv(
            *(qkv, self.qk_weight, *rotary, self.eps, k_cache, v_cache),
            *(batch, self.softmax_scale, kv_scales, total if is_late else None),
        )  # [T, Hq, D]
        out = out.reshape(-1, self.num_heads * self.head_dim)
        if wanted is not None:
            out, total = out[wanted], total[wanted]
        if is_late and norm.is_late(total, None):
            return self.o_proj.add_to(total, out), None
        return self.o_proj.addends(out), total
