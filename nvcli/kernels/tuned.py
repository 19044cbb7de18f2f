"""Which kernel takes a product, and how kernels cut their work: the one place that says so.

`tuned.json` beside this file is what was measured, by kind of GPU: for products by shape, from how
many rows to how many which kernel was the fastest, the library among them, and where it is the
library's, which of the library's algorithms. `python -m benchmarks.kernels.tune` and
`benchmarks.kernels.tune_library` measure and print it. Shapes that it lacks follow the rules in
`cuts`, which take our kernels no further than they were seen ahead, and the library's own choice.

`NVCLI_TUNED=FILE` reads another table; `NVCLI_SKINNY_ROWS=N` leaves products of more than N rows to
the library, those of one row aside; norms come late from `NVCLI_LATE_NORM_ROWS=N` rows on, with 0
never.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from nvcli.errors import UsageError
from nvcli.kernels import cublaslt, cuts
from nvcli.kernels.cublaslt import Algorithm
from nvcli.kernels.cuts import Attention, Fp8Tiles, Gemv, Product, Split, Tiles

TABLE = Path(__file__).with_name("tuned.json")
DEFAULT_GPU = "sm_90"  # of the interpreter, and of kernels compiled ahead
NO_LIMIT = 1 << 30  # of rows
OPS = ("linear", "addends", "swiglu")
KERNELS = ("library", "skinny", "tiles")


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the table: who takes a product of `rows[0]` to `rows[1]` rows."""

    op: str
    columns: int
    outputs: int
    rows: tuple[int, int]
    kernel: str
    tiles: Tiles | None  # of that kernel

    def takes(self, op: str, num_rows: int, size: int, num_outputs: int) -> bool:
        is_shape = (self.op, self.columns, self.outputs) == (op, size, num_outputs)
        return is_shape and self.rows[0] <= num_rows <= self.rows[1]


@dataclass(frozen=True, slots=True)
class Named:
    """A line of the table: the library's algorithm for `rows[0]` to `rows[1]` rows."""

    columns: int
    outputs: int
    adds: bool  # to what is there
    rows: tuple[int, int]
    algorithm: Algorithm


@dataclass(frozen=True, slots=True)
class Table:
    """What was measured on one kind of GPU."""

    products: tuple[Entry, ...] = ()
    attention: Attention = cuts.ATTENTION
    algorithms: tuple[Named, ...] = ()
    library_version: int | None = None  # of cublasLt, whose algorithms those are


# --- what kernels ask ----------------------------------------------------------------------------


def choose(
    op: str, num_rows: int, size: int, num_outputs: int, device: torch.device, dtype: torch.dtype
) -> Product | None:
    """Who takes a product of [num_rows, size] with a matrix of so many outputs; None: the library.

    op: `linear`; `addends`, where the result may be those; `swiglu`, of F outputs from 2F rows
    """
    return _choose(op, num_rows, size, num_outputs, gpu_of(device), dtype.itemsize)


def choose_with_norm(op: str, num_rows: int, size: int, *, is_fp8: bool = False) -> Gemv | None:
    """The same where the norm of the input would be computed in it; None: it is apart."""
    if num_rows != 1:
        return None
    return cuts.norm_gemv_cut(size, is_swiglu=op == "swiglu", is_fp8=is_fp8)


@lru_cache(maxsize=4096)
def choose_fp8(
    op: str, num_rows: int, size: int, num_outputs: int, dtype: torch.dtype, *, is_plain: bool
) -> Gemv | Fp8Tiles | None:
    """Who takes a product with an fp8 weight as it is stored, by rules alone, none of which is
    measured; None: the library, with a dense copy of the weight.

    op: as in `choose`, or `deterministic`, where the answer is the same for every number of rows
    is_plain: without a bias, all contiguous
    """
    is_float32 = dtype == torch.float32
    if op == "deterministic":
        return None if is_float32 else cuts.DETERMINISTIC_FP8
    assert op in OPS, f"no op {op!r}"
    if num_rows == 1 and is_plain:
        return None if op == "swiglu" else cuts.fp8_gemv_cut(size, num_outputs)
    if num_rows > _max_rows():
        return None
    return cuts.fp8_tiles(op, num_rows, size, num_outputs, is_float32=is_float32)


def algorithm(
    num_rows: int, size: int, num_outputs: int, device: torch.device, *, adds: bool
) -> Algorithm | None:
    """The library's for a product of [num_rows, size] with a matrix of so many outputs, in
    bfloat16; None: what it chooses itself. adds: the product is added to what is there.
    """
    return _algorithm(num_rows, size, num_outputs, gpu_of(device), adds)


