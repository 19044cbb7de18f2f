"""Waiting for a line at a question, and what a signal does to that."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

import pytest

from nvcli.repl import tool_calls
from nvcli.repl.tool_calls import wait_for_line


@pytest.fixture
def keyboard() -> Iterator[tuple[TextIO, Callable[[str], object]]]:
    """What is read, and how to type."""
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as keys, open(writing, "wb", buffering=0) as typing:
        yield keys, lambda text: typing.write(text.encode())


@pytest.fixture
def select_calls(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Things to do, one each time that the wait is about to begin, and not before."""
    todo: list[Callable[[], object]] = []
    select = tool_calls.select.select

    def waiting(*args: object) -> object:
        if todo:
            threading.Timer(0.05, todo.pop(0)).start()
        return select(*args)

    monkeypatch.setattr(tool_calls.select, "select", waiting)
    return todo


def test_a_line_ends_the_wait(keyboard, select_calls) -> None:  # type: ignore[no-untyped-def]
    keys, type_keys = keyboard
    select_calls.append(lambda: type_keys("yes\n"))
    wait_for_line(keys)
    assert keys.readline() == "yes\n"
    type_keys("no\n")
    wait_for_line(keys)  # it is there already
    assert keys.readline() == "no\n"


def test_an_interrupt_ends_the_wait(keyboard, select_calls) -> None:  # type: ignore[no-untyped-def]
    select_calls.append(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        wait_for_line(keyboard[0])


def test_a_signal_that_raises_nothing_does_not_end_it(keyboard, select_calls) -> None:  # type: ignore[no-untyped-def]
    keys, type_keys = keyboard
    seen: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        select_calls += [
            lambda: os.kill(os.getpid(), signal.SIGUSR1),
            lambda: type_keys("yes\n"),
        ]
        wait_for_line(keys)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert seen == [signal.SIGUSR1]
    assert keys.readline() == "yes\n"


def test_a_signal_leaves_a_byte_that_wakes(keyboard, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """So that one which came before the wait ends it: the socket is watched from the beginning,
    and whoever watched signals before watches them again afterwards.
    """
    keys, type_keys = keyboard
    watched: list[int] = []
    select = tool_calls.select.select

    def waiting(*args: object) -> object:
        watched.append(signal.set_wakeup_fd(-1))
        signal.set_wakeup_fd(watched[0])
        type_keys("\n")
        return select(*args)

    monkeypatch.setattr(tool_calls.select, "select", waiting)
    wait_for_line(keys)
    assert watched[0] >= 0
    assert signal.set_wakeup_fd(-1) == -1, "as it was before"
