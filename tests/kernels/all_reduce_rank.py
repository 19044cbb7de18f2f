"""One rank of `test_all_reduce_cuda`: `python -m tests.kernels.all_reduce_rank RANK SIZE PORT`."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from typing import Any

import torch
from torch import Tensor

from nvcli import kernels
from nvcli.engine.cuda_graph import Capture
from nvcli.engine.peers import connect
from nvcli.kernels.launch import set_pdl
from nvcli.parallel import TPGroup, find_store, prepare_environment

KINDS = [(torch.bfloat16, 4096), (torch.float16, 5120), (torch.float32, 1000)]
REPLAYS = 1000


def main(rank: int, size: int, port: int) -> None:
    prepare_environment()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = TPGroup.at(find_store(port, size), rank, size, device)
    group.greet(device)
    with torch.inference_mode():
        for dtype, columns in KINDS:
            said = connect(group, columns, dtype, device, fuses_norm=True)
            assert said.startswith("ours"), said
            for is_dependent in (True, False):
                set_pdl(is_dependent)
                compare(group, dtype, columns, device)
                replay(group, dtype, columns, device)
            set_pdl(True)
        waits_end(group, device)
    print("all equal", flush=True)
    time.sleep(1)  # the others read their last result before the store goes
    os._exit(0)


def compare(group: TPGroup, dtype: torch.dtype, columns: int, device: torch.device) -> None:
    """With NCCL's sums, which between two have the same bits, and with the norm apart."""
    short: Any = group.short
    generator = torch.Generator().manual_seed(group.rank)
    weight = torch.linspace(0.5, 1.5, columns, device=device).to(dtype)
    for rows in (1, 2, min(17, short.rows), short.rows) * 5:
        x = torch.randn(rows, columns, generator=generator).to(device, dtype)
        wanted = group.library_sum(x.clone())
        found = short.all_reduce(x.clone())
        if group.size == 2:
            assert torch.equal(found, wanted), (dtype, rows)
        else:
            torch.testing.assert_close(found, wanted)
        assert group.least([1], device) == [1]
        if not short.fits_norm(x):
            continue
        residual = wanted.flip(0).contiguous()
        normed, total = short.add_rms_norm(x, residual, weight, 1e-6)
        norm, exact = kernels.add_rms_norm(found, residual, weight, 1e-6)
        assert torch.equal(total, exact), (dtype, rows)
        torch.testing.assert_close(normed, norm)


def replay(group: TPGroup, dtype: torch.dtype, columns: int, device: torch.device) -> None:
    """A graph of several sums, with other numbers in each replay; every rank at its own pace."""
    short: Any = group.short
    step = torch.zeros(1, device=device)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    weight = torch.ones(columns, device=device, dtype=dtype)
    matrix = torch.zeros(columns, columns, device=device, dtype=dtype)
    every = [(rows, i) for i, rows in enumerate((1, 3, short.rows, 2))]

    def part(rank: int, rows: int, i: int) -> Tensor:
        count = torch.arange(rows * columns, device=device).view(rows, columns)
        return ((count * (rank + 1) + step + i) % 13 - 6).to(dtype)

    def body() -> None:
        step.add_(1)
        for rows, i in every:
            expected = torch.stack([part(r, rows, i) for r in range(group.size)]).float().sum(0)
            x = part(group.rank, rows, i)
            if short.fits_norm(x):
                total = short.add_rms_norm(x, x * 0, weight, 1e-6)[1]
                kernels.linear(total, matrix, None)  # another that is launched early
                wrong.add_((total.float() != expected).sum())
            wrong.add_((short.all_reduce(x).float() != expected).sum())

    graph = Capture(device)(body)
    pauses = random.Random(group.rank)
    for _ in range(REPLAYS):
        if pauses.random() < 0.1:
            torch.cuda._sleep(pauses.randrange(1, 200_000))
        if pauses.random() < 0.02:
            time.sleep(0.003 * pauses.random())
        graph.replay()
    assert int(wrong) == 0, f"{int(wrong)} numbers of {dtype} were wrong"
    assert not short.gave_up


def waits_end(group: TPGroup, device: torch.device) -> None:
    """Rank 0 waits for the others, which do not come: until it is stopped, or gives up."""
    short: Any = group.short
    if group.rank == 0:
        x = torch.ones(1, short.columns, dtype=short.dtype, device=device)
        threading.Timer(0.3, group.stop_waiting).start()
        short.all_reduce(x)
        torch.cuda.synchronize(device)
        assert not short.gave_up
        short._stop.zero_()
        short.limit = 1 << 12
        short.all_reduce(x)
        torch.cuda.synchronize(device)
        assert short.gave_up
    group.least([0], device)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
