"""Checkpoints with fp8 weights: loaded whole, computed as transformers computes them, refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvcli import kernels
from nvcli.errors import WeightsError
from nvcli.layers.linear import Linear
from nvcli.models.config import ModelConfig
from nvcli.models.qwen3 import Qwen3ForCausalLM
from tests.builders_torch import PagedModel, Rows, load_tiny
from tests.fp8_checkpoint import FP8, dense, write_dense_twin, write_fp8_checkpoint
from tests.models.test_against_transformers import TOLERANCE, prompt, transformers_logits
from tests.tiny import write_tensors

pytestmark = pytest.mark.torch

UP = "model.layers.1.mlp.up_proj.weight"
SCALES = f"{UP}_scale_inv"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay fp8, as on a GPU."""
    monkeypatch.setattr(kernels, "keeps_fp8", lambda device: True)


def linears(model: Qwen3ForCausalLM) -> dict[str, Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}


def fused(tensors: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """The tensors of a layer's projections, one below the other where the engine fuses them."""
    prefix = f"model.layers.{layer}"
    qkv = [tensors[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkv"]
    gate_up = [tensors[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    return {
        f"{prefix}.self_attn.qkv_proj": torch.cat(qkv),
        f"{prefix}.self_attn.o_proj": tensors[f"{prefix}.self_attn.o_proj.weight"],
        f"{prefix}.mlp.gate_up_proj": torch.cat(gate_up),
        f"{prefix}.mlp.down_proj": tensors[f"{prefix}.mlp.down_proj.weight"],
    }


# --- what loads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_without_a_gpu_weights_become_dense(
    tmp_path: Path, shards: int, scale_dtype: torch.dtype
) -> None:
    tensors = write_fp8_checkpoint(tmp_path, shards=shards, scale_dtype=scale_dtype)
    model = load_tiny(tmp_path)
    found = linears(model)
    for layer in range(2):
        for name, want in fused(dense(tensors), layer).items():
            assert torch.equal(found[name].weight, want), name
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(linear.weight_scale_inv is None for linear in found.values())


def test_on_a_gpu_they_stay_as_they_are(tmp_path: Path, kept: None) -> None:
    tensors = write_fp8_checkpoint(tmp_path)
    model = load_tiny(tmp_path, dtype=torch.bfloat16)
    found = linears(model)
    exact = fused(dense(tensors), 0)
    for name, want in exact.items():
        assert found[name].weight.dtype == FP8
        assert found[name].weight_scale_inv.dtype == torch.float32  # type: ignore[union-attr]
        assert torch.equal(found[name].dense_weight(torch.float32), want), name
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.lm_head.weight_scale_inv is None
    first, linear = 512, found["model.layers.0.self_attn.qkv_proj"]  # keys and values
    assert torch.equal(linear.dense_weight(torch.float32, first), exact[next(iter(exact))][first:])


def test_the_bound_of_an_fp8_cache_knows_the_scales(tmp_path: Path, kept: None) -> None:
    folder = tmp_path / "fp8"
    tensors = write_fp8_checkpoint(folder)
    twin = write_dense_twin(folder, tmp_path / "twin", tensors)
    torch.testing.assert_close(load_tiny(folder).kv_limits(), load_tiny(twin).kv_limits())


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True, "attention_bias": True},
        {"architecture": "Qwen2ForCausalLM"},
        {"architecture": "LlamaForCausalLM", "attention_bias": True, "mlp_bias": True},
    ],
    ids=["qwen3", "tied, biases", "qwen2", "llama"],
)
def test_logits_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], keeps: bool
) -> None:
    monkeypatch.setattr(kernels, "keeps_fp8", lambda device: keeps)
    tensors = write_fp8_checkpoint(tmp_path / "fp8", **changes)
    twin = write_dense_twin(tmp_path / "fp8", tmp_path / "twin", tensors)
    expected = transformers_logits(twin)
    model, ids = PagedModel(load_tiny(tmp_path / "fp8")), prompt(19)
    pieces = [(0, 11), (11, 12), (12, 19)]
    logits = [model.compute(Rows(ids[a:b], a, [9, 2, 5, 30, 31]))[0] for a, b in pieces]
    torch.testing.assert_close(torch.cat(logits), expected(ids), **TOLERANCE)


def test_dummy_weights_are_fp8_too(tmp_path: Path, kept: None) -> None:
    write_fp8_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first, second = (load_tiny(tmp_path, load_format="dummy") for _ in range(2))
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a.float(), b.float()), name
        assert not a.isnan().any(), name
    down = linears(first)["model.layers.0.mlp.down_proj"]
    assert down.weight.dtype == FP8
    assert float(down.dense_weight(torch.float32).std()) == pytest.approx(0.02, rel=0.02)


# --- errors --------------------------------------------------------------------------------------

Damage = Callable[[dict[str, Tensor]], object]


def without_scales(tensors: dict[str, Tensor]) -> None:
    del tensors[SCALES]


def in_16_bits(tensors: dict[str, Tensor]) -> None:
    tensors[UP] = tensors[UP].to(torch.bfloat16)


def in_another_fp8(tensors: dict[str, Tensor]) -> None:
    tensors[UP] = tensors[UP].to(torch.float8_e5m2)


def one_scale(tensors: dict[str, Tensor]) -> None:
    tensors[SCALES] = torch.ones(1, 1)


def fp8_scales(tensors: dict[str, Tensor]) -> None:
    tensors[SCALES] = tensors[SCALES].to(FP8)


def fp8_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(FP8)


def scaled_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight_scale_inv"] = torch.ones(3, 2)


def weight_nan(tensors: dict[str, Tensor]) -> None:
    tensors[UP].view(torch.uint8)[77, 5] = 0xFF


def scale_nan(tensors: dict[str, Tensor]) -> None:
    tensors[SCALES][0, 1] = float("nan")


FILE = "FOLDER/model.safetensors"
FLOATS = "only F64, F32, F16, BF16 are supported"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_scales, f"FOLDER lacks {SCALES}"),
        (in_16_bits, f"{FILE}: {UP} is BF16, the configuration says F8_E4M3"),
        (in_another_fp8, f"{FILE}: {UP} is F8_E5M2, the configuration says F8_E4M3"),
        (
            one_scale,
            f"{FILE}: {SCALES} has shape [1, 1], the configuration says [4, 2]",
        ),
        (fp8_scales, f"{FILE}: {SCALES} is F8_E4M3, {FLOATS}"),
        (fp8_head, f"{FILE}: lm_head.weight is F8_E4M3, {FLOATS}"),
        (
            scaled_head,
            f"{FILE} holds lm_head.weight_scale_inv, unknown to the architecture",
        ),
        (weight_nan, f"FOLDER: {UP} holds values that are not numbers"),
        (scale_nan, f"FOLDER: {SCALES} holds values that are not numbers"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path: Path, damage: Damage, message: str) -> None:
    tensors = write_fp8_checkpoint(tmp_path)
    damage(tensors)
    write_tensors(tmp_path, tensors)
    with pytest.raises(WeightsError) as caught:
        load_tiny(tmp_path)
    assert str(caught.value).replace(str(tmp_path), "FOLDER") == message


def test_fp8_weights_need_their_configuration(tmp_path: Path) -> None:
    from tests.fp8_checkpoint import change_config

    write_fp8_checkpoint(tmp_path)
    change_config(tmp_path, quantization_config=None)
    assert not ModelConfig.from_hf(tmp_path).is_fp8
    with pytest.raises(WeightsError, match=r"_proj.weight_scale_inv and 13 more, unknown"):
        load_tiny(tmp_path)
