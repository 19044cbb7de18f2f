"""Newlines next to a tag belong to the markup, not to the text; the trimmers take them away.

A newline is held back while a tag may still follow it and let go with the next other character.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvcli.text.detokenizer import StopMatcher


class NewlineTrimmer:
    """Drops the newlines at both ends, as of a think block."""

    def __init__(self) -> None:
        self.has_text = False
        self._newlines = ""

    def feed(self, text: str) -> str:
        if not self.has_text:
            text = text.lstrip("\n")
            self.has_text = bool(text)
        text = self._newlines + text
        shown = text.rstrip("\n")
        self._newlines = text[len(shown) :]
        return shown


class ContentTrimmer:
    """Content on its way out: newlines after a tag, then stop strings, then newlines before a tag.

    The order matters: a stop of two newlines must not match those that follow `</think>`, and must
    match those of the answer at once.
    """

    def __init__(self, matcher: StopMatcher, *, hold_newlines: bool) -> None:
        self.stop: str | None = None
        self._matcher = matcher
        self._hold_newlines = hold_newlines
        self._is_after_tag = False
        self._leading = ""  # newlines after a tag
        self._trailing = ""  # newlines that a tag may follow
        self._has_text = False

    @property
    def is_plain(self) -> bool:
        """Whether text may come in pieces of any size: there are no stop strings to end at."""
        return self.stop is None and not self._matcher.has_stops

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        if self._is_after_tag:
            rest = text.lstrip("\n")
            self._leading += text[: len(text) - len(rest)]
            if not rest:
                return ""
            # Between two pieces of content that a tool call parts, the newlines stay.
            text = self._leading + rest if self._has_text else rest
            self._is_after_tag = False
            self._leading = ""
        if not may_stop or not self._matcher.has_stops:
            return self._out(text)
        piece = self._matcher.feed(text)
        self.stop = piece.stop
        return self._out(piece.text)

    def drop_leading_newlines(self) -> None:
        self._is_after_tag = True
        self._leading = ""

    def end_before_tag(self) -> str:
        """A tag comes: a stop string cannot go on across it, newlines before it are markup."""
        shown = self._out(self._matcher.flush())
        self._trailing = ""
        return shown

    def finish(self) -> str:
        return self._out(self._matcher.flush()) + self._trailing

    def _out(self, text: str) -> str:
        text = self._trailing + text
        shown = text.rstrip("\n") if self._hold_newlines else text
        self._trailing = text[len(shown) :]
        self._has_text = self._has_text or bool(shown)
        return shown
