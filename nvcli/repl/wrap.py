"""nvcli's own lines fitted to the terminal: broken between words, never inside one that fits.

Only for what nvcli says. An answer, a prompt or a file is shown as it is, so that it can be copied.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_GAP = 2
_STEP = 4  # how far a description stands in that does not fit beside its name


def cells(text: str) -> int:
    """Columns that `text` takes; good enough to break lines by."""
    return sum(_width(char) for char in text)


def _width(char: str) -> int:
    if char < "\u0300":
        return 1
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def wrap(text: str, width: int, indent: int = 0, separator: str = " ") -> str:
    """`text` in lines of at most `width` columns where its parts allow; all but the first of a line
    stand in by `indent`. A separator at a break is dropped."""
    return "\n".join(_wrap_line(line, width, indent, separator) for line in text.split("\n"))


def _wrap_line(line: str, width: int, indent: int, separator: str) -> str:
    if cells(line) <= width:
        return line
    body = line.lstrip(" ")
    rows, row = [], line[: len(line) - len(body)]
    is_empty = True
    for part in body.split(separator):
        longer = row + part if is_empty else f"{row}{separator}{part}"
        if not is_empty and cells(longer) > width:
            rows.append(row)
            longer = " " * indent + part
        row, is_empty = longer, False
    return "\n".join([*rows, row])


def table(rows: Sequence[tuple[str, str]], width: int) -> str:
    """Names, and beside or (in a narrow window) below each what is said of it."""
    left = max((cells(name) for name, _ in rows), default=0) + _GAP
    if left > width // 2 + _GAP:
        lines = []
        for name, text in rows:
            line = f"{name}{' ' * _GAP}{text}".rstrip()
            if cells(line) > width:
                line = f"{name}\n{wrap(' ' * _STEP + text, width, _STEP)}".rstrip()
            lines.append(line)
        return "\n".join(lines)
    lines = [f"{name}{' ' * (left - cells(name))}{text}".rstrip() for name, text in rows]
    return "\n".join(_hang(line, width, left) for line in lines)


def _hang(line: str, width: int, left: int) -> str:
    """The name's columns are no place to break."""
    return line[:left] + wrap(line[left:], width - left).replace("\n", "\n" + " " * left)
