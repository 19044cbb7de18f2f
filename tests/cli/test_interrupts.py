"""Signals that end a command: also those that come where Python drops exceptions."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from nvcli.bench.load_run import run_cancellable
from nvcli.cli.interrupts import interrupts_never_lost, is_lost_in, never_lost
from tests.waiting import PATIENCE_S

# As `_get_module_lock` of importlib: a weak reference's callback takes the lock of all imports.
_CALLBACK = """
def callback(ref):
    lock.acquire()
    raise_signal(number)
    try:
        pass
    finally:
        lock.release()
"""


class Target:
    """Something that a weak reference can point to."""


@pytest.fixture
def lock() -> threading.Lock:
    return threading.Lock()


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGALRM)}
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupted_import(lock: threading.Lock, number: int) -> None:
    """What a signal meets when it comes at the worst moment of an import."""
    names = {"lock": lock, "raise_signal": signal.raise_signal, "number": number}
    exec(compile(_CALLBACK, "<frozen importlib._bootstrap>", "exec"), names)
    target = Target()
    reference = weakref.ref(target, names["callback"])  # type: ignore[call-overload]
    del target
    assert reference() is None


def interrupted_del(lock: threading.Lock, number: int) -> None:
    class Closing:
        def __del__(self) -> None:
            signal.raise_signal(number)

    Closing()


def meet(moment: Callable[[threading.Lock, int], None], lock: threading.Lock, number: int) -> None:
    """The signal at that moment, and the time after it in which it may come again."""
    moment(lock, number)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        pass


@pytest.mark.parametrize("moment", [interrupted_import, interrupted_del])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_is_not_lost(
    moment: Callable[[threading.Lock, int], None], lock: threading.Lock
) -> None:
    moment_of_default = None
    try:
        moment(lock, signal.SIGINT)  # Python's own handler: dropped, and the lock stays taken
    except KeyboardInterrupt as exc:
        moment_of_default = exc
    assert moment_of_default is None
    assert lock.locked() == (moment is interrupted_import)
    if lock.locked():
        lock.release()
    with interrupts_never_lost():
        with pytest.raises(KeyboardInterrupt):
            meet(moment, lock, signal.SIGINT)
        assert not lock.locked()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_other_signals(lock: threading.Lock) -> None:
    came = []

    def leave(signum: int, frame: object) -> None:
        came.append(signum)
        raise SystemExit(143)

    signal.signal(signal.SIGINT, never_lost(leave))
    with pytest.raises(SystemExit):
        meet(interrupted_import, lock, signal.SIGINT)
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGINT)
    assert came == [signal.SIGINT] * 2
    assert not lock.locked()
    assert not is_lost_in(None)


def test_other_handlers_are_left_alone() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a job in the background
    with interrupts_never_lost():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_load_on_a_server_is_cancelled() -> None:
    """asyncio cancels its task only where the handler is Python's own."""

    async def work() -> str:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            return "kept"
        return "slept"

    with interrupts_never_lost():
        ours = signal.getsignal(signal.SIGINT)
        assert run_cancellable(work()) == "kept"
        assert signal.getsignal(signal.SIGINT) is ours
