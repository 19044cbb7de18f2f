"""Which algorithm of cuBLAS becomes an entry of the table, of times that are made up."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from benchmarks.kernels import tune_library
from benchmarks.kernels.tune_library import best_entry, entries
from benchmarks.kernels.tune_products import Place
from nvcli.kernels.cublaslt import Algorithm

pytestmark = pytest.mark.torch

PLACE = Place("down", "addends", 64, 32)
WEIGHTS = [torch.zeros(32, 64)]
FIRST, SECOND = Algorithm(*[1] * 9), Algorithm(*[2] * 9)
LIBRARY_US = 10.0


class Bench:
    """Stands in for a product on a GPU: how wrong each algorithm is."""

    wrong: dict[Algorithm, float]

    def __init__(self, place: Place, rows: int, weights: list[torch.Tensor]) -> None:
        self.rows, self.adds = rows, place.op == "addends"

    def error(self, algorithm: Algorithm) -> float:
        return Bench.wrong.get(algorithm, 2e-3)


class Clock:
    """us of each algorithm by the number of rows; the library takes 10."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.us: dict[int, dict[Algorithm, float]] = {}
        self.asked: list[tuple[int, list[Algorithm]]] = []
        monkeypatch.setattr(Bench, "wrong", {}, raising=False)
        monkeypatch.setattr(tune_library, "Bench", Bench)
        monkeypatch.setattr(tune_library, "rival", self.rival)

    def rival(
        self, bench: Bench, algorithms: list[Algorithm]
    ) -> tuple[float, list[tuple[float, Algorithm]]]:
        self.asked.append((bench.rows, algorithms))
        us = self.us.get(bench.rows, {})
        return LIBRARY_US, sorted((us[a], a) for a in algorithms if a in us)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def best(rows: int, lowest: int, last: dict[str, Any] | None = None) -> dict[str, Any] | None:
    return best_entry(PLACE, rows, lowest, WEIGHTS, [FIRST, SECOND], last)


def test_one_that_is_ahead_by_more_than_noise_is_an_entry(clock: Clock) -> None:
    clock.us[64] = {FIRST: 9.5, SECOND: 9.0}
    assert best(64, 57) == {
        "columns": 64,
        "outputs": 32,
        "adds": True,
        "rows": [57, 64],
        "algorithm": list(SECOND),
        "us": 9.0,
        "library_us": 10.0,
    }
    clock.us[64] = {FIRST: 9.9}
    assert best(64, 57) is None


def test_what_fewer_rows_have_is_kept_where_it_is_as_fast(clock: Clock) -> None:
    last = {"algorithm": list(FIRST)}
    for us, want in ((9.05, FIRST), (9.06, SECOND)):
        clock.us[64] = {FIRST: us, SECOND: 9.0}
        entry = best(64, 57, last)
        assert entry is not None
        assert entry["algorithm"] == list(want), us


def test_one_that_is_wrong_is_none(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.us[64] = {FIRST: 9.0}
    monkeypatch.setattr(Bench, "wrong", {FIRST: 6e-3})
    assert best(64, 57) is None
    assert "WRONG: down x64" in capsys.readouterr().out


def test_many_rows_are_judged_at_both_ends(clock: Clock) -> None:
    """For any number of them occurs; few are those of captured steps."""
    clock.us = {2048: {FIRST: 8.0, SECOND: 9.0}, 1025 + 127: {FIRST: 10.1, SECOND: 9.9}}
    entry = best(2048, 1025)
    assert entry is not None
    assert entry["algorithm"] == list(SECOND)
    assert clock.asked[-1] == (1152, [FIRST, SECOND])
    clock.us[1152] = {FIRST: 10.1, SECOND: 10.0}
    assert best(2048, 1025) is None
    clock.us[512] = {FIRST: 8.0}
    assert best(512, 385) is not None
    assert clock.asked[-1][0] == 512, "captured: its own number is all"


def test_neighbours_of_one_algorithm_are_one_entry(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing lies between, neither the library's rows nor those of our own kernels."""
    monkeypatch.setattr(tune_library, "ROWS", (24, 32, 40, 48, 56, 64))
    monkeypatch.setattr(tune_library, "offered", lambda place, rows, device: [FIRST, SECOND])
    monkeypatch.setattr(tune_library, "is_own", lambda place, rows, device: rows == 56)
    clock.us = {24: {FIRST: 9.0}, 32: {FIRST: 8.0}, 48: {FIRST: 9.0}, 64: {FIRST: 7.0}}
    found = entries(PLACE, WEIGHTS)
    assert [line["rows"] for line in found] == [[17, 32], [41, 48], [57, 64]]
    assert [line["us"] for line in found] == [8.0, 9.0, 7.0], "of the most rows"
    assert all(line["algorithm"] == list(FIRST) for line in found)


def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options, said in (([], "it needs a CUDA device"), (["--models", "x"], "unknown: x")):
        monkeypatch.setattr(sys, "argv", ["tune_library", *options])
        with pytest.raises(SystemExit, match="2"):
            tune_library.main()
        assert capsys.readouterr().err.endswith(f"error: {said}\n")
