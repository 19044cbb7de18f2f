"""The all-reduce over each other's memory, on all the GPUs there are."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from nvcli.parallel import make_store

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def test_sums_are_right_whatever_the_pace() -> None:
    size = torch.cuda.device_count()
    store = make_store(size)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.all_reduce_rank", *map(str, numbers)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for numbers in [(rank, size, store.port) for rank in range(size)]
    ]
    try:
        told = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, text in zip(ranks, told, strict=True):
        assert rank.returncode == 0, text
        assert text.endswith("all equal\n")
