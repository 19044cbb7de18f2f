"""The model asks for tools: each call is shown, asked for unless it is allowed, and run."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import termios
from typing import TYPE_CHECKING

from nvcli.repl.numbers import spaced
from nvcli.repl.screen import visible
from nvcli.repl.shell import first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TextIO

    from nvcli.repl.screen import Screen
    from nvcli.tools import Toolbox
    from nvcli.types import ToolCall

MAX_ROUNDS = 16  # of calls for one question; a model may ask for ever
REFUSED = "error: the user did not allow this call"
INTERRUPTED = "error: the user interrupted this call"


class StoppedError(Exception):
    """The user wants neither this call nor what the model makes of a refusal."""


def ask_short(screen: Screen, keyboard: TextIO, question: str) -> str:
    """A line from the keyboard; Ctrl+D is an empty answer. What was typed before the question is
    none: it is dropped."""
    with contextlib.suppress(termios.error, OSError, ValueError):
        termios.tcflush(keyboard.fileno(), termios.TCIFLUSH)
    screen.write_err(question)
    try:
        with contextlib.suppress(OSError, ValueError):  # no file of the system's
            if os.isatty(keyboard.fileno()):  # which gives a line at a time
                wait_for_line(keyboard)
        return keyboard.readline().strip()
    except (KeyboardInterrupt, SystemExit):
        screen.write_err("\n")  # what is said next begins a line
        raise


def wait_for_line(keyboard: TextIO) -> None:
    """Until the keyboard can be read, or a signal's handler raises. In the main thread.

    A signal that comes right before a read is only noted, and has to wait for the line. One that
    comes right before this wait ends it: Python leaves a byte in `signal.set_wakeup_fd`'s socket.
    """
    woken, wakes = socket.socketpair()
    with woken, wakes:
        wakes.setblocking(False)
        previous = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        try:
            watched: list[TextIO | socket.socket] = [keyboard, woken]
            while keyboard not in select.select(watched, [], [])[0]:
                woken.recv(64)
        finally:
            signal.set_wakeup_fd(previous)


def run_calls(
    calls: Sequence[ToolCall],
    tools: Toolbox,
    screen: Screen,
    allowed: set[str],
    ask: Callable[[str], str] | None,
) -> list[str]:
    """The results, in order. `ask` None: there is nobody to ask, only `allowed` tools run.

    An answer of `a` allows the tool for the rest of the conversation. Raises `StoppedError` for
    Ctrl+C at the question; while a tool runs it ends that tool, and the model is told.
    """
    results = []
    for call in calls:
        screen.line_err(f"tool: {show_call(call)}", indent=2)
        try:
            is_allowed = _is_allowed(call, allowed, ask)
        except KeyboardInterrupt:
            raise StoppedError from None
        if not is_allowed:
            screen.line_err("  not allowed", dim=True)
            results.append(REFUSED)
            continue
        try:
            result = tools.call(call.name, call.arguments)
        except KeyboardInterrupt:
            screen.line_err("  interrupted", dim=True)
            results.append(INTERRUPTED)
            continue
        mark = "" if result.is_error else f"{spaced(len(result.text))} characters, "
        line = f"  {first_line(result.text)}  ({mark}{result.seconds:.1f} s)"
        screen.line_err(line, dim=True, indent=2)
        results.append(result.text)
    return results


def _is_allowed(call: ToolCall, allowed: set[str], ask: Callable[[str], str] | None) -> bool:
    if allowed & {call.name, "*"}:
        return True
    if ask is None:
        return False
    answer = ask(f"  run {visible(call.name)}? [y]es, [n]o, [a]lways: ").strip().lower()
    if answer in ("a", "always"):
        allowed.add(call.name)
    return answer in ("y", "yes", "a", "always")


def show_call(call: ToolCall) -> str:
    """`add(a=2, b=3)`; what cannot be read as JSON is shown as it came."""
    try:
        values = json.loads(call.arguments or "{}")
        pairs = [f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in values.items()]
    except (ValueError, AttributeError, RecursionError):
        return f"{call.name}({call.arguments})"
    return f"{call.name}({', '.join(pairs)})"
