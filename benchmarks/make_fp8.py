"""Write a dense checkpoint again with fp8 weights, as Qwen3-*-FP8 has them.

    python -m benchmarks.make_fp8 FROM TO

The layers' projections become float8_e4m3fn with a bfloat16 scale for each block of 128 x 128, the
largest weight of a block being 448; everything else is copied. FROM: a folder, or `demo`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvcli.models.resolve import resolve_model
from nvcli.types import FP8_BLOCK

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    "modules_to_not_convert": ["lm_head"],
}


def quantise(weight: Tensor, scale_dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """([N, K] fp8, [N / 128, K / 128] scales): weight is their product, up to rounding."""
    rows, columns = (size // FP8_BLOCK for size in weight.shape)
    blocks = weight.float().view(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scales = (blocks.abs().amax((1, 3)) / FP8_MAX).to(scale_dtype)
    scaled = (weight.float() / spread(scales)).nan_to_num(0.0)  # a block of zeros
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8), scales


def spread(scales: Tensor) -> Tensor:
    """[N / 128, K / 128] -> [N, K] float32"""
    return scales.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)


def quantised(
    tensors: dict[str, Tensor], scale_dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """The same checkpoint with its layers' projections in fp8."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        found[name], found[f"{name}_scale_inv"] = quantise(tensors[name], scale_dtype)
    return found


def write_fp8(source: Path, target: Path) -> None:
    """source: a folder of any number of safetensors files; target: is made, with one."""
    target.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    save_file(quantised(tensors), target / "model.safetensors", metadata={"format": "pt"})
    for file in source.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, target / file.name)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = QUANTIZATION
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    write_fp8(resolve_model(args.source), args.target)


if __name__ == "__main__":
    main()
