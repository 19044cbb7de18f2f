"""Writes tiny random checkpoints that nvcli and transformers both load.

`write_tiny_checkpoint` writes config.json and safetensors (in one file, or in shards with an
index) and returns the tensors, so that a test may damage them and write them again with
`write_tensors`. A tokenizer is somebody else's: pass `write_tokenizer` to have one written beside.

The defaults are the tiny model of all engine tests: head_dim 32 is not hidden / heads, and norm
weights and biases are random too, because zeros and ones hide mistakes. Experts are written one by
one, as published checkpoints have them; `stack_experts` makes one tensor of a layer's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

MODEL_TYPES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
}
QK_NORM = (["Qwen3ForCausalLM"], ["Qwen3MoeForCausalLM"])
MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
INDEX_NAME = "model.safetensors.index.json"


def write_tiny_checkpoint(
    folder: Path,
    *,
    architecture: str = "Qwen3ForCausalLM",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 96,
    vocab: int = 300,
    tied: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    rope_theta: float = 10_000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    max_position_embeddings: int = 512,
    eos_token_id: int | list[int] | None = None,
    dtype: str = "float32",
    shards: int = 1,
    seed: int = 0,
    extra_config: Mapping[str, Any] | None = None,
    write_tokenizer: Callable[[Path], object] | None = None,
) -> dict[str, Tensor]:
    """Returns the tensors written, by checkpoint name. `rope_scaling` lengths are its own."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": rope_theta,
        "rope_scaling": dict(rope_scaling) if rope_scaling else None,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "eos_token_id": eos_token_id,
    }
    if [architecture] in QK_NORM:
        config["attention_bias"] = attention_bias
    if architecture == "Qwen3MoeForCausalLM":
        config |= MOE
    if architecture == "LlamaForCausalLM":
        config |= {"attention_bias": attention_bias, "mlp_bias": mlp_bias}
    config |= extra_config or {}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = random_tensors(config, dtype=getattr(torch, dtype), seed=seed)
    write_tensors(folder, tensors, shards=shards)
    if write_tokenizer is not None:
        write_tokenizer(folder)
    return tensors


def random_tensors(
    config: Mapping[str, Any], *, dtype: torch.dtype, seed: int
) -> dict[str, Tensor]:
    """Matrices keep the size of their input, norms are around 1, biases around 0."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head_dim = (
        config[key] for key in ("hidden_size", "intermediate_size", "head_dim")
    )
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    is_qwen2 = config["architectures"] == ["Qwen2ForCausalLM"]
    qkv_bias = is_qwen2 or config.get("attention_bias", False)
    output_bias = not is_qwen2 and config.get("attention_bias", False)
    mlp_bias = config.get("mlp_bias", False)
    tensors: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int, *, bias: bool = False) -> None:
        weight = torch.randn(rows, columns, generator=generator) / columns**0.5
        tensors[f"{name}.weight"] = weight.to(dtype)
        if bias:
            tensors[f"{name}.bias"] = (torch.randn(rows, generator=generator) * 0.2).to(dtype)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = (1 + 0.2 * torch.randn(size, generator=generator)).to(dtype)

    matrix("model.embed_tokens", config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm", hidden)
        matrix(f"{prefix}.self_attn.q_proj", q_size, hidden, bias=qkv_bias)
        matrix(f"{prefix}.self_attn.k_proj", kv_size, hidden, bias=qkv_bias)
        matrix(f"{prefix}.self_attn.v_proj", kv_size, hidden, bias=qkv_bias)
        matrix(f"{prefix}.self_attn.o_proj", hidden, q_size, bias=output_bias)
        if config["architectures"] in QK_NORM:
            norm(f"{prefix}.self_attn.q_norm", head_dim)
            norm(f"{prefix}.self_attn.k_norm", head_dim)
        norm(f"{prefix}.post_attention_layernorm", hidden)
        mlps, width = [f"{prefix}.mlp"], inner
        if _has_experts(config, layer):
            matrix(f"{prefix}.mlp.gate", config["num_experts"], hidden)
            mlps = [f"{prefix}.mlp.experts.{e}" for e in range(config["num_experts"])]
            width = config["moe_intermediate_size"]
        for mlp in mlps:
            matrix(f"{mlp}.gate_proj", width, hidden, bias=mlp_bias)
            matrix(f"{mlp}.up_proj", width, hidden, bias=mlp_bias)
            matrix(f"{mlp}.down_proj", hidden, width, bias=mlp_bias)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head", config["vocab_size"], hidden)
    return tensors


def _has_experts(config: Mapping[str, Any], layer: int) -> bool:
    is_dense = layer in config.get("mlp_only_layers", ())
    return "num_experts" in config and not (is_dense or (layer + 1) % config["decoder_sparse_step"])


def stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As transformers 5 writes them with `save_original_format=False`: gate above up."""
    found = {name: t for name, t in tensors.items() if ".experts." not in name}
    by_layer: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        prefix, _, rest = name.partition(".experts.")
        if rest:
            by_layer.setdefault(f"{prefix}.experts", {})[rest] = tensor
    for prefix, mine in by_layer.items():
        gate, up, down = (
            torch.stack([mine[f"{e}.{part}_proj.weight"] for e in range(len(mine) // 3)])
            for part in ("gate", "up", "down")
        )
        found[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        found[f"{prefix}.down_proj"] = down
    return found


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], *, shards: int = 1) -> None:
    """One `model.safetensors`, or `shards` files with an index; replaces what was there."""
    for old in [*folder.glob("*.safetensors"), folder / INDEX_NAME]:
        old.unlink(missing_ok=True)
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata=metadata)
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file, metadata=metadata)
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1))
