"""Numbers, strips and curves as plain text, without escapes.

What may not be stated is a dash, what lies beyond the timeout is `>timeout`. `to_ascii` is for
terminals and pipes that cannot hold the block characters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = str.maketrans(
    "▁▂▃▄▅▆▇█·–×≤≥σλ│✔✘→─┤",
    "_.:-=+*#.-x<>sl|vx>-|",
)


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


def ecdf(ordered: Sequence[float]) -> list[str]:
    """Share of samples up to x over time, in milliseconds; failures keep it below 1."""
    width, height = 40, 4
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
