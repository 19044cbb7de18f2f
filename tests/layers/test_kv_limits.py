"""The bounds an fp8 KV cache takes its scales from hold for any input, and are near it for some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders_torch import PagedModel, Rows, load_tiny
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.torch

KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3 with biases": {"attention_bias": True},
    "experts": {"architecture": "Qwen3MoeForCausalLM"},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "llama": {"architecture": "LlamaForCausalLM"},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_no_key_and_no_value_is_beyond_its_limit(tmp_path: Path, kind: str) -> None:
    write_tiny_checkpoint(tmp_path, **KINDS[kind])
    model = load_tiny(tmp_path)
    limits = model.kv_limits()  # [L, 2, Hk]
    layer = model.model.layers[0]
    attention, norm = layer.self_attn, layer.input_layernorm
    # Inputs that point along a row of the projection are the worst there are.
    rows = attention.qkv_proj.weight[attention.num_heads * attention.head_dim :] * norm.weight
    model.model.embed_tokens.weight[: len(rows)] = rows
    model.model.embed_tokens.weight[len(rows) : 2 * len(rows)] = -rows
    paged = PagedModel(model)
    paged.compute(Rows(list(range(2 * len(rows))), 0, list(range(64))))
    largest = torch.stack(
        [
            torch.stack([cache.nan_to_num().abs().amax((0, 1, 3)) for cache in layer_caches])
            for layer_caches in paged.kv_caches
        ]
    )
    assert (largest <= limits * (1 + 1e-5)).all()
    assert (largest[0, 1] > 0.99 * limits[0, 1]).all(), "values of the first layer reach theirs"
    assert (largest[0, 0] > 0.1 * limits[0, 0]).all()


@torch.inference_mode()
def test_a_constant_in_the_padding_of_a_head_bounds_its_keys(tmp_path: Path) -> None:
    """As `benchmarks/make_smollm2.py` makes them: the norm's weight alone would be far too wide."""
    write_tiny_checkpoint(tmp_path, attention_bias=True)
    model = load_tiny(tmp_path)
    attention = model.model.layers[0].self_attn
    D, first = attention.head_dim, attention.num_heads * attention.head_dim
    keys = attention.qkv_proj.weight[first : first + 2 * D].view(2, D, -1)
    bias = attention.qkv_proj.bias[first : first + 2 * D].view(2, D)
    keys[:, 1::2], bias[:, ::2], bias[:, 1::2] = 0, 0, 4096
    attention.k_norm.weight[::2], attention.k_norm.weight[1::2] = 4096 / 2**0.5, 0
    limits = model.kv_limits()[0, 0]
    assert (limits < 100).all()
    paged = PagedModel(model)
    paged.compute(Rows(list(range(100)), 0, list(range(30))))
    assert (paged.kv_caches[0][0].nan_to_num().abs().amax((0, 1, 3)) <= limits).all()
