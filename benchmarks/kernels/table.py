"""What a sweep found, as entries of `nvcli/kernels/tuned.json`, and that file's text."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nvcli.kernels import cuts, tuned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.kernels.tune_products import Measured, Place

ROWS = (8, 16, 32, 64, 128, 256)  # each stands for those above the one before
NOISE = 0.02  # of a time: what is not further ahead is not ahead
LINEAR = {"linear", "addends"}
Shape = tuple[int, int, bool]  # columns and outputs of a weight, and whether its product is added


def winners(place: Place, measured: dict[int, Measured]) -> Iterator[dict[str, Any]]:
    """One entry for every run of rows with the same choice."""
    last: dict[str, Any] | None = None
    for rows, result in measured.items():
        entry = _entry(place, rows, result, last)
        is_next = last is not None and last["rows"][1] + 1 == entry["rows"][0]
        if last and is_next and all(last.get(k) == entry.get(k) for k in ("kernel", "tiles")):
            last |= {k: entry[k] for k in ("us", "library_us")}
            last["rows"] = [last["rows"][0], rows]
            continue
        if last:
            yield last
        last = entry
    if last:
        yield last


def _entry(
    place: Place, rows: int, result: Measured, last: dict[str, Any] | None
) -> dict[str, Any]:
    cut, us = _winner(result, last)
    entry: dict[str, Any] = {
        "op": place.op,
        "columns": place.size,
        "outputs": place.num_outputs,
        "rows": [2 if rows == ROWS[0] else ROWS[ROWS.index(rows) - 1] + 1, rows],
        "kernel": "library",
    }
    if isinstance(cut, cuts.Skinny):
        entry["kernel"] = "skinny"
    elif cut is not None:
        entry |= {"kernel": "tiles", "tiles": asdict(cut)}
    return entry | {"us": round(us, 2), "library_us": round(result.library_us, 2)}


def _winner(
    result: Measured, last: dict[str, Any] | None
) -> tuple[cuts.Tiles | cuts.Skinny | None, float]:
    """The fastest; or what fewer rows have, where it is as fast: a start compiles fewer kernels."""
    if not result.tried or result.tried[0][0] > (1 - NOISE) * result.library_us:
        return None, result.library_us
    best_us, best = result.tried[0]
    for us, cut in result.tried:
        is_near = us <= (1 + NOISE) * best_us
        if is_near and last and isinstance(cut, cuts.Tiles) and last.get("tiles") == asdict(cut):
            return cut, us
    return best, best_us


def with_kernels(
    table: dict[str, Any], gpu: str, found: list[dict[str, Any]], attention: dict[str, Any] | None
) -> dict[str, Any]:
    """`table` with what was found on that GPU in place of what it had for those rows."""
    part = table.get(gpu, {"products": []})
    kept = [old for old in part["products"] if not any(_replaces(new, old) for new in found)]
    part = part | {"products": _sorted(kept + found, "columns", "outputs", "op", "rows")}
    if attention is not None:
        part |= {"attention": attention}
    return table | {gpu: part}


def with_algorithms(
    table: dict[str, Any], gpu: str, version: int, found: dict[Shape, list[dict[str, Any]]]
) -> dict[str, Any]:
    """`table` with the library's algorithms of these shapes, also where there are none, in place of
    what it had: of one version of the library.
    """
    part = table.get(gpu, {"products": []})
    old = part.get("library", {})
    is_kept = old.get("version") == version
    kept = [o for o in old["products"] if _shape(o) not in found] if is_kept else []
    new = [line for lines in found.values() for line in lines]
    lines = _sorted(kept + new, "columns", "outputs", "adds", "rows")
    return table | {gpu: part | {"library": {"version": version, "products": lines}}}


def _shape(line: dict[str, Any]) -> Shape:
    return line["columns"], line["outputs"], line["adds"]


def table_text(table: dict[str, Any]) -> str:
    """Of the file: a line an entry."""
    parts = []
    for name, value in table.items():
        text = f'  "products": {_lines(value["products"])}'
        if "library" in value:
            version, products = value["library"]["version"], value["library"]["products"]
            text += f',\n  "library": {{"version": {version}, "products": {_lines(products)}}}'
        if "attention" in value:
            text += f',\n  "attention": {json.dumps(value["attention"])}'
        parts.append(f' "{name}": {{\n{text}\n }}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(entries: list[dict[str, Any]]) -> str:
    lines = ",\n".join(f"   {json.dumps(entry)}" for entry in entries)
    return f"[\n{lines}\n  ]"


def _sorted(entries: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    return sorted(entries, key=lambda entry: [entry[k] for k in keys])


def _replaces(new: dict[str, Any], old: dict[str, Any]) -> bool:
    """The same shape and some of the rows; addends replace what was measured as linear."""
    is_shape = all(new[k] == old[k] for k in ("columns", "outputs"))
    is_op = new["op"] == old["op"] or {new["op"], old["op"]} <= LINEAR
    meets = new["rows"][0] <= old["rows"][1] and old["rows"][0] <= new["rows"][1]
    return is_shape and is_op and meets


def package_table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tuned.TABLE.read_text(encoding="utf-8"))
    return found
