"""The sweep without a GPU: what it tries, what it believes, and the table it writes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine.workloads import SHAPES, Shape
from benchmarks.kernels import candidates, tune, tune_attention, tune_products
from benchmarks.kernels.table import (
    ROWS,
    package_table,
    table_text,
    winners,
    with_algorithms,
    with_kernels,
)
from benchmarks.kernels.tune_products import Measured, Place, places
from nvcli.kernels import cuts, tuned
from nvcli.kernels.cuts import ATTENTION, DecodeLaunch, Skinny, Split, Tiles

pytestmark = pytest.mark.torch

PLACE = Place("down", "addends", 3072, 1024)
FAST = Tiles(16, 64, 512, 1, 6, 4, 1)
SLOW = Tiles(32, 64, 256, 2, 6, 4, 1)
SKINNY = Skinny(16, 3, 8, 8)


# --- candidates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", SHAPES)
def test_candidates_can_be_launched(model: str) -> None:
    for place in places(model):
        weight_rows = place.weight_shape[0]
        for rows in ROWS:
            found = place.candidates(rows)
            assert len(found) <= 10, "few, chosen by thought"
            assert len(set(found)) == len(found)
            for cut in found:
                if isinstance(cut, Skinny):
                    assert rows <= cuts.SKINNY_ROWS
                    continue
                assert cut.splits == 1 or place.op == "addends"
                assert place.size % (cut.columns * cut.splits) == 0, "no split without columns"
                assert cut.held <= place.size // (cut.columns * cut.splits)
                held_whole = cut.held * cut.columns * cut.splits == place.size
                assert held_whole or cut.stages > 1, "a loop that is not pipelined"
                assert candidates.shared_bytes(cut) <= 227 << 10
                assert weight_rows // cut.outputs * cut.splits >= 48, "SMs without weights"
                assert cut.outputs >= 64 or cut.rows >= 64, "no operand of a warp group"
    assert all(place.candidates(64) for place in places(model)), "nothing is tried"


def test_places_are_the_products_of_a_layer() -> None:
    shape = SHAPES["qwen3-8b"]
    found = {place.name: place.weight_shape for place in places("qwen3-8b")}
    assert found == {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (24_576, 4096),
        "down": (4096, 12_288),
        "head": (151_936, 4096),
    }
    sizes = {name: rows * columns for name, (rows, columns) in found.items()}
    assert sizes.pop("head") == shape.head_params
    assert sum(sizes.values()) * shape.layers == shape.body_params
    assert [place.name for place in places("qwen3-30b-a3b")] == ["qkv", "o", "head"]


# --- the table -----------------------------------------------------------------------------------


def entries(*results: tuple[float, list[tuple[float, Any]]]) -> list[dict[str, Any]]:
    measured = {rows: Measured(*r) for rows, r in zip(ROWS, results, strict=False)}
    return list(winners(PLACE, measured))


def test_ours_is_taken_where_it_is_ahead_by_more_than_noise() -> None:
    found = entries((7.0, [(3.0, FAST), (4.0, SKINNY)]), (7.0, [(6.9, FAST)]), (7.0, []))
    assert [(e["rows"], e["kernel"]) for e in found] == [([2, 8], "tiles"), ([9, 32], "library")]
    assert found[0] | {"tiles": None} == {
        "op": "addends",
        "columns": 3072,
        "outputs": 1024,
        "rows": [2, 8],
        "kernel": "tiles",
        "tiles": None,
        "us": 3.0,
        "library_us": 7.0,
    }
    assert found[0]["tiles"] == asdict(FAST)
    assert entries((7.0, [(3.0, SKINNY)]))[0]["kernel"] == "skinny"


def test_what_fewer_rows_have_is_kept_where_it_is_as_fast() -> None:
    near = (7.0, [(4.0, SLOW), (4.05, FAST)])
    found = entries((7.0, [(3.0, FAST)]), near, (7.0, [(4.0, SLOW), (4.2, FAST)]))
    assert [(e["rows"], e["tiles"]["columns"]) for e in found] == [([2, 16], 512), ([17, 32], 256)]
    assert found[0]["us"] == 4.05


def test_table_text_is_a_table_with_what_was_found(tmp_path: Path) -> None:
    found = entries((7.0, [(3.0, FAST)]))
    before = package_table()
    text = table_text(with_kernels(before, "sm_90", found, None))
    assert table_text(with_kernels(json.loads(text), "sm_90", found, None)) == text, (
        "found again: the same"
    )
    path = tmp_path / "tuned.json"
    path.write_text(text)
    table = tuned.read_table(path)["sm_90"]
    (mine,) = [e for e in table.products if e.takes("addends", 8, 3072, 1024)]
    assert (mine.rows, mine.tiles) == ((2, 8), FAST), "in place of what it had for those rows"
    shape = {"columns": 3072, "outputs": 1024}
    others = [
        line
        for line in before["sm_90"]["products"]
        if not (shape.items() <= line.items() and line["rows"][0] <= 8)
    ]
    assert len(table.products) == len(others) + 1
    assert table.attention == tuned.read_table(tuned.TABLE)["sm_90"].attention, "as it was"
    cut = replace(ATTENTION, splits=((9, Split(1, 2)),), decode_warps=4)
    path.write_text(table_text(with_kernels(before, "sm_100", found, asdict(cut))))
    assert tuned.read_table(path)["sm_100"].attention == cut
    assert tuned.read_table(path)["sm_90"] == tuned.read_table(tuned.TABLE)["sm_90"]


# --- a sweep on the CPU --------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Every candidate computes what the library does, but one; times are the clock's."""
    said: list[str] = []
    monkeypatch.setenv("NVCLI_RESULTS", str(tmp_path))
    monkeypatch.setenv("NVCLI_COMMIT", "test")
    monkeypatch.setitem(SHAPES, "tiny", Shape(512, 1024, 2, 16, 8, True, vocab=300))
    monkeypatch.setattr(tune, "say", said.append)
    monkeypatch.setattr(tune, "compile_all", lambda wanted, device, say: len(wanted))
    library = Place.run

    def run(self: Place, x: torch.Tensor, weight: torch.Tensor, cut: Any) -> torch.Tensor:
        y = library(self, x, weight, None)
        if isinstance(cut, Tiles) and cut.splits > 1:
            y = torch.stack([y.float() / cut.splits] * cut.splits)
        is_wrong = isinstance(cut, Tiles) and cut.warps == 8 and self.name == "o"
        return y * 1.1 if is_wrong else y

    def time_of(body: Any) -> float:
        body()
        return 1e-6 * next(clock)

    clock = iter(range(10_000, 0, -1))  # each later one is faster
    monkeypatch.setattr(Place, "run", run)
    monkeypatch.setattr(tune_products, "seconds_in_graph", time_of)
    return said


