"""Where lines go: a file or a pipe, one `write()` a line, and never half a line left behind.

A failed write cuts a regular file back to its last whole line, so that what is there is always
valid. A lock file beside the output keeps a second writer away; the kernel drops the lock with the
process, however that ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import stat
from contextlib import suppress
from pathlib import Path
from typing import Self

from nvcli.errors import ClosedPipeError, NvcliError, UsageError


class OutputError(NvcliError):
    """The output cannot be written on; the lines before are whole."""

    code = "output_error"


class LineSink:
    """Writes whole lines to a file descriptor. Owns it unless it is standard output."""

    def __init__(self, fd: int, name: str, *, size: int = 0) -> None:
        self._fd = fd
        self._name = name
        self._is_regular = stat.S_ISREG(os.fstat(fd).st_mode)
        self._size = size  # of a regular file, up to the last whole line

    @classmethod
    def stdout(cls) -> LineSink:
        sink = cls(1, "standard output")
        sink._is_regular = False  # its position may be shared with others: never cut it
        return sink

    @classmethod
    def append_to(cls, path: Path) -> LineSink:
        """Open a file to write at its end. Raises `OutputError`."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}") from error
        return cls(fd, str(path), size=os.fstat(fd).st_size)

    def write(self, line: bytes) -> None:
        """Raises `OutputError`, and `ClosedPipeError` when nobody reads any more."""
        done = 0
        try:
            while done < len(line):
                try:
                    done += os.write(self._fd, line[done:])
                except BlockingIOError:
                    select.select([], [self._fd], [])
        except OSError as error:
            if self._is_regular:  # no half line stays
                os.ftruncate(self._fd, self._size)
            if error.errno == errno.EPIPE:
                raise ClosedPipeError("the reader closed the pipe") from error
            raise OutputError(f"cannot write {self._name}: {error.strerror}") from error
        self._size += len(line)

    def close(self) -> None:
        """Raises `OutputError` when what was written does not reach the disk."""
        if self._fd <= 2:
            return
        try:
            if self._is_regular:
                os.fsync(self._fd)
        except OSError as error:
            raise OutputError(f"cannot write {self._name}: {error.strerror}") from error
        finally:
            os.close(self._fd)
            self._fd = -1


class OutputLock:
    """`OUT.lock`, held while a run writes OUT. Raises `UsageError` when another run holds it."""

    def __init__(self, output: Path) -> None:
        self._output = output
        path = Path(os.path.abspath(output))  # `.` and `/` have no name of their own
        self._path = path.parent / f"{path.name}.lock"
        self._fd = -1

    def __enter__(self) -> Self:
        while True:
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise OutputError(f"cannot write {self._output}: {error.strerror}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                os.close(fd)
                raise UsageError(
                    f"another run writes {self._output}" + (f" (process {owner})" if owner else ""),
                    hint="Wait for it, or give another -o.",
                ) from error
            if self._is_current(fd):
                break
            os.close(fd)  # its last owner removed it between our two calls
        with suppress(OSError):  # the number is only a hint; the disk may be full
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        self._fd = fd
        return self

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path))
        except FileNotFoundError:
            return False

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):  # somebody tidied up; the lock is the open file's
            os.unlink(self._path)
        os.close(self._fd)
