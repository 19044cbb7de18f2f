"""Signals that end a command as an exception, raised only where it is not lost.

Python runs a signal's handler between any two steps of the main thread. An exception that is raised
there inside a weak reference's callback or a `__del__` is printed and dropped: the signal has done
nothing. The import machinery has such callbacks, a thousand of them while torch is loaded, and they
hold the lock of all imports, which then stays taken: the command goes on, and the first thread that
imports something hangs. So a handler that comes at such a moment comes again a little later.
"""

from __future__ import annotations

import _weakrefset
import contextlib
import signal
import threading
import weakref
from typing import TYPE_CHECKING

from nvcli.errors import HungUpRunError, TerminatedRunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    Handler = Callable[[int, FrameType | None], object]

_AGAIN_S = 0.01
ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_LOSING_FILES = ("<frozen importlib._bootstrap>", weakref.__file__, _weakrefset.__file__)


def is_lost_in(frame: FrameType | None) -> bool:
    """Whether an exception raised in this frame might go no further, or leave a lock behind."""
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back  # the signal came again, while we were at it
    if frame is not None and frame.f_code.co_filename in _LOSING_FILES:
        return True
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def never_lost(handler: Handler) -> Handler:
    """A handler that raises, put off while that would be lost. Takes SIGALRM for it."""

    def handle(signum: int, frame: FrameType | None) -> None:
        if is_lost_in(frame):
            signal.signal(signal.SIGALRM, lambda _, frame: signal.raise_signal(signum))
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            handler(signum, frame)

    return handle


def end_on_signals() -> None:
    """SIGTERM and SIGHUP (a terminal that closes) unwind the stack as a `SystemExit`, so that files
    are flushed and the terminal is restored. An ignored one stays so, as SIGHUP under `nohup`."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, never_lost(_end))


def _end(signum: int, frame: object) -> None:
    """A second SIGTERM ends at once. A second SIGHUP is usual, as the shell sends one and the
    kernel another, and so is one behind a SIGTERM: it has nothing to say any more."""
    for number in ENDING:
        is_term = number == signal.SIGTERM
        signal.signal(number, signal.SIG_DFL if is_term else signal.SIG_IGN)
    is_hangup = signum != signal.SIGTERM
    raise SystemExit(HungUpRunError.exit_code if is_hangup else TerminatedRunError.exit_code)


@contextlib.contextmanager
def interrupts_never_lost() -> Iterator[None]:
    """Ctrl-C is Python's `KeyboardInterrupt`, never lost, while the block runs. Does nothing where
    Ctrl-C means something else, or outside the main thread."""
    usual = signal.default_int_handler
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    signal.signal(signal.SIGINT, never_lost(usual))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
