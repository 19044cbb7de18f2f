"""`nvcli serve` under load beside `LLM.generate`: the same prompts, the same engine, one run.

    python -m benchmarks.serve_load MODEL --streams 1 8 16 --device cpu
    python -m benchmarks.serve_load qwen3-0.6b --streams 1 8 64 256

For each number of streams: the prompts in one in-process batch, then as that many concurrent
streams over HTTP (completions, token ids in, one event a token), from a client process of its own.
A shape's name needs no files: random weights, with a small byte tokenizer. Every output runs to its
length; each pass has prompts of its own. With `--seconds` no pass begins after
that time (loading counted), but each number of streams gets one.

With `--simulated MS` there is no device: steps take that long and the host is all there is to see.
The row then has what a streamed token costs in CPU time, in the server's process and the engine's.

Prints a card to standard error; the row goes to `benchmarks/results/` and to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.engine.workloads import SHAPES, write_shape

TARGETS = {64: 0.95, 256: 0.90}  # of the in-process batch's tokens per second


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    shapes = ", ".join(SHAPES)
    parser.add_argument("model", nargs="?", help=f"a folder, an id, or random weights: {shapes}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--engine", choices=["process", "thread"], default="process")
    parser.add_argument(
        "--simulated", type=float, metavar="MS", help="a device that takes so long a step"
    )
    parser.add_argument("--client", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- the client, a process of its own ------------------------------------------------------------


def encoded(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
    return head.encode() + data


async def one_stream(port: int, request: bytes) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    sent = time.perf_counter()
    writer.write(request)
    moments: list[float] = []
    num_events = 0
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit((status + await reader.read()).decode(errors="replace"))
    rest = b""
    while piece := await reader.read(1 << 16):
        now = time.perf_counter()
        rest += piece
        count = rest.count(b'"finish_reason":null')
        if count:
            moments.append(now)
            num_events += count
        rest = rest[-40:] if b'"finish_reason":null' not in rest[-40:] else rest[-19:]
    writer.close()
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    return {"ttft": moments[0] - sent, "gaps": gaps, "end": moments[-1], "events": num_events}


async def client(spec: dict[str, Any]) -> dict[str, Any]:
    requests = [
        encoded(
            {
                "model": spec["model"],
                "prompt": prompt,
                "max_tokens": spec["output"],
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
                "temperature": 1,
                "top_p": 1,
                "top_k": 0,
            }
        )
        for prompt in spec["prompts"]
    ]
    start = time.perf_counter()
    done = await asyncio.gather(*(one_stream(spec["port"], request) for request in requests))
    seconds = max(item["end"] for item in done) - start
    gaps = sorted(gap for item in done for gap in item["gaps"])
    ttfts = sorted(item["ttft"] for item in done)
    return {
        "seconds": seconds,
        "ttft_ms": percentiles(ttfts),
        "gap_ms": percentiles(gaps),
        "events": sum(item["events"] for item in done),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        name: round(values[min(len(values) - 1, int(share * len(values)))] * 1e3, 3)
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    }


# --- the server and the in-process batch ---------------------------------------------------------


def write_random(folder: Path, name: str) -> None:
    from tests.text.tiny_tokenizer import write_tokenizer

    write_shape(folder, name, eos_token_id=276)  # the tokenizer's
    write_tokenizer(folder, vocab_size=300)


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(97, 123) for _ in range(length)] for _ in range(count)]


def cpu_seconds(engine_pid: int | None) -> tuple[float, float]:
    """CPU time so far of this process and of the engine's, where it has one."""
    own = time.process_time()
    if engine_pid is None:
        return own, own
    fields = Path(f"/proc/{engine_pid}/stat").read_text().rpartition(")")[2].split()
    return own, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def one_pass(
    llm: Any,
    params: Any,
    args: argparse.Namespace,
    *,
    count: int,
    port: int,
    seed: int,
    engine_pid: int | None,
) -> dict[str, Any]:
    """The in-process batch, then the same number of streams over HTTP."""
    began = time.perf_counter()
    outputs = llm.generate(prompts_of(count, args.input, seed), params)
    seconds = time.perf_counter() - began
    tokens = sum(output.usage.completion_tokens for output in outputs)
    prompts = prompts_of(count, args.input, seed + 1)
    cpu_before = cpu_seconds(engine_pid)
    spec = {"model": "m", "port": port, "prompts": prompts, "output": args.output}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serve_load", "--client", "1"],
        input=json.dumps(spec),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ},
    )
    http = json.loads(done.stdout)
    cpu = [
        after - before for before, after in zip(cpu_before, cpu_seconds(engine_pid), strict=True)
    ]
    num_tokens = count * args.output
    row = {
        "streams": count,
        "batch_tokens_per_s": round(tokens / seconds, 1),
        "http_tokens_per_s": round(count * args.output / http["seconds"], 1),
        "ttft_ms": http["ttft_ms"],
        "gap_ms": http["gap_ms"],
        "events": http["events"],
        "server_us_per_token": round(cpu[0] / num_tokens * 1e6, 1),
        "engine_us_per_token": round(cpu[1] / num_tokens * 1e6, 1),
    }
    row["ratio"] = round(row["http_tokens_per_s"] / row["batch_tokens_per_s"], 4)
    return row


