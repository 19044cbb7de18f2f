"""Raw key strokes become text."""

from __future__ import annotations

import os
import pty
import select
import termios

import pytest

from nvcli.repl.typeahead import TypeAhead, typed_text
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("hello", "hello"),
        ("a\rb\nc\r\nd", "a\nb\nc\nd"),
        ("\x1b[200~one\rtwo\x1b[201~", "one\ntwo"),
        ("helo\x7flo", "hello"),
        ("\x7f\x7fx", "x"),
        ("one\ntwo\x15three", "one\nthree"),
        ("a\x1b[A\x1b[1;5Cb\x1bOPc\x1b[24;80R", "abc"),
        ("a\x1b\rb", "a\nb"),
        ("a\x04\x0c\x1a\x00b\t世", "ab\t世"),
        ("a\x1b", "a"),
    ],
)
def test_typed_text(data: str, text: str) -> None:
    assert typed_text(data) == text


def type_keys(master: int, slave: int, keys: bytes) -> None:
    """The kernel hands them over when it gets to it."""
    os.write(master, keys)
    assert select.select([slave], [], [], PATIENCE_S)[0]


def test_keys_are_collected_silently_and_the_terminal_is_restored() -> None:
    master, slave = pty.openpty()
    try:
        before = termios.tcgetattr(slave)
        with TypeAhead(slave) as typeahead:
            type_keys(master, slave, "grüße\r".encode())
            typeahead.poll()
            type_keys(master, slave, b"more")
        assert typeahead.text == "grüße\nmore"
        assert termios.tcgetattr(slave) == before
        os.set_blocking(master, False)
        with pytest.raises(BlockingIOError):
            os.read(master, 100)  # nothing was echoed
    finally:
        os.close(master)
        os.close(slave)


def test_ctrl_c_drops_no_key_that_was_not_read_yet() -> None:
    master, slave = pty.openpty()
    try:
        with TypeAhead(slave) as typeahead:
            type_keys(master, slave, b"before\x03after\x1alast")
        assert typeahead.text == "beforeafterlast"
    finally:
        os.close(master)
        os.close(slave)


def test_no_terminal_is_no_error() -> None:
    read, write = os.pipe()
    with TypeAhead(read) as typeahead:
        pass
    assert typeahead.text == ""
    os.close(read)
    os.close(write)
