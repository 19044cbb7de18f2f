"""Does greedy text equal transformers'? 20 prompts of 64 tokens on a trained model, every way that
nvcli can come to them: alone, in one batch, from the prefix cache, in chunks, after preemption.

    python -m benchmarks.greedy_parity models/smollm2-135m
    python -m benchmarks.greedy_parity models/smollm2-135m --device cuda --dtype bfloat16

In float32 on the CPU every text must be equal, and the exit code says so. In bfloat16 two
implementations round differently: the row then reports, for each text that leaves the reference,
the position and how far apart the reference's logits of the two tokens were there.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.rows import write_row
from nvcli import LLM, Message, SamplingParams

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many days are in a week?",
    "Name three colours.",
    "Why is the sky blue?",
    "Translate 'good morning' into French.",
    "What do bees make?",
    "Give me a recipe for tea.",
    "Who wrote Romeo and Juliet?",
    "What is two plus two?",
    "Explain gravity to a child.",
    "List the months of spring.",
    "What is a compiler?",
    "Tell me a short story about a dog.",
    "How do I boil an egg?",
    "What is the largest planet?",
    "Write a haiku about rain.",
    "What is the opposite of hot?",
    "Describe a lighthouse.",
    "What should I read next?",
)

WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "batch": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "preempted": {"num_blocks": 24},
    "run-ahead off": {"run_ahead": False},
    "run-ahead on": {"run_ahead": True},
    "graphs off": {"enforce_eager": True},  # the CPU has none
}


@dataclass(frozen=True)
class Reference:
    """transformers' greedy continuation of one prompt, with the logits it chose from."""

    token_ids: list[int]
    logits: torch.Tensor  # [num_tokens, V], float32


def reference_of(model: Any, prompt: list[int], num_tokens: int) -> Reference:
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
        )
    logits = torch.cat([step.float() for step in output.logits]).cpu()
    return Reference(output.sequences[0, len(prompt) :].tolist(), logits)


def first_difference(ours: list[int], reference: Reference) -> dict[str, float] | None:
    for position, (a, b) in enumerate(zip(ours, reference.token_ids, strict=True)):
        if a != b:
            row = reference.logits[position]
            return {"position": position, "gap": round(float(row[b] - row[a]), 4)}
    return None


def run_way(llm: LLM, prompts: list[list[int]], num_tokens: int, *, alone: bool) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    if alone:
        return [list(llm.generate(p, params)[0].token_ids) for p in prompts]
    return [list(o.token_ids) for o in llm.generate(prompts, params)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a Qwen3 folder")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model.to(args.device)
    prompts: list[list[int]] = []
    references: list[Reference] = []
    metrics: dict[str, Any] = {}
    backend = ""
    for way in args.ways:
        options = WAYS[way]
        with LLM(
            args.model,
            device=args.device,
            dtype=args.dtype,
            attention_backend=args.attention_backend,
            block_size=args.block_size,
            max_model_len=256,
            **options,
        ) as llm:
            backend = llm.startup.attention_backend
            if not prompts:
                tokenizer = llm.tokenizer
                prompts = [tokenizer.encode_chat([Message("user", q)]) for q in QUESTIONS]
                references = [reference_of(model, p, args.tokens) for p in prompts]
            texts = run_way(llm, prompts, args.tokens, alone=way == "alone")
            if way == "batch":  # once more, now that every prompt is in the prefix cache
                cached = run_way(llm, prompts, args.tokens, alone=False)
                assert cached == texts or args.dtype != "float32", "a prefix hit changed a text"
            num_preemptions = llm.stats().num_preemptions
        leaves = [
            {"prompt": i, **difference}
            for i, (text, ref) in enumerate(zip(texts, references, strict=True))
            if (difference := first_difference(text, ref)) is not None
        ]
        metrics[way] = {"equal": len(prompts) - len(leaves), "leaves": leaves}
        if way == "preempted":
            metrics[way]["num_preemptions"] = num_preemptions
        print(f"{way}: {len(prompts) - len(leaves)} of {len(prompts)} equal", flush=True)
    gaps = Counter(round(leaf["gap"], 2) for way in metrics.values() for leaf in way["leaves"])
    metrics["largest_gap"] = max(gaps, default=0.0)
    write_row(
        "greedy_parity",
        metrics=metrics,
        config={
            "model": str(args.model).rstrip("/").rsplit("/", 1)[-1],
            "device": args.device,
            "dtype": args.dtype,
            "attention_backend": backend,
            "block_size": args.block_size,
            "prompts": len(prompts),
            "tokens": args.tokens,
        },
        peer=f"transformers generate, {args.dtype}",
    )
    is_exact = all(
        way["equal"] == len(prompts) for way in metrics.values() if isinstance(way, dict)
    )
    return int(args.dtype == "float32" and args.device == "cpu" and not is_exact)


if __name__ == "__main__":
    sys.exit(main())
