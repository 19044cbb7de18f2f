"""Rendering: append-only, byte for byte, with a screen model that obeys cursor movement."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvcli.repl.blocks import BlockSplitter, draw_block
from nvcli.repl.render import (
    AnswerRenderer,
    MarkdownAnswer,
    PlainAnswer,
    ThinkingPane,
    ThinkingView,
    last_rows,
)
from nvcli.repl.screen import Screen
from nvcli.types import FinishReason, RequestOutput, Usage


def split(text: str, size: int = 1) -> list[str]:
    splitter = BlockSplitter()
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    return [block for piece in pieces for block in splitter.feed(piece)] + splitter.flush()


ANSWER = """\
# Title
Some *text*
in a paragraph.

- one
- two

  still two

1. first

   ```py
   x = 1

   y = 2
   ```
2. second

```sh
echo a

echo b
```
Last words.
"""


def test_blocks_end_where_nothing_can_change_them() -> None:
    assert [block.strip("\n") for block in split(ANSWER)] == [
        "# Title",
        "Some *text*\nin a paragraph.",
        "- one\n- two\n\n  still two",
        "1. first\n\n   ```py\n   x = 1\n\n   y = 2\n   ```\n2. second",
        "```sh\necho a\n\necho b\n```",
        "Last words.",
    ]


@given(size=st.integers(1, 40))
@settings(max_examples=20)
def test_blocks_do_not_depend_on_the_pieces(size: int) -> None:
    assert split(ANSWER, size) == split(ANSWER, len(ANSWER))


@given(st.lists(st.sampled_from(["a", "\n", "\n\n", "```", "~~~", "# ", "- ", "  ", "`"])))
@settings(max_examples=300)
def test_no_text_is_lost(parts: list[str]) -> None:
    text = "".join(parts)
    assert "".join(split(text)).split() == text.split()


def test_drawn_blocks_keep_what_markdown_would_swallow() -> None:
    text = "[/INST] list[int] [bold]x :smile: <b>tag</b> a_b_c\nnext line\n"
    drawn = draw_block(text, width=80, use_color=False)
    assert drawn == "[/INST] list[int] [bold]x :smile: <b>tag</b> a_b_c\nnext line\n"
    assert draw_block("<div>\nhidden?\n</div>\n", width=80, use_color=False) == (
        "<div>\nhidden?\n</div>\n"
    )


def test_code_can_be_copied() -> None:
    drawn = draw_block("```python\ndef f():\n    return 1\n```\n", width=40, use_color=False)
    assert drawn == "def f():\n    return 1\n"
    assert draw_block("7. seven\n", width=40, use_color=False).strip() == "7 seven"


class TinyTerminal(io.StringIO):
    """Applies what the renderer writes to rows of `width` cells (no scrolling: all rows stay).

    wide: characters that it draws in two cells, whatever others think of them.
    """

    def __init__(self, width: int, wide: str = "") -> None:
        super().__init__()
        self.width = width
        self.wide = wide
        self.breaks = True
        self.rows = [""]
        self.row = 0
        self.column = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for part in re.findall(r"\x1b\[\??\d*[A-Za-z]|\x1b\[[0-9;]*m|[^\x1b]", text):
            if part in ("\x1b[?7l", "\x1b[?7h"):
                self.breaks = part == "\x1b[?7h"
            elif part == "\r":
                self.column = 0
            elif part == "\n":
                self.row, self.column = self.row + 1, 0
                while len(self.rows) <= self.row:
                    self.rows.append("")
            elif part == "\x1b[J":
                del self.rows[self.row + 1 :]
                self.rows[self.row] = self.rows[self.row][: self.column]
            elif part == "\x1b[K":
                self.rows[self.row] = self.rows[self.row][: self.column]
            elif part.startswith("\x1b") and part.endswith("A"):
                self.row -= int(part[2:-1])
                assert self.row >= 0
            elif not part.startswith("\x1b"):
                self._draw(part + "\0" * (part in self.wide))
        return len(text)

    def _draw(self, cells: str) -> None:
        if self.column + len(cells) > self.width:
            if self.breaks:
                self.write("\n")
            else:
                self.column = self.width - len(cells)
        line = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = line[: self.column] + cells + line[self.column + len(cells) :]
        self.column += len(cells)

    def screen(self) -> Screen:
        return Screen(self, self, out_is_terminal=True, err_is_terminal=True)

    def shown(self) -> str:
        return "\n".join(row.replace("\0", "").rstrip() for row in self.rows).rstrip("\n")


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_streamed_answer_ends_as_if_drawn_at_once(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("LINES", "15")
    terminal = TinyTerminal(30)
    ticks = iter(range(10**6))
    answer = MarkdownAnswer(terminal.screen(), clock=lambda: float(next(ticks)))
    text = ANSWER + "\n" + "A long paragraph that wraps. " * 20 + "\n\n"
    text += "\n".join(f"{n}. item" for n in range(1, 41))
    for start in range(0, len(text), size):
        answer.feed(text[start : start + size])
    answer.finish()
    expected = "\n".join(draw_block(b, width=30, use_color=False) for b in split(text))
    assert terminal.shown() == expected.rstrip("\n")
    assert terminal.shown().count(" 1 item") == 1  # nothing twice, however long the list


def test_what_the_terminal_draws_wider_than_it_was_measured_stands_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each redraw takes back all that the one before drew."""
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("LINES", "15")
    terminal = TinyTerminal(30, wide="…")
    ticks = iter(range(10**6))
    answer = MarkdownAnswer(terminal.screen(), clock=lambda: float(next(ticks)))
    answer.feed("Before.\n\n")
    for char in "one… two… " * 12:
        answer.feed(char)
        assert len(terminal.rows) <= 2 + 8
        assert terminal.shown().startswith("Before.\n\no")
    answer.finish()
    assert "".join(terminal.shown().split()) == "Before." + "one…two…" * 12
    assert terminal.breaks


