"""How far each attention backend's log-probabilities lie from PyTorch's in float32, on a trained
model: no further than twice as far as PyTorch's attention does with the same dtype.

    python -m benchmarks.attention_accuracy --device cuda --dtype bfloat16
    python -m benchmarks.attention_accuracy FOLDER --device cuda --backends triton fa3 --text FILE

Text and questions are those of `kv_accuracy`: `prompts` are the tokens of the text, computed in
steps of thousands, `answers` those of greedy answers, one a row and step. An answer counts up to
where it leaves that of float32, as all before it is the same text. The distance is the mean of how
much the log-probability of a token differs. A backend that cannot run here is named and left out.
Exits with 1 when one is too far away.
"""

from __future__ import annotations

import argparse
import sys
from itertools import takewhile
from typing import Any

from benchmarks.kv_accuracy import Side, arguments, config_of, run_side
from benchmarks.rows import write_row
from nvcli.errors import NvcliError

BACKENDS = ("triton", "fa3", "fa2", "auto")
BLOCKS = {"fa2": {"block_size": 256}}  # where a backend does not know the usual ones
MOST = 2.0  # times PyTorch's distance, and for a distance of nothing as much as float32 rounds
LEAST = 1e-5


def distances(side: Side, exact: Side) -> dict[str, float]:
    """Of both kinds of tokens, and how many of the answers' there were to compare."""
    moved = [abs(a - b) for a, b in zip(side.logprobs, exact.logprobs, strict=True)]
    answered: list[float] = []
    for ids, want, a, b in zip(
        *(side.answers, exact.answers), *(side.answer_logprobs, exact.answer_logprobs), strict=True
    ):
        same = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, want, strict=True))
        )
        answered += [abs(x - y) for x, y in zip(a[:same], b[:same], strict=True)]
    return {
        "prompts": sum(moved) / len(moved),
        "answers": sum(answered) / max(1, len(answered)),
        "answer_tokens": len(answered),
    }


def is_close(found: dict[str, float], plain: dict[str, float]) -> bool:
    """Whether a backend is as near as it has to be. plain: PyTorch's distances"""
    kinds = ("prompts", "answers")
    return bool(found["answer_tokens"]) and all(
        found[kind] <= MOST * plain[kind] + LEAST for kind in kinds
    )


def side_of(args: argparse.Namespace, backend: str, dtype: str) -> Side:
    changed = {"attention_backend": backend, "dtype": dtype}
    options = BLOCKS.get(backend, {})
    return run_side(argparse.Namespace(**{**vars(args), **changed}), "auto", **options)


def main() -> int:
    args = arguments(
        __doc__.partition("\n\n")[0],
        lambda parser: parser.add_argument("--backends", nargs="+", default=list(BACKENDS)),
    )
    exact, plain = side_of(args, "torch", "float32"), side_of(args, "torch", args.dtype)
    metrics: dict[str, Any] = {"torch": distances(plain, exact), "tokens": len(exact.logprobs)}
    is_good = True
    for backend in args.backends:
        try:
            side = side_of(args, backend, args.dtype)
        except NvcliError as error:
            print(f"{backend}: {error.message}")
            continue
        found = metrics[backend] = distances(side, exact)
        near = is_close(found, metrics["torch"])
        is_good &= near
        times = [found[kind] / max(metrics["torch"][kind], 1e-9) for kind in ("prompts", "answers")]
        print(
            f"{backend}: prompts {times[0]:.2f}, answers {times[1]:.2f} times PyTorch's distance "
            f"from float32{'' if near else ', TOO FAR'}",
            flush=True,
        )
    write_row("attention_accuracy", metrics=metrics, config=config_of(args, plain))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
