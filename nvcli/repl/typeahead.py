"""Keys typed while an answer streams: collected silently, offered as a draft, never sent.

The terminal is switched to unbuffered, silent input for that time; Ctrl+C and Ctrl+Z keep their
meaning but drop nothing that was typed before them, and keys that act on the answer are told to the
caller. What comes in is reduced to text:
line ends stay, escape sequences go.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import termios
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|\r|\n)|\x1b.?")
_MAX_BYTES = 1 << 20


def typed_text(data: str) -> str:
    """The text of raw key strokes: backspace and Ctrl+U applied, other control keys dropped."""
    data = _SEQUENCE.sub(lambda m: "\n" if m[0] in ("\x1b\r", "\x1b\n") else "", data)
    result: list[str] = []
    for char in data.replace("\r\n", "\n").replace("\r", "\n"):
        if char in "\x7f\b":
            if result:
                result.pop()
        elif char == "\x15":  # Ctrl+U
            while result and result[-1] != "\n":
                result.pop()
        elif char in "\n\t" or char >= " ":
            result.append(char)
    return "".join(result)


class TypeAhead:
    """Context manager around an answer; `poll` between its deltas, then read `text`."""

    def __init__(self, fd: int, keys: Mapping[bytes, Callable[[], None]] | None = None) -> None:
        """`keys`: control characters that act at once and are no part of the text."""
        self._fd = fd
        self._keys = keys or {}
        self._data = bytearray()
        self._saved: list[Any] | None = None
        self._previous_handler: Any = None

    @property
    def text(self) -> str:
        return typed_text(self._data.decode("utf-8", "replace"))

    def poll(self) -> None:
        """Take what is there, without waiting."""
        with contextlib.suppress(OSError, ValueError):
            while select.select([self._fd], [], [], 0)[0]:
                chunk = os.read(self._fd, 4096)
                if not chunk:
                    return
                for key, act in self._keys.items():
                    if key in chunk:
                        chunk = chunk.replace(key, b"")
                        act()
                if len(self._data) < _MAX_BYTES:
                    self._data += chunk

    def __enter__(self) -> Self:
        with contextlib.suppress(termios.error):
            self._saved = termios.tcgetattr(self._fd)
            self._go_silent()
            self._previous_handler = signal.signal(signal.SIGCONT, self._go_silent)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._saved is None:
            return
        signal.signal(signal.SIGCONT, self._previous_handler)
        self.poll()
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self._fd, termios.TCSANOW, self._saved)

    def _go_silent(self, *_: object) -> None:
        """Also after a suspension (SIGCONT), when the shell has set its own modes."""
        if self._saved is None:
            return
        mode = [*self._saved[:6], list(self._saved[6])]
        mode[3] &= ~(termios.ECHO | termios.ICANON)
        mode[3] |= termios.NOFLSH  # Ctrl+C drops neither keys that wait nor text that is on its way
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self._fd, termios.TCSANOW, mode)
