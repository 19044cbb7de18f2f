"""Progress on standard error: a bar that redraws itself, plain lines, or JSON for schedulers.

`auto` is a bar on a terminal. Without one it is plain lines, the first after half a minute: a short
run in a pipe says nothing, a long one under nohup leaves a trace. SIGUSR1 asks for a line any time.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from nvcli.batch.options import ProgressMode
from nvcli.logs import log_said

if TYPE_CHECKING:
    from collections.abc import Callable

_INTERVAL_S = {ProgressMode.BAR: 0.2, ProgressMode.PLAIN: 10.0, ProgressMode.JSON: 1.0}
_QUIET_INTERVAL_S = 60.0
_FIRST_WAVE_S = 30.0  # in which few records end, though many run
_QUIET_START_S = 30.0


class Pace:
    """How many records end in a second, of late: over the last half to three quarters of the run,
    so that the first wave, in which none ends, is soon forgotten."""

    def __init__(self) -> None:
        self._before = self._last = (0.0, 0)  # moments, and records that had ended

    def note(self, elapsed_s: float, num_ended: int) -> None:
        if elapsed_s >= max(0.5, 2 * self._last[0]):
            self._before, self._last = self._last, (elapsed_s, num_ended)

    def per_s(self, elapsed_s: float, num_ended: int) -> float:
        """`num_ended` must not be 0."""
        moment, num_before = self._before
        if num_ended == num_before:
            moment, num_before = 0.0, 0
        return (num_ended - num_before) / max(elapsed_s - moment, 1e-9)


@dataclass(slots=True)
class Counts:
    """Where a run stands. `total` is None while the input's length is not known."""

    total: int | None = None  # records of this run
    num_before: int = 0  # records that an earlier run finished
    num_written: int = 0
    num_failed: int = 0
    failure: tuple[int, str, str] | None = None  # line, code and message of the first in the input
    num_running: int = 0  # in the engine
    num_held: int = 0  # finished, and waiting for those before them
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    pace: Pace = field(default_factory=Pace)
    started: float = field(default_factory=time.monotonic)

    def add_failure(self, line: int, code: str, message: str) -> None:
        self.num_failed += 1
        if self.failure is None or line < self.failure[0]:
            self.failure = (line, code, message)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / max(self.elapsed_s, 1e-9)

    @property
    def num_ended(self) -> int:
        return self.num_written + self.num_held

    @property
    def eta_s(self) -> float | None:
        if self.total is None or self.num_ended == 0:
            return None
        if self.num_ended < self.num_running / 2 and self.elapsed_s < _FIRST_WAVE_S:
            return None  # too early to tell
        per_s = self.pace.per_s(self.elapsed_s, self.num_ended)
        return (self.total - self.num_ended) / per_s

    def as_json(self) -> dict[str, Any]:
        eta = self.eta_s
        return {
            "event": "progress",
            "records": self.num_written,
            "total": self.total,
            "resumed": self.num_before,
            "failed": self.num_failed,
            "running": self.num_running,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "elapsed_s": round(self.elapsed_s, 3),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "eta_s": None if eta is None else round(eta, 1),
        }

    def as_text(self) -> str:
        of = "" if self.total is None else f"/{self.total:,}"
        parts = [f"{self.num_written:,}{of} records"]
        if self.total:
            parts[0] += f" ({100 * self.num_written // self.total} %)"
        if self.num_failed:
            parts.append(f"{self.num_failed:,} failed")
        if self.num_running:
            parts.append(f"{self.num_running:,} running")
        parts.append(f"{self.tokens_per_s:,.0f} tok/s")
        if self.eta_s is not None and self.num_written != self.total:
            parts.append(f"{format_duration(self.eta_s)} left")
        return " · ".join(parts)


def format_duration(seconds: float) -> str:
    """`42 s`, `3 min 10 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class ShowsProgress(Protocol):
    """What a run tells of itself to: `Progress`, or a server's batch."""

    def update(self, counts: Counts) -> None: ...
    def finish(self, counts: Counts, *, is_whole: bool = True) -> None: ...
    def status(self, counts: Counts) -> None: ...
    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...


class Progress:
    """Writes to `stream`; a stream that is gone or full is not worth ending a run for."""

    def __init__(
        self,
        mode: ProgressMode,
        stream: TextIO | None = None,
        *,
        is_quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if stream is None:  # sys.stderr is None where the process was started without one
            stream = sys.stderr or io.StringIO()
        self._stream = stream
        self._clock = clock
        self._is_quiet = is_quiet
        self._is_terminal = self._stream.isatty()
        is_dumb = os.environ.get("TERM", "dumb") == "dumb"
        self._is_silent = False  # plain lines of `auto`: rare, and late
        if mode is ProgressMode.AUTO:
            self._is_silent = not self._is_terminal or is_dumb
            mode = ProgressMode.PLAIN if self._is_silent else ProgressMode.BAR
            if is_quiet:
                mode = ProgressMode.NONE
        self._mode = mode
        self._interval_s = _QUIET_INTERVAL_S if self._is_silent else _INTERVAL_S.get(mode, 60.0)
        self._next = clock() + (_QUIET_START_S if self._is_silent else 0.0)
        self._has_bar = False

    def update(self, counts: Counts) -> None:
        """Show where the run stands, if it is time."""
        now = self._clock()
        if self._mode is ProgressMode.NONE or now < self._next:
            return
        self._next = now + self._interval_s
        if self._mode is ProgressMode.BAR:
            self._draw(counts.as_text())
        elif self._mode is ProgressMode.JSON:
            self._write(json.dumps(counts.as_json()) + "\n")
        else:
            self._say(counts.as_text())

    def status(self, counts: Counts) -> None:
        """One line now, because somebody asked."""
        if self._mode is ProgressMode.JSON:
            self._write(json.dumps(counts.as_json()) + "\n")
        else:
            self.note(counts.as_text())

    def note(self, text: str) -> None:
        """A line of its own, above the bar."""
        self._clear()
        self._say(text)

    def warn(self, text: str) -> None:
        """Of something that may not be as it was meant."""
        if not self._is_quiet:
            self._clear()
            self._write(f"nvcli: {text}\n")
        log_said(text, logging.WARNING)

    def finish(self, counts: Counts, *, is_whole: bool = True) -> None:
        """The last state; a run that spoke so far also says how it ended. The last object of JSON
        is `done` where the input was, and `stopped` after an early end."""
        self._clear()
        took = format_duration(counts.elapsed_s)
        tokens = f"{counts.prompt_tokens:,} + {counts.completion_tokens:,} tokens"
        text = f"{counts.as_text()} · {tokens} in {took}"
        log_said(text)
        if self._mode is ProgressMode.JSON:
            event = "done" if is_whole else "stopped"
            self._write(json.dumps({**counts.as_json(), "event": event}) + "\n")
        elif self._mode is not ProgressMode.NONE and not self._is_silent:
            self._write(text + "\n")

    def _draw(self, text: str) -> None:
        width = shutil.get_terminal_size().columns
        # Never broken into a second row, which would stay: a terminal may draw a sign wider.
        self._write(f"\x1b[?7l\r\x1b[K{text[: width - 1]}\x1b[?7h")
        self._has_bar = True

    def _clear(self) -> None:
        if self._has_bar:
            self._write("\r\x1b[K")
            self._has_bar = False

    def _say(self, text: str) -> None:
        self._write(text + "\n")
        log_said(text.removeprefix("nvcli: "))

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
