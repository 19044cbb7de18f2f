"""`python -m nvcli.cluster.reaper MARK`: waits until its standard input ends, as it does with the
process that holds the other end, then kills every process that was started with the mark.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "NVCLI_OWN_CLUSTER"
_ROUNDS = 100
_QUIET_ROUNDS = 5  # without any: one that is just starting has no environment to be seen
_PAUSE_S = 0.1


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    quiet = 0
    for _ in range(_ROUNDS):
        pids = marked(sys.argv[1])
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        quiet = 0 if pids else quiet + 1
        if quiet == _QUIET_ROUNDS:
            break
        time.sleep(_PAUSE_S)


def marked(value: str) -> list[int]:
    """Processes of this user whose environment had `MARK=value` in it when they began. One that
    has ended, and waits to be collected, has none any more."""
    entry = f"{MARK}={value}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # somebody else's, or gone
                if entry in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


if __name__ == "__main__":
    main()
