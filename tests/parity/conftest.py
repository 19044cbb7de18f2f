"""A tiny random Qwen3 with tokenizer, and LLMs over it. Block size 4, vocabulary 300 of which the
tokenizer knows 290, head_dim 32 with 4 heads of hidden 64. `both_models` runs a test on one with
experts too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nvcli.llm import LLM
from tests.text.tiny_tokenizer import write_tokenizer
from tests.tiny import write_tiny_checkpoint

VOCAB = 290
DEVICE = os.environ.get("NVCLI_TEST_DEVICE", "cpu")  # read before the fixtures clear it

both_models = pytest.mark.parametrize(
    "checkpoint", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"], ids=["dense", "moe"], indirect=True
)


@pytest.fixture(scope="session")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(folder, architecture=getattr(request, "param", "Qwen3ForCausalLM"))
    write_tokenizer(folder, vocab_size=VOCAB)
    # No EOS: a random model must run to its limit unless a test says otherwise.
    set_eos(folder, [])
    return folder


def set_eos(folder: Path, token_ids: list[int]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("eos_token_id", None)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": token_ids}))
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer_config.pop("eos_token", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


@pytest.fixture
def make_llm(checkpoint: Path) -> Iterator[Callable[..., LLM]]:
    """LLMs over the tiny checkpoint; closed after the test, every block back in the pool."""
    made: list[LLM] = []

    def make(folder: Path = checkpoint, **options: Any) -> LLM:
        defaults: dict[str, Any] = {
            "device": DEVICE,
            "dtype": "float32",
            "block_size": 4,
            "num_blocks": 1000,
            "max_model_len": 256,
            "max_num_seqs": 16,
        }
        llm = LLM(str(folder), **{**defaults, **options})
        made.append(llm)
        return llm

    yield make
    for llm in made:
        stats = llm.stats()
        assert stats.num_free_blocks == stats.num_blocks
        llm.close()