@lru_cache(maxsize=4096)
def _algorithm(
    num_rows: int, size: int, num_outputs: int, gpu: str, adds: bool
) -> Algorithm | None:
    table = _table_of(gpu)
    if table.library_version != cublaslt.version():
        return None
    for named in table.algorithms:
        is_shape = (named.columns, named.outputs, named.adds) == (size, num_outputs, adds)
        if is_shape and named.rows[0] <= num_rows <= named.rows[1]:
            return named.algorithm
    return None


def attention(device: torch.device) -> Attention:
    return _table_of(gpu_of(device)).attention


@lru_cache(maxsize=4096)
def _choose(
    op: str, num_rows: int, size: int, num_outputs: int, gpu: str, element_bytes: int
) -> Product | None:
    assert op in OPS, f"no op {op!r}"
    is_swiglu = op == "swiglu"
    if num_rows > 1 and num_rows > _max_rows():
        return None
    for wanted in ("addends", "linear") if op == "addends" else (op,):
        for entry in _table_of(gpu).products:
            if not entry.takes(wanted, num_rows, size, num_outputs):
                continue
            if entry.kernel == "library":
                return None
            if entry.kernel == "skinny":
                return cuts.skinny_cut(num_rows, size, num_outputs, is_swiglu=is_swiglu)
            if element_bytes == 2:
                return entry.tiles
    if num_rows == 1:
        return cuts.gemv_cut(size, num_outputs)
    return cuts.skinny_cut(num_rows, size, num_outputs, is_swiglu=is_swiglu)


def gpu_of(device: torch.device) -> str:
    """The kind of GPU whose part of the table counts: its compute capability."""
    return _gpu_of(device.index or 0) if device.type == "cuda" else DEFAULT_GPU


@lru_cache
def _gpu_of(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def late_norm_rows(size: int) -> int:
    """From how many rows of so many columns on norms come late: see `layers.norm`."""
    return _rows_named("NVCLI_LATE_NORM_ROWS", cuts.late_norm_rows(size)) or NO_LIMIT


def _max_rows() -> int:
    return _rows_named("NVCLI_SKINNY_ROWS", NO_LIMIT)


def _rows_named(name: str, usual: int) -> int:
    text = os.environ.get(name) or str(usual)
    if not text.isdecimal():
        raise UsageError(f"{name} must be a number of rows, got {text!r}", param=name)
    return int(text)


# --- the table -----------------------------------------------------------------------------------


@lru_cache
def _table_of(gpu: str) -> Table:
    """What counts. Raises `UsageError` for a file named by the user that is no table."""
    named = os.environ.get("NVCLI_TUNED")
    if not named:
        return read_table(TABLE).get(gpu, Table())
    try:
        return read_table(Path(named)).get(gpu, Table())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"NVCLI_TUNED: {named} is no table of kernels: {error!r}",
            hint="`python -m benchmarks.kernels.tune` writes one.",
            param="NVCLI_TUNED",
        ) from error


def read_table(path: Path) -> dict[str, Table]:
    """By kind of GPU. Raises what reading and parsing raise, for a file that is no table."""
    found: dict[str, Table] = {}
    for gpu, part in json.loads(path.read_text(encoding="utf-8")).items():
        products = tuple(_entry(line) for line in part["products"])
        settings = dict(part.get("attention", {}))  # others are as in the rules
        for name in ("splits", "fp8_splits"):
            if name in settings:
                settings[name] = tuple((rows, Split(**cut)) for rows, cut in settings[name])
        library = part.get("library", {"version": None, "products": []})
        named = tuple(_named(line) for line in library["products"])
        cut = replace(cuts.ATTENTION, **settings)
        found[gpu] = Table(products, cut, named, library["version"])
    return found


def _named(line: dict[str, Any]) -> Named:
    (first, last), shape = line["rows"], (line["columns"], line["outputs"], line["adds"])
    return Named(*shape, (first, last), Algorithm(*map(int, line["algorithm"])))


def _entry(line: dict[str, Any]) -> Entry:
    op, kernel, (first, last) = line["op"], line["kernel"], line["rows"]
    if op not in OPS or kernel not in KERNELS:
        raise ValueError(f"an unknown op or kernel in {line}")
    tiles = Tiles(**line["tiles"]) if kernel == "tiles" else None
    if tiles is not None and tiles.splits > 1 and op != "addends":
        raise ValueError(f"splits of what is not added up in {line}")
    return Entry(op, line["columns"], line["outputs"], (first, last), kernel, tiles)


def forget() -> None:
    """What was read, after a change of the environment: for tests and sweeps."""
    _table_of.cache_clear()
    _choose.cache_clear()
    _algorithm.cache_clear()
    choose_fp8.cache_clear()