def main() -> None:
    args = arguments()
    if args.client:
        print(json.dumps(asyncio.run(client(json.loads(sys.stdin.read())))))
        return
    import uvicorn

    from benchmarks.rows import write_row
    from benchmarks.simulated import install
    from nvcli.config import EngineConfig
    from nvcli.heap import frozen_heap
    from nvcli.llm import LLM
    from nvcli.server.app import create_app
    from nvcli.server.config import ServerConfig
    from nvcli.server.http_protocol import GuardedProtocol
    from nvcli.server.remote_engine import WORKER, RemoteEngine
    from nvcli.server.run import listen

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        is_random = args.model in SHAPES
        if is_random:
            write_random(Path(folder), args.model)
        engine_config = EngineConfig(
            model=folder if is_random else args.model,
            load_format="dummy" if is_random else "auto",
            device=args.device,
            max_model_len=1024,
            max_num_seqs=max(args.streams),
            memory_utilization=0.4,  # two engines, of which one rests
        )
        worker = WORKER
        if args.simulated is not None:
            install(args.simulated * 1e-3, 0)
            os.environ["NVCLI_SIMULATED_MS"] = str(args.simulated)
            worker = "benchmarks.simulated_worker"
        llm = LLM(config=engine_config)
        is_apart = args.engine == "process"
        served = RemoteEngine(engine_config, worker=worker) if is_apart else llm
    app = create_app(ServerConfig(served_model_names=("m",)), served)
    listener = listen(ServerConfig(port=0)).socket
    config = uvicorn.Config(
        app, log_config=None, lifespan="off", http=GuardedProtocol, loop="uvloop"
    )
    server = uvicorn.Server(config)
    loop = config.get_loop_factory()

    def serve() -> None:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(server.serve(sockets=[listener]))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    params = llm.sampling(
        temperature=1.0, top_p=1.0, top_k=0, max_tokens=args.output, ignore_eos=True
    )
    done: dict[int, list[dict[str, Any]]] = {count: [] for count in args.streams}
    port = listener.getsockname()[1]
    seed = 0
    loaded_s = time.perf_counter() - started
    print(f"loaded in {loaded_s:.1f} s", file=sys.stderr, flush=True)
    load_before = os.getloadavg()[0]
    # The first pass of all warms up; then every pass takes each number of streams in turn.
    plan = [(args.streams[0], False)]
    plan += [(count, True) for _ in range(args.passes) for count in args.streams]
    with frozen_heap():  # as `nvcli serve` does
        for count, counts in plan:
            if counts and done[count] and time.perf_counter() - started > args.seconds:
                continue
            seed += 2
            where = {"port": port, "engine_pid": getattr(served, "pid", None)}
            row = one_pass(llm, params, args, count=count, seed=seed, **where)
            print(json.dumps(row), file=sys.stderr, flush=True)
            if counts:
                done[count].append(row)
    rows = []
    for passes in done.values():
        passes.sort(key=lambda row: float(row["ratio"]))
        rows.append({**passes[len(passes) // 2], "num_passes": len(passes)})  # the median of ratios
    write_row(
        "serve_load",
        metrics={
            "passes": rows,
            "targets": TARGETS,
            "loaded_s": round(loaded_s, 1),
            "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        },
        config={
            "model": f"{args.model}, random weights" if is_random else args.model,
            "input_tokens": args.input,
            "output_tokens": args.output,
            "engine": args.engine,
            "weights_dtype": llm.startup.weights_dtype,
        },
        peer="LLM.generate, same process",
    )
    server.should_exit = True
    thread.join(10)
    served.close()
    llm.close()


if __name__ == "__main__":
    main()
