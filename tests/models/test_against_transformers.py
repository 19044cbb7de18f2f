"""Logits equal transformers' in float32, however a prompt is cut, cached and batched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.builders_torch import PagedModel, Rows, load_tiny
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.torch

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "tied": {"tied": True},
    "biases": {"attention_bias": True},
    "yarn": {"rope_scaling": YARN},
    "one KV head": {"kv_heads": 1},
    "no grouping": {"kv_heads": 4},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "head_dim": 16},
    "moe": {"architecture": "Qwen3MoeForCausalLM"},
    "moe in some layers, not renormalised": {
        "architecture": "Qwen3MoeForCausalLM",
        "layers": 4,
        "attention_bias": True,
        "extra_config": {
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "num_experts": 9,
            "num_experts_per_tok": 3,
        },
    },
    "llama": {"architecture": "LlamaForCausalLM", "head_dim": 16},
    "llama with biases": {
        "architecture": "LlamaForCausalLM",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": LLAMA3,
    },
}

Oracle = Callable[[list[int]], Tensor]


def transformers_logits(folder: Path) -> Oracle:
    """[n, V] logits of a whole prompt in one plain forward pass."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logits(token_ids: list[int]) -> Tensor:
        with torch.inference_mode():
            out: Tensor = model(torch.tensor([token_ids])).logits[0]
        return out

    return logits


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 300, (length,), generator=generator).tolist()


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=list(VARIANTS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("variant")
    write_tiny_checkpoint(path, **request.param)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> Oracle:
    return transformers_logits(folder)


@pytest.fixture
def model(folder: Path) -> PagedModel:
    return PagedModel(load_tiny(folder))


def test_whole_prompt(model: PagedModel, expected: Oracle) -> None:
    ids = prompt(23)
    (logits,) = model.compute(Rows(ids, 0, [9, 2, 5, 30, 31, 0]))
    torch.testing.assert_close(logits, expected(ids), **TOLERANCE)


def test_chunks_and_decode(model: PagedModel, expected: Oracle) -> None:
    ids, blocks = prompt(23), [9, 2, 5, 30, 31, 0]
    pieces = [(0, 3), (3, 4), (4, 11), (11, 20), (20, 21), (21, 22), (22, 23)]
    logits = [model.compute(Rows(ids[a:b], a, blocks))[0] for a, b in pieces]
    torch.testing.assert_close(torch.cat(logits), expected(ids), **TOLERANCE)


def test_prefix_hit_reads_another_sequences_blocks(model: PagedModel, expected: Oracle) -> None:
    shared, first, second = prompt(8), prompt(5, seed=1), prompt(6, seed=2)
    model.compute(Rows(shared + first, 0, [7, 3, 1, 2]))
    (logits,) = model.compute(Rows(second, 8, [7, 3, 20, 21]))
    torch.testing.assert_close(logits, expected(shared + second)[8:], **TOLERANCE)


def test_full_prefix_hit_recomputes_one_token_without_storing(
    model: PagedModel, expected: Oracle
) -> None:
    ids = prompt(8)
    model.compute(Rows(ids, 0, [7, 3]))
    before = [cache.clone() for pair in model.kv_caches for cache in pair]
    (logits,) = model.compute(Rows(ids[7:], 7, [7, 3], is_stored=True))
    torch.testing.assert_close(logits, expected(ids)[7:], **TOLERANCE)
    after = [cache for pair in model.kv_caches for cache in pair]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


def test_mixed_batch(model: PagedModel, expected: Oracle) -> None:
    """Decoding rows of many lengths, a chunk in the middle and a new prompt, in one step."""
    lengths = [1, 5, 9, 9, 30, 31, 2]
    prompts = [prompt(length + 1, seed=i) for i, length in enumerate(lengths)]
    chunked, new = prompt(14, seed=20), prompt(6, seed=21)
    widths = [-(-len(ids) // 4) for ids in [*prompts, chunked, new]]
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    tables = [list(range(end - width, end)) for end, width in zip(ends, widths, strict=True)]
    tables[1].reverse()  # not consecutive
    tables[4].reverse()
    for ids, blocks in zip(prompts, tables, strict=False):
        model.compute(Rows(ids[:-1], 0, blocks))
    model.compute(Rows(chunked[:6], 0, tables[7]))

    rows = [
        Rows(ids[-1:], len(ids) - 1, blocks) for ids, blocks in zip(prompts, tables, strict=False)
    ]
    rows.insert(3, Rows(chunked[6:], 6, tables[7]))
    rows.append(Rows(new, 0, tables[8]))
    want = [expected(ids)[-1:] for ids in prompts]
    want.insert(3, expected(chunked)[6:])
    want.append(expected(new))
    for got, wanted in zip(model.compute(*rows), want, strict=True):
        torch.testing.assert_close(got, wanted, **TOLERANCE)


def test_cache_stored_heads_first(folder: Path, expected: Oracle) -> None:
    model = PagedModel(load_tiny(folder), heads_first=True)
    ids, blocks = prompt(13), [4, 5, 6, 7]
    logits = [model.compute(Rows(ids[a:b], a, blocks))[0] for a, b in ((0, 7), (7, 12), (12, 13))]
    torch.testing.assert_close(torch.cat(logits), expected(ids), **TOLERANCE)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_checkpoint_in_float32(tmp_path: Path, name: str) -> None:
    write_tiny_checkpoint(tmp_path, dtype=name)
    ids = prompt(11)
    (logits,) = PagedModel(load_tiny(tmp_path)).compute(Rows(ids, 0, [2, 1, 0]))
    torch.testing.assert_close(logits, transformers_logits(tmp_path)(ids), **TOLERANCE)


def test_bfloat16_runs_close_to_float32(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    ids = prompt(11)
    model = PagedModel(load_tiny(tmp_path, dtype=torch.bfloat16))
    (logits,) = model.compute(Rows(ids, 0, [2, 1, 0]))
    assert logits.dtype == torch.bfloat16
    want = transformers_logits(tmp_path)(ids)
    torch.testing.assert_close(logits.float(), want, atol=0.15, rtol=0)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_reference_kernels_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    from nvcli import kernels

    write_tiny_checkpoint(tmp_path, architecture=architecture, attention_bias=True)
    ids, rows = prompt(9), [(0, 6), (6, 8), (8, 9)]

    def logits() -> Tensor:
        model = PagedModel(load_tiny(tmp_path))
        return torch.cat([model.compute(Rows(ids[a:b], a, [3, 1, 2]))[0] for a, b in rows])

    fast = logits()
    monkeypatch.setattr(kernels, "_use_fast", False)
    torch.testing.assert_close(fast, logits(), atol=1e-5, rtol=0)
