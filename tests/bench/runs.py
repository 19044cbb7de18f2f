"""Runs with known numbers, written as `nvcli bench` writes them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from nvcli.bench.record import RequestRecord, Run, RunWriter, read_runs

MS = 1_000_000
HEADER: dict[str, Any] = {
    "id": "abc123",
    "command": "serve",
    "created": "2026-11-29T12:00:00+00:00",
    "model": {"name": "m", "dtype": "bfloat16"},
    "load": {"mode": "closed", "concurrency": 4, "text": "closed, c = 4"},
    "workload": {"hash": "w1", "text": "random 8 -> 4", "seed": 7, "cache": "cold"},
    "warmup": 0,
    "slo": {},
    "environment": {"device": "none", "nvcli": "0.0"},
    "clock": {"name": "CLOCK_MONOTONIC", "resolution_ns": 1},
}


def closed_loop(
    num_each: int = 100, *, clients: int = 4, ttft_ms: float = 20, gap_ms: float = 10, n: int = 4
) -> list[RequestRecord]:
    """Each client sends when its last one ended; the clients are shifted against each other."""
    whole = ttft_ms + (n - 1) * gap_ms
    records = []
    for client in range(clients):
        start = client * whole / clients
        for _ in range(num_each):
            chunks = [(int((start + ttft_ms + i * gap_ms) * MS), 1) for i in range(n)]
            records.append(
                RequestRecord(
                    id=f"r{len(records)}",
                    s_star_ns=int(start * MS),
                    s_ns=int(start * MS),
                    end_ns=chunks[-1][0],
                    chunks=chunks,
                    n_in=8,
                    n_out=n,
                    cached=0,
                )
            )
            start += whole
    return records


def noisy(records: list[RequestRecord], factor: float, seed: int) -> list[RequestRecord]:
    """Every latency times `factor` and a random 0.8 to 1.2; the sends stay."""
    rng = random.Random(seed)
    for r in records:
        stretch = factor * (0.8 + 0.4 * rng.random())
        r.chunks = [(r.s_ns + int((t - r.s_ns) * stretch), k) for t, k in r.chunks]
        r.end_ns = r.chunks[-1][0]
    return records


def store(path: Path, records: list[RequestRecord], **header: Any) -> Path:
    with RunWriter(path, {**HEADER, **header}) as run:
        for record in records:
            run.request(record)
        run.finish(planned=len(records), interrupted=False, client_cpu_s=0.1, wall_s=1.0)
    return path


def own_runs(tmp_path: Path) -> list[Run]:
    """The runs of the only file that this test has stored."""
    (path,) = (tmp_path / "state" / "nvcli" / "bench").glob("*.jsonl")
    return read_runs(path)
