"""Who takes a product: the table, the rules beside it, and what the user may change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nvcli import kernels
from nvcli.errors import UsageError
from nvcli.kernels import cublaslt, cuts, tuned
from nvcli.kernels.cuts import ATTENTION, DecodeLaunch, Gemv, Skinny, Split, Tiles

pytestmark = pytest.mark.torch

CPU, BF16 = torch.device("cpu"), torch.bfloat16
TILES = {
    "rows": 32,
    "outputs": 64,
    "columns": 64,
    "held": 1,
    "splits": 2,
    "warps": 4,
    "stages": 1,
}


@pytest.fixture(autouse=True)
def read_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("NVCLI_TUNED", raising=False)
    monkeypatch.delenv("NVCLI_SKINNY_ROWS", raising=False)
    tuned.forget()
    yield
    tuned.forget()


def choose(op: str, rows: int, size: int, outputs: int = 7, dtype: torch.dtype = BF16) -> object:
    return tuned.choose(op, rows, size, outputs, CPU, dtype)


def use(monkeypatch: pytest.MonkeyPatch, path: Path, *lines: dict[str, object]) -> None:
    path.write_text(json.dumps({"sm_90": {"products": lines}}))
    monkeypatch.setenv("NVCLI_TUNED", str(path))
    tuned.forget()


# --- rules ---------------------------------------------------------------------------------------


def test_one_row() -> None:
    assert isinstance(choose("linear", 1, 17_408), Gemv)
    assert choose("addends", 1, 1000) == choose("linear", 1, 1000) == Gemv(4, 1024, 4)
    assert choose("swiglu", 1, 5120) == Gemv(2, 4096, 8)  # shorter ones with the norm, too
    assert choose("linear", 0, 1024) is None
    assert tuned.choose_with_norm("linear", 1, 2048) is not None
    assert tuned.choose_with_norm("linear", 1, 4096) is None
    assert tuned.choose_with_norm("linear", 2, 1024) is None
    assert tuned.choose_with_norm("linear", 0, 1024) is None


def test_two_to_sixteen_rows() -> None:
    for rows, size in ((2, 1024), (16, 2048), (8, 3072), (3, 192)):
        cut = choose("linear", rows, size)
        assert isinstance(cut, Skinny), (rows, size)
        assert cut.slices * 16 <= size // cut.pieces
    assert isinstance(choose("swiglu", 8, 2048), Skinny)
    assert choose("swiglu", 8, 3072) is None
    for rows, size in ((17, 1024), (8, 4096), (8, 12_288), (8, 1000), (8, 32)):
        assert choose("linear", rows, size) is None, (rows, size)


def test_deterministic_tiles_do_not_know_the_rows() -> None:
    assert cuts.deterministic_tiles(1024).outputs < cuts.deterministic_tiles(4096).outputs
    assert cuts.deterministic_tiles(1024).splits == 1


def test_powers_of_two() -> None:
    assert [cuts.next_power_of_2(n) for n in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]


# --- the table -----------------------------------------------------------------------------------


def test_the_table_of_the_package_can_be_read_and_launched() -> None:
    """Every entry is a shape that its kernel takes, and no two say different things."""
    for gpu, table in tuned.read_table(tuned.TABLE).items():
        assert gpu.startswith("sm_")
        taken: dict[tuple[str, int, int], set[int]] = {}
        for entry in table.products:
            rows = set(range(entry.rows[0], entry.rows[1] + 1))
            assert rows, entry
            before = taken.setdefault((entry.op, entry.columns, entry.outputs), set())
            assert not rows & before, f"two entries for {rows & before}: {entry}"
            before |= rows
            if entry.kernel == "skinny":
                shape = (entry.rows[1], entry.columns, entry.outputs)
                cut = cuts.skinny_cut(*shape, is_swiglu=entry.op == "swiglu")
                assert cut is not None, entry
            if entry.tiles is not None:
                pieces = -(-entry.columns // entry.tiles.columns)
                assert entry.tiles.held <= -(-pieces // entry.tiles.splits), entry


def test_the_algorithms_of_the_package_are_some() -> None:
    """Of one version; in order, none for the same rows as another; numbers that fit their types."""
    for gpu, part in json.loads(tuned.TABLE.read_text(encoding="utf-8")).items():
        table = tuned.read_table(tuned.TABLE)[gpu]
        lines = part.get("library", {"products": []})["products"]
        assert len(table.algorithms) == len(lines)
        assert bool(lines) == (table.library_version is not None)
        last: dict[tuple[int, int, bool], int] = {}
        for line, named in zip(lines, table.algorithms, strict=True):
            shape, (first, end) = (named.columns, named.outputs, named.adds), named.rows
            assert last.get(shape, 0) < first <= end, line
            last[shape] = end
            assert list(named.algorithm) == line["algorithm"], line
            for kind, number in zip(cublaslt.ATTRIBUTE_TYPES, named.algorithm, strict=True):
                assert kind(number).value == number, line
            assert 0 < line["us"] < line["library_us"], line
        assert list(last) == sorted(last)


def test_entries_go_before_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shape = {"columns": 1024, "outputs": 7}
    use(
        monkeypatch,
        tmp_path / "table.json",
        {"op": "linear", **shape, "rows": [2, 8], "kernel": "library"},
        {"op": "linear", **shape, "rows": [9, 20], "kernel": "skinny"},
        {"op": "addends", **shape, "rows": [9, 32], "kernel": "tiles", "tiles": TILES, "us": 3.2},
    )
    tiles = Tiles(**TILES)
    assert choose("linear", 8, 1024) is None
    assert isinstance(choose("linear", 9, 1024), Skinny)
    assert choose("linear", 17, 1024) is None  # beyond what it can
    assert choose("addends", 9, 1024) == choose("addends", 32, 1024) == tiles
    assert choose("addends", 33, 1024) is None
    assert choose("addends", 8, 1024) is None  # as linear, where it has no entry of its own
    assert isinstance(choose("linear", 1, 1024), Gemv)
    assert isinstance(choose("linear", 8, 1024, outputs=9), Skinny)  # another shape: the rule
    assert choose("addends", 32, 1024, dtype=torch.float32) is None  # tiles are for 16 bits
    other = tuned._choose("linear", 8, 1024, 7, "sm_80", 2)
    assert isinstance(other, Skinny), "another kind of GPU"


def test_rows_left_to_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line = {"op": "swiglu", "columns": 1024, "outputs": 7, "rows": [2, 64], "kernel": "tiles"}
    use(monkeypatch, tmp_path / "table.json", line | {"tiles": TILES | {"splits": 1}})
    assert isinstance(choose("swiglu", 64, 1024), Tiles)
    monkeypatch.setenv("NVCLI_SKINNY_ROWS", "8")
    tuned.forget()
    assert isinstance(choose("swiglu", 8, 1024), Tiles)
    assert choose("swiglu", 9, 1024) is None
    monkeypatch.setenv("NVCLI_SKINNY_ROWS", "0")
    tuned.forget()
    assert choose("swiglu", 2, 1024) is None
    assert choose("linear", 2, 1024) is None
    assert isinstance(choose("linear", 1, 1024), Gemv)
    monkeypatch.setenv("NVCLI_SKINNY_ROWS", "many")
    tuned.forget()
    with pytest.raises(UsageError, match="NVCLI_SKINNY_ROWS must be a number of rows, got 'many'"):
        choose("linear", 2, 1024)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ("[]", "no attribute 'items'"),
        ('{"sm_90": {}}', "'products'"),
        ('{"sm_90": {"products": [{"op": "linear"}]}}', "'kernel'"),
        (
            '{"sm_90": {"products": [{"op": "conv", "kernel": "library", "rows": [2, 3]}]}}',
            "an unknown op or kernel",
        ),
    ],
)
def test_a_file_that_is_no_table(
    text: str | None, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("NVCLI_TUNED", str(path))
    with pytest.raises(UsageError) as caught:
        choose("linear", 2, 1024)
    assert str(caught.value).startswith(f"NVCLI_TUNED: {path} is no table of kernels: ")
    assert why in str(caught.value)


def test_splits_of_what_is_not_added_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line = {"op": "swiglu", "columns": 8, "outputs": 7, "rows": [2, 64], "kernel": "tiles"}
    use(monkeypatch, tmp_path / "table.json", line | {"tiles": TILES})
    with pytest.raises(UsageError, match="splits of what is not added up"):
        choose("swiglu", 2, 8)


def test_attention_is_cut_as_the_table_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from nvcli.kernels.attention_plan import item_limits
    from nvcli.kernels.prefill_attention import tokens_per_tile

    path = tmp_path / "table.json"
    path.write_text(json.dumps({"sm_90": {"products": []}}))
    monkeypatch.setenv("NVCLI_TUNED", str(path))
    tuned.forget()
    assert tuned.attention(CPU) == ATTENTION, "a table without a part for attention"
    assert ATTENTION.split(1) == ATTENTION.split(32) != ATTENTION.split(33)
    assert ATTENTION.split(1000) == ATTENTION.split(256)
    some = {"decode_warps": 8, "prefill_keys": 128}
    path.write_text(json.dumps({"sm_90": {"products": [], "attention": some}}))
    tuned.forget()
    assert tuned.attention(CPU) == replace(ATTENTION, decode_warps=8, prefill_keys=128)
    other = {
        "splits": [[4, {"even": 3, "uneven": 4}], [64, {"even": 5, "uneven": 6}]],
        "decode_warps": 4,
        "decode_stages": 2,
        "prefill_rows": 64,
        "prefill_keys": 32,
        "prefill_warps": 4,
        "prefill_stages": 2,
    }
    path.write_text(json.dumps({"sm_90": {"products": [], "attention": other}}))
    tuned.forget()
    found = tuned.attention(CPU)
    assert found.decode_warps == 4
    assert (found.split(4), found.split(5)) == (Split(3, 4), Split(5, 6))
    assert tokens_per_tile(2, CPU) == 32
    assert item_limits(3, 8, 132, CPU) == (49, 66)
    assert item_limits(64, 8, 132, CPU) == (82, 99)
    assert item_limits(90, 8, 132, CPU) == (90, 99), "one for every row"
    assert item_limits(64, 8, 132, CPU, is_fp8=True) == (82, 99), "as another cache"
    fp8 = {"fp8_tile": 32, "fp8_warps": 1, "fp8_stages": 5, "fp8_registers": 128}
    cut = {"fp8_splits": [[64, {"even": 12, "uneven": 16}]], "decode_tile": 16}
    cut |= {"many_tile": 32, "many_warps": 2, "many_stages": 4}
    path.write_text(json.dumps({"sm_90": {"products": [], "attention": other | fp8 | cut}}))
    tuned.forget()
    found = tuned.attention(CPU)
    for rows in (192, 193):
        assert found.decode(rows, is_fp8=True) == DecodeLaunch(32, 1, 5, 128)
    assert found.decode(192, is_fp8=False) == DecodeLaunch(16, 4, 2, 0)
    assert found.decode(193, is_fp8=False) == DecodeLaunch(32, 2, 4, 0)
    assert item_limits(64, 8, 132, CPU, is_fp8=True) == (198, 264)
    wide = {"splits": [[64, {"even": 12, "uneven": 16, "wide": 8}]]}
    path.write_text(json.dumps({"sm_90": {"products": [], "attention": other | wide}}))
    tuned.forget()
    assert [item_limits(64, 8, 132, CPU, group_size=g) for g in (1, 2, 3, 8)] == [
        *[(198, 264)] * 2,
        *[(198, 132)] * 2,
    ]
    path.write_text(json.dumps({"sm_90": {"products": [], "attention": other | cut}}))
    tuned.forget()
    assert item_limits(64, 8, 132, CPU) == (82, 99)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"fp8_tile": 48}, "fp8_tile must be 16, 32 or 64, not 48"),
        ({"many_tile": 128}, "many_tile must be 16, 32 or 64, not 128"),
        ({"decode_tile": 128}, "decode_tile must be 16, 32 or 64, not 128"),
        ({"fp8_warps": 3}, "fp8_warps must be 1, 2, 4, 8 or 16, not 3"),
        ({"decode_warps": "2"}, "decode_warps must be 1, 2, 4, 8 or 16, not '2'"),
        ({"fp8_stages": 0}, "fp8_stages must be a number of 1 or more, not 0"),
        ({"decode_stages": 2.5}, "decode_stages must be a number of 1 or more, not 2.5"),
        ({"fp8_registers": 16}, "fp8_registers must be 0, or 32 to 255, not 16"),
        ({"fp8_registers": True}, "fp8_registers must be 0, or 32 to 255, not True"),
        ({"prefill_keys": 100}, "prefill_keys must be 16, 32, 64, 128 or 256, not 100"),
        ({"early_rows": -1}, "early_rows must be a number of 0 or more, not -1"),
        ({"splits": []}, "splits must not be empty"),
        (
            {"fp8_splits": [[8, {"even": 0, "uneven": 4}]]},
            "fp8_splits, 8 rows, even must be a number of 1 or more, not 0",
        ),
        (
            {"splits": [[8, {"even": 4, "uneven": 4, "wide": 0}]]},
            "splits, 8 rows, wide must be a number of 1 or more, not 0",
        ),
        (
            {"splits": [[8, {"even": 4, "uneven": 4}], [8, {"even": 4, "uneven": 4}]]},
            "a limit in splits must be a number of 9 or more, not 8",
        ),
        ({"fp8_tiles": 32}, "unexpected keyword argument 'fp8_tiles'"),
    ],
)
def test_settings_of_attention_that_no_kernel_takes(
    setting: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"sm_90": {"products": [], "attention": setting}}))
    monkeypatch.setenv("NVCLI_TUNED", str(path))
    tuned.forget()
    with pytest.raises(UsageError) as caught:
        tuned.attention(CPU)
    assert str(caught.value).startswith(f"NVCLI_TUNED: {path} is no table of kernels: ")
    assert why in str(caught.value).replace("\\'", "'")


# --- what the ops do with it ---------------------------------------------------------------------


@pytest.mark.parametrize("as_addends", [False, True])
def test_a_product_is_never_addends_for_who_does_not_ask(
    as_addends: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from nvcli.kernels import gemm

    line = {"op": "addends", "columns": 64, "outputs": 7, "rows": [17, 64], "kernel": "tiles"}
    use(monkeypatch, tmp_path / "table.json", line | {"tiles": TILES})
    monkeypatch.setattr(kernels, "_use_triton", lambda x: True)
    monkeypatch.setattr(gemm, "linear_addends", lambda x, weight, tiles: "addends")
    x, weight = torch.ones(17, 64, dtype=BF16), torch.ones(7, 64, dtype=BF16)
    out = torch.empty(17, 7, dtype=BF16)
    got = kernels.linear(x, weight, None, as_addends=as_addends)
    assert isinstance(got, str) == as_addends
    assert kernels.linear(x, weight, None, out, as_addends=as_addends) is out
    bias = torch.ones(7, dtype=BF16)
    assert torch.equal(kernels.linear(x, weight, bias, as_addends=as_addends), out + 1)
