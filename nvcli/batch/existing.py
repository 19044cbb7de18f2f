"""An output that is there already: which records it holds, whether its end is whole, its order.

Kill -9 can leave half a line at the end; that is cut off before anything is appended. Rewrites
(errors taken out for `--retry-errors`, records put into input order) go to a temporary file that
replaces the output in one step, so a crash leaves the old file or the new one.
"""

from __future__ import annotations

import json
import os
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvcli.batch.identity import DigestTable, indexed_key_of, key_of
from nvcli.batch.options import OnDuplicate
from nvcli.batch.sink import OutputError
from nvcli.batch.source import split_lines
from nvcli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_CHUNK_BYTES = 1024 * 1024


@dataclass(slots=True)
class ExistingOutput:
    """What a scan of the output found."""

    finished: DigestTable = field(default_factory=DigestTable)
    num_records: int = 0  # lines that count as finished
    num_errors: int = 0  # of them, failures
    num_dropped: int = 0  # failures that are to be run again
    last_index: int = -1


def _chunks(path: Path, size: int | None = None) -> Iterator[bytes]:
    """The first `size` bytes of a file, all by default."""
    left = path.stat().st_size if size is None else size
    try:
        with path.open("rb") as file:
            while left > 0 and (chunk := file.read(min(_CHUNK_BYTES, left))):
                left -= len(chunk)
                yield chunk
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def read_line(path: Path, number: int, data: bytes | None) -> dict[str, Any]:
    """One output line. Raises `UsageError` when it is no line of ours."""
    value: Any = None
    with suppress(ValueError, RecursionError):
        value = json.loads(data or b"")
    if (
        isinstance(value, dict)
        and isinstance(value.get("index"), int)
        and isinstance(value.get("id", value.get("custom_id")), str)
    ):
        return value
    raise UsageError(
        f"line {number} of {path} is no output record of nvcli batch",
        hint="--append writes behind it, --force replaces the file.",
    )


def _key(value: dict[str, Any], on_duplicate: OnDuplicate) -> bytes:
    record_id = value["custom_id"] if "custom_id" in value else value["id"]
    error = value.get("error")
    is_duplicate = isinstance(error, dict) and error.get("code") == "duplicate_id"
    if is_duplicate or on_duplicate is OnDuplicate.KEEP:
        return indexed_key_of(record_id, value["index"])
    return key_of(record_id)


def scan(
    path: Path, on_duplicate: OnDuplicate, *, drops_error_at: Callable[[int], bool]
) -> ExistingOutput:
    """Read the whole lines of an output; half a line at the end is passed over. Changes nothing.
    Failures of records at these indices count as not there: they are to be run again.

    Raises `UsageError` for a file that is no output of ours.
    """
    found = ExistingOutput()
    start, is_whole = _inspect_tail(path)
    for line in split_lines(_chunks(path, None if is_whole else start)):
        value = read_line(path, line.number, line.data)
        is_error = value.get("error") is not None
        if is_error and drops_error_at(value["index"]):
            found.num_dropped += 1
            continue
        found.num_records += 1
        found.num_errors += is_error
        found.finished.set(_key(value, on_duplicate))
        found.last_index = max(found.last_index, value["index"])
    return found


def repair_tail(path: Path, *, is_ours: bool = True) -> None:
    """Make the file end in LF: half a line at the end is cut off, a whole one gets its LF. In a
    file that may be another's only the beginning of an object is half a line.

    Raises `OutputError`.
    """
    start, is_whole = _inspect_tail(path)
    if start == path.stat().st_size:
        return
    try:
        if is_whole or not (is_ours or _starts_object(path, start)):
            with path.open("ab") as file:
                file.write(b"\n")
        else:
            os.truncate(path, start)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


def _starts_object(path: Path, start: int) -> bool:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(1) == b"{"


def _inspect_tail(path: Path) -> tuple[int, bool]:
    """Where the bytes after the last LF begin, and whether they are a whole JSON object."""
    try:
        with path.open("rb") as file:
            start = _tail_start(file, file.seek(0, os.SEEK_END))
            file.seek(start)
            tail = file.read()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    try:
        return start, isinstance(json.loads(tail), dict)
    except (ValueError, RecursionError):
        return start, False


def _tail_start(file: Any, size: int) -> int:
    """Where the bytes after the last LF begin."""
    end = size
    while end > 0:
        start = max(0, end - _CHUNK_BYTES)
        file.seek(start)
        place: int = file.read(end - start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return 0


def drop_errors(path: Path, at: Callable[[int], bool]) -> None:
    """Rewrite the output without the failures of records at these indices."""

    def write(target: Any) -> None:
        for line in split_lines(_chunks(path)):
            assert line.data is not None
            value = read_line(path, line.number, line.data)
            if value.get("error") is None or not at(value["index"]):
                target.write(line.data + b"\n")

    _replace(path, write)


def sort_by_index(path: Path) -> None:
    """Rewrite the output in input order; does nothing where it is."""
    indices, offsets = array("q"), array("q")
    is_ordered, place = True, 0
    for line in split_lines(_chunks(path)):
        assert line.data is not None
        index = read_line(path, line.number, line.data)["index"]
        is_ordered &= not indices or index > indices[-1]
        indices.append(index)
        offsets.append(place)
        place += len(line.data) + 1
    if is_ordered:
        return

    def write(target: Any) -> None:
        with path.open("rb") as source:
            for number in sorted(range(len(indices)), key=indices.__getitem__):
                source.seek(offsets[number])
                target.write(source.readline())

    _replace(path, write)


def _replace(path: Path, write: Callable[[Any], None]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as target:
            write(target)
            target.flush()
            os.fsync(target.fileno())
        temporary.chmod(path.stat().st_mode & 0o7777)
        temporary.replace(path)
    except OSError as error:
        raise OutputError(
            f"cannot rewrite {path}: {error.strerror}", hint="The old file is untouched."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
