"""Does tensor parallelism compute what one GPU computes, and how much faster is it?

    python -m benchmarks.tensor_parallel                        all stages, 1 and 2 ranks
    python -m benchmarks.tensor_parallel speed --models qwen3-32b --sizes 1,2,4
    python -m benchmarks.tensor_parallel equal --device cpu     without a GPU

    equal    greedy text of the built-in model in float32: every size must give the ids of one rank,
             with log-probabilities to 1e-3; the exit code says so
    reduce   microseconds of an all-reduce in a CUDA graph, NCCL's and ours, alone and with the norm
             that follows, of 1 to 256 rows: `parallel.SHORT_BYTES` belongs where NCCL overtakes
    speed    workloads of `benchmarks.engine` (A and B) on random weights, with each size

Every engine has a process of its own. Appends rows to `benchmarks/results/tensor_parallel.jsonl`
and prints each line as soon as it is known, so that a run that is cut short has told something.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import all_reduce
from benchmarks.engine.__main__ import HEADLINES, run_worker
from benchmarks.engine.workloads import write_shape
from benchmarks.rows import write_row
from benchmarks.stopwatch import say

STAGES = ("equal", "reduce", "speed")
QUESTIONS = (
    "What is 3+4?",
    "Say hello.",
    "Name a colour.",
    "What is the capital of France?",
    "Repeat: one two three",
    "Who are you?",
    "What is 12-5?",
    "Write one sentence about the sea.",
)


# --- equal ---------------------------------------------------------------------------------------


def answer(args: Namespace) -> None:
    """The process of one size: ids and log-probabilities of greedy answers, to a file."""
    from nvcli import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=64, logprobs=0, ignore_eos=True)
    options = json.loads(args.options)
    with LLM(device=args.device, dtype="float32", tensor_parallel_size=args.size, **options) as llm:
        prompts = [llm.render([_user(question)]) for question in QUESTIONS]
        ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
        alone = [llm.generate(one, params)[0] for one in ids]
        together = llm.generate(ids, params)
        found = {
            name: [
                {
                    "ids": list(output.token_ids),
                    "logprobs": [entry.logprob for entry in output.logprobs or ()],
                }
                for output in outputs
            ]
            for name, outputs in (("alone", alone), ("together", together))
        }
        startup = llm.startup
        found["report"] = {
            "attention": startup.attention_backend,
            "num_graphs": startup.num_graphs,
            "weights_dtype": startup.weights_dtype,
            "weights_bytes": startup.weights_bytes,
            "num_blocks": startup.num_blocks,
        }
    Path(args.result).write_text(json.dumps(found), encoding="utf-8")


def _user(text: str) -> Any:
    from nvcli import Message

    return Message("user", text)


def check_equal(args: Namespace) -> bool:
    """Whether every size gave what the first gave."""
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            result = Path(folder) / f"{size}.json"
            extra = ["--size", str(size), "--result", str(result), "--device", args.device]
            if not _run("answer", [*extra, "--options", args.options], args.limit_s):
                return False
            found[size] = json.loads(result.read_text(encoding="utf-8"))
            say(f"equal: size {size} answered, {found[size]['report']}")
    first = args.sizes[0]
    is_equal = True
    for size in args.sizes[1:]:
        metrics: dict[str, Any] = {}
        for way in ("alone", "together"):
            pairs = list(zip(found[first][way], found[size][way], strict=True))
            same = sum(one["ids"] == other["ids"] for one, other in pairs)
            gap = (
                max(
                    abs(p - q)
                    for one, other in pairs
                    for p, q in zip(one["logprobs"], other["logprobs"], strict=True)
                    if one["ids"] == other["ids"]
                )
                if same
                else None
            )
            metrics[way] = {"equal": same, "of": len(pairs), "largest_logprob_gap": gap}
            is_equal &= same == len(pairs) and gap is not None and gap < 1e-3
        say(f"equal: size {size} against {first}: {metrics}")
        write_row(
            "tensor_parallel",
            metrics=metrics,
            config={"stage": "equal", "model": "demo", "dtype": "float32", "sizes": [first, size]}
            | {"device": args.device, "report": found[size]["report"]},
        )
    return is_equal


# --- reduce --------------------------------------------------------------------------------------


def check_reduce(args: Namespace) -> bool:
    is_ok = True
    for size in args.sizes:
        if size == 1:
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "times.json"
            extra = ["--size", str(size), "--folder", folder, "--result", str(result)]
            extra += ["--device", args.device]
            ranks = [
                subprocess.Popen(_command("reduce-rank", [*extra, "--rank", str(rank)]))
                for rank in range(size)
            ]
            try:
                for rank in ranks:
                    rank.wait(timeout=args.limit_s)
            except subprocess.TimeoutExpired:
                say(f"reduce: {size} ranks did not end in {args.limit_s} s")
            for rank in ranks:
                rank.kill()
                rank.wait()
            if not result.exists():
                say(f"reduce: {size} ranks gave no times")
                is_ok = False
                continue
            times = json.loads(result.read_text(encoding="utf-8"))
        lines, is_right = all_reduce.table(size, times)
        for line in lines:
            say(f"reduce: {line}")
        is_ok &= is_right
        write_row(
            "tensor_parallel",
            metrics=times,
            config={"stage": "reduce", "size": size, "device": args.device}
            | {"dtype": "bfloat16", "columns": all_reduce.COLUMNS},
        )
    return is_ok


# --- speed ---------------------------------------------------------------------------------------


def check_speed(args: Namespace) -> bool:
    is_ok = True
    alone: dict[str, Any] = {}  # by model: what one GPU reached
    for size in args.sizes:  # all of one GPU first: the others are free until then
        options = json.loads(args.options) | {"tensor_parallel_size": size}
        for model in args.models.split(","):
            given = Namespace(
                model=model,
                workloads=args.workloads,
                repeat=args.repeat,
                options=json.dumps(options),
                limit_s=args.limit_s,
            )
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                write_shape(folder, model)
                say(f"speed: {model}, size {size}")
                record = run_worker("nvcli", given, folder)
            if not record:
                is_ok = False
                continue
            metrics = record["metrics"]
            for values in metrics.values():  # floors are those of one GPU
                values.pop("floor_share", None)
            if size == 1:
                alone[model] = dict(metrics)
            elif model in alone:
                metrics["times_one_gpu"] = _factors(alone[model], metrics)
                say(f"speed: {model}, size {size}: {metrics['times_one_gpu']} times one GPU")
            write_row(
                "tensor_parallel",
                metrics=metrics,
                config={
                    "stage": "speed",
                    "model": model,
                    "dtype": "bfloat16",
                    "size": size,
                    "options": options,
                    "report": record["report"],
                    "repeat": args.repeat,
                },
            )
    return is_ok


def _factors(one: dict[str, Any], many: dict[str, Any]) -> dict[str, float]:
    factors = {}
    for name in one:
        metric, is_rate = HEADLINES.get(name[0], ("", False))
        if metric in one[name] and metric in many.get(name, {}):
            ratio = many[name][metric] / one[name][metric]
            factors[f"{name} {metric}"] = round(ratio if is_rate else 1 / ratio, 3)
    return factors


# --- the command ---------------------------------------------------------------------------------


def _command(worker: str, extra: list[str]) -> list[str]:
    return [sys.executable, "-m", "benchmarks.tensor_parallel", "--worker", worker, *extra]


def _run(worker: str, extra: list[str], limit_s: float) -> bool:
    try:
        subprocess.run(_command(worker, extra), timeout=limit_s, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        say(f"{worker}: {error}")
        return False
    return True


def _sizes(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", default=list(STAGES), metavar=f"{'|'.join(STAGES)}")
    parser.add_argument("--sizes", type=_sizes, default=[1, 2], help="numbers of ranks, 1 first")
    parser.add_argument("--models", default="qwen3-8b,qwen3-14b,qwen3-32b")
    parser.add_argument("--workloads", default="BA")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--options", default="{}", help="EngineConfig's fields, as JSON")
    parser.add_argument("--limit-s", type=float, default=400, help="for one process")
    parser.add_argument("--size", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    for name in ("--worker", "--folder", "--result"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        {"answer": answer, "reduce-rank": all_reduce.run_rank}[args.worker](args)
        return 0
    checks = {"equal": check_equal, "reduce": check_reduce, "speed": check_speed}
    if unknown := set(args.stages) - set(checks):
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    results = {stage: checks[stage](args) for stage in args.stages}
    say(f"{results}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