def test_a_sweep_finds_checks_and_writes(no_gpu: list[str], tmp_path: Path) -> None:
    found = tune.tune_products(["tiny"], [8, 64], lambda: True, torch.device("cpu"))
    assert {(e["op"], e["columns"], e["outputs"]) for e in found} == {
        ("linear", 512, 4096),
        ("addends", 2048, 512),
        ("swiglu", 512, 1024),
        ("addends", 1024, 512),
        ("linear", 512, 300),
    }
    wrong = [line for line in no_gpu if line.startswith("WRONG: o ")]
    assert wrong
    assert not any("WRONG" in line and not line.startswith("WRONG: o ") for line in no_gpu)
    assert not any("failed" in line for line in no_gpu), no_gpu
    rows = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
    assert [row["config"]["product"] for row in rows] == ["qkv", "o", "gate_up", "down", "head"]
    for row in rows:
        assert row["peer"] == "cuBLAS"
        for n in ("8", "64"):
            metrics = row["metrics"][n]
            assert metrics["us"] <= metrics["library_us"]
            assert all(us >= metrics["us"] for us, *_ in metrics["tried"])
            assert metrics["share_of_floor"] == pytest.approx(
                row["metrics"]["floor_us"] / metrics["us"], rel=0.2, abs=2e-3
            )


def test_what_there_was_no_time_for_is_named(no_gpu: list[str]) -> None:
    looks = iter([True, True, False])
    found = tune.tune_products(["tiny"], [8, 64], lambda: next(looks, False), torch.device("cpu"))
    assert [e["rows"] for e in found] == [[2, 8]]
    assert "no time for tiny qkv of 64 rows and more" in no_gpu
    assert [f"no time for tiny {name}" in no_gpu for name in ("o", "down", "head")] == [True] * 3


# --- attention -----------------------------------------------------------------------------------


