"""Qwen3 in plain torch, with the parameter names of transformers' Qwen3ForCausalLM."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention


@dataclass(frozen=True)
class Config:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int = 128
    vocabulary: int = 4096
    context: int = 2048
    theta: float = 10000.0
    eps: float = 1e-6

    def as_json(self, eos: int, pad: int) -> dict[str, object]:
        """config.json as transformers reads it."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "rope_theta": self.theta,
            "rope_scaling": None,
            "rms_norm_eps": self.eps,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.layers,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": pad,
            "eos_token_id": eos,
            "torch_dtype": "bfloat16",
        }


MAIN = Config(hidden=256, layers=6, heads=4, kv_heads=2, ffn=768)
DRAFT = Config(hidden=128, layers=2, heads=2, kv_heads=1, ffn=384)

Cache = list[
    tuple[Tensor, Tensor]
]  # for each layer: keys, values [batch, kv_heads, length, head_dim]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def rotary(positions: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """cos and sin [batch, 1, length, head_dim] for the positions [batch, length]."""
    half = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / config.theta ** (half / config.head_dim)
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden, config.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(config.heads * self.dim, config.hidden, bias=False)
        self.q_norm = RMSNorm(self.dim, config.eps)
        self.k_norm = RMSNorm(self.dim, config.eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | BlockMask,
        cache: tuple[Tensor, Tensor] | None,
        places: Tensor | None,
    ) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, -1, self.dim)
        k = self.k_proj(x).view(batch, length, -1, self.dim)
        v = self.v_proj(x).view(batch, length, -1, self.dim).transpose(1, 2)
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin).to(v.dtype)
        if cache is not None and places is not None:
            index = places[:, None, :, None].expand_as(k)
            cache[0].scatter_(2, index, k.to(cache[0].dtype))
            cache[1].scatter_(2, index, v.to(cache[1].dtype))
            k, v = cache
        if isinstance(mask, BlockMask):
            y = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | BlockMask,
        cache: tuple[Tensor, Tensor] | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache, places)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)


class Qwen3(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.05)
        for name, weight in self.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                nn.init.normal_(weight, std=0.5 * weight.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=0.1 * weight.shape[1] ** -0.5)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | BlockMask,
        cache: Cache | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states, after the final norm."""
        x = self.model.embed_tokens(tokens)
        cos, sin = rotary(positions, self.config)
        for number, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, mask, cache[number] if cache else None, places)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)


def positions_of(docs: Tensor) -> Tensor:
    """Positions that start again with every sample; ``docs`` [batch, length] never falls."""
    place = torch.arange(docs.shape[1], device=docs.device).expand_as(docs)
    starts = torch.ones_like(docs, dtype=torch.bool)
    starts[:, 1:] = docs[:, 1:] != docs[:, :-1]
    return place - torch.where(starts, place, 0).cummax(dim=1).values


def dense_mask(docs: Tensor) -> Tensor:
    """Causal attention inside each sample, as a mask [batch, 1, length, length]."""
    place = torch.arange(docs.shape[1], device=docs.device)
    same = docs[:, :, None] == docs[:, None, :]
    return (same & (place[:, None] >= place))[:, None]


class DocumentMask:
    """The same mask in blocks of 128, for flex_attention.

    One buffer serves every batch, so that the compiled code sees one mask function."""

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        self.docs = torch.zeros(rows, length, dtype=torch.int32, device=device)
        docs = self.docs

        def inside(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (q >= kv) & (docs[b, q] == docs[b, kv])

        self.inside = inside

    def of(self, docs: Tensor) -> BlockMask:
        self.docs.copy_(docs)
        grouped = self.docs.view(docs.shape[0], -1, 128)
        low, high = grouped.amin(-1), grouped.amax(-1)
        block = torch.arange(low.shape[1], device=docs.device)
        reach = (block[:, None] >= block) & (high[:, None, :] >= low[:, :, None])
        full = (block[:, None] > block) & (low[:, None, :] == high[:, :, None])
        part_count, part = _ordered(reach & ~full)
        full_count, full_index = _ordered(full)
        return BlockMask.from_kv_blocks(
            part_count, part, full_count, full_index, BLOCK_SIZE=128, mask_mod=self.inside
        )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    count = blocks.sum(-1, dtype=torch.int32)[:, None]
    index = blocks.int().argsort(dim=-1, descending=True, stable=True).to(torch.int32)[:, None]
    return count.contiguous(), index.contiguous()
