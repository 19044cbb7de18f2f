"""Which kernel takes a product, and how it is cut: the one place that says so.

`tuned.json` beside this file is what was measured: by kind of GPU and shape, from how many rows to
how many which kernel was the fastest, the library among them. `python -m benchmarks.kernels.tune`
measures and writes it. Shapes that it lacks follow rules, which take our kernels no further than
they were seen ahead.

`NVCLI_TUNED=FILE` reads another table; `NVCLI_SKINNY_ROWS=N` leaves products of more than N rows to
the library, those of one row aside.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nvcli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

TABLE = Path(__file__).with_name("tuned.json")
DEFAULT_GPU = "sm_90"  # of the interpreter, and of kernels compiled ahead
OPS = ("linear", "addends", "swiglu")


@dataclass(frozen=True, slots=True)
class Gemv:
    """One row: outputs of a program, columns at a time, warps."""

    outputs: int
    columns: int
    warps: int


@dataclass(frozen=True, slots=True)
class Skinny:
    """Up to 16 rows: outputs of a program, pieces of the columns, slices of a piece, warps."""

    outputs: int
    pieces: int
    slices: int
    warps: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """`gemm`: rows and outputs of a tile, columns at a time, pieces of so many columns held before
    the wait, splits of all columns, warps, and stages of the loop over what is not held.
    """

    rows: int
    outputs: int
    columns: int
    held: int
    splits: int
    warps: int
    stages: int


Choice = Gemv | Skinny | Tiles | None  # None: the library


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the table: who takes a product of `rows[0]` to `rows[1]` rows."""

    op: str
    columns: int
    outputs: int
    rows: tuple[int, int]
    kernel: str  # library, skinny or tiles
    tiles: Tiles | None

    def takes(self, op: str, num_rows: int, size: int, num_outputs: int) -> bool:
        is_shape = (self.op, self.columns, self.outputs) == (op, size, num_outputs)
        return is_shape and self.rows[0] <= num_rows <= self.rows[1]


# --- the choice ----------------------------------------------------------------------------------


def choose(
    op: str, num_rows: int, size: int, num_outputs: int, device: torch.device, dtype: torch.dtype
) -> Choice:
    """Who takes the product of [num_rows, size] with a matrix of so many outputs.

    op: `linear`; `addends`, where the result may be those; `swiglu`, of F outputs from 2F rows
    """
    return _choose(op, num_rows, size, num_outputs, gpu_of(device), dtype.itemsize)


def choose_with_norm(op: str, num_rows: int, size: int, num_outputs: int) -> Gemv | None:
    """The same where the norm of the input is computed in the product; None: apart from it.

    Every program reads all of x, the residual and the norm's weights. With more rows, or long ones,
    that is as much as its share of W.
    """
    if num_rows != 1 or size > MAX_NORM_COLUMNS:
        return None
    width = next_power_of_2(size)
    outputs = 4 if width <= 1024 else 2
    return Gemv(outputs, width, _gemv_warps(outputs * width * (1 + (op == "swiglu"))))


@lru_cache(maxsize=4096)
def _choose(
    op: str, num_rows: int, size: int, num_outputs: int, gpu: str, element_bytes: int
) -> Choice:
    assert op in OPS, f"no op {op!r}"
    if num_rows > 1 and num_rows > _max_rows():
        return None
    for wanted in ("addends", "linear") if op == "addends" else (op,):
        for entry in _table().get(gpu, ()):
            if not entry.takes(wanted, num_rows, size, num_outputs):
                continue
            if entry.kernel == "library":
                return None
            if entry.tiles is None:
                return skinny_cut(op, num_rows, size, num_outputs)
            if element_bytes == 2:
                return entry.tiles
    if num_rows == 1:
        return None if op == "swiglu" else _gemv(size, num_outputs)
    return skinny_cut(op, num_rows, size, num_outputs)


def gpu_of(device: torch.device) -> str:
    """The kind of GPU whose part of the table counts: its compute capability."""
    return _gpu_of(device.index or 0) if device.type == "cuda" else DEFAULT_GPU


