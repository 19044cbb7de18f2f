"""The prompt from its parts: files, standard input, the argument.

Standard input is read as bytes and decoded here, because text mode hides what was wrong (and turns
bad bytes into surrogates under the C locale). Text that had to be repaired is reported.
"""

from __future__ import annotations

import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nvcli.errors import UsageError
from nvcli.paths import read_whole
from nvcli.repl.files import decode, fence, read_file
from nvcli.repl.screen import repair

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PATIENCE_S = 2.0


def repair_argument(text: str, name: str, warn: Callable[[str], None]) -> str:
    """`text` from the command line, where bytes that are no UTF-8 arrive as surrogates."""
    fixed = repair(text)
    try:  # under a C locale all that is not ASCII arrives as surrogates
        text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        warn(f"{name} is not UTF-8; bad bytes were replaced")
    return fixed


def read_stdin(
    warn: Callable[[str], None],
    note: Callable[[str], None] | None = None,
    *,
    is_asked: bool = False,
) -> str:
    """All of standard input; empty where it is closed, unless it `is_asked` for by name.

    `note` is told when nothing comes for a while: a program that inherited an open pipe would
    otherwise seem to hang.
    """
    if sys.stdin is None or sys.stdin.closed:
        if is_asked:
            raise UsageError("cannot read standard input: it is closed")
        return ""
    try:
        if note is not None and not _is_ready(sys.stdin):
            note("waiting for standard input; --no-stdin leaves it out")
        return decode(read_whole(sys.stdin.buffer), "standard input", warn)
    except OSError as exc:
        raise UsageError(f"cannot read standard input: {exc.strerror or exc}") from exc


def _is_ready(stream: TextIO) -> bool:
    try:
        return bool(select.select([stream], [], [], PATIENCE_S)[0])
    except (OSError, ValueError):  # no file descriptor: nothing to wait for
        return True


def text_or_file(value: str, warn: Callable[[str], None]) -> str:
    """`TEXT`, or the contents of FILE for `@FILE`."""
    if value == "@":
        raise UsageError("@ names no file", hint="Write @FILE.")
    if value.startswith("@"):
        return read_file(Path(value[1:]), warn).rstrip("\n")
    return repair_argument(value, "the system prompt", warn)


def read_files(paths: Sequence[Path], warn: Callable[[str], None]) -> list[str]:
    """The files as fenced blocks; `-` is standard input."""
    blocks = []
    for path in paths:
        if str(path) == "-":
            blocks.append(fence("standard input", read_stdin(warn, is_asked=True)))
        else:
            blocks.append(fence(path.name, read_file(path, warn)))
    return blocks


def join_parts(
    argument: str | None, stdin: str, files: Sequence[str], *, stdin_first: bool = True
) -> str:
    """Files, then standard input, then the argument, one blank line between; empty parts vanish."""
    parts = [stdin, argument or ""] if stdin_first else [argument or "", stdin]
    return "\n\n".join(p.strip("\n") for p in [*files, *parts] if p.strip())
