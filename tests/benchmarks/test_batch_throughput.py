"""The batch benchmark runs, on the simulated device."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import batch_throughput, simulated
from nvcli.config import EngineConfig
from nvcli.engine import model_runner
from nvcli.llm import LLM
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.torch


def test_both_sides_make_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "HOST_S", 0.0)
    monkeypatch.setattr(simulated.SimulatedRunner, "step_s", 1e-4)
    monkeypatch.setattr(model_runner, "ModelRunner", simulated.SimulatedRunner)
    write_tiny_checkpoint(tmp_path / "model", max_position_embeddings=256)
    args = argparse.Namespace(
        records=80,
        max_input=64,
        max_output=32,
        prefix=16,
        groups=4,
        order="input",
        window=None,
        seed=0,
        passes=2,
    )
    folder = tmp_path / "work"
    folder.mkdir()
    config = EngineConfig(model=str(tmp_path / "model"), load_format="dummy", max_num_seqs=16)
    with LLM(config=config) as llm:
        sides = batch_throughput.measure(llm, args, folder)
    tokens = {run.completion_tokens for runs in sides.values() for run in runs}
    assert len(tokens) == 1
    assert all(run.cached_tokens > 0 for runs in sides.values() for run in runs)
    assert (sides["batch"][0].estimate_s or 0) > 0
    assert sides["batch"][0].eta_errors().keys() <= {"5%", "10%", "25%", "50%", "75%", "90%"}
