"""The two output streams as the user sees them: what is a terminal, what may hold escapes.

Answers go to `out`, everything else to `err`. All text that does not come from nvcli itself passes
`visible` (or a `ControlFilter`, where it arrives in pieces) first: a model, a file or a pasted text
can hold terminal escapes that clear the screen, set the title or write the clipboard.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from dataclasses import dataclass
from typing import TextIO

from nvcli.errors import ClosedPipeError, NvcliError
from nvcli.logs import log_said
from nvcli.repl.wrap import wrap

# Everything below space but tab and newline, DEL, and the 8-bit control set.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _show_control(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # the Unicode pictures: ␛ for escape
    return "␡" if code == 0x7F else f"\\x{code:02x}"


def visible(text: str) -> str:
    """`text` with control characters as visible signs; tabs and line ends stay."""
    return _CONTROLS.sub(_show_control, text.replace("\r\n", "\n"))


def repair(text: str) -> str:
    """`text` without lone surrogates (undecodable bytes in arguments or typed input)."""
    raw = text.encode("utf-8", "surrogateescape") if _is_escaped(text) else None
    if raw is not None:
        return raw.decode("utf-8", "replace")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _is_escaped(text: str) -> bool:
    return all(not 0xD800 <= ord(c) <= 0xDFFF or 0xDC80 <= ord(c) <= 0xDCFF for c in text)


def unbroken(text: str) -> str:
    """`text` whose rows the terminal cuts at its edge instead of breaking them: what is to be taken
    back must stand on the rows that were counted, and only the terminal knows how wide it draws an
    emoji, or a sign that is narrow here and wide in a Chinese or Japanese setup."""
    return f"\x1b[?7l{text}\x1b[?7h"


class ControlFilter:
    """`visible` for text that arrives in pieces: a CR LF may be split between two of them."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        return visible(text[: len(text) - len(self._held)])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return visible(held)


@dataclass
class Screen:
    """Where to write, and what each stream can show."""

    out: TextIO
    err: TextIO
    out_is_terminal: bool = False
    err_is_terminal: bool = False
    out_color: bool = False
    err_color: bool = False
    is_dumb: bool = False  # TERM=dumb: not even cursor movement
    is_quiet: bool = False
    is_verbose: bool = False

    @property
    def can_redraw_out(self) -> bool:
        return self.out_is_terminal and not self.is_dumb

    @property
    def can_redraw_err(self) -> bool:
        return self.err_is_terminal and not self.is_dumb

    def size(self) -> tuple[int, int]:
        """Columns and rows now; read again for each block, so that a resize is followed."""
        columns, rows = shutil.get_terminal_size()
        if "COLUMNS" not in os.environ:
            for stream in (self.out, self.err):
                with contextlib.suppress(OSError, ValueError):
                    found = os.get_terminal_size(stream.fileno())
                    if found.columns > 0:  # 0: a terminal that nobody has told its size
                        columns, rows = found.columns, found.lines or rows
                        break
        return max(columns, 10), max(rows, 4)

    def write(self, text: str) -> None:
        """Write a part of the answer, at once.

        Raises `ClosedPipeError` when the reader is gone, `NvcliError` when the disk is full.
        """
        try:
            self.out.write(text)
            self.out.flush()
        except BrokenPipeError as exc:
            raise ClosedPipeError("the reader closed the pipe") from exc
        except OSError as exc:
            reason = exc.strerror or str(exc)
            raise NvcliError(f"cannot write to standard output: {reason}") from exc

    def write_err(self, text: str, *, dim: bool = False) -> None:
        """Write beside the answer; a closed standard error is nobody's problem."""
        if dim and self.err_color and text.strip("\n"):
            body = text.rstrip("\n")
            text = f"\x1b[2m{body}\x1b[0m{text[len(body) :]}"
        with contextlib.suppress(OSError, ValueError):
            self.err.write(text)
            self.err.flush()

    def line_err(
        self,
        text: str,
        *,
        dim: bool = False,
        indent: int = 0,
        separator: str = " ",
        prefix: str = "",
        level: int = logging.INFO,
        is_shown: bool = True,
    ) -> None:
        """A line of nvcli's own beside the answer; on a terminal it is broken between words. The
        log file has it, without the prefix, whether it is shown or not."""
        text = visible(text)
        log_said(text, level)
        if not is_shown:
            return
        text = prefix + text
        if self.err_is_terminal:
            text = wrap(text, self.size()[0], indent, separator)
        self.write_err(f"{text}\n", dim=dim)

    def note(self, text: str) -> None:
        """A line of information: only where somebody looks."""
        self.line_err(text, dim=True, is_shown=self.err_is_terminal and not self.is_quiet)

    def detail(self, text: str) -> None:
        """What only `-v` asks for."""
        self.line_err(text, dim=True, is_shown=self.is_verbose)

    def warn(self, text: str) -> None:
        """A line about something that changes the answer: also where nobody looks."""
        level = logging.WARNING
        self.line_err(text, prefix="nvcli: ", level=level, is_shown=not self.is_quiet)

    def error(self, text: str) -> None:
        """A failure that does not end the run: always shown."""
        self.line_err(text, prefix="nvcli: ", level=logging.ERROR)
