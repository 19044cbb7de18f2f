"""Everything that needs a GPU, in one command: for a machine that is lent for minutes.

    python -m benchmarks.campaign check             # is it right?
    python -m benchmarks.campaign serving           # batch and serve beside LLM.generate, and plan
    python -m benchmarks.campaign peer large experts    # beside vLLM, where it is installed
    python -m benchmarks.campaign tune              # the table of kernels, and the engine with it
    python -m benchmarks.campaign shared            # keys that many rows begin with, read once
    python -m benchmarks.campaign parallel          # two GPUs as one

A campaign is a list of lanes. A lane's jobs run one after the other on GPUs of its own; lanes run
at the same time as far as there are GPUs, and those of `check` share one, since nothing there is
timed. Every job has a limit. A job says when it ends and how; the last lines of all logs come at
the end, also of a campaign that is interrupted, and all logs stand in `campaign.log` beside the
rows (`NVCLI_RESULTS` says where). With `--seconds` no job runs beyond that, and what there was no
time for is named.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.groups import INTERRUPTED, EndedError, Groups
from benchmarks.rows import RESULTS
from benchmarks.stopwatch import elapsed_s, say

PYTEST = "pytest -q -o addopts= -p no:cacheprovider --import-mode=importlib --maxfail=12 --tb=short"


@dataclass(frozen=True, slots=True)
class Job:
    """A command after `python -m`, and how many lines of its log to show. `$CAMPAIGN` in it and in
    its environment is a folder that all jobs have, for this campaign.
    """

    name: str
    command: str
    limit_s: float = 240
    tail: int = 12
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lane:
    jobs: list[Job]
    num_gpus: int = 1  # 0: shares the first with others


def _tests(name: str, paths: str, *, marker: str = "gpu", **env: str) -> Lane:
    return Lane([Job(name, f"{PYTEST} -m '{marker}' {paths}", tail=25, env=env)], num_gpus=0)


def _engine(model: str, workloads: str, limit_s: float, *options: str) -> Job:
    command = ["benchmarks.engine", "--model", model, "--workloads", workloads, *options]
    return Job(f"engine {model} {workloads}", shlex.join(command), limit_s, tail=16)


def _speed(name: str, workloads: str, options: str, limit_s: float = 60, **env: str) -> Job:
    command = ["benchmarks.engine", "--engines", "nvcli", "--workloads", workloads]
    command += ["--repeat", "1", "--options", options]
    return Job(name, shlex.join(command), limit_s, 8, env)


CUDA = {"NVCLI_TEST_DEVICE": "cuda"}
CAMPAIGNS = {
    "check": [
        _tests("captured", "tests/engine/test_captured_steps_cuda.py"),
        _tests("shared steps", "tests/engine/test_shared_steps.py"),
        _tests(
            "attention", "tests/kernels/test_triton_attention.py tests/kernels/test_attention.py"
        ),
        _tests(
            "shared keys",
            "tests/kernels/test_shared_attention.py tests/engine/test_shared_steps.py",
        ),
        _tests("fp8 cache", "tests/kernels/test_fp8_cache.py"),
        _tests("kernels", "tests/kernels --ignore-glob=*attention.py --ignore-glob=*fp8_cache.py"),
        _tests(
            "parity",
            "tests/parity --ignore=tests/parity/test_deterministic.py",
            marker="not soak",
            **CUDA,
        ),
        _tests("deterministic", "tests/parity/test_deterministic.py", marker="not soak", **CUDA),
        Lane([Job("equal", "benchmarks.engine.gpu_check kernels equal", tail=30)], num_gpus=0),
        Lane([Job("kv", "benchmarks.kv_accuracy --device cuda --dtype bfloat16")], num_gpus=0),
        Lane(
            [Job("backends", "benchmarks.attention_accuracy --device cuda --dtype bfloat16")],
            num_gpus=0,
        ),
        Lane(
            [Job("weights", "benchmarks.weights_accuracy --device cuda --dtype bfloat16")],
            num_gpus=0,
        ),
    ],
    "serving": [
        Lane(
            [
                Job(
                    "batch",
                    "benchmarks.batch_throughput qwen3-0.6b --device cuda --max-model-len 2048"
                    " --records 10000 --max-input 256 --max-output 256",
                    limit_s=130,
                ),
                Job(
                    "serve",
                    "benchmarks.serve_load qwen3-0.6b --streams 64 256 1 8 --passes 3 --seconds 70",
                    limit_s=130,
                ),
                Job(
                    "serve, long",
                    "benchmarks.serve_load qwen3-0.6b --streams 256 64 --output 768 --passes 2",
                    limit_s=90,
                ),
                Job(
                    "serve, thread",
                    "benchmarks.serve_load qwen3-0.6b --streams 64 256 --engine thread",
                    limit_s=60,
                ),
            ]
        ),
        Lane(
            [
                Job(
                    f"plan {model}",
                    f"benchmarks.plan_error {model} --concurrency 1,8,64,256 --in-len 1024"
                    f" --out-len 256 --times {times} --duration 40",
                    limit_s=200,
                    tail=60,
                )
                for model, times in (("qwen3-0.6b", 4), ("qwen3-8b", 3))
            ]
        ),
    ],
    "peer": [Lane([_engine("qwen3-0.6b", "BCADEL", 290, "--side-by-side")], num_gpus=2)],
    "large": [
        Lane([_engine(m, w, 200, "--side-by-side", "--repeat", "1")], num_gpus=2)
        for m, w in (("qwen3-8b", "BCAD"), ("qwen3-8b-fp8", "BCAD"), ("qwen3-14b", "A"))
    ],
    "experts": [
        Lane([_engine("qwen3-30b-a3b", "BCAD", 290, "--side-by-side", "--repeat", "1")], num_gpus=2)
    ],
    "options": [
        Lane(
            [
                _speed("bf16", "BCA", "{}"),
                _speed("fp8 cache", "A", '{"kv_cache_dtype": "fp8"}'),
                _speed("deterministic", "BCA", '{"deterministic": true}'),
            ]
        )
    ],
    "tune": [
        Lane(
            [
                Job("tiles", f"{PYTEST} -m gpu tests/kernels/test_gemm.py", 90, tail=20),
                Job(
                    "sweep",
                    "benchmarks.kernels.tune --attention --seconds 170"
                    " --write $CAMPAIGN/tuned.json",
                    limit_s=230,
                    tail=120,
                ),
                _speed("tuned", "BCA", "{}", NVCLI_TUNED="$CAMPAIGN/tuned.json"),
            ]
        )
    ],
    "shared": [
        Lane(
            [
                _speed("E, shared keys read once", "E", "{}"),
                _speed("E, read for every row", "E", "{}", NVCLI_SHARED_PREFIX="0"),
                Job("bandwidth", "benchmarks.kernels.bandwidth shared decode", tail=30),
            ]
        )
    ],
    "parallel": [
        Lane(
            [
                Job("ranks", f"{PYTEST} -m multi_gpu tests/kernels tests/engine", 160, tail=20),
                Job("all-reduce", "benchmarks.tensor_parallel reduce", limit_s=60),
                Job(
                    "speed", "benchmarks.tensor_parallel speed --models qwen3-8b,qwen3-14b", 200, 20
                ),
            ],
            num_gpus=2,
        )
    ],
}


class Gpus:
    """Those of the machine, lent to lanes."""

    def __init__(self, ids: list[str]) -> None:
        self.ids = ids
        self._free = list(ids)
        self._changed = threading.Condition()

    def take(self, count: int) -> list[str]:
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            return [self._free.pop() for _ in range(count)]  # the first, which is shared, last

    def give(self, ids: list[str]) -> None:
        with self._changed:
            self._free.extend(ids)
            self._changed.notify_all()


def run_lane(lane: Lane, gpus: Gpus, folder: Path, seconds: float, groups: Groups) -> None:
    ids = gpus.take(lane.num_gpus)
    try:
        for job in lane.jobs:
            run_job(job, ids or gpus.ids[:1], folder, seconds, groups)
    except EndedError:
        pass  # who has ended us says so
    finally:
        gpus.give(ids)


def run_job(job: Job, gpus: list[str], folder: Path, seconds: float, groups: Groups) -> None:
    """Run to its end or its limit; what it started ends with it."""
    left = seconds - elapsed_s()
    if left < 5:
        say(f"{job.name}: left out, no time")
        return
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONUNBUFFERED": "1"}
    env |= {name: value.replace("$CAMPAIGN", str(folder)) for name, value in job.env.items()}
    command = job.command.replace("$CAMPAIGN", str(folder))
    begin = time.monotonic()
    with (folder / job.name).open("wb") as log:
        code = groups.run(
            [sys.executable, "-m", *shlex.split(command)],
            min(left, job.limit_s),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
        )
    how = "cut off" if code is None else f"exit {code}"
    say(f"{job.name}: {how} after {time.monotonic() - begin:.0f} s")


def show(jobs: list[Job], folder: Path, results: Path) -> None:
    """The logs' ends to the terminal, all of them into one file."""
    results.mkdir(parents=True, exist_ok=True)
    with (results / "campaign.log").open("a", encoding="utf-8") as whole:
        for job in jobs:
            path = folder / job.name
            if not path.exists():
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            whole.write(f"===== {job.name}: python -m {job.command}\n{text}\n")
            lines = [line for line in text.splitlines() if not line.startswith('{"name"')]  # rows
            print(f"== {job.name}")
            print("\n".join(line[:200] for line in lines[-job.tail :]))


