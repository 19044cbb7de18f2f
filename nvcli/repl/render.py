"""An answer on the screen while it is generated, append-only.

What is printed stays printed: finished markdown blocks are drawn once, and only the unfinished
tail, limited to a few rows, is drawn again as it grows. Nothing above the tail is ever touched, so
a resize or a long answer cannot leave duplicates. Without a terminal the text is passed on as it
is.
Thinking goes to standard error: in full (dim), or folded to one line with its time and tokens.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING

from nvcli.repl.blocks import BlockSplitter, draw_block
from nvcli.repl.screen import ControlFilter, Screen, unbroken
from nvcli.text.trimmers import NewlineTrimmer

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.types import RequestOutput

MAX_TAIL_ROWS = 8
_REDRAW_INTERVAL_S = 1 / 30


class ThinkingView(StrEnum):
    """How reasoning is shown; it is generated all the same."""

    FULL = "full"
    FOLD = "fold"
    HIDE = "hide"


class PlainAnswer:
    """The text as it comes; one newline at the end, however many the model wrote."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._filter = ControlFilter()
        self._trimmer = NewlineTrimmer()

    def feed(self, text: str) -> None:
        self._put(self._filter.feed(text))

    def finish(self) -> None:
        self._put(self._filter.flush())
        if self._trimmer.has_text:
            self._screen.write("\n")
        self._trimmer = NewlineTrimmer()

    def _put(self, text: str) -> None:
        shown = self._trimmer.feed(text)
        if shown:
            self._screen.write(shown)


class MarkdownAnswer:
    """Finished blocks through Rich, the tail live where the terminal can move its cursor."""

    def __init__(self, screen: Screen, clock: Callable[[], float]) -> None:
        self._screen = screen
        self._filter = ControlFilter()
        self._splitter = BlockSplitter()
        self._clock = clock
        self._is_first = True
        self._tail: list[str] = []  # the rows drawn now
        self._last_redraw = float("-inf")

    def feed(self, text: str) -> None:
        self._print(self._splitter.feed(self._filter.feed(text)))
        if self._screen.can_redraw_out:
            self._redraw()

    def finish(self) -> None:
        blocks = self._splitter.feed(self._filter.flush()) + self._splitter.flush()
        self._print(blocks)
        self._erase()

    def _print(self, blocks: list[str]) -> None:
        for block in blocks:
            width, _ = self._screen.size()
            drawn = draw_block(block, width=width, use_color=self._screen.out_color)
            self._erase()
            self._screen.write(drawn if self._is_first else "\n" + drawn)
            self._is_first = False

    def _redraw(self) -> None:
        now = self._clock()
        if now - self._last_redraw < _REDRAW_INTERVAL_S:
            return
        self._last_redraw = now
        width, height = self._screen.size()
        rows = last_rows(self._splitter.tail, width - 1, min(MAX_TAIL_ROWS, height - 3))
        if rows == self._tail:
            return
        self._erase()
        gap = "" if self._is_first or not rows else "\n"
        self._tail = [""] * len(gap) + rows
        self._screen.write(unbroken("\n".join(self._tail)))

    def _erase(self) -> None:
        """Take the tail back, counting its rows at the width the terminal has now."""
        if not self._tail:
            return
        from rich.cells import cell_len

        width, _ = self._screen.size()
        rows = sum(max(1, -(-cell_len(row) // width)) for row in self._tail)
        self._tail = []
        up = f"\x1b[{rows - 1}A" if rows > 1 else ""
        self._screen.write(f"\r{up}\x1b[J")


def last_rows(text: str, width: int, limit: int) -> list[str]:
    """The last `limit` rows of `text` wrapped at `width` cells."""
    from rich.cells import chop_cells

    rows: list[str] = []
    lines = text.rstrip("\n").expandtabs(4).split("\n")
    for line in lines[-limit:]:
        rows += chop_cells(line, width) if line else [""]
    return rows[-limit:] if text.strip() else []


class ThinkingPane:
    """Reasoning on standard error, and its summary line."""

    def __init__(self, screen: Screen, view: ThinkingView, clock: Callable[[], float]) -> None:
        self._screen = screen
        self._view = view
        self._clock = clock
        self._filter = ControlFilter()
        self._start: float | None = None
        self._tokens = 0
        self._is_open = False
        self._trimmer = NewlineTrimmer()
        self._last_redraw = float("-inf")

    def feed(self, text: str, num_tokens: int) -> None:
        if self._start is None:
            self._start = self._clock()
            self._is_open = True
        self._tokens = max(self._tokens, num_tokens)
        if self._view is ThinkingView.FULL:
            self._put(self._filter.feed(text))
        elif self._view is ThinkingView.FOLD and self._screen.can_redraw_err:
            now = self._clock()
            if now - self._last_redraw >= 0.1:
                self._last_redraw = now
                line = self._line("thinking")
                self._screen.write_err(unbroken(f"\r\x1b[K{line}"), dim=True)

    def change(self, view: ThinkingView) -> None:
        """Folded: what was printed stays, the rest is counted. Shown: from here on."""
        if self._is_open and view is not self._view:
            if self._view is ThinkingView.FULL and self._trimmer.has_text:
                self._screen.write_err("\n")
            elif self._view is ThinkingView.FOLD and self._screen.can_redraw_err:
                self._screen.write_err("\r\x1b[K")
            self._trimmer = NewlineTrimmer()
        self._view = view

    def close(self) -> None:
        """The reasoning is over; called again, it does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        if self._view is ThinkingView.HIDE:
            return
        if self._view is ThinkingView.FULL:
            self._put(self._filter.flush())
            if self._trimmer.has_text:
                self._screen.write_err("\n")
        elif self._screen.can_redraw_err:
            self._screen.write_err("\r\x1b[K")
        self._screen.write_err(f"{self._line('thought')}\n", dim=True)

    def _put(self, text: str) -> None:
        shown = self._trimmer.feed(text)
        if shown:
            self._screen.write_err(shown, dim=True)

    def _line(self, verb: str) -> str:
        elapsed = self._clock() - self._start if self._start is not None else 0.0
        return f"{verb} {elapsed:.1f} s, {self._tokens} tok"


class AnswerRenderer:
    """One answer: feed it every delta, then `finish`, also after an interruption."""

    def __init__(
        self,
        screen: Screen,
        *,
        thinking: ThinkingView,
        markdown: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._thinking = ThinkingPane(screen, thinking, clock)
        self._body = MarkdownAnswer(screen, clock) if markdown else PlainAnswer(screen)

    def show_thinking(self, view: ThinkingView) -> None:
        """Change it in the middle of an answer."""
        self._thinking.change(view)

    def feed(self, delta: RequestOutput) -> None:
        if delta.reasoning:
            self._thinking.feed(delta.reasoning, delta.usage.reasoning_tokens)
        if delta.text:
            self._thinking.close()
            self._body.feed(delta.text)

    def finish(self) -> None:
        self._thinking.close()
        self._body.finish()
