"""First things first on a GPU: do our kernels compute what they should, is captured text the eager
text, and how fast is it. One process, stages in the order given, every line printed at once, so
that a run that is cut short has said what it knew.

    python -m benchmarks.engine.gpu_check kernels speed equal bandwidth

    kernels    each kernel at the shapes of Qwen3-0.6B, experts at those of 30B-A3B, against its
               float32 reference
    speed      workloads B, C and A on random weights of 0.6B (`--workloads`)
    equal      greedy and seeded text of the built-in model: graphs, run-ahead and dependent launch
               on and off, and our attention beside PyTorch's
    bandwidth  GB/s of the kernels whose floor is bytes
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.stopwatch import say

if TYPE_CHECKING:
    from collections.abc import Callable


def attempt(name: str, check: Callable[[], Any]) -> Any:
    """Run a check, say how it went, and go on."""
    start = time.perf_counter()
    try:
        result = check()
    except Exception:  # noqa: BLE001 - the next check may still tell something
        say(f"{name}: FAILED\n{traceback.format_exc(limit=-4)}")
        return None
    took = time.perf_counter() - start
    say(f"{name}: ok ({took:.2f} s)" + (f" {result}" if result is not None else ""))
    return result


# --- kernels -------------------------------------------------------------------------------------


def check_kernels() -> None:
    import torch

    from tests.kernels import test_attention_plan as plan
    from tests.kernels import test_deterministic_kernels as fixed
    from tests.kernels import test_early_keys as early
    from tests.kernels import test_fp8_cache as fp8
    from tests.kernels import test_fp8_weights as fp8_weights
    from tests.kernels import test_gemm as gemm
    from tests.kernels import test_gemv as gemv
    from tests.kernels import test_moe as moe
    from tests.kernels import test_row_kernels as rows
    from tests.kernels import test_sampling_kernels as sampling
    from tests.kernels import test_shared_attention as shared
    from tests.kernels import test_skinny as skinny
    from tests.kernels import test_triton_attention as attention

    bf16, heads = torch.bfloat16, (16, 8, 128, 16)
    checks: dict[str, Callable[[], Any]] = {
        "norm": lambda: rows.check_norm((7, 1024), bf16, "cuda"),
        "look up": lambda: rows.check_look_up((9, 151_936, 1024, 128), bf16, "cuda", None),
        "swiglu": lambda: rows.check_swiglu((5, 3072), bf16, "cuda"),
        "rotary store": lambda: rows.check_rotary((9, 16, 8, 128, 16, True, True), bf16, "cuda"),
        "prepare": lambda: sampling.check_prepare("cuda"),
        "hand over": lambda: sampling.check_hand_over("cuda"),
        "noise": lambda: sampling.check_uniforms("cuda"),
        "sampling": lambda: sampling.check_sampling(151_936, 151_936, bf16, "cuda"),
        "dependent launch": rows.test_dependent_launch_changes_nothing,
        "padding": lambda: attention.check_padding(bf16, "cuda"),
        "padding, shared keys": lambda: shared.check_padding(bf16, "cuda"),
    }
    for shape in ((1024, 2048), (151_936, 1024)):
        checks[f"linear, {shape}"] = partial(gemv.check_linear, shape, bf16, "cuda")
    checks["norm and linear"] = partial(
        gemv.check_norm, (3072, 1024), bf16, "cuda", has_residual=True
    )
    for size in (1024, 2048, 3072):
        checks[f"skinny, {size} columns"] = partial(skinny.check, (8, 1024, size), bf16, "cuda")
    for case in gemm.CUDA_CASES:
        checks[f"tiles, {case}"] = partial(gemm.check, case, bf16, "cuda")
    for dtype in (bf16, torch.float16):
        checks[f"fp8 weights, {dtype}"] = partial(fp8_weights.check_on_cuda, dtype)
    checks["tiles, dependent launch"] = gemm.test_dependent_launch_changes_nothing
    checks["norm of addends"] = partial(gemm.check_norm_of_addends, (6, 32, 1024), bf16, "cuda")
    for name, case in attention.CASES.items():
        checks[f"attention, {name}"] = partial(attention.check, case, heads, bf16, "cuda")
        checks[f"deterministic, {name}"] = partial(fixed.check_attention, case, heads, bf16, "cuda")
        checks[f"fp8, {name}"] = partial(fp8.check_attention, case, heads, bf16, "cuda")
    for name, cut_case in plan.CASES.items():
        checks[f"work lists, {name}"] = partial(plan.check, *cut_case, "cuda")
    for name, keys in early.CUDA_CASES.items():
        checks[f"early keys, {name}"] = partial(early.check, keys, heads)
        checks[f"early keys, fp8, {name}"] = partial(early.check, keys, heads, has_fp8=True)
    checks["early keys, captured"] = early.check_captured_steps
    checks["early keys, captured, fp8"] = partial(early.check_captured_steps, has_fp8=True)
    for name, shared_case in shared.CUDA_CASES.items():
        args = (shared_case, heads, bf16, "cuda")
        checks[f"shared keys, {name}"] = partial(shared.check, *args, is_padded=True)
        checks[f"shared keys, eager, {name}"] = partial(shared.check, *args)
        checks[f"shared keys, fp8, {name}"] = partial(shared.check, *args, has_fp8=True)
    for shape in fixed.CUDA_PRODUCTS:
        checks[f"deterministic, {shape}"] = partial(fixed.check_product, shape, bf16, "cuda")
    for moe_shape in moe.CUDA_SHAPES:
        checks[f"experts, {moe_shape}"] = partial(
            moe.check_experts, moe_shape, "random", bf16, "cuda"
        )
    checks["route"] = partial(moe.check_route, (300, 128, 8), bf16, "cuda")
    checks["groups"] = partial(moe.check_groups, (256, 128, 8, 8, 8), "random", "cuda", 32)
    checks["fp8 stores"] = lambda: fp8.check_stores("cuda", bf16)
    with torch.inference_mode():
        for name, check in checks.items():
            attempt(name, check)


# --- speed ---------------------------------------------------------------------------------------


def check_speed(workloads: str, options: dict[str, Any], model: str) -> None:
    from benchmarks.engine.engines import Nvcli
    from benchmarks.engine.measure import measure
    from benchmarks.engine.workloads import SHAPES
    from benchmarks.rows import write_row

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPES[model].config()))
        engine = attempt("load", lambda: Nvcli(folder, 4096, options))
    if engine is None:
        return
    say(f"startup {engine.report()}")
    found = measure(engine, SHAPES[model], workloads, 1, lambda n, v: say(f"{n}: {json.dumps(v)}"))
    config = {"engine": "nvcli", "model": model, "dtype": "bfloat16", "report": engine.report()}
    write_row("engine", metrics=found, config=config | {"options": options, "repeat": 1})
    engine.close()


# --- equality ------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "graphs, run-ahead": {},
    "graphs": {"run_ahead": False},
    "eager": {"enforce_eager": True, "run_ahead": False},
    "torch attention": {"attention_backend": "torch"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "fp8 cache, torch attention": {"kv_cache_dtype": "fp8", "attention_backend": "torch"},
}


def check_equal(model: str) -> None:
    """Texts of every way beside the first one's; positions where they part."""
    from nvcli import LLM, Message, SamplingParams

    texts: dict[str, list[list[int]]] = {}
    questions = [f"What is {a} plus {b}?" for a, b in itertools.product((3, 12, 40), (5, 28))]
    questions += ["What is the capital of France?", "Tell me a story about a fox.", "Hello!"]
    for way, options in WAYS.items():
        llm = attempt(f"load, {way}", partial(LLM, model, device="cuda", **options))
        if llm is None:
            continue
        found = []
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, max_tokens=64, seed=7)
            prompts = [llm.tokenizer.encode_chat([Message("user", q)]) for q in questions]
            found += [list(output.token_ids) for output in llm.generate(prompts, params)]
            found += [list(output.token_ids) for output in llm.generate(prompts[:1], params)]
        llm.close()
        texts[way] = found
        first = next(iter(texts.values()))
        same = sum(a == b for a, b in zip(found, first, strict=True))
        parts = [
            next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), -1)
            for a, b in zip(found, first, strict=True)
            if a != b
        ]
        say(f"{way}: {same}/{len(found)} equal to '{next(iter(texts))}', others part at {parts}")


# --- bandwidth -----------------------------------------------------------------------------------


def check_bandwidth() -> None:
    from benchmarks.kernels.bandwidth import measure_all

    measure_all(say)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="+", choices=["kernels", "speed", "equal", "bandwidth"])
    parser.add_argument("--workloads", default="BCA")
    parser.add_argument("--model", default="qwen3-0.6b", help="of the speed stage")
    parser.add_argument("--options", default="{}", help="of nvcli, as JSON")
    parser.add_argument("--text-model", default="demo")
    args = parser.parse_args()
    import torch

    say(f"torch {torch.__version__} on {torch.cuda.get_device_name()}")
    stages: dict[str, Callable[[], Any]] = {
        "kernels": check_kernels,
        "speed": lambda: check_speed(args.workloads, json.loads(args.options), args.model),
        "equal": lambda: check_equal(args.text_model),
        "bandwidth": check_bandwidth,
    }
    for stage in args.stages:
        say(f"--- {stage}")
        attempt(stage, stages[stage])


if __name__ == "__main__":
    main()
