"""Rotary tables against transformers', up to position 100,000."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nvcli.layers.rotary import RotaryEmbedding, inverse_frequencies
from nvcli.models.config import ModelConfig
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.torch

ORIGINAL = 32_768
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "yarn": YARN,
    "yarn with options": YARN | {"attention_factor": 1.3, "beta_fast": 20, "beta_slow": 2},
    "yarn without rounding": YARN | {"truncate": False},
    "yarn with mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn by its old name": {("type" if k == "rope_type" else k): v for k, v in YARN.items()},
    "llama3": YARN
    | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
POSITIONS = [0, 1, 1000, ORIGINAL - 1, ORIGINAL, 100_000]


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=list(SCALINGS))
@pytest.mark.parametrize("head_dim", [32, 128])
def test_tables_equal_transformers(
    tmp_path: Path, scaling: dict[str, Any] | None, head_dim: int
) -> None:
    from transformers import AutoConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    write_tiny_checkpoint(
        tmp_path,
        head_dim=head_dim,
        rope_theta=1e6,
        rope_scaling=scaling,
        max_position_embeddings=131_072,
    )
    theirs = Qwen3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    want_cos, want_sin = theirs(torch.zeros(1, 1, 1), torch.tensor([POSITIONS]))
    config = ModelConfig.from_hf(tmp_path)
    assert torch.equal(inverse_frequencies(config.rope, head_dim), theirs.inv_freq)

    rotary = RotaryEmbedding(
        config.rope, head_dim, config.max_model_len, device=torch.device("cpu")
    )
    cos, sin = rotary.cos_sin[POSITIONS].unbind(1)
    sign = torch.cat([-torch.ones(head_dim // 2), torch.ones(head_dim // 2)])
    torch.testing.assert_close(cos, want_cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(sin * sign, want_sin[0], atol=1e-6, rtol=0)
    # `kernels.rope_norm_store` reads one half of each row.
    cos, sin = rotary.cos_sin.unbind(1)
    assert torch.equal(cos[:, : head_dim // 2], cos[:, head_dim // 2 :])
    assert torch.equal(sin[:, : head_dim // 2], -sin[:, head_dim // 2 :])


def test_yarn_with_an_empty_ramp_divides_by_nothing(tmp_path: Path) -> None:
    scaling = YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}
    write_tiny_checkpoint(tmp_path, rope_scaling=scaling, max_position_embeddings=1024)
    frequencies = inverse_frequencies(ModelConfig.from_hf(tmp_path).rope, 32)
    assert frequencies.isfinite().all()
    assert (frequencies.diff() < 0).all()