def test_a_setting_of_attention_is_judged_by_all_its_shapes() -> None:
    other, third = (replace(ATTENTION, decode_warps=warps) for warps in (4, 8))
    times = {
        ATTENTION: {"a": 10.0, "b": 10.0},
        other: {"a": 8.0, "b": 13.0},
        third: {"a": 9.5, "b": 9.9},
    }
    assert tune_attention.choose(times, ATTENTION) == third
    times[third] = {"a": 9.9, "b": 9.9}
    assert tune_attention.choose(times, ATTENTION) == ATTENTION, "within noise: as it was"
    assert tune_attention.difference(third, ATTENTION) == {"decode_warps": 8}


def test_rows_of_one_length_and_others_are_cut_as_each_does_best() -> None:
    times = {
        4: {"64x400": 29.0, "59x1360+-460": 97.0},
        8: {"64x400": 33.0, "59x1360+-460": 80.0},
        12: {"64x400": 34.0, "59x1360+-460": 79.0},
    }
    assert tune_attention.choose_split(times, Split(8, 8)) == Split(4, 8), "12 is within noise"
    assert tune_attention.choose_split(times, Split(8, 4)) == Split(4, 12)
    even = {n: {"64x400": found["64x400"]} for n, found in times.items()}
    assert tune_attention.choose_split(even, Split(8, 8)) == Split(4, 4)
    wide = tune_attention.choose_split(even, Split(8, 8, wide=6))
    assert wide == Split(4, 4, wide=6), "these shapes say nothing of it"


