"""Logging: quiet by default, to standard error, and in full to a file when one is asked for. The
file also has what a command says itself on standard error, or would where somebody looks.

The library itself only calls `logging.getLogger(__name__)`; nothing is configured on import, so a
program that uses `nvcli` as a library keeps its own set-up.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING

from nvcli.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

_LEVELS = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO}
_SAID = logging.getLogger("nvcli.screen")
_SAID.addHandler(logging.NullHandler())  # or Python would print it where nothing is configured
_FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _LogFile(logging.FileHandler):
    """A full disk is told once, in a line: the command goes on without its log."""

    has_failed = False

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of what could not be written before
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.has_failed:
            self.has_failed = True
            reason = error.strerror or str(error)
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"nvcli: cannot write the log file: {reason}\n")


_setup: tuple[int, Path | None] | None = None


def logging_setup() -> tuple[int, Path | None] | None:
    """What a process of ours calls `configure_logging` with, to log to the same places; None where
    nobody has."""
    return _setup


def log_said(text: str, level: int = logging.INFO) -> None:
    """Into the log file alone, on one line: standard error has it, or is not to have it."""
    _SAID.log(level, "%s", " ".join(text.split()))


def configure_logging(verbosity: int = 0, log_file: Path | None = None) -> None:
    """Send nvcli's log to standard error, and all of it to `log_file`.

    verbosity: -1 errors only, 0 warnings, 1 progress, 2 and more everything. Calling it again
    replaces what the last call set up. Raises `UsageError` when the file cannot be opened.
    """
    global _setup
    _setup = (verbosity, log_file)
    logger = logging.getLogger("nvcli")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = False
    mcp = logging.getLogger("mcp")  # the SDK logs tracebacks about what a server does wrong
    mcp.handlers[:] = [logging.NullHandler()]
    mcp.propagate = False
    level = _LEVELS.get(verbosity, logging.DEBUG)
    stream = logging.StreamHandler()
    stream.setLevel(level)
    stream.addFilter(lambda record: record.name != _SAID.name)
    stream.setFormatter(logging.Formatter("nvcli: %(message)s"))
    logger.addHandler(stream)
    if log_file is not None:
        try:
            file = _LogFile(log_file, encoding="utf-8", errors="backslashreplace")
        except OSError as exc:
            raise UsageError(
                f"cannot write the log file {log_file}: {exc.strerror or exc}", param="log_file"
            ) from exc
        file.setFormatter(logging.Formatter(_FILE_FORMAT))
        logger.addHandler(file)
        mcp.addHandler(file)
        level = logging.DEBUG
    logger.setLevel(level)
