"""`nvcli bench serve` and guidellm on one server, at the same load.

    python -m benchmarks.agreement --guidellm VENV/bin/guidellm
    python -m benchmarks.agreement --guidellm VENV/bin/guidellm --how turns -c 4
    python -m benchmarks.agreement --guidellm VENV/bin/guidellm --server stub

guidellm comes from an environment of its own. Both run closed loops of `-c`. `--how together`: at
the same time, what the machine does meanwhile both see; of both only the requests count that were
sent in the steady window of `bench serve`. `--how turns`: one after another, each beside what the
server itself saw meanwhile (its histograms), so that what is left is the client's. `--server stub`
is the stub of nvcli with a known timetable: first token after 20 ms, then one every 5 ms. One row
is appended to `results/agreement.jsonl`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nvcli
from benchmarks.rows import write_row

if TYPE_CHECKING:
    from collections.abc import Iterator

STUB = (20.0, 0.0, 5.0)  # ms: first token, more by request, gap
LEAD_S, TAIL_S = 3.0, 6.0  # guidellm runs before and after
DEMO = Path(nvcli.__file__).parent / "demo"  # the tokenizer of its synthetic prompts


@contextlib.contextmanager
def server(kind: str) -> Iterator[str]:
    from nvcli.bench.children import own_server, stub_server

    with stub_server(*STUB) if kind == "stub" else own_server([]) as url:
        yield url


def start_guidellm(args: argparse.Namespace, url: str, out: Path) -> subprocess.Popen[bytes]:
    backend = f"kind=openai_http,target={url},request_format=/v1/completions"
    data = f"kind=synthetic_text,prompt_tokens={args.in_len},output_tokens={args.out_len}"
    command = [
        args.guidellm, "run", "--backend", backend,
        "--profile", f"kind=concurrent,streams={args.concurrency}",
        "--constraint", f"kind=max_duration,seconds={LEAD_S + args.duration + TAIL_S}",
        "--tokenizer", f"kind=huggingface_auto,model={DEMO}",
        "--data", data, "--output", f"kind=json,path={out}", "--disable-console",
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.Popen(command, env=environment)


def wait_for_load(url: str, process: subprocess.Popen[bytes], kind: str) -> None:
    """guidellm takes long to start; the server's gauge tells that it sends."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if kind == "stub":  # it has no gauges: its requests are found by their times later
            time.sleep(25)
            return
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        running = [x for x in text.split("\n") if x.startswith("nvcli:num_requests_running")]
        if running and float(running[0].rsplit(" ", 1)[1]) > 0:
            time.sleep(LEAD_S)
            return
        time.sleep(0.2)
    raise SystemExit("guidellm sent nothing")


def seen_by_server(url: str) -> dict[str, tuple[float, float]]:
    """(sum in ms, count) of its histograms until now."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for name in ("time_to_first_token", "e2e_request_latency"):
        pair = []
        for part in ("sum", "count"):
            match = re.search(rf"^nvcli:{name}_seconds_{part}\{{[^}}]*\}} (\S+)", text, re.M)
            pair.append(float(match.group(1)) if match else 0.0)
        found[name] = (pair[0] * 1e3, pair[1])
    return found


def with_server(url: str, client: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The client's means beside the server's of the same time."""
    after = seen_by_server(url)
    for name, ours in (("time_to_first_token", "ttft_ms"), ("e2e_request_latency", "e2e_ms")):
        count = after[name][1] - before[name][1]
        server = (after[name][0] - before[name][0]) / count if count else None
        client[f"server_{ours}"] = server
        if server is not None and client[ours] is not None:
            client[f"outside_{ours}"] = client[ours] - server
    return client


