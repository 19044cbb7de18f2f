"""How far `bench plan` is off: calibrate, predict, then measure TTFT, TPOT and throughput.

    python -m benchmarks.plan_error demo --concurrency 1,8,16 --in-len 128 --out-len 64 --times 8
    python -m benchmarks.plan_error qwen3-0.6b qwen3-8b --concurrency 1,8,64,256

`qwen3-0.6b` and `qwen3-8b` are those shapes with random weights, nothing is downloaded. Everything
runs in this process, without HTTP. Each load lasts `--times` the time that is predicted for one of
its requests, and long enough for ten, `--duration` at most; then up to a stay until the last
have ended. A prediction is for the lengths of the requests that were counted. A load that is not
steady says so, and its numbers are no measure of a plan. Beside the three numbers stands what the
steps were like and where the time of a first token went, measured and predicted.
`--clock cpu` counts the process's CPU time in place of the wall's: on a machine that others use as
well it is closer to what a quiet one would show, as long as one thread computes
(OMP_NUM_THREADS=1). One row a load is appended to `results/plan_error.jsonl` when it ends, so a run
that is cut keeps what it measured; on CUDA it has what NVML told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engine.workloads import SHAPES, write_shape
from benchmarks.rows import write_row

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORTEST_S, FEWEST = 3.0, 10
NAMES = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "out_tok_s": "output_tokens_per_s"}


def measure(model: str, load_format: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The metrics of every load, as it ends."""
    from nvcli.bench import calibrate, nvml
    from nvcli.bench.engine_run import Bench
    from nvcli.bench.points import default_points, run_points
    from nvcli.bench.workload import Lengths, Workload
    from nvcli.llm import LLM

    # Equal lengths would run in lock-step: half to one and a half times the mean.
    around = [Lengths.parse(f"{n // 2}:{n + n // 2}") for n in (args.in_len, args.out_len)]
    workload = Workload(in_len=around[0], out_len=around[1])
    begin = time.perf_counter()
    with LLM(model, load_format=load_format, max_num_seqs=args.max_num_seqs) as llm:
        bench = Bench.of(llm)
        seconds = {"start": time.perf_counter() - begin}
        measured = run_points(
            bench,
            default_points(bench),
            repeats=args.repeat,
            rounds=args.rounds,
            seed=0,
            progress=lambda text: print(f"{time.perf_counter() - begin:6.1f} s  {text}"),
        )
        rows, found = measured.rows, measured.calibration
        assert found is not None, "too few points to calibrate"
        calibrate.save(found)
        seconds["steps"] = time.perf_counter() - begin - seconds["start"]
        _print_points(rows)
        common = {
            "leave_one_out": found.errors,
            "cost": asdict(found.cost),
            "steps_ms": {r["name"]: sorted(r["t_s"])[len(r["t_s"]) // 2] * 1e3 for r in rows},
            "notes": found.notes,
            "hardware": {
                "bandwidth": bench.hardware.bandwidth,
                "flops": bench.hardware.flops,
                "source": bench.hardware.source,
            },
            "attention": bench.llm.startup.attention_backend,
            "weights_dtype": bench.llm.startup.weights_dtype,
        }
        for concurrency in args.concurrency:
            point = _point(bench, workload, found, concurrency, args)
            facts = nvml.gpu_facts()
            missing = nvml_missing(facts, [point]) if bench.device == "cuda" else []
            if missing:
                print("NVML:", json.dumps(facts), "missing or odd:", missing)
            seconds["all"] = time.perf_counter() - begin
            print(f"{seconds['all']:.0f} s so far", flush=True)
            yield {
                "points": [point],
                "seconds": dict(seconds),
                **common,
                "nvml": facts,
                "nvml_missing": missing,
            }


def _print_points(rows: list[dict[str, Any]]) -> None:
    """Each measured step beside what the fit without it says."""
    for row in rows:
        t = sorted(row["t_s"])[len(row["t_s"]) // 2]
        error = 100 * (row["predicted_s"] / t - 1)
        print(f"  {row['name']:28} {t * 1e3:9.3f} ms  {row['predictor']} {error:+.0f} %")


def _point(
    bench: Any, workload: Any, found: Any, concurrency: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One load, measured and predicted."""
    from nvcli.bench.offline import run_throughput
    from nvcli.bench.record import read_runs
    from nvcli.bench.summary import summarize

    slots = bench.llm.max_num_seqs
    stay_s = found.perf_model.under(args.in_len, args.out_len).closed(concurrency, slots).e2e_s
    duration = max(args.times, FEWEST / concurrency) * stay_s
    duration = min(max(duration, SHORTEST_S), args.duration)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        run_throughput(
            bench,
            workload,
            concurrency=concurrency,
            num_requests=None,
            duration_s=duration,
            warmup="auto",
            slo={},
            path=path,
            with_gpu=bench.device == "cuda",
        )
        run = read_runs(path)[0]
    json_ = summarize(run).json
    steps = {
        "measured": measured_steps(run, json_["window"]),
        "predicted": predicted_steps(run, found.perf_model, min(concurrency, slots)),
    }
    rows = {row["name"]: (row["measured"], row["predicted"]) for row in json_["model_rows"]}
    pairs = {name: rows[theirs] for name, theirs in NAMES.items() if theirs in rows}
    print(
        f"c = {concurrency:4}  "
        + "  ".join(
            f"{name} {m:.4g} predicted {p:.4g} ({100 * (p / m - 1):+.0f} %)"
            for name, (m, p) in pairs.items()
            if m
        )
        + f"  {json_['little']['verdict']}"
    )
    for who, values in steps.items():
        if values is not None:
            print(f"    steps {who:9} ", "  ".join(f"{k} {_short(v)}" for k, v in values.items()))
    parts = json_["breakdown_ms"]
    print("    of a request, ms:", "  ".join(f"{k} {_short(v)}" for k, v in parts.items()))
    return {
        "concurrency": concurrency,
        "ok": json_["counts"]["ok"],
        "duration_s": duration,
        "little": json_["little"]["verdict"],
        "mean_in_flight": json_["concurrency"]["mean"],
        "energy": json_["energy"],
        "steps": steps,
        "breakdown_ms": parts,
        **{
            name: {"measured": m, "predicted": p, "error": p / m - 1 if m else None}
            for name, (m, p) in pairs.items()
        },
    }


def measured_steps(run: Any, window: dict[str, Any]) -> dict[str, float | None]:
    """What the steps of the steady window were like: how many rows decode in one, which share of
    them holds prompts, and how long those take and the others."""
    first = min(r.s_star_ns for r in run.requests)
    a, b = (first + window[name] * 1e9 for name in ("start_s", "end_s"))
    steps = [s for s in run.steps if a < s.t_ns <= b]
    prompts = [s.dt_s for s in steps if s.p]
    decodes = [s.dt_s for s in steps if not s.p]
    return {
        "rows": statistics.fmean(s.b for s in steps) if steps else None,
        "prompt_share": len(prompts) / len(steps) if steps else None,
        "decode_s": statistics.fmean(decodes) if decodes else None,
        "prompt_s": statistics.fmean(prompts) if prompts else None,
    }


def predicted_steps(run: Any, model: Any, running: int) -> dict[str, float | None] | None:
    """The same, predicted for the lengths that were counted."""
    from nvcli.bench.stats import equal_parts

    counted = [r for r in run.requests if r.status == "ok" and r.n_in]
    if not counted:
        return None
    n_in = round(statistics.fmean(r.n_in for r in counted))
    n_out = statistics.fmean(r.num_tokens for r in counted)
    lens = equal_parts([r.n_in for r in counted])
    return steps_of(model.under(n_in, n_out, lens=lens), running)


def steps_of(traffic: Any, b: int) -> dict[str, float | None]:
    """Those of a closed loop of b requests that all run."""
    from nvcli.bench.under_load import binomial

    more, pieces = max(traffic.n_out - 1, 0), traffic.pieces
    if b <= 1:
        steps = more + pieces
        return {
            "rows": more / steps,
            "prompt_share": pieces / steps,
            "decode_s": traffic.model.decode(1, traffic.context) if more else None,
            "prompt_s": traffic.alone() / pieces,
        }
    steps, _ = traffic.steps_of_stay(b)
    rows = b * more / steps
    (_, none), *some = binomial(b, pieces / steps)
    share = sum(chance for _, chance in some)
    return {
        "rows": rows,
        "prompt_share": 1 - none,
        "decode_s": traffic.time(rows, 0),
        "prompt_s": traffic.mean(rows, some) / share if some else None,
    }


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def nvml_missing(facts: dict[str, Any] | None, points: list[dict[str, Any]]) -> list[str]:
    """What NVML did not tell, or what cannot be true."""
    if facts is None:
        return ["NVML itself"]
    found = [name for name, value in facts.items() if value is None]
    cap = facts["power_cap_w"] or float("inf")
    for p in points:
        energy = p["energy"]
        if energy is None:
            found.append(f"energy at c = {p['concurrency']}")
        elif not 20 < energy["power_w"] <= 1.1 * cap or not energy["joule_per_token"]:
            found.append(f"{energy} at c = {p['concurrency']}")
    return found


def count_cpu_time() -> None:
    """From here on the monotonic clock is the CPU time of this process. Before nvcli is imported:
    the engine takes the clock when its classes are made."""
    time.monotonic, time.monotonic_ns = time.process_time, time.process_time_ns


def each_alone(models: list[str]) -> int:
    """A process for every model: what one leaves on the GPU is not there for the next, and one
    that fails takes no other with it."""
    options = [a for a in sys.argv[1:] if a not in models]
    command = [sys.executable, "-m", "benchmarks.plan_error"]
    return max(subprocess.run([*command, name, *options]).returncode for name in models)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--concurrency", default="1,8,64,256")
    parser.add_argument("--in-len", type=int, default=1024)
    parser.add_argument("--out-len", type=int, default=256)
    parser.add_argument("--duration", type=float, default=60.0, help="the longest of one load")
    parser.add_argument("--times", type=float, default=4.0, help="a load lasts so many stays")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--rounds", type=int, help="default: 1 on CUDA, 3 on the CPU")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    args = parser.parse_args()
    args.concurrency = [int(n) for n in args.concurrency.split(",")]
    if len(args.models) > 1:
        raise SystemExit(each_alone(args.models))
    if args.clock == "cpu":
        count_cpu_time()
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            path, load_format = name, "auto"
            if name in SHAPES:
                path, load_format = write_shape(Path(folder) / name, name), "dummy"
            config = {
                "model": name,
                "weights": "random" if name in SHAPES else "as stored",
                "in_len": args.in_len,
                "out_len": args.out_len,
                "spread": "uniform, 0.5 to 1.5 of the mean",
                "clock": args.clock,
            }
            for metrics in measure(path, load_format, args):
                write_row("plan_error", metrics=metrics, config=config, prints=False)


if __name__ == "__main__":
    main()
