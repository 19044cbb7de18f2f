"""How nvcli speaks to the shell: which streams hold colour, error lines, JSON, a spinner.

The environment is read once, in `make_screen`. The answer and help go to standard output,
everything else to standard error.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import sys
import threading
import time
from enum import StrEnum
from typing import IO, TYPE_CHECKING, Any, Self

from nvcli.errors import NvcliError
from nvcli.repl.numbers import startup_lines
from nvcli.repl.screen import Screen, repair, unbroken, visible
from nvcli.repl.wrap import wrap
from nvcli.types import RequestTimes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvcli.engine.startup import StartupReport
    from nvcli.types import RequestOutput

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class ColorMode(StrEnum):
    """The value of --color and NVCLI_COLOR."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def is_terminal(stream: IO[Any] | None) -> bool:
    """Whether `stream` is an open terminal; a closed or missing stream is not."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def wants_color(
    mode: ColorMode, environ: Mapping[str, str], *, to_terminal: bool, is_answer: bool
) -> bool:
    """Whether a stream may hold colour.

    --color (or NVCLI_COLOR, which arrives here as the same value) decides alone; then NO_COLOR,
    then TERM=dumb, then FORCE_COLOR, then whether the stream is a terminal. FORCE_COLOR is for
    logs: an answer or a help page in a pipe stays plain unless --color asks.
    """
    if mode is not ColorMode.AUTO:
        return mode is ColorMode.ALWAYS
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return False
    if not is_answer and environ.get("FORCE_COLOR", "0") not in ("", "0", "false"):
        return True
    return to_terminal


def make_screen(
    mode: ColorMode = ColorMode.AUTO, *, is_quiet: bool = False, is_verbose: bool = False
) -> Screen:
    """The process's two streams, with colour decided from `mode` and the environment."""
    out = sys.stdout if sys.stdout is not None else _Closed()
    err = sys.stderr if sys.stderr is not None else _Closed()
    out_is_terminal, err_is_terminal = is_terminal(out), is_terminal(err)
    env = os.environ
    return Screen(
        out=out,
        err=err,
        out_is_terminal=out_is_terminal,
        err_is_terminal=err_is_terminal,
        out_color=wants_color(mode, env, to_terminal=out_is_terminal, is_answer=True),
        err_color=wants_color(mode, env, to_terminal=err_is_terminal, is_answer=False),
        is_dumb=env.get("TERM") == "dumb",
        is_quiet=is_quiet,
        is_verbose=is_verbose,
    )


class _Closed(io.StringIO):
    """Stands for a stream that the parent closed (`>&-`)."""

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, "it is closed")


def hold_closed_streams() -> None:
    """Give the standard streams that the parent closed back their numbers and objects.

    Where a number is free, the next file that is opened gets it, and what a library says to
    standard error would be written into that file. Python's own stand-in is None, which `print`
    takes for standard output: an error would land among the answers, and an answer nowhere.
    """
    for fd, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:  # the lowest free number is this one; reading 0 and writing 1 still fail
            os.set_inheritable(os.open(os.devnull, mode), True)  # our children need them as well
    if sys.stdout is None:
        sys.stdout = _Closed()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end


def check_standard_output() -> None:
    """Raises `NvcliError` where it is closed: before a model is loaded for what it would take."""
    if isinstance(sys.stdout, _Closed):
        raise NvcliError("cannot write to standard output: it is closed")


def print_text(text: str) -> None:
    """Help and version text, in one write."""
    print(text)


def print_lines(*lines: str, indent: int = 4) -> None:
    """Lines on standard output; on a terminal they are broken between words."""
    if is_terminal(sys.stdout):
        width = make_screen().size()[0]
        lines = tuple(wrap(line, width, indent) for line in lines)
    print_text("\n".join(lines))


def report(error: NvcliError) -> None:
    """One line on standard error: what is wrong, then what to do next."""
    line = visible("nvcli: " + " ".join(repair(str(error)).split()))
    if is_terminal(sys.stderr):
        line = wrap(line, make_screen().size()[0])
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def silence(*streams: IO[str] | None) -> None:
    """Flush, and where that fails point the stream at /dev/null, so that exit stays silent."""
    for stream in streams:
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)


# --- JSON ----------------------------------------------------------------------------------------


def dump_json(value: object) -> str:
    """JSON on one line that no terminal or line reader can misread; NaN is refused."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    is_ascii = "utf" not in encoding.lower()  # a C locale would write question marks
    text = json.dumps(value, ensure_ascii=is_ascii, allow_nan=False)
    return _UNSAFE_IN_JSON.sub(lambda m: f"\\u{ord(m[0]):04x}", text)


def figures_json(output: RequestOutput) -> dict[str, Any]:
    """What an output cost: OpenAI's `usage` object, and `timings`."""
    usage = output.usage
    return {
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        },
        "timings": (output.times or RequestTimes(0.0)).as_json(usage.completion_tokens),
    }


# --- loading -------------------------------------------------------------------------------------


def tell_startup(screen: Screen, report: StartupReport | None, *, with_stages: bool = True) -> None:
    """What was loaded and how long it took, for `-v` and the log file. None: by a server."""
    if report is not None:
        for line in startup_lines(report, with_stages=with_stages):
            screen.detail(line)


class Spinner:
    """`⠋ loading NAME 3.2 s` on standard error while the block runs; nothing without a terminal."""

    def __init__(self, screen: Screen, text: str) -> None:
        self._screen = screen
        self._text = visible(text)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._screen.can_redraw_err and not self._screen.is_quiet:
            self._thread = threading.Thread(target=self._spin, name="spinner", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._screen.write_err("\r\x1b[K")

    def _spin(self) -> None:
        start = time.monotonic()
        frame = 0
        while not self._stop.wait(0.1):
            elapsed = time.monotonic() - start
            width, _ = self._screen.size()
            line = f"{_FRAMES[frame % len(_FRAMES)]} {self._text} {elapsed:.1f} s"[: width - 1]
            self._screen.write_err(unbroken(f"\r\x1b[K{line}"))
            frame += 1