def test_a_terminal_too_narrow_for_the_count_of_thinking_keeps_one_row() -> None:
    terminal = TinyTerminal(12)
    ticks = iter(range(100))
    pane = ThinkingPane(terminal.screen(), ThinkingView.FOLD, lambda: float(next(ticks)))
    for count in range(20):
        pane.feed("hm", count)
        assert len(terminal.rows) == 1
    pane.close()
    assert "".join(terminal.rows).startswith("thought")


def test_live_tail_shows_what_is_new() -> None:
    terminal = TinyTerminal(80)
    answer = MarkdownAnswer(terminal.screen(), clock=iter(range(99)).__next__)
    answer.feed("Done.\n\nHalf a sen")
    assert terminal.shown() == "Done.\n\nHalf a sen"
    answer.feed("tence")
    assert terminal.shown() == "Done.\n\nHalf a sentence"


def test_last_rows() -> None:
    assert last_rows("", 10, 5) == []
    assert last_rows("abc", 10, 5) == ["abc"]
    assert last_rows("a\nb\nc\n", 10, 2) == ["b", "c"]
    assert last_rows("abcdefgh", 3, 2) == ["def", "gh"]
    assert last_rows("世界世界", 4, 5) == ["世界", "世界"]


def test_r14_plain_text_is_passed_on_whole() -> None:
    out = io.StringIO()
    answer = PlainAnswer(Screen(out, out))
    pieces = ["\n\nSpace ", "👩🏽‍🚀", "\n", "\n", "世", "界", "\n\n"]
    for piece in pieces:
        answer.feed(piece)
    answer.finish()
    assert out.getvalue() == "Space 👩🏽‍🚀\n\n世界\n"


def deltas() -> list[RequestOutput]:
    return [
        RequestOutput(request_id="r", reasoning="\nTwo\x1b[2J ", usage=Usage(1, 1, 0, 1)),
        RequestOutput(request_id="r", reasoning="and two.\n\n", usage=Usage(1, 2, 0, 2)),
        RequestOutput(request_id="r", text="4"),
        RequestOutput(request_id="r", text="\n", finish_reason=FinishReason.STOP),
    ]


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (ThinkingView.FULL, "Two␛[2J and two.\nthought 2.0 s, 2 tok\n"),
        (ThinkingView.FOLD, "thought 2.0 s, 2 tok\n"),
        (ThinkingView.HIDE, ""),
    ],
)
def test_thinking_views(view: ThinkingView, expected: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    ticks = iter([0.0, 2.0])
    renderer = AnswerRenderer(
        Screen(out, err), thinking=view, markdown=False, clock=lambda: next(ticks)
    )
    for delta in deltas():
        renderer.feed(delta)
    renderer.finish()
    renderer.finish()  # again, as after a late interruption
    assert (out.getvalue(), err.getvalue()) == ("4\n", expected)


def test_folded_thinking_counts_live_and_leaves_one_line() -> None:
    terminal = TinyTerminal(80)
    ticks = iter(range(100))
    renderer = AnswerRenderer(
        terminal.screen(),
        thinking=ThinkingView.FOLD,
        markdown=False,
        clock=lambda: float(next(ticks)),
    )
    renderer.feed(deltas()[0])
    assert terminal.shown().startswith("thinking ")
    for delta in deltas()[1:]:
        renderer.feed(delta)
    renderer.finish()
    assert re.fullmatch(r"thought \d+\.0 s, 2 tok\n4", terminal.shown())
