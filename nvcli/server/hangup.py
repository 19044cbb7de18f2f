"""SIGHUP means two things: somebody sent it, as to any server, for a rolling restart; or the
terminal is gone, and then this process should go too, as it would without a handler.

The kernel takes the terminal away from a session before it sends the signal. So a process that had
one and cannot open it any more knows which of the two it was; the next one is somebody's again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

TERMINAL = "/dev/tty"


class Hangup:
    """Made before a handler is: `nohup` shows in the one that was there."""

    def __init__(self, note: Callable[[str], None], end: Callable[[], None]) -> None:
        self._note = note
        self._end = end
        handler = signal.getsignal(signal.SIGHUP) if hasattr(signal, "SIGHUP") else None
        self._outlives_terminal = handler is signal.SIG_IGN
        self._has_terminal = _can_open_terminal()

    def take(self, llm: Any, drain_s: float) -> None:
        """One signal. llm: None before it is loaded, and once the server ends."""
        if self._has_terminal and not _can_open_terminal():
            self._has_terminal = False
            if not self._outlives_terminal:
                self._end()
            return
        restart = getattr(llm, "restart", None)  # of `nvcli.cluster`
        if llm is None:
            self._note("SIGHUP is ignored: the server is loading, or about to end")
        elif restart is None:
            self._note(
                "SIGHUP is ignored: the only engine cannot be replaced while it answers; "
                "with --replicas it could"
            )
        else:
            thread = threading.Thread(target=restart, args=(drain_s,), name="nvcli-restart")
            thread.daemon = True
            thread.start()


def _can_open_terminal() -> bool:
    with contextlib.suppress(OSError):
        os.close(os.open(TERMINAL, os.O_RDONLY | os.O_NOCTTY))
        return True
    return False
