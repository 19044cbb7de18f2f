"""Bytes in, lines out: plain, gzip or zstd by magic, from a file or standard input.

Lines end at LF and nowhere else (U+2028, U+0085 and a bare CR are text); one CR before it and a
byte order mark at the start are dropped. Reads are unbuffered, so that a line of a pipe is seen as
soon as it is there, and bounded, so that memory stays flat whatever a file unpacks to.
"""

from __future__ import annotations

import itertools
import os
import sys
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nvcli.errors import NvcliError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

CHUNK_BYTES = 256 * 1024
MAX_PIECE_BYTES = 4 * CHUNK_BYTES  # unpacked at once
MAX_LINE_BYTES = 64 * 1024 * 1024  # a longer line costs one error record, not our memory
BOM = b"\xef\xbb\xbf"
# No UTF-8 begins so. UTF-32's mark begins with one of them.
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
# Frames that a zstd file may begin or end with and that hold no data (pzstd writes them).
_ZSTD_SKIPPABLE = tuple(bytes([0x50 + i]) + b"\x2a\x4d\x18" for i in range(16))
_ZSTD_MAGICS = (_ZSTD, *_ZSTD_SKIPPABLE)
_SLICE = 512  # fed at once: of zstd at most a hundred blocks of 128 KiB each


class InputError(NvcliError):
    """The input cannot be read to its end; what was read before is good."""

    code = "input_error"


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


@contextmanager
def open_chunks(path: str) -> Iterator[Iterator[bytes]]:
    """The unpacked bytes of a file, or of standard input for `-`.

    Raises `UsageError` for a file that cannot be opened; reading raises it for one in UTF-16, and
    `InputError`.
    """
    name = "standard input" if path == "-" else path
    fd = _standard_input() if path == "-" else _open(path)
    try:
        yield _of_utf8(_unpack(_read(fd, name), name), name)
    finally:
        if path != "-":
            os.close(fd)


def _standard_input() -> int:
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("cannot read standard input: it is closed")
    return 0


def _open(path: str) -> int:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if os.path.isdir(path):
        os.close(fd)
        raise UsageError(f"cannot read {path}: it is a folder")
    return fd


def _read(fd: int, name: str) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(fd, CHUNK_BYTES)
        except OSError as error:
            raise InputError(f"cannot read {name}: {error.strerror}") from error
        if not chunk:
            return
        yield chunk


def _of_utf8(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
    """The same bytes. Spreadsheets and PowerShell write UTF-16 behind a mark; its lines end inside
    of characters, so that some would pass for prompts with zero bytes between the letters."""
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) > 1:
            break
    if head.startswith(_UTF16):
        raise UsageError(
            f"{name} is UTF-16, not UTF-8",
            hint="Convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW",
        )
    yield head
    yield from chunks


def _unpack(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
    head = b""
    for chunk in chunks:
        head += chunk
        magics = (_GZIP, *_ZSTD_MAGICS)
        if not any(magic.startswith(head) and head != magic for magic in magics):
            break  # enough to tell
    if not head:
        return
    rest = itertools.chain([head], chunks)
    if head.startswith(_GZIP):
        yield from _decompress(
            rest, lambda: zlib.decompressobj(wbits=31), (_GZIP,), f"{name} (gzip)"
        )
    elif head.startswith(_ZSTD_MAGICS):
        yield from _decompress(rest, _zstd_factory(name), _ZSTD_MAGICS, f"{name} (zstd)")
    else:
        yield from rest


def _unpack_some(inner: _Decompressor, data: bytes) -> tuple[bytes, bytes]:
    """(a piece of bounded size, what is still packed). A library is fed so little at once that its
    output is bounded too: four bytes of zstd may unpack to 128 KiB, and not all libraries can be
    told where to stop."""
    pieces: list[bytes] = []
    size = place = 0
    while place < len(data) and size < MAX_PIECE_BYTES and not inner.eof:
        pieces.append(inner.decompress(data[place : place + _SLICE]))
        size += len(pieces[-1])
        place += _SLICE
    left = data[place:]
    return b"".join(pieces), inner.unused_data + left if inner.eof else left


def _zstd_factory(name: str) -> Callable[[], _Decompressor]:
    from importlib import import_module

    try:
        module: Any = import_module("compression.zstd")  # Python 3.14
        return lambda: module.ZstdDecompressor()
    except ImportError:
        pass
    try:
        module = import_module("zstandard")
    except ImportError:
        raise UsageError(
            f"{name} is packed with zstd, which needs the Python package zstandard",
            hint="Run 'pip install zstandard', or unpack it: zstd -dc FILE | nvcli batch -",
        ) from None
    return lambda: module.ZstdDecompressor().decompressobj()


def _decompress(
    chunks: Iterator[bytes], new: Callable[[], _Decompressor], magics: tuple[bytes, ...], name: str
) -> Iterator[bytes]:
    """All members or frames, one after the other; zeros behind the last are padding."""
    unpacker: _Decompressor | None = None
    data = b""
    for chunk in chunks:
        data += chunk
        while data:
            if unpacker is None:
                if any(magic.startswith(data) and data != magic for magic in magics):
                    break  # the next member begins at the edge of a chunk
                if not data.strip(b"\0"):
                    data = b""
                    break
                if not data.startswith(magics):
                    raise InputError(f"cannot read {name}: something else follows the packed data")
                unpacker = new()
            try:
                piece, data = _unpack_some(unpacker, data)
            except Exception as error:  # each library has its own
                raise InputError(f"cannot read {name}: {error or 'corrupt data'}") from error
            if piece:
                yield piece
            if unpacker.eof:
                unpacker = None
    if unpacker is not None or data.strip(b"\0"):
        raise InputError(f"cannot read {name}: it ends in the middle of the packed data")


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its end; `data` is None where it is longer than `MAX_LINE_BYTES`."""

    number: int  # from 1
    data: bytes | None


class LineSplitter:
    """Splits bytes that come in any pieces; the pieces make no difference."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._size = 0
        self._number = 0

    def feed(self, chunk: bytes) -> list[Line]:
        """The lines that end in this chunk."""
        *ends, tail = chunk.split(b"\n")
        lines = []
        for end in ends:
            self._hold(end)
            lines.append(self._take())
        self._hold(tail)
        return lines

    def finish(self) -> list[Line]:
        """The last line, where the input does not end in LF."""
        return [self._take()] if self._size else []

    def _hold(self, piece: bytes) -> None:
        if not piece:
            return
        self._size += len(piece)
        if self._size <= self._max_bytes + len(BOM) + 1:
            self._pieces.append(piece)
        else:
            self._pieces.clear()

    def _take(self) -> Line:
        data = b"".join(self._pieces)
        is_dropped = bool(self._size and not self._pieces)
        self._number += 1
        if self._number == 1:
            data = data.removeprefix(BOM)
        data = data.removesuffix(b"\r")
        is_overlong = is_dropped or len(data) > self._max_bytes
        self._pieces, self._size = [], 0
        return Line(self._number, None if is_overlong else data)


def split_lines(chunks: Iterable[bytes]) -> Iterator[Line]:
    splitter = LineSplitter()
    for chunk in chunks:
        yield from splitter.feed(chunk)
    yield from splitter.finish()
