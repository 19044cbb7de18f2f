"""`nvcli serve` under clients that leave and requests that are wrong, as a process of its own.

    python -m benchmarks.serve_soak demo --device cpu
    python -m benchmarks.serve_soak Qwen/Qwen3-0.6B --clients 200 --bad 10000

First `--clients` at once, of which a third leave at a random moment, streaming or not: afterwards
the gauges of running and waiting sequences and the free KV blocks are what they were. Then `--bad`
requests of every kind: afterwards a good one answers, and the server's memory has not grown.

The row goes to `benchmarks/results/` and to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_blocks_free", "open_sequences")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--bad", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def gauges(client: httpx.Client) -> dict[str, float]:
    text = client.get("/metrics").text
    return {
        name: float(re.search(rf"^nvcli:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]
        for name in GAUGES
    }


def memory_mib(pid: int) -> float:
    """Resident memory of the server and its children."""
    total = 0
    for each in [pid, *children(pid)]:
        pages = int(Path(f"/proc/{each}/statm").read_text().split()[1])
        total += pages * os.sysconf("SC_PAGE_SIZE")
    return round(total / 2**20, 1)


def children(pid: int) -> list[int]:
    names = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for name in names for child in name.read_text().split()]


async def one_client(url: str, body: dict[str, Any], draw: random.Random, ends: list[str]) -> None:
    body = {**body, "stream": draw.random() < 0.7, "n": draw.choice([1, 1, 2])}
    await asyncio.sleep(draw.random() * 2)
    patience = draw.random() * 5 if draw.random() < 1 / 3 else 600.0
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        try:
            async with asyncio.timeout(patience):
                response = await client.post(CHAT, json=body)
        except TimeoutError:
            ends.append("left")
            return
    good = response.status_code == 200
    if good and body["stream"]:
        good = response.text.endswith("data: [DONE]\n\n") and '"error"' not in response.text
    ends.append("answered" if good else f"status {response.status_code}")


def leave_and_stay(client: httpx.Client, url: str, args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(args.seed)
    ends: list[str] = []
    body = {
        "model": args.model,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": args.tokens,
    }
    before = gauges(client)

    async def run() -> None:
        await asyncio.gather(*(one_client(url, body, draw, ends) for _ in range(args.clients)))

    began = time.perf_counter()
    asyncio.run(run())
    seconds = time.perf_counter() - began
    deadline = time.monotonic() + 10
    while (after := gauges(client)) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    return {
        "clients": {end: ends.count(end) for end in sorted(set(ends))},
        "seconds": round(seconds, 1),
        "gauges_before": before,
        "gauges_after": after,
        "is_restored": before == after,
    }


def bad_requests(client: httpx.Client, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    from tests.server.test_load import bad_request

    class Target:
        """What `bad_request` needs of a server."""

        def __init__(self) -> None:
            self.client = client

    draw = random.Random(args.seed)
    for _ in range(args.bad // 5):  # caches fill up
        bad_request(Target(), draw)  # type: ignore[arg-type]
    before = memory_mib(pid)
    began = time.perf_counter()
    for _ in range(args.bad):
        bad_request(Target(), draw)  # type: ignore[arg-type]
    seconds = time.perf_counter() - began
    after = memory_mib(pid)
    body = {"model": args.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    good = client.post(CHAT, json=body)
    return {
        "requests": args.bad,
        "seconds": round(seconds, 1),
        "memory_mib_before": before,
        "memory_mib_after": after,
        "next_good_status": good.status_code,
    }


def main() -> None:
    from benchmarks.rows import write_row

    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "nvcli", "serve", "-m", args.model, "--port", "0"]
        command += ["--served-model-name", args.model, "--served-model-name", "scripted"]
        command += ["--device", args.device, "--ready-file", str(ready)]
        environment = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"}
        server = subprocess.Popen(command, env=environment)
        try:
            while not ready.exists():
                if server.poll() is not None:
                    raise SystemExit("the server did not start")
                time.sleep(0.1)
            url = json.loads(ready.read_text())["url"]
            with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
                left = leave_and_stay(client, url, args)
                print(json.dumps(left), file=sys.stderr, flush=True)
                bad = bad_requests(client, server.pid, args)
        finally:
            server.terminate()
            code = server.wait(60)
    write_row(
        "serve_soak",
        metrics={
            "leaving": left,
            "bad_requests": bad,
            "exit_code": code,
            "load_average": round(os.getloadavg()[0], 2),
        },
        config={
            "model": args.model,
            "answer_tokens": args.tokens,
            "seed": args.seed,
            "threads": os.environ.get("OMP_NUM_THREADS"),
        },
    )


if __name__ == "__main__":
    main()