def run_ours(args: argparse.Namespace, url: str, folder: Path) -> tuple[dict[str, Any], Path]:
    command = [
        sys.executable, "-m", "nvcli", "bench", "serve", url, "-c", str(args.concurrency),
        "--in-len", str(args.in_len), "--out-len", str(args.out_len),
        "--duration", f"{args.duration}s", "--json", "--out", str(folder / "ours.jsonl"),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
    if done.returncode not in (0, 6):
        raise SystemExit(f"bench serve ended with {done.returncode}")
    return json.loads(done.stdout), folder / "ours.jsonl"


def window_of(path: Path, report: dict[str, Any]) -> tuple[float, float]:
    """The steady window as seconds of the wall clock."""
    from nvcli.bench.record import read_runs

    (run,) = read_runs(path)
    first = min(r.s_star_ns for r in run.requests) / 1e9 + time.time() - time.monotonic()
    return first + report["window"]["start_s"], first + report["window"]["end_s"]


def theirs(report: Path, start: float, end: float) -> dict[str, Any]:
    """Their own numbers of the requests that were sent in the window."""
    (run,) = json.loads(report.read_text())["benchmarks"]
    every = run["requests"]["successful"]
    if math.isinf(start):  # all of them
        start, end = run["start_time"], run["end_time"]
    mine = [r for r in every if start <= r["request_start_time"] <= end]
    ended = [r for r in every if start < r["request_end_time"] <= end]

    def mean(name: str) -> float | None:
        values = [r[name] for r in mine if r[name] is not None]
        return sum(values) / len(values) if values else None

    return {
        "requests": len(mine),
        "ttft_ms": mean("time_to_first_token_ms"),
        "tpot_ms": mean("inter_token_latency_ms"),
        "their_tpot_ms": mean("time_per_output_token_ms"),
        "e2e_ms": None if (e2e := mean("request_latency")) is None else e2e * 1e3,
        "requests_per_s": len(ended) / (end - start),
        "prompt_tokens": mean("prompt_tokens"),
        "output_tokens": mean("output_tokens"),
        "cached_tokens": mean("cached_tokens"),
    }


def ours(report: dict[str, Any]) -> dict[str, Any]:
    return {
        "requests": report["counts"]["sent"],
        "ttft_ms": report["ttft_service_ms"]["mean"],
        "tpot_ms": report["tpot_ms"]["mean"],
        "e2e_ms": report["e2e_service_ms"]["mean"],
        "requests_per_s": report["throughput"]["requests_per_s"],
        "late_ms": report["late_ms"]["mean"],
        "cached_share": report["cache"]["hit_share"],
        "verdict": report["verdict"],
    }


def together(
    args: argparse.Namespace, url: str, folder: Path
) -> tuple[dict[str, dict[str, Any]], float]:
    if args.server == "stub":
        args.duration += 15  # how long it takes to start is not known there
    process = start_guidellm(args, url, folder / "theirs.json")
    wait_for_load(url, process, args.server)
    report, path = run_ours(args, url, folder)
    process.wait(timeout=300)
    start, end = window_of(path, report)
    found = {"bench": ours(report), "guidellm": theirs(folder / "theirs.json", start, end)}
    return found, end - start


def in_turns(
    args: argparse.Namespace, url: str, folder: Path
) -> tuple[dict[str, dict[str, Any]], float]:
    before = seen_by_server(url)
    start_guidellm(args, url, folder / "theirs.json").wait(timeout=300)
    guidellm = theirs(folder / "theirs.json", -math.inf, math.inf)
    guidellm = with_server(url, guidellm, before)
    before = seen_by_server(url)
    report, _ = run_ours(args, url, folder)
    return {"bench": with_server(url, ours(report), before), "guidellm": guidellm}, args.duration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--guidellm", required=True, help="its executable")
    parser.add_argument("--how", choices=("together", "turns"), default="together")
    parser.add_argument("--server", choices=("nvcli", "stub"), default="nvcli")
    parser.add_argument("-c", "--concurrency", type=int, default=2, help="of each")
    parser.add_argument("--in-len", type=int, default=128)
    parser.add_argument("--out-len", type=int, default=64)
    parser.add_argument("--duration", type=float, default=40.0)
    args = parser.parse_args()
    version = subprocess.run([args.guidellm, "--version"], capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as name, server(args.server) as url:
        folder = Path(name)
        if args.how == "turns":
            assert args.server == "nvcli", "the stub keeps no histograms"
            found, width = in_turns(args, url, folder)
        else:
            found, width = together(args, url, folder)
    ratios = {
        k: found["guidellm"][k] / v
        for k in ("ttft_ms", "tpot_ms", "e2e_ms", "requests_per_s")
        if (v := found["bench"][k]) and found["guidellm"][k]
    }
    print(json.dumps(found, indent=1))
    print("guidellm / bench:", {k: round(v, 3) for k, v in ratios.items()})
    config = {
        "server": args.server,
        "concurrency_each": args.concurrency,
        "in_len": args.in_len,
        "out_len": args.out_len,
        "how": args.how,
        "window_s": width,
        "timetable_ms": STUB if args.server == "stub" else None,
    }
    peer = version.stdout.strip().replace("version: ", "")
    write_row("agreement", metrics={**found, "ratio": ratios}, config=config, peer=peer)


if __name__ == "__main__":
    main()
