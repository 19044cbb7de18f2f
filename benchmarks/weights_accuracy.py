"""What fp8 weights cost in accuracy: the same text and prompts, with a dense checkpoint and the
same in fp8 (`make_fp8`). As `kv_accuracy`, whose bars these are.

    python -m benchmarks.weights_accuracy
    python -m benchmarks.weights_accuracy FOLDER --device cuda --dtype bfloat16 --text FILE ...

On the CPU also what activations in fp8 would cost besides, which the engine does not have
(docs/decisions/0009): each token's, in groups of 128 columns, the largest being 448.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.kv_accuracy import arguments, compare, config_of, is_within_the_bars, run_side
from benchmarks.make_fp8 import FP8, FP8_MAX, write_fp8
from benchmarks.rows import write_row
from nvcli import kernels
from nvcli.models.config import ModelConfig
from nvcli.models.resolve import resolve_model
from nvcli.types import FP8_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def rounded(x: Tensor) -> Tensor:
    """[T, K] as fp8 with a scale for a token and 128 columns would have it."""
    groups = x.float().view(len(x), -1, FP8_BLOCK)
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return ((groups / scales).to(FP8).float() * scales).view_as(x).to(x.dtype)


@contextmanager
def fp8_activations(vocab_size: int) -> Iterator[None]:
    """Inputs of all products but the head's are rounded."""
    plain = kernels.linear

    def linear(x: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        is_head = len(weight) == vocab_size
        return plain(x if is_head else rounded(x), weight, *args, **options)

    kernels.linear = linear
    try:
        yield
    finally:
        kernels.linear = plain


def main() -> int:
    args = arguments(__doc__.splitlines()[0])
    source = resolve_model(args.model)
    exact = run_side(args, "auto")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "fp8"
        write_fp8(source, folder)
        fp8 = run_side(args, "auto", str(folder))
        metrics: dict[str, Any] = {"weights": compare(exact, fp8)}
        if torch.device(args.device).type == "cpu":
            with fp8_activations(ModelConfig.from_hf(source).vocab_size):
                both = run_side(args, "auto", str(folder))
            metrics["weights_and_activations"] = compare(exact, both)
    write_row("weights_accuracy", metrics=metrics, config=config_of(args, fp8))
    is_good = is_within_the_bars(metrics["weights"])
    print("fp8 weights:", "within the bars" if is_good else "BEYOND THE BARS")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
