"""How kernels cut their work: the settings of each, and rules for shapes that were not measured.

`tuned.py` is who asks; what was measured goes before these rules.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from nvcli.types import FP8_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

# --- products ------------------------------------------------------------------------------------

MAX_NORM_COLUMNS = 2048
MAX_WHOLE = 2048  # columns that one tile of the GEMV holds; longer rows are walked in pieces
GEMV_PIECE = 2048
LONG_ROW = 8192  # columns
MANY_OUTPUTS = 32_768  # an LM head: enough programs even if each does more
SKINNY_ROWS = 16  # of a tensor core's tile: more would be two
SKINNY_COLUMNS = 3072  # x has to be short enough to be held at once
SKINNY_PIECE = 2048  # columns held as one tile
MIN_SLICE = 16  # columns a tensor core takes
FEW_OUTPUTS = 4096  # under it the deterministic mode has narrow tiles, so that there are enough


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


Product = Gemv | Skinny | Tiles


def gemv_cut(size: int, num_outputs: int) -> Gemv:
    """One row of so many columns.

    Long rows: few outputs a program, so that there are enough programs, and pieces that leave a
    thread 16 to 64 weights and no last piece that is mostly empty.
    """
    width = next_power_of_2(size)
    if width <= MAX_WHOLE:
        outputs = 8 if num_outputs >= MANY_OUTPUTS else 4 if width <= 1024 else 2
        return Gemv(outputs, width, _gemv_warps(outputs * width))
    outputs = 4 if num_outputs >= MANY_OUTPUTS else 2
    if size < 2 * GEMV_PIECE:
        return Gemv(outputs, GEMV_PIECE, 4)
    if size <= LONG_ROW:
        return Gemv(outputs, GEMV_PIECE if size % GEMV_PIECE == 0 else 2 * GEMV_PIECE, 8)
    if size % (2 * GEMV_PIECE) == 0:
        return Gemv(outputs, 2 * GEMV_PIECE, 4)
    return Gemv(4, GEMV_PIECE // 2, 8)


def norm_gemv_cut(size: int, *, is_swiglu: bool, is_fp8: bool = False) -> Gemv | None:
    """One row whose norm is computed in the product. None: apart from it.

    Every program reads all of x, the residual and the norm's weights. With long rows that is as
    much as its share of W.
    """
    if size > MAX_NORM_COLUMNS:
        return None
    width = next_power_of_2(size)
    outputs = (4 if width <= 1024 else 2) * (1 + is_fp8)  # as many bytes of it
    return Gemv(outputs, width, _gemv_warps(outputs * width * (1 + is_swiglu)))


def _gemv_warps(num_elements: int) -> int:
    """At most 64 weights a thread, so that they stay in registers."""
    return 4 if num_elements <= 8192 else 8 if num_elements <= 32_768 else 16


def skinny_cut(num_rows: int, size: int, num_outputs: int, *, is_swiglu: bool) -> Skinny | None:
    """Two to sixteen rows, of columns in one to three pieces; with SwiGLU in one."""
    if not 1 < num_rows <= SKINNY_ROWS or size > SKINNY_COLUMNS:
        return None
    for pieces in (1,) if is_swiglu else (1, 2, 3):
        piece = size // pieces
        is_even = piece * pieces == size and piece == next_power_of_2(piece)
        if is_even and 4 * MIN_SLICE <= piece <= SKINNY_PIECE:
            warps = 4 if size <= 1024 else 8
            outputs = 32 if num_outputs >= 4096 and size <= 1024 and not is_swiglu else 16
            return Skinny(outputs, pieces, min(warps, piece // MIN_SLICE), warps)
    return None


def late_norm_rows(size: int) -> int:
    """From where on the library takes the products anyway: it can add the residual in place, and
    two kernels a layer are spared.
    """
    return 65 if size <= MAX_NORM_COLUMNS else 33


def deterministic_tiles(num_outputs: int) -> Tiles:
    """The same for every number of rows."""
    outputs = 32 if num_outputs < FEW_OUTPUTS else 128
    return Tiles(rows=64, outputs=outputs, columns=64, held=0, splits=1, warps=4, stages=4)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


# --- products with fp8 weights -------------------------------------------------------------------

FP8_ROWS = 512  # beyond it the operations decide, which a library has faster
FP8_SWIGLU_ROWS = 64  # two sums of more do not fit into the registers
FP8_FLOAT32_ROWS = 16  # nor does one in float32, which tensor cores do not take
NUM_SMS = 132  # fewer programs leave some without work


@dataclass(frozen=True, slots=True)
class Fp8Tiles:
    """`fp8_gemm`: rows and outputs of a tile, splits of the columns, warps, and stages."""

    rows: int
    outputs: int
    splits: int
    warps: int
    stages: int


DETERMINISTIC_FP8 = Fp8Tiles(rows=64, outputs=64, splits=1, warps=4, stages=4)


def fp8_gemv_cut(size: int, num_outputs: int) -> Gemv:
    """As many bytes a program as of a dense weight."""
    dense = gemv_cut(size, num_outputs)
    warps = _gemv_warps(2 * dense.outputs * dense.columns)
    if dense.columns < size:
        return Gemv(dense.outputs, 2 * dense.columns, warps)
    return Gemv(2 * dense.outputs, dense.columns, warps)


def fp8_tiles(
    op: str, num_rows: int, size: int, num_outputs: int, *, is_float32: bool
) -> Fp8Tiles | None:
    """op: as in `tuned.choose`. None: so many rows are the library's."""
    most = FP8_SWIGLU_ROWS if op == "swiglu" else FP8_ROWS
    if num_rows > (FP8_FLOAT32_ROWS if is_float32 else most):
        return None
    if num_rows > 64 and -(-num_rows // 128) * (num_outputs // 128) >= NUM_SMS:
        return Fp8Tiles(rows=128, outputs=128, splits=1, warps=8, stages=3)
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    stages = 4 if rows == 64 else 6  # of small tiles more have to be on their way
    programs = -(-num_rows // rows) * (num_outputs // 64)
    if op == "addends":
        splits = min(-(-3 * NUM_SMS // (2 * programs)), size // FP8_BLOCK // 2, 8)
        return Fp8Tiles(rows, 64, max(splits, 1), warps=4, stages=stages)
    outputs = 32 if programs < NUM_SMS and rows < 64 else 64
    return Fp8Tiles(rows, outputs, splits=1, warps=4, stages=stages)


# --- attention -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Split:
    """Programs an SM, at most, that decode attention cuts the keys of a step into: see
    `attention_plan.cut_rows`.

    An SM holds four at once (with two warps and three stages), so multiples of it do best: a last
    round of few programs cannot ask for all that memory gives. Rows of about the same length make
    one even round; rows of other lengths want two and more, of smaller programs.
    """

    even: int
    uneven: int  # where the longest row has more than 5/4 of the average keys
    wide: int | None = None  # the same where KV heads serve WIDE_GROUP query heads or more

    def uneven_of(self, group_size: int) -> int:
        """group_size: query heads a KV head. Their parts cost as much to leave and merge each."""
        return self.uneven if self.wide is None or group_size < WIDE_GROUP else self.wide


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """Of the decode kernel: keys at a time, warps, stages, and registers of a thread at most, 0
    where the compiler decides.
    """

    tile: int
    warps: int
    stages: int
    registers: int


MANY_ROWS = 192
WIDE_GROUP = 3
TILES_OF_KEYS = (16, 32, 64)  # a chunk of a row is a multiple of the last
WARPS = (1, 2, 4, 8, 16)
REGISTERS = range(32, 256)  # of a thread


@dataclass(frozen=True, slots=True)
class Attention:
    """Raises `ValueError` for a setting that no kernel takes, with its name."""

    splits: tuple[tuple[int, Split], ...]  # for steps of up to so many rows, rising
    decode_warps: int
    decode_stages: int
    prefill_rows: int  # tokens times query heads of a tile
    prefill_keys: int
    prefill_warps: int
    prefill_stages: int
    # Decode attention that asks for keys before its wait: ahead at one row, behind at eight.
    early_rows: int = 2  # steps of so many rows
    early_warps: int = 4
    decode_tile: int = 64
    # Steps of more than MANY_ROWS rows, which bytes alone decide.
    many_tile: int = 64
    many_warps: int = 2
    many_stages: int = 3
    # The same over an fp8 cache: half the bytes a key, and more to do with each.
    fp8_tile: int = 64
    fp8_warps: int = 2
    fp8_stages: int = 3
    fp8_registers: int = 0
    fp8_splits: tuple[tuple[int, Split], ...] = ()  # none: `splits`

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name.endswith("splits"):
                _check_splits(name, value)
            elif name.endswith("_tile"):
                _check(name, value, TILES_OF_KEYS)
            elif name.endswith("_warps"):
                _check(name, value, WARPS)
            elif name in ("prefill_rows", "prefill_keys"):
                _check(name, value, (16, 32, 64, 128, 256))
            elif name == "fp8_registers":
                _check(name, value, (0, *REGISTERS))
            else:
                _check(name, value, range(0 if name == "early_rows" else 1, 1 << 30))
        if not self.splits:
            raise ValueError("splits must not be empty")

    def split(self, num_rows: int, *, is_fp8: bool = False) -> Split:
        """Of a step of so many rows; those beyond the last are cut as it is."""
        splits = self.fp8_splits if is_fp8 and self.fp8_splits else self.splits
        return next((cut for limit, cut in splits if num_rows <= limit), splits[-1][1])

    def decode(self, num_rows: int, *, is_fp8: bool) -> DecodeLaunch:
        if is_fp8:
            return DecodeLaunch(self.fp8_tile, self.fp8_warps, self.fp8_stages, self.fp8_registers)
        if num_rows > MANY_ROWS:
            return DecodeLaunch(self.many_tile, self.many_warps, self.many_stages, registers=0)
        return DecodeLaunch(self.decode_tile, self.decode_warps, self.decode_stages, registers=0)


def _check(name: str, value: object, allowed: Sequence[int]) -> None:
    if type(value) is int and value in allowed:
        return
    if isinstance(allowed, range):
        which = f"a number of {allowed[0]} or more"
    elif len(allowed) > len(WARPS):
        which = f"{allowed[0]}, or {allowed[1]} to {allowed[-1]}"
    else:
        which = f"{', '.join(map(str, allowed[:-1]))} or {allowed[-1]}"
    raise ValueError(f"{name} must be {which}, not {value!r}")


def _check_splits(name: str, splits: tuple[tuple[int, Split], ...]) -> None:
    last = 0
    for limit, cut in splits:
        _check(f"a limit in {name}", limit, range(last + 1, 1 << 30))
        _check(f"{name}, {limit} rows, even", cut.even, range(1, 1 << 30))
        _check(f"{name}, {limit} rows, uneven", cut.uneven, range(1, 1 << 30))
        if cut.wide is not None:
            _check(f"{name}, {limit} rows, wide", cut.wide, range(1, 1 << 30))
        last = limit


ATTENTION = Attention(
    splits=(
        (32, Split(4, 4)),
        (64, Split(4, 8)),
        (128, Split(12, 8)),
        (256, Split(16, 16)),
    ),
    decode_warps=2,
    decode_stages=3,
    prefill_rows=128,
    prefill_keys=64,
    prefill_warps=8,
    prefill_stages=3,
)
