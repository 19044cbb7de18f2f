"""nvcli's speed on one GPU, beside vLLM where it is installed, in the same run.

    python -m benchmarks.engine --model qwen3-0.6b --workloads BCA

Random weights; every engine in a process of its own, one after the other, with the same prompts and
lengths (`workloads.py`). On a machine of two GPUs `--side-by-side` runs them at the same time, each
on a GPU of its own: half the time, and the row says so. Prints a table and appends one row an
engine to `benchmarks/results/engine.jsonl`. Compare figures of one run only: the host's speed
differs between machines of one kind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from benchmarks.engine.engines import ENGINES, is_installed
from benchmarks.engine.measure import ALL, Stopwatch, measure, used_memory
from benchmarks.engine.workloads import SHAPES, write_shape
from benchmarks.rows import write_row

MAX_MODEL_LEN = {False: 4096, True: 33_024}  # with L
# What a user would see as the number of the workload, and whether more is better.
HEADLINES = {"A": ("tok_s", True), "B": ("tpot_ms", False), "C": ("tok_s", True)}
HEADLINES |= {"D": ("prefill_tok_s", True), "E": ("cold_s", False), "L": ("ttft_s", False)}


def work(args: argparse.Namespace) -> None:
    """The process of one engine: load, measure, write everything to a file."""
    watch = Stopwatch()
    options = json.loads(args.options)
    engine = ENGINES[args.worker](Path(args.folder), MAX_MODEL_LEN["L" in args.workloads], options)
    ready_s = watch.seconds
    found: dict[str, Any] = {"start": {"ready_s": round(ready_s, 2)}}

    def tell(name: str, values: dict[str, Any]) -> None:
        found[name] = values
        print(f"  {args.worker} {name}: {json.dumps(values)}", flush=True)
        Path(args.result).write_text(json.dumps(record), encoding="utf-8")

    record = {
        "version": engine.version,
        "options": options,
        "report": engine.report(),
        "metrics": found,
    }
    print(f"  {args.worker} ready after {ready_s:.1f} s {engine.report()}", flush=True)
    measure(engine, SHAPES[args.model], args.workloads, args.repeat, tell)
    tell("memory", used_memory())
    engine.close()


def run_worker(
    engine: str, args: argparse.Namespace, folder: Path, gpu: int | None = None
) -> dict[str, Any]:
    """What the engine's process found, as far as it came. gpu: the one that it may use."""
    result = folder / f"{engine}.json"
    command = [sys.executable, "-m", "benchmarks.engine", "--worker", engine]
    command += ["--model", args.model, "--workloads", args.workloads, "--folder", str(folder)]
    command += ["--repeat", str(args.repeat), "--result", str(result)]
    command += ["--options", args.options if engine == "nvcli" else "{}"]
    env = dict(os.environ)
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    try:
        subprocess.run(command, timeout=args.limit_s, check=True, env=env)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        print(f"  {engine}: {error}", flush=True)
    if not result.exists():
        return {}
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def print_table(records: dict[str, dict[str, Any]]) -> None:
    names = [n for n in next(iter(records.values()))["metrics"] if n[0] in HEADLINES]
    print(
        f"\n{'workload':<12}" + "".join(f"{engine:>12}" for engine in records) + "   factor  floor"
    )
    for name in names:
        metric, is_rate = HEADLINES[name[0]]
        values = [r["metrics"].get(name, {}).get(metric) for r in records.values()]
        cells = "".join(f"{'-' if v is None else v:>12}" for v in values)
        factor = ""
        if len(values) > 1 and values[0] and values[1]:
            factor = f"{values[0] / values[1] if is_rate else values[1] / values[0]:8.2f}x"
        share = next(iter(records.values()))["metrics"][name].get("floor_share")
        floor = f"{share:7.0%}" if share else ""
        print(f"{name + ' ' + metric:<18}{cells}{factor}{floor}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--workloads", default=ALL, help=f"some of {ALL}, in order")
    parser.add_argument("--engines", default="nvcli,vllm", help="those not installed are left out")
    parser.add_argument("--options", default="{}", help="of nvcli, as JSON: EngineConfig's fields")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--side-by-side", action="store_true", help="at once, a GPU each")
    parser.add_argument("--limit-s", type=float, default=900, help="for one engine")
    for name in ("--worker", "--folder", "--result"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shape(folder, args.model)
        engines = [engine for engine in args.engines.split(",") if is_installed(engine)]
        with ThreadPoolExecutor(len(engines) if args.side_by_side else 1) as pool:
            gpus = range(len(engines)) if args.side_by_side else repeat(None)
            found = list(pool.map(run_worker, engines, repeat(args), repeat(folder), gpus))
        records = {engine: record for engine, record in zip(engines, found, strict=True) if record}
    if not records:
        sys.exit("no engine ran")
    print_table(records)
    for engine, record in records.items():
        others = [other for other in records if other != engine]
        write_row(
            "engine",
            metrics=record["metrics"],
            config={
                "engine": engine,
                "engine_version": record["version"],
                "model": args.model,
                "dtype": "bfloat16",
                "options": record["options"],
                "report": record["report"],
                "repeat": args.repeat,
                "side_by_side": args.side_by_side,
            },
            peer=", ".join(others) or None,
        )


if __name__ == "__main__":
    main()