@pytest.mark.parametrize("limit", tune_attention.DECODE)
def test_shapes_of_attention_are_what_their_names_say(limit: int) -> None:
    """Each is cut as its group is, and as rows of one length are where its name says so."""
    limits = list(tune_attention.DECODE)
    least = limits[limits.index(limit) - 1] + 1 if limit != limits[0] else 1
    assert limits == list(candidates.DECODE_PROGRAMS) == list(candidates.FP8_PROGRAMS)
    for shape in tune_attention.DECODE[limit]:
        rows, keys, spread = shape
        assert least <= rows <= limit
        longest, mean = -(-(keys + spread) // 64), -(-keys // 64)
        name = tune_attention.shape_name(*shape)
        assert tune_attention.is_even(name) == (longest * 4 <= mean * 5), name
        assert tune_attention.is_early(name, replace(ATTENTION, early_rows=rows))
        assert not tune_attention.is_early(name, replace(ATTENTION, early_rows=rows - 1))


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_launch_is_judged_with_its_own_cut(monkeypatch: pytest.MonkeyPatch, is_fp8: bool) -> None:
    """One launch is slow with the cut of the usual, and fast with another."""
    fast = (candidates.FP8_LAUNCHES if is_fp8 else candidates.DECODE_LAUNCHES)[2]
    usual = ATTENTION
    assert usual.decode(1, is_fp8=is_fp8) != fast

    def time_of(body: Any, replays: int) -> float:
        now = tuned.attention(torch.device("cpu"))
        has_own = now.split(1, is_fp8=is_fp8) == Split(6, 6)
        is_fast = now.decode(1, is_fp8=is_fp8) == fast
        return (5e-6 if has_own else 9e-6) if is_fast else 7e-6 + has_own * 1e-6

    monkeypatch.setattr(tune_attention, "seconds_in_graph", time_of)
    monkeypatch.setattr(tuned, "attention", tuned.attention)
    layers = tune_attention.Layers(lambda: None, torch.nn.Module())  # type: ignore[arg-type]
    bodies = {8: {"8x400": layers}}
    ends = (lambda: True, lambda text: None)
    found = tune_attention.tune_decode(usual, bodies, {}, *ends, is_fp8=is_fp8)
    assert found.decode(1, is_fp8=is_fp8) == fast
    assert (found.fp8_splits if is_fp8 else found.splits) == ((8, Split(6, 6)),)
    assert found.decode(1, is_fp8=not is_fp8) == usual.decode(1, is_fp8=not is_fp8)
    assert (found.splits if is_fp8 else found.fp8_splits) == (usual.splits if is_fp8 else ())


def test_steps_of_many_rows_have_a_launch_and_cuts_of_their_own() -> None:
    few, many = candidates.DECODE_LAUNCHES[0], candidates.DECODE_LAUNCHES[3]
    cuts = {
        few: ((64, Split(1, 2)), (256, Split(3, 4))),
        many: ((64, Split(5, 6)), (256, Split(7, 8))),
    }
    layers = tune_attention.Layers(lambda: None, torch.nn.Module())  # type: ignore[arg-type]
    bodies = {64: {"64x400": layers}, 256: {"256x400": layers}}

    def times(launch: DecodeLaunch) -> dict[str, float]:
        return {"64x400": 5.0 + (launch == many), "256x400": 8.0 + (launch == few)}

    with_own = {
        tune_attention.with_launch(ATTENTION, one, cuts[one], is_fp8=False): times(one)
        for one in (few, many)
    }
    found = tune_attention.best_of_both(with_own, bodies, ATTENTION)
    assert [found.decode(n, is_fp8=False) for n in (1, 192, 193, 300)] == [few, few, many, many]
    assert found.splits == ((64, Split(1, 2)), (256, Split(7, 8)))


def test_settings_of_attention_are_used_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def time_of(body: Any, replays: int) -> float:
        body()
        return 1e-6

    def layers(*args: int, spread: int = 0, fp8: bool = False) -> Any:
        batch = torch.nn.Module()
        return tune_attention.Layers(
            lambda: used.append(tuned.attention(torch.device("cpu"))), batch, num_layers=2
        )

    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(tune_attention, "seconds_in_graph", time_of)
    monkeypatch.setattr(tune_attention, "decode_layers", layers)
    monkeypatch.setattr(tune_attention, "prefill_layer", layers)
    monkeypatch.setattr(tune_attention, "compile_all", lambda usual, say: None)
    monkeypatch.setattr(tune_attention, "write_row", lambda name, **row: rows.append(row))
    monkeypatch.setattr(tuned, "attention", lambda device: ATTENTION)
    ask, said = tuned.attention, []
    found = tune_attention.tune_attention(lambda: True, said.append)
    splits = tuple((limit, ATTENTION.split(limit)) for limit in tune_attention.DECODE)
    same = replace(ATTENTION, splits=splits, fp8_splits=splits)
    assert found == asdict(same), "all are as fast: as it was"
    assert tuned.attention is ask
    for name in ("decode_warps", "early_warps", "prefill_keys", "fp8_tile", "fp8_registers"):
        assert len({getattr(one, name) for one in used}) > 1, "nothing else was tried"
    names = {"decode, early", "prefill"}
    for is_fp8, kind, launches, programs in (
        (False, "decode", candidates.DECODE_LAUNCHES, candidates.DECODE_PROGRAMS),
        (True, "decode, fp8", candidates.FP8_LAUNCHES, candidates.FP8_PROGRAMS),
    ):
        assert {one.decode(1, is_fp8=is_fp8) for one in used} == set(launches)
        assert len(set(launches)) == len(launches)
        for numbers in programs.values():
            assert {one.split(1, is_fp8=is_fp8) for one in used} >= {Split(n, n) for n in numbers}
        names |= {
            f"{kind}, {limit} rows, {tune_attention.launch_name(launch)}"
            for limit in tune_attention.DECODE
            for launch in launches
        }
    assert set(rows[0]["metrics"]) == names
    num_used = len(used)
    assert tune_attention.tune_attention(lambda: len(used) % 50 != 0, said.append) is None
    assert tuned.attention is ask
    assert said[-1].startswith("no time for all of attention")
    used.clear()
    found = tune_attention.tune_attention(lambda: len(used) < num_used - 5, said.append)
    assert found == asdict(replace(ATTENTION, splits=splits)), "what was done before counts"
    assert said[-1].startswith("no time for all of attention over an fp8 cache")


def test_algorithms_of_the_library_are_of_one_version() -> None:
    line = {
        "columns": 8,
        "outputs": 16,
        "adds": True,
        "rows": [9, 16],
        "us": 1.0,
        "library_us": 2.0,
    }
    old = {**line, "algorithm": [1] * 9}
    new = {**line, "rows": [1, 8], "algorithm": [2] * 9}
    other = {**old, "outputs": 32}
    shape = (8, 16, True)
    table = with_algorithms(package_table(), "sm_90", 1, {shape: [old], (8, 32, True): [other]})
    found = with_algorithms(table, "sm_90", 1, {shape: [new]})["sm_90"]["library"]
    assert found == {"version": 1, "products": [new, other]}, "a shape's lines are replaced at once"
    found = with_algorithms(table, "sm_90", 1, {shape: []})["sm_90"]["library"]
    assert found == {"version": 1, "products": [other]}, "none is ahead any more"
    found = with_algorithms(table, "sm_90", 2, {shape: [new]})["sm_90"]["library"]
    assert found == {"version": 2, "products": [new]}, "others mean nothing to another version"
    text = table_text(table)
    assert json.loads(text) == table
    assert with_kernels(table, "sm_90", [], None)["sm_90"]["library"] == table["sm_90"]["library"]
