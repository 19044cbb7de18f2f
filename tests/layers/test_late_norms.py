"""Norms whose weight went into the projection behind them: the same model, fewer kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nvcli import kernels
from nvcli.errors import UsageError
from nvcli.kernels import tuned
from nvcli.layers.norm import RMSNorm
from nvcli.parallel import TPGroup
from tests.builders_torch import PagedModel, Rows, load_tiny
from tests.fp8_checkpoint import write_fp8_checkpoint
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.torch

NEVER: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True},
    "experts": {"architecture": "Qwen3MoeForCausalLM"},
    "experts in some layers": {
        "architecture": "Qwen3MoeForCausalLM",
        "extra_config": {"mlp_only_layers": [0]},
    },
    "qwen2, which has biases": {"architecture": "Qwen2ForCausalLM"},
}


@pytest.fixture(autouse=True)
def always_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCLI_LATE_NORM_ROWS", "4")


def folded_norms(model: torch.nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, RMSNorm) and m.late_rows]


def spread_norm_weights(model: torch.nn.Module) -> None:
    """Far from one, so that a weight that is forgotten or applied twice shows."""
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.uniform_(0.25, 2.0, generator=generator)


@torch.inference_mode()
@pytest.mark.parametrize("kind", [{}, {"architecture": "LlamaForCausalLM"}], ids=["qwen3", "llama"])
def test_late_norms_compute_the_same(tmp_path: Path, kind: dict[str, Any]) -> None:
    eps = {"rms_norm_eps": 0.1}  # large enough to show where it is missing
    write_tiny_checkpoint(tmp_path, extra_config=eps, **kind)
    model = load_tiny(tmp_path)
    spread_norm_weights(model)
    # A prompt of late norms, then steps of fewer rows over what it stored.
    prompt, more = Rows(list(range(9)), 0, list(range(16))), Rows([7, 8], 9, list(range(16)))

    def run() -> list[torch.Tensor]:
        paged = PagedModel(model)
        logits = [*paged.compute(prompt), *paged.compute(more)]
        return [*logits, *(cache.clone() for pair in paged.kv_caches for cache in pair)]

    limits = model.kv_limits()
    plain = run()
    model.fold_norms()
    assert len(folded_norms(model)) == 2 * len(model.model.layers)
    torch.testing.assert_close(model.kv_limits(), limits)
    for got, want in zip(run(), plain, strict=True):
        torch.testing.assert_close(got.nan_to_num(), want.nan_to_num(), rtol=2e-5, atol=2e-5)


@torch.inference_mode()
@pytest.mark.parametrize("kind", NEVER)
def test_some_models_keep_their_norms(tmp_path: Path, kind: str) -> None:
    write_tiny_checkpoint(tmp_path, **NEVER[kind])
    model = load_tiny(tmp_path)
    model.fold_norms()
    assert not folded_norms(model)


@torch.inference_mode()
def test_half_precision_keeps_its_norms(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    model = load_tiny(tmp_path).half()
    model.fold_norms()
    assert not folded_norms(model)


@torch.inference_mode()
def test_fp8_weights_keep_their_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "keeps_fp8", lambda device: True)
    write_fp8_checkpoint(tmp_path)
    model = load_tiny(tmp_path)
    model.fold_norms()
    assert not folded_norms(model)


@torch.inference_mode()
def test_a_part_of_a_model_keeps_its_norms(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    model = load_tiny(tmp_path)
    model.group = TPGroup.__new__(TPGroup)
    model.group.size = 2
    model.fold_norms()
    assert not folded_norms(model)


@torch.inference_mode()
def test_zero_rows_mean_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCLI_LATE_NORM_ROWS", "0")
    write_tiny_checkpoint(tmp_path)
    model = load_tiny(tmp_path)
    model.fold_norms()
    assert not folded_norms(model)


def test_the_number_of_rows_is_read_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned.late_norm_rows(1024) == 4
    for text, wanted in (("", tuned.cuts.late_norm_rows(1024)), ("300", 300)):
        monkeypatch.setenv("NVCLI_LATE_NORM_ROWS", text)
        assert tuned.late_norm_rows(1024) == wanted
    monkeypatch.setenv("NVCLI_LATE_NORM_ROWS", "-1")
    with pytest.raises(UsageError, match="NVCLI_LATE_NORM_ROWS must be a number of rows, got '-1'"):
        tuned.late_norm_rows(1024)
