"""Tokens per second on the CPU beside transformers' `generate`, on a trained model, float32.

    python -m benchmarks.make_smollm2 models/smollm2-135m
    python -m benchmarks.cpu_generate models/smollm2-135m

Prompts of mixed length at batch 1 and 8, the same token ids and output lengths for both, greedy,
end of sequence ignored; each runs once to warm up and then `--repeat` times in turn, so that both
see the same machine. The texts are compared as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.rows import write_row
from nvcli import LLM, SamplingParams

PASSAGE = (
    "The lighthouse keeper counted the waves as they came in. Each one carried a little of the "
    "sea's patience with it, and each one left a little on the rocks. In the evening he wrote the "
    "number into a book that nobody else had ever opened, closed it, and lit the lamp. "
)
WORDS_PER_PROMPT = (6, 20, 45, 80, 110, 150, 190, 240)


def make_prompts(llm: LLM, batch: int) -> list[list[int]]:
    words = (PASSAGE * 10).split()
    lengths = WORDS_PER_PROMPT if batch > 1 else (80,)
    return [llm.tokenizer.encode(" ".join(words[:n])) for n in lengths[:batch]]


def run_nvcli(llm: LLM, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[Any]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return time.perf_counter() - start, [list(o.token_ids) for o in outputs]


def run_transformers(
    model: Any, prompts: list[list[int]], num_tokens: int
) -> tuple[float, list[Any]]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            use_cache=True,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
    elapsed = time.perf_counter() - start
    return elapsed, output[:, longest:].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a Qwen3 folder")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens a prompt")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    metrics: dict[str, Any] = {}
    with LLM(args.model, device="cpu", max_model_len=2048, enable_prefix_caching=False) as llm:
        for batch in (1, 8):
            prompts = make_prompts(llm, batch)
            run_nvcli(llm, prompts, 8)
            run_transformers(reference, prompts, 8)
            ours, theirs, texts = [], [], ([], [])
            for _ in range(args.repeat):
                seconds, left = run_nvcli(llm, prompts, args.tokens)
                ours.append(batch * args.tokens / seconds)
                seconds, right = run_transformers(reference, prompts, args.tokens)
                theirs.append(batch * args.tokens / seconds)
                texts = (left, right)
            same = sum(a == b for a, b in zip(*texts, strict=True))
            nvcli, peer = statistics.median(ours), statistics.median(theirs)
            metrics[f"batch_{batch}"] = {
                "nvcli_tok_s": round(nvcli, 2),
                "transformers_tok_s": round(peer, 2),
                "ratio": round(nvcli / peer, 3),
                "equal_outputs": f"{same}/{batch}",
                "prompt_tokens": [len(p) for p in prompts],
            }
            print(
                f"batch {batch}: nvcli {nvcli:.1f} tok/s, transformers {peer:.1f} tok/s", flush=True
            )
    write_row(
        "cpu_generate",
        metrics=metrics,
        config={
            "model": "SmolLM2-135M in Qwen3's architecture",
            "dtype": "float32",
            "output_tokens": args.tokens,
            "repeat": args.repeat,
            "threads": torch.get_num_threads(),
        },
        peer="transformers generate, use_cache",
    )


if __name__ == "__main__":
    main()
