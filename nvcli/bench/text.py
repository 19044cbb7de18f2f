"""Numbers, strips and curves as plain text, without escapes.

What may not be stated is a dash, what lies beyond the timeout is `>timeout`. `to_ascii` is for
terminals and pipes that cannot hold the block characters.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = str.maketrans(
    "▁▂▃▄▅▆▇█·–×≤≥σλ│✔✘→─┤",
    "_.:-=+*#.-x<>sl|vx>-|",
)


class Wide(str):
    """A line of a table or of a picture, as a terminal of `needs` columns shows it, files and pipes
    too. `narrow(width)` is for fewer columns, with " · " where it may be broken; None: it is left
    out there."""

    needs: int
    narrow: Callable[[int], str | None]

    @classmethod
    def of(cls, text: str, needs: int, narrow: Callable[[int], str | None]) -> Wide:
        line = cls(text)
        line.needs, line.narrow = needs, narrow
        return line


def table(header: str, rows: Sequence[tuple[str, str, Sequence[tuple[str, str]]]]) -> list[str]:
    """`header` and the rows below it, all in columns: (line, name of the row, its values with what
    they are called). A narrow terminal has the names and, behind each, the values that are there.
    """
    needs = max(len(header), *(len(line) for line, _, _ in rows), 0)
    lines: list[str] = [Wide.of(header, needs, lambda width: None)]
    for line, name, values in rows:
        said = " · ".join(f"{label} {value}".strip() for label, value in values if value)
        lines.append(Wide.of(line, needs, partial(constant, f"{name.strip()}: {said}")))
    return lines


def entries(text: str) -> list[str]:
    """A text of names and, in a column behind them, what is said of each, which may go on in the
    lines below."""
    found: list[str] = []
    lines = text.split("\n")
    needs = max(map(len, lines))
    for index, line in enumerate(lines):
        if line.startswith(" "):
            found.append(Wide.of(line, needs, lambda width: None))
            continue
        more = itertools.takewhile(lambda below: below.startswith(" "), lines[index + 1 :])
        name, _, said = line.partition("  ")
        words = " ".join([said, *more]).split()
        found.append(Wide.of(line, needs, partial(constant, f"{name}: {' '.join(words)}")))
    return found


def constant(text: str, width: int) -> str:
    """For `Wide.narrow`: the same for every width."""
    return text


def to_ascii(text: str) -> str:
    return text.translate(_ASCII).encode("ascii", "replace").decode()


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits; a dash for what may not be stated."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return ">timeout" if value > 0 else "–"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size >= digits:
        return f"{value:,.0f}"
    return f"{value:.{min(max(digits - 1 - size, 0), 6)}f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def spark(values: Sequence[float], width: int = 40) -> str:
    """A strip of blocks; the highest value fills one."""
    if not values:
        return ""
    step = len(values) / width
    if step > 1:
        values = [
            max(values[int(i * step) : max(int((i + 1) * step), int(i * step) + 1)])
            for i in range(width)
        ]
    top = max(values)
    if top <= 0:
        return BLOCKS[1] * len(values)
    return "".join(BLOCKS[1 + min(int(7 * v / top + 0.5), 7)] for v in values)


def ecdf(ordered: Sequence[float], width: int = 40) -> list[str]:
    """Share of samples up to x over time, in milliseconds, `width` columns of it; failures keep it
    below 1."""
    height = 4
    finite = [v for v in ordered if math.isfinite(v)]
    if len(finite) < 5:
        return []
    low, high = finite[0], finite[-1]
    if high <= low:
        return []
    shares, index = [], 0
    for column in range(width):
        x = low + (high - low) * (column + 1) / width
        while index < len(finite) and finite[index] <= x:
            index += 1
        shares.append(index / len(ordered))
    lines = []
    for row in range(height, 0, -1):
        cells = [
            BLOCKS[max(0, min(8, round(8 * (share * height - (row - 1)))))] for share in shares
        ]
        lines.append(f"  {row / height:4.2f} ┤{''.join(cells)}")
    left, right = number(low * 1e3), number(high * 1e3)
    lines.append(f"       {left}{' ' * max(width - len(left) - len(right), 1)}{right} ms")
    return lines
