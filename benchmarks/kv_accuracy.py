"""What an fp8 KV cache costs in accuracy: the same text and prompts, with the cache as it is by
default and in fp8.

    python -m benchmarks.kv_accuracy
    python -m benchmarks.kv_accuracy FOLDER --device cuda --dtype bfloat16 --text FILE ...

Text is cut into windows, and every token of a window but the first is predicted from those before
it: perplexity, and how often the likeliest token is the same (no error runs on into the next
position). Beside that, greedy answers to prompts, compared token for token. Random weights say
nothing here. Exits with 1 when perplexity rises by more than 2 % or the likeliest token is the same
at fewer than 90 % of the positions: the type's three bits of mantissa cost less than that, heads
that overflow cost tens of percent.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.greedy_parity import QUESTIONS
from benchmarks.rows import write_row
from nvcli import LLM, Message, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "demo-model" / "results" / "examples.jsonl"
MAX_PERPLEXITY_RATIO = 1.02
MIN_AGREEMENT = 0.9
SIDES = ("auto", "fp8")


@dataclass(frozen=True)
class Side:
    """What one cache type gave."""

    kv_cache_dtype: str
    weights_dtype: str
    attention: str
    logprobs: list[float]  # of every predicted token of the text
    likeliest: list[int]  # at the same positions
    answers: list[tuple[int, ...]]
    answer_logprobs: list[list[float]]  # of their tokens


def windows_of(args: argparse.Namespace, tokenizer: Tokenizer) -> list[tuple[list[int], int]]:
    """Token ids, and from which on they are predicted: of the files given; else, for the built-in
    model, its answers in conversations, and this repository's documentation for others.
    """
    if args.text is None and args.model == "demo":
        rows = [json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines()]
        prompts = [tokenizer.encode_chat([Message("user", row["question"])]) for row in rows]
        answers = [tokenizer.encode(row["want"]) for row in rows]
        return [(a + b, len(a)) for a, b in zip(prompts, answers, strict=True)]
    docs = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    ids = [
        token_id
        for path in (map(Path, args.text) if args.text else docs)
        for token_id in tokenizer.encode(path.read_text(encoding="utf-8"), parse_special=False)
    ]
    starts = range(0, min(len(ids), args.windows * args.window) - 1, args.window)
    return [(ids[start : start + args.window], 1) for start in starts]


def run_side(
    args: argparse.Namespace, kv_cache_dtype: str, model: str | None = None, **options: Any
) -> Side:
    """model: in place of the one whose text it is; options: more of `EngineConfig`'s fields"""
    with LLM(
        model or args.model,
        device=args.device,
        dtype=args.dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max(args.window, 1024) + args.tokens,
        attention_backend=args.attention_backend,
        **options,
    ) as llm:
        params = SamplingParams(max_tokens=0, prompt_logprobs=1)
        logprobs, likeliest = [], []
        windows = windows_of(args, llm.tokenizer)
        outputs = llm.generate([ids for ids, _ in windows], params)
        for output, (_, first) in zip(outputs, windows, strict=True):
            for entry in (output.prompt_logprobs or ())[first:]:
                assert entry is not None, "all but the first have one"
                logprobs.append(entry.logprob)
                likeliest.append(entry.top[0][0])
        greedy = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, logprobs=0)
        prompts = [llm.tokenizer.encode_chat([Message("user", q)]) for q in QUESTIONS]
        outputs = llm.generate(prompts, greedy)
        answers = [tuple(output.token_ids) for output in outputs]
        answer_logprobs = [[e.logprob for e in output.logprobs or ()] for output in outputs]
        startup = llm.startup
        kinds = (startup.kv_cache_dtype, startup.weights_dtype, startup.attention_backend)
        return Side(*kinds, logprobs, likeliest, answers, answer_logprobs)


def compare(exact: Side, fp8: Side) -> dict[str, Any]:
    perplexities = [math.exp(-sum(s.logprobs) / len(s.logprobs)) for s in (exact, fp8)]
    same = [a == b for a, b in zip(exact.likeliest, fp8.likeliest, strict=True)]
    common = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(exact.answers, fp8.answers, strict=True)
    ]
    moved = [abs(a - b) for a, b in zip(exact.logprobs, fp8.logprobs, strict=True)]
    return {
        "positions": len(same),
        "perplexity": round(perplexities[0], 4),
        "perplexity_fp8": round(perplexities[1], 4),
        "perplexity_ratio": round(perplexities[1] / perplexities[0], 5),
        "same_likeliest": round(sum(same) / len(same), 5),
        "mean_abs_logprob_change": round(sum(moved) / len(moved), 5),
        "answers": len(common),
        "answers_equal": sum(n == len(x) for n, x in zip(common, exact.answers, strict=True)),
        "mean_tokens_before_difference": round(sum(common) / len(common), 2),
    }


def is_within_the_bars(metrics: dict[str, Any]) -> bool:
    is_likely = metrics["perplexity_ratio"] <= MAX_PERPLEXITY_RATIO
    return is_likely and bool(metrics["same_likeliest"] >= MIN_AGREEMENT)


def arguments(
    description: str, more: Callable[[argparse.ArgumentParser], object] | None = None
) -> argparse.Namespace:
    """more: adds what one command has and the others have not"""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", nargs="?", default="demo", help="a folder; default: built in")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--text", nargs="+", help="files to predict")
    parser.add_argument("--window", type=int, default=512, help="tokens predicted together")
    parser.add_argument("--windows", type=int, default=40, help="at most so many")
    parser.add_argument("--tokens", type=int, default=64, help="of a greedy answer")
    if more is not None:
        more(parser)
    return parser.parse_args()


def config_of(args: argparse.Namespace, side: Side) -> dict[str, Any]:
    return {
        "model": str(args.model).rstrip("/").rsplit("/", 1)[-1],
        "device": args.device,
        "dtype": args.dtype,
        "weights_dtype": side.weights_dtype,
        "attention": side.attention,
        "window": args.window,
        "text": "given" if args.text else "demo examples" if args.model == "demo" else "docs",
        "tokens": args.tokens,
    }


def main() -> int:
    args = arguments(__doc__.splitlines()[0])
    exact, fp8 = (run_side(args, kind) for kind in SIDES)
    metrics = compare(exact, fp8)
    kinds = {"kv_cache_dtypes": [exact.kv_cache_dtype, fp8.kv_cache_dtype]}
    write_row("kv_accuracy", metrics=metrics, config=config_of(args, exact) | kinds)
    is_good = is_within_the_bars(metrics)
    print("fp8 cache:", "within the bars" if is_good else "BEYOND THE BARS")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
