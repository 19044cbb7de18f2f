"""What `tune` tries: few settings, chosen by what a Hopper GPU has to do in each.

Products. 132 SMs read at most some 100 GB/s each, so a product wants 64 programs and more, and x,
which every program reads, wants few. Where a program's share of W fits into shared memory beside a
piece of x, all of it is held before the wait; where it does not, most of it comes in a loop.
"""

from __future__ import annotations

from dataclasses import replace

from nvcli.kernels import cuts
from nvcli.kernels.cuts import DecodeLaunch, Skinny, Tiles

SHARED_BYTES = 200 << 10  # of 227 KB: the norm beside it, or the next product's start
FEW_PROGRAMS, MANY_PROGRAMS = 48, 264
LARGE_TILE = 128
SHARES = (256, 512, 1024)  # columns of a program that holds all of them
LOOPS = ((64, 128, 4, 4), (128, 64, 4, 8), (128, 128, 3, 8))  # outputs, columns, stages, warps


def products(op: str, num_rows: int, size: int, num_outputs: int) -> list[Tiles | Skinny]:
    """For a product of so many rows, columns and outputs; `op` as in `tuned.choose`."""
    tile = min(max(16, cuts.next_power_of_2(num_rows)), LARGE_TILE)
    weight_rows = num_outputs * (1 + (op == "swiglu"))
    found: list[Tiles | Skinny] = []
    skinny = cuts.skinny_cut(num_rows, size, num_outputs, is_swiglu=op == "swiglu")
    if skinny is not None:
        found.append(skinny)
    found += _held(op, tile, size, weight_rows)
    found += _looped(op, tile, size, weight_rows)
    return [cut for cut in found if isinstance(cut, Skinny) or shared_bytes(cut) <= SHARED_BYTES]


def shared_bytes(cut: Tiles) -> int:
    """Of 16-bit elements: what is held and a piece of x, then the stages of the loop."""
    piece = (cut.outputs + cut.rows) * cut.columns * 2
    loop = cut.stages * piece if cut.stages > 1 else 0
    return cut.held * cut.outputs * cut.columns * 2 + max(loop, cut.rows * cut.columns * 2)


def _held(op: str, tile: int, size: int, weight_rows: int) -> list[Tiles]:
    found = []
    for share in SHARES:
        splits = size // share
        if splits * share != size or (splits > 1 and op != "addends"):
            continue
        if FEW_PROGRAMS <= weight_rows // 64 * splits <= MANY_PROGRAMS:
            columns = min(share, 512 if tile <= 32 else 256)
            cut = Tiles(tile, 64, columns, share // columns, splits, 4, 1)
            found += [replace(cut, warps=8)] if tile == LARGE_TILE else [cut, replace(cut, warps=8)]
            if tile == LARGE_TILE:  # W twice, x in smaller tiles
                found.append(replace(cut, rows=64, warps=8))
        if splits == 1 and tile <= 64 and FEW_PROGRAMS <= weight_rows // 32 <= MANY_PROGRAMS:
            found.append(Tiles(64, 32, 256, share // 256, 1, 4, 1))
    return found


def _looped(op: str, tile: int, size: int, weight_rows: int) -> list[Tiles]:
    if size <= 1024 and tile < LARGE_TILE and weight_rows // 64 <= MANY_PROGRAMS:
        return []  # held whole
    found = []
    for outputs, columns, stages, warps in LOOPS:
        programs = weight_rows // outputs
        splits = 1
        while op == "addends" and programs * splits < 96 and size // splits >= 8 * columns:
            splits *= 2
        if programs * splits >= FEW_PROGRAMS and size % (splits * columns) == 0:
            found.append(Tiles(tile, outputs, columns, 2, splits, warps, stages))
    return found


# --- attention -----------------------------------------------------------------------------------

# With three stages (or four) a program has one tile of keys and values on its way, and an SM holds
# four; with five it has two, and an SM holds three, which come further where few are left.
DECODE_LAUNCHES = (
    DecodeLaunch(64, warps=2, stages=3, registers=0),
    DecodeLaunch(64, warps=2, stages=5, registers=0),
    DecodeLaunch(64, warps=4, stages=5, registers=0),
    DecodeLaunch(32, warps=1, stages=3, registers=0),
    DecodeLaunch(32, warps=1, stages=5, registers=0),
)
# Of programs of one warp, which wait for no other, an SM holds more: what half the bytes want.
FP8_LAUNCHES = (
    DecodeLaunch(64, warps=2, stages=3, registers=0),
    DecodeLaunch(64, warps=2, stages=5, registers=0),
    DecodeLaunch(32, warps=1, stages=3, registers=0),
    DecodeLaunch(32, warps=1, stages=5, registers=128),
    DecodeLaunch(16, warps=1, stages=5, registers=0),
)
EARLY_WARPS = (2, 4, 8)
DECODE_PROGRAMS = {  # an SM, by the largest step that is cut alike: rounds of three and four
    2: (2, 3, 4, 6),
    8: (2, 3, 4, 6),
    16: (3, 4, 6, 8),
    32: (3, 4, 6, 8),
    64: (4, 6, 8, 9, 12),
    128: (8, 9, 12, 16, 20),
    192: (8, 11, 12, 16, 20),
    256: (8, 12, 16, 20, 24, 32),
}
FP8_PROGRAMS = {
    2: (2, 3, 4, 8),
    8: (2, 4, 6, 8),
    16: (4, 6, 8, 12),
    32: (4, 8, 12, 16),
    64: (6, 8, 12, 16, 20),
    128: (8, 12, 16, 20, 28),
    192: (10, 12, 14, 16, 20),
    256: (12, 16, 20, 28, 40),
}
PREFILL = tuple(
    {"prefill_rows": rows, "prefill_keys": keys, "prefill_warps": warps, "prefill_stages": stages}
    for rows, keys, warps, stages in (
        (128, 64, 8, 3),
        (64, 64, 4, 3),
        (128, 128, 8, 3),
        (128, 32, 8, 4),
        (64, 128, 4, 3),
        (128, 64, 8, 2),
    )
)
