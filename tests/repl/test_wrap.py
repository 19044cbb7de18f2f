"""nvcli's own lines in a narrow window."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nvcli.repl.wrap import cells, table, wrap
from tests.repl.driver import Tmux, has_tmux


def test_words_stay_whole_and_width_is_kept() -> None:
    text = "one two three four five six seven"
    rows = wrap(text, 12).split("\n")
    assert max(map(len, rows)) <= 12
    assert " ".join(rows) == text
    assert wrap("  deep " + text, 12, 4).startswith("  deep one\n    two")
    assert wrap("a-word-that-does-not-fit is long", 10) == "a-word-that-does-not-fit\nis long"
    assert wrap("12 tok · 3 tok/s · stop", 16, separator=" · ") == "12 tok · 3 tok/s\nstop"
    assert wrap("世界 世界 世界", 10) == "世界 世界\n世界"
    assert cells("e\u0301世") == 3
    assert wrap("", 5) == ""


def test_a_table_hangs_or_goes_below() -> None:
    rows = [("/a", "one two three"), ("/bc", "four")]
    assert table(rows, 80) == "/a   one two three\n/bc  four"
    assert table(rows, 13) == "/a   one two\n     three\n/bc  four"
    assert table([("/a-long-name", "one two"), ("/b", "four")], 16) == (
        "/a-long-name\n    one two\n/b  four"
    )


@pytest.mark.skipif(not has_tmux, reason="tmux is not installed")
def test_no_word_is_cut_in_40_columns(tmp_path: Path) -> None:
    with Tmux(tmp_path, width=40, height=50) as term:
        term.run("plain")
        for line, last in (
            ("hi", "stop$"),
            ("/context", "cache$"),
            ("/probs", "server|keeps"),
            ("/retyr", "text.$"),
            ("/help", r"starts\s+with /.$"),
        ):
            term.keys(line, "Enter")
            term.wait_for(last)
            term.wait_for(r"^>>>\s*\Z")
        words = set(re.split(r"\s+", term.screen()))
        for word in ("conversation", "alternative", "$EDITOR", "reusable", "searches", "messages]"):
            assert any(word in found for found in words), word
