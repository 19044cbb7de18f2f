"""Markdown cut into blocks as it streams, and each block drawn once through Rich.

A block is finished when nothing that follows can change how it looks: a heading, a closed fence, or
anything followed by a blank line and a line that starts in the first column (so that the parts of a
list item stay together).
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from rich.markdown import Markdown

_FENCE = re.compile(r"( {0,3})(`{3,}|~{3,})([^\n]*)")
_HEADING = re.compile(r"#{1,6}[ \t]")


class BlockSplitter:
    """Takes text in pieces, gives finished blocks; `tail` is what is still open."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._partial = ""
        self._fence: str | None = None
        self._fence_is_indented = False
        self._after_blank = False

    @property
    def tail(self) -> str:
        return "".join(self._lines) + self._partial

    def feed(self, text: str) -> list[str]:
        done: list[str] = []
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._take(line, done)
        starts_block = self._partial[:1] not in ("", " ", "\t")
        if self._after_blank and starts_block and self._fence is None:
            self._close(done)
        return done

    def flush(self) -> list[str]:
        done: list[str] = []
        if self._partial:
            self._lines.append(self._partial)
            self._partial = ""
        self._close(done)
        self._fence = None
        return done

    def _take(self, line: str, done: list[str]) -> None:
        if self._fence is not None:
            self._lines.append(line + "\n")
            if line.strip().startswith(self._fence) and not line.strip().strip(self._fence[0]):
                self._fence = None
                if not self._fence_is_indented:
                    self._close(done)
            return
        if not line.strip():
            if self._lines:
                self._lines.append("\n")
                self._after_blank = True
            return
        fence = _FENCE.match(line)
        in_first_column = line[0] not in " \t"
        is_heading = _HEADING.match(line) is not None
        opens_fence = fence is not None and not (fence[2][0] == "`" and "`" in fence[3])
        if in_first_column and (self._after_blank or is_heading or opens_fence):
            self._close(done)
        self._after_blank = False
        self._lines.append(line + "\n")
        nested = _FENCE.match(line.lstrip())  # a fence inside a list item may be indented further
        if nested is not None and (opens_fence or not in_first_column):
            self._fence = nested[2]
            self._fence_is_indented = not in_first_column
        elif is_heading:
            self._close(done)

    def _close(self, done: list[str]) -> None:
        block = "".join(self._lines)
        self._lines.clear()
        self._after_blank = False
        if block.strip():
            done.append(block)


def draw_block(block: str, *, width: int, use_color: bool) -> str:
    """One markdown block as terminal text of at most `width` columns, ending in a newline."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=use_color,
        color_system="standard" if use_color else None,
        no_color=not use_color,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(_markdown(block))
    lines = [line.rstrip() for line in capture.get().split("\n")]
    return "\n".join(lines).strip("\n") + "\n"


def _markdown(block: str) -> Markdown:
    """Rich's Markdown with three things set right for a model's answer.

    HTML is text (Rich drops it without a word), a line end is a line end, and code has no frame
    of blanks around it, so that it can be copied.
    """
    from markdown_it import MarkdownIt
    from rich.markdown import CodeBlock, Markdown
    from rich.syntax import Syntax

    class PlainCodeBlock(CodeBlock):
        def __rich_console__(self, console: Any, options: Any) -> Any:
            yield Syntax(
                str(self.text).rstrip("\n"),
                self.lexer_name,
                theme="ansi_dark",
                background_color="default",
                word_wrap=True,
            )

    class AnswerMarkdown(Markdown):
        elements: ClassVar[dict[str, Any]] = {
            **Markdown.elements,
            "fence": PlainCodeBlock,
            "code_block": PlainCodeBlock,
        }

    markdown = AnswerMarkdown("", hyperlinks=False)
    parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
    markdown.parsed = parser.parse(block)
    for token in markdown.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return markdown
