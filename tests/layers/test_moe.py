"""The router's and the experts' place in a layer: what is padding, and what reaches the kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.builders_torch import Rows, load_tiny, make_forward_batch, make_kv_caches
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.torch
MOE = "Qwen3MoeForCausalLM"


def test_padding_is_told_by_rows_and_by_tokens() -> None:
    caches = [(torch.zeros(8, 4, 1, 2), torch.zeros(8, 4, 1, 2))]
    batch = make_forward_batch([Rows([5, 6, 7], 0, [0]), Rows([8], 4, [1, 2])], caches)
    assert batch.is_token() is None
    longer = replace(batch, input_ids=torch.zeros(7), is_padded=True)
    found = longer.is_token()
    assert found is not None
    assert found.tolist() == [True] * 4 + [False] * 3
    lens = torch.tensor([3, 0, 1, 0], dtype=torch.int32)
    decoding = replace(batch, seq_lens=lens, is_padded=True, is_decode=True).is_token()
    assert decoding is not None
    assert decoding.tolist() == [True, False, True, False]


@torch.inference_mode()
def test_padding_is_no_experts_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every layer the padded tokens of a step go to no expert, and change no other token."""
    from nvcli import kernels

    write_tiny_checkpoint(tmp_path, architecture=MOE)
    model = load_tiny(tmp_path)
    caches = make_kv_caches(model.config)
    batch = make_forward_batch([Rows([5, 6, 7], 0, [0])], caches)
    plain = model(batch)
    chosen: list[torch.Tensor] = []
    experts = kernels.experts

    def watched(x: torch.Tensor, expert_ids: torch.Tensor, *args: object, **more: object) -> object:
        chosen.append(expert_ids)
        return experts(x, expert_ids, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "experts", watched)
    rows = [Rows([5, 6, 7], 0, [0]), Rows([0, 0], 0, [1], is_stored=True)]
    padded = make_forward_batch(rows, caches)
    padded.cu_seqlens_q[-1] = 3
    padded.seq_lens[-1] = 0
    padded.key_lens[-1] = 0
    padded.is_padded = True
    torch.testing.assert_close(model(padded)[:3], plain, atol=1e-5, rtol=0)
    assert len(chosen) == 2
    for expert_ids in chosen:
        assert (expert_ids[:3] < 6).all()
        assert (expert_ids[3:] == 6).all()


def test_deterministic_reaches_the_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nvcli import kernels
    from nvcli.layers.linear import Linear

    write_tiny_checkpoint(tmp_path, architecture=MOE)
    model = load_tiny(tmp_path)
    told: list[object] = []
    experts = kernels.experts

    def watched(*args: torch.Tensor, deterministic: bool, **options: bool) -> torch.Tensor:
        told.append(deterministic)
        return experts(*args, deterministic=deterministic, **options)

    monkeypatch.setattr(kernels, "experts", watched)
    for on in (False, True):
        for module in model.modules():
            if isinstance(module, Linear):  # as the runner sets it
                module.deterministic = on
        with torch.inference_mode():
            model(make_forward_batch([Rows([5], 0, [0])], make_kv_caches(model.config)))
    assert told == [False, False, True, True]
