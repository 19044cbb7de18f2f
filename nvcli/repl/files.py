"""Files in a message: read, decoded, fenced with their name; `@path` in what was typed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nvcli.errors import UsageError
from nvcli.paths import expand_user, read_whole
from nvcli.repl.screen import repair

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_MENTION = re.compile(r"(\\?)(?<![\w@])@(?:\"([^\"\n]+)\"|'([^'\n]+)'|([^\s\"'@]+))")


def decode(data: bytes, name: str, warn: Callable[[str], None]) -> str:
    """UTF-8 without a byte-order mark; bytes that are none become U+FFFD, with a warning."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as exc:
        text = data.decode("utf-8", "replace")
        warn(f"{name} is not UTF-8 from byte {exc.start}; bad bytes were replaced")
        return text


def read_file(path: Path, warn: Callable[[str], None]) -> str:
    """Raises `UsageError` for what cannot be read."""
    try:
        return decode(read_whole(path), str(path), warn)
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror or exc}", param="file") from exc


def fence(name: str, text: str) -> str:
    """`text` as a code block titled `name`, with a fence longer than any inside."""
    ticks = max((len(run) for run in re.findall(r"`{3,}", text)), default=2) + 1
    title = " ".join(repair(name).split()).replace("`", "'")
    return f"{'`' * ticks}{title}\n{text.rstrip(chr(10))}\n{'`' * ticks}"


def expand_mentions(text: str) -> tuple[str, list[Path]]:
    """The message with `@path` as the file's name, and the files it names.

    Quotes hold a path with spaces; `\\@` is a plain @. What names no file stays as it was typed, so
    that addresses and handles need no quoting.
    """
    found: list[Path] = []

    def replace(match: re.Match[str]) -> str:
        if match[1]:
            return match[0][1:]
        name = match[2] or match[3] or match[4]
        for candidate in (name, name.rstrip(".,;:!?)")):
            path = expand_user(candidate)
            if candidate and _is_file(path):
                found.append(path)
                return f"{path.name}{name[len(candidate) :]}"
        return match[0]

    return _MENTION.sub(replace, text), list(dict.fromkeys(found))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def path_completions(start: str) -> list[str]:
    """Paths that begin with `start`; folders end in a slash."""
    folder, slash, name = start.rpartition("/")
    base = expand_user(f"{folder}{slash}" or ".")
    try:
        entries = sorted(base.iterdir())
    except OSError:
        return []
    hidden = name.startswith(".")
    return [
        f"{folder}{slash}{entry.name}{'/' if entry.is_dir() else ''}"
        for entry in entries
        if entry.name.startswith(name) and (hidden or not entry.name.startswith("."))
    ]
