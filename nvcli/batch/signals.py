"""Signals of a batch run: they only leave word, the run acts on it at its next turn."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Wish(Enum):
    STATUS = auto()  # SIGUSR1, SIGINFO: say where it stands
    FINISH = auto()  # the first SIGINT: end what runs, then stop
    STOP = auto()  # the second SIGINT: stop now
    TERMINATE = auto()  # SIGTERM
    HANG_UP = auto()  # SIGHUP: the same, when the terminal is closed


@contextmanager
def handle_signals(put: Callable[[Wish], object]) -> Iterator[None]:
    """Turn signals into wishes while the run lasts. `put` must be safe in a signal handler
    (`queue.SimpleQueue.put` is). Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    num_interrupts = 0

    def interrupt(signum: int, frame: object) -> None:
        nonlocal num_interrupts
        num_interrupts += 1
        put(Wish.FINISH if num_interrupts == 1 else Wish.STOP)

    def end(wish: Wish) -> Callable[[int, object], None]:
        def handle(signum: int, frame: object) -> None:
            # Another SIGHUP has nothing to say: the shell sends one and the kernel another, and
            # systemd one behind a SIGTERM. It must not cut off what is told at the end.
            if hasattr(signal, "SIGHUP"):
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
            put(wish)

        return handle

    handlers: dict[int, Any] = {signal.SIGINT: interrupt, signal.SIGTERM: end(Wish.TERMINATE)}
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = end(Wish.HANG_UP)  # nohup, which ignores it, means what it says
    for name in ("SIGUSR1", "SIGINFO"):
        if hasattr(signal, name):
            handlers[getattr(signal, name)] = lambda signum, frame: put(Wish.STATUS)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def answer_status(say: Callable[[], object]) -> Iterator[None]:
    """SIGUSR1 while there is no run yet (its default would end the process)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, n) for n in ("SIGUSR1", "SIGINFO") if hasattr(signal, n)]
    before = {n: signal.signal(n, lambda signum, frame: say()) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