@lru_cache
def _gpu_of(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def _max_rows() -> int:
    text = os.environ.get("NVCLI_SKINNY_ROWS") or str(1 << 30)
    if not text.isdecimal():
        raise UsageError(
            f"NVCLI_SKINNY_ROWS must be a number of rows, got {text!r}", param="NVCLI_SKINNY_ROWS"
        )
    return int(text)


# --- rules ---------------------------------------------------------------------------------------

MAX_NORM_COLUMNS = 2048
MAX_WHOLE = 2048  # columns that one tile of the GEMV holds; longer rows are walked in pieces
GEMV_PIECE = 1024
MANY_OUTPUTS = 32_768  # an LM head: enough programs even if each does more
SKINNY_ROWS = 16  # of a tensor core's tile: more would be two
SKINNY_COLUMNS = 3072  # x has to be short enough to be held at once
SKINNY_PIECE = 2048  # columns held as one tile
MIN_SLICE = 16  # columns a tensor core takes
FEW_OUTPUTS = 4096  # under it the deterministic mode has narrow tiles, so that there are enough


def _gemv(size: int, num_outputs: int) -> Gemv:
    width = next_power_of_2(size)
    piece = width if width <= MAX_WHOLE else GEMV_PIECE
    outputs = 8 if width > MAX_WHOLE else 4 if width <= 1024 else 2
    if num_outputs >= MANY_OUTPUTS:
        outputs = 8
    return Gemv(outputs, piece, _gemv_warps(outputs * piece))


def _gemv_warps(num_elements: int) -> int:
    """At most 64 weights a thread, so that they stay in registers."""
    return 4 if num_elements <= 8192 else 8 if num_elements <= 32_768 else 16


def skinny_cut(op: str, num_rows: int, size: int, num_outputs: int) -> Skinny | None:
    """Two to sixteen rows, of columns in one to three pieces; with SwiGLU in one."""
    if not 1 < num_rows <= SKINNY_ROWS or size > SKINNY_COLUMNS:
        return None
    for pieces in (1,) if op == "swiglu" else (1, 2, 3):
        piece = size // pieces
        is_even = piece * pieces == size and piece == next_power_of_2(piece)
        if is_even and 4 * MIN_SLICE <= piece <= SKINNY_PIECE:
            warps = 4 if size <= 1024 else 8
            outputs = 32 if num_outputs >= 4096 and size <= 1024 and op != "swiglu" else 16
            return Skinny(outputs, pieces, min(warps, piece // MIN_SLICE), warps)
    return None


def deterministic_tiles(num_outputs: int) -> Tiles:
    """The same for every number of rows."""
    outputs = 32 if num_outputs < FEW_OUTPUTS else 128
    return Tiles(rows=64, outputs=outputs, columns=64, held=0, splits=1, warps=4, stages=4)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


# --- the table -----------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _table() -> dict[str, list[Entry]]:
    """What counts. Raises `UsageError` for a file named by the user that is no table."""
    named = os.environ.get("NVCLI_TUNED")
    if not named:
        return read_table(TABLE)
    try:
        return read_table(Path(named))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"NVCLI_TUNED: {named} is no table of kernels: {error!r}",
            hint="`python -m benchmarks.kernels.tune` writes one.",
            param="NVCLI_TUNED",
        ) from error


def read_table(path: Path) -> dict[str, list[Entry]]:
    """By kind of GPU. Raises what reading and parsing raise, for a file that is no table."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return {gpu: list(_entries(lines)) for gpu, lines in found.items()}


def _entries(lines: list[dict[str, Any]]) -> Iterator[Entry]:
    for line in lines:
        if line["op"] not in OPS or line["kernel"] not in ("library", "skinny", "tiles"):
            raise ValueError(f"an unknown op or kernel in {line}")
        first, last = line["rows"]
        tiles = Tiles(**line["tiles"]) if line["kernel"] == "tiles" else None
        if tiles is not None and tiles.splits > 1 and line["op"] != "addends":
            raise ValueError(f"splits of what is not added up in {line}")
        shape = (line["op"], line["columns"], line["outputs"])
        yield Entry(*shape, (first, last), line["kernel"], tiles)


def forget() -> None:
    """What was read, after a change of the environment: for tests and sweeps."""
    _table.cache_clear()
    _choose.cache_clear()
