"""Weights and configuration in a folder, as transformers and nvcli read them."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from nvdemo.model import Config, Qwen3

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer


def special_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """The ids that end a turn and that pad, by name."""
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    if end is None or pad is None:
        raise ValueError("the tokenizer lacks Qwen3's special tokens")
    return end, pad


def save(model: Qwen3, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(model.config.as_json(*special_ids(tokenizer)), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def load(folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> Qwen3:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = {
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "ffn": "intermediate_size",
        "head_dim": "head_dim",
        "vocabulary": "vocab_size",
        "context": "max_position_embeddings",
        "theta": "rope_theta",
        "eps": "rms_norm_eps",
    }
    model = Qwen3(Config(**{entry.name: raw[names[entry.name]] for entry in fields(Config)}))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(device, dtype)
