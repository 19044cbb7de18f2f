"""What a process that nvcli starts for itself owes to the one that started it."""

from __future__ import annotations

import os
import signal
import threading
import time

_INTERVAL_S = 0.5


def be_child_of(parent: int) -> None:
    """From here on signals that are sent to the whole group are left to the parent, and this
    process ends soon after the parent has, however it did.

    The kernel's own signal for that comes when the *thread* that started us ends, and that may be
    one that only loads.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=watch, name="nvcli-parent", daemon=True).start()
