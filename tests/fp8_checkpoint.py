"""Tiny checkpoints with fp8 weights as Qwen3-*-FP8 has them, and what they mean in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.make_fp8 import FP8, QUANTIZATION, quantised, spread
from tests.tiny import write_tensors, write_tiny_checkpoint

# Everything a multiple of 128, and more than one block of it where that may go wrong.
TINY: dict[str, Any] = {
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 128,
    "intermediate": 512,
    "layers": 2,
}


def write_fp8_checkpoint(
    folder: Path, *, shards: int = 1, scale_dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> dict[str, Tensor]:
    """A tiny checkpoint in fp8. Returns the tensors written, by checkpoint name."""
    tensors = write_tiny_checkpoint(folder, shards=shards, **(TINY | changes))
    tensors = quantised(tensors, scale_dtype)
    write_tensors(folder, tensors, shards=shards)
    change_config(folder, quantization_config=QUANTIZATION)
    return tensors


def dense(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the tensors of an fp8 checkpoint mean, in float32."""
    return {
        name: tensor.float() * spread(tensors[f"{name}_scale_inv"])
        if tensor.dtype == FP8
        else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }


def write_dense_twin(folder: Path, twin: Path, tensors: dict[str, Tensor]) -> Path:
    """The same numbers without fp8, for engines that have none."""
    twin.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            (twin / file.name).write_bytes(file.read_bytes())
    change_config(twin, quantization_config=None, torch_dtype="float32")
    write_tensors(twin, dense(tensors))
    return twin


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