def find_gpus() -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given:
        return given.split(",")
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return [str(index) for index in range(len(found.stdout.splitlines()))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("campaigns", nargs="+", choices=CAMPAIGNS, metavar="|".join(CAMPAIGNS))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--only", nargs="*", help="jobs, by the beginning of their names")
    args = parser.parse_args()
    gpus = Gpus(find_gpus())
    lanes = [lane for name in args.campaigns for lane in CAMPAIGNS[name]]
    if args.only is not None:
        wanted = tuple(args.only)
        kept = ([job for job in lane.jobs if job.name.startswith(wanted)] for lane in lanes)
        lanes = [Lane(jobs, lane.num_gpus) for jobs, lane in zip(kept, lanes, strict=True)]
    too_wide = [lane.jobs[0].name for lane in lanes if lane.num_gpus > len(gpus.ids)]
    if too_wide:
        parser.error(f"{', '.join(too_wide)}: more GPUs than the {len(gpus.ids)} here")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        groups = Groups()
        threads = [
            threading.Thread(target=run_lane, args=(lane, gpus, folder, args.seconds, groups))
            for lane in lanes
        ]
        try:
            with groups.ended_by_signals():
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        except KeyboardInterrupt:
            say("interrupted")
            return INTERRUPTED
        finally:  # what was measured until then is there to be read
            for thread in threads:
                thread.join()
            jobs = [job for lane in lanes for job in lane.jobs]
            show(jobs, folder, Path(os.environ.get("NVCLI_RESULTS", RESULTS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
