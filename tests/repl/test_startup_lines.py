"""What `-v` and `/show model` tell about the start."""

from __future__ import annotations

from types import SimpleNamespace

from nvcli.repl.numbers import startup_lines
from tests.fakes import STARTUP


def test_several_gpus_and_who_sums() -> None:
    several = {"tensor_parallel_size": 2, "all_reduce": "ours up to 80 rows, NCCL"}
    first, second, *_ = startup_lines(SimpleNamespace(**vars(STARTUP) | several))
    assert first.startswith("2 x cpu (sums: ours up to 80 rows, NCCL), ")
    assert " each" in second
    assert "sums" not in startup_lines(STARTUP)[0]
