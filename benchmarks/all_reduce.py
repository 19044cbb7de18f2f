"""The all-reduce of decode steps, NCCL's and ours, by number of rows: what `tensor_parallel reduce`
measures in each rank, and what it tells.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
COLUMNS = 4096
CHAIN = 20  # sums of a graph


def run_rank(args: Namespace) -> None:
    """One rank of the all-reduce stage; rank 0 writes the times."""
    import torch

    from nvcli.engine.peers import connect
    from nvcli.parallel import TPGroup, find_store, make_store, prepare_environment

    prepare_environment()
    device = torch.device("cuda", args.rank) if args.device == "cuda" else torch.device("cpu")
    if args.rank == 0:
        store = make_store(args.size)
        Path(args.folder, "port.tmp").write_text(str(store.port))
        Path(args.folder, "port.tmp").rename(Path(args.folder, "port"))
    else:
        port = Path(args.folder, "port")
        while not port.exists():
            time.sleep(0.05)
        store = find_store(int(port.read_text()), args.size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = TPGroup.at(store, args.rank, args.size, device)
    group.greet(device)
    options = {"fuses_norm": True, "rows": max(ROWS)}
    found: dict[str, Any] = {}
    with torch.inference_mode():
        found["sums"] = connect(group, COLUMNS, torch.bfloat16, device, **options)
        for rows in ROWS:
            found[str(rows)] = _time_sums(group, rows, device)
    if args.rank == 0:
        Path(args.result).write_text(json.dumps(found), encoding="utf-8")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    sys.stdout.flush()
    time.sleep(1)  # the others read their last result before the store goes
    os._exit(0)


def _time_sums(group: Any, rows: int, device: Any) -> dict[str, Any]:
    """Microseconds of each way, and whether ours has NCCL's bits, as it must between two."""
    import torch

    from nvcli import kernels

    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(rows, COLUMNS, generator=generator).to(device, torch.bfloat16)
    residual, weight = x[:1].expand(rows, -1).contiguous(), x[0].clone()
    ways: dict[str, Any] = {
        "library": lambda: group.library_sum(y),
        "library_norm": lambda: kernels.add_rms_norm(group.library_sum(y), residual, weight, 1e-6),
    }
    short = group.short
    if short is not None:
        ways["ours"] = lambda: short.all_reduce(y)
        ways["ours_norm"] = lambda: short.add_rms_norm(y, residual, weight, 1e-6)
    times: dict[str, Any] = {"bytes": x.nbytes}
    sums = {}
    for name, way in ways.items():
        y = x.clone()
        way()
        sums[name] = y.clone()
        if device.type != "cuda":
            times[name] = round(1e6 * _time(way, device, CHAIN), 2)
            continue
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CHAIN):
                way()
        times[name] = round(1e6 * _time(graph.replay, device, 20) / CHAIN, 2)
    if "ours" in sums:
        times["is_equal"] = torch.equal(sums["ours"], sums["library"])
    return times


def _time(work: Any, device: Any, count: int) -> float:
    """The median over three rounds of the mean over `count` calls, in seconds."""
    import torch

    rounds = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(count):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rounds.append((time.perf_counter() - start) / count)
    return statistics.median(rounds[1:])


def table(size: int, times: dict[str, Any]) -> tuple[list[str], bool]:
    """Lines to print, with what they say about `parallel.SHORT_BYTES`; whether ours is right.

    times: of rank 0 of so many, as `run_rank` writes them
    """
    names = ("library", "ours", "library_norm", "ours_norm")
    lines = [f"{size} ranks, rows of {COLUMNS} in bf16, us; sums: {times['sums']}"]
    lines.append("".join(f"{name:>14}" for name in ("rows", "bytes", *names)))
    rows = {n: times[str(n)] for n in ROWS}
    for n, found in rows.items():
        values = (n, *(found.get(name, "-") for name in ("bytes", *names)))
        lines.append("".join(f"{value:>14}" for value in values))
    if "ours" not in rows[ROWS[0]]:
        return lines, True
    ahead = 0
    for n, found in rows.items():
        if found["ours_norm"] > found["library_norm"]:
            break
        ahead = n
    pushed = ahead * (size - 1) * COLUMNS * 4
    lines.append(f"with the norm ours is ahead up to {ahead} rows: SHORT_BYTES = {pushed}")
    wrong = [n for n, found in rows.items() if size == 2 and not found["is_equal"]]
    if wrong:
        lines.append(f"ours has other bits than NCCL's at {wrong} rows")
    return lines, not wrong
