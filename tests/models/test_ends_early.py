"""A step of which only some hidden states are wanted: those are the same, and so is the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nvcli import kernels
from nvcli.models.qwen3 import Qwen3ForCausalLM
from tests.builders_torch import PagedModel, Rows, load_tiny, make_forward_batch
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.torch

KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "experts": {"architecture": "Qwen3MoeForCausalLM"},
    "llama": {"architecture": "LlamaForCausalLM"},
}
ROWS = [Rows(list(range(9)), 0, [0, 1, 2]), Rows([5], 0, [4]), Rows(list(range(30, 36)), 0, [7, 8])]


def run(model: Qwen3ForCausalLM, *, ends_early: bool, is_padded: bool) -> list[torch.Tensor]:
    """Hidden states at the rows' ends, and all that was stored."""
    paged = PagedModel(model)
    batch = make_forward_batch(ROWS, paged.kv_caches)
    batch.ends_early, batch.is_padded = ends_early, is_padded
    hidden = model(batch)
    if not ends_early:
        hidden = hidden[batch.logits_indices]
    return [hidden, *(cache.nan_to_num() for pair in paged.kv_caches for cache in pair)]


@torch.inference_mode()
@pytest.mark.parametrize("late_from", ["0", "1", "4"], ids=lambda rows: f"late from {rows}")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wanted_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, late_from: str
) -> None:
    """Also where norms come late in the step, and not for the few tokens that go on."""
    monkeypatch.setenv("NVCLI_LATE_NORM_ROWS", late_from)
    write_tiny_checkpoint(tmp_path, **KINDS[kind])
    model = load_tiny(tmp_path)
    model.fold_norms()
    for is_padded in (False, True):
        whole = run(model, ends_early=False, is_padded=is_padded)
        short = run(model, ends_early=True, is_padded=is_padded)
        assert short[0].shape == (len(ROWS), model.config.hidden_size)
        for got, want in zip(short, whole, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@torch.inference_mode()
def test_padding_goes_to_no_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A padding row has no token of its own: its index names the last one of another row."""
    write_tiny_checkpoint(tmp_path, **KINDS["experts"])
    model = load_tiny(tmp_path)
    route, masks = kernels.route, list[list[bool]]()

    def routed(*args: Any, is_token: torch.Tensor, **options: Any) -> Any:
        masks.append(is_token.tolist())
        return route(*args, is_token=is_token, **options)

    monkeypatch.setattr(kernels, "route", routed)
    batch = make_forward_batch([*ROWS, Rows([], 0, [0])], PagedModel(model).kv_caches)
    batch.ends_early = batch.is_padded = True
    assert model(batch).shape[0] == len(ROWS) + 1
    *_, before, last = masks
    assert before == [True] * sum(batch.query_lens)
    assert last == [True, True, True, False]
