"""The REPL in a real terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.repl.driver import Tmux, has_tmux

pytestmark = pytest.mark.skipif(not has_tmux, reason="tmux is not installed")


def test_r1_bracketed_paste(tmp_path: Path) -> None:
    with Tmux(tmp_path) as term:
        term.run("plain")
        term.paste("one\ntwo\nthree")
        term.wait_for(r"^\.\.\. three")
        term.keys("Enter")
        assert term.log.wait(1) == [["one\ntwo\nthree"]]


def test_r2_paste_while_streaming_is_a_draft(tmp_path: Path) -> None:
    with Tmux(tmp_path) as term:
        term.run("slow")
        term.keys("count", "Enter")
        term.wait_for("9 10 11")
        term.paste("one\ntwo\nthree\n")
        term.wait_counted(10)
        assert "two" not in term.screen()  # nothing is echoed into the answer
        term.keys("C-c")
        screen = term.wait_for(r"^\.\.\. three")
        assert re.search(r"^>>> one\n\.\.\. two\n\.\.\. three", screen, re.MULTILINE)
        assert term.log.requests() == [["count"]]


def test_r12_r13_hostile_answer(tmp_path: Path) -> None:
    with Tmux(tmp_path) as term:
        term.run("hostile")
        term.keys("hi", "Enter")
        screen = term.wait_for("stop$")
        assert "[/INST] list[int] [bold]x :smile: ␛[2J␛]0;own␇ed␍␈ <b>end</b>" in screen
        assert ">>> hi" in screen  # not cleared
        assert term.flag("pane_title") != "own"


def test_r14_wide_characters(tmp_path: Path) -> None:
    with Tmux(tmp_path) as term:
        term.run("unicode")
        term.keys("hi", "Enter")
        screen = term.wait_for("stop$")
        assert screen.count("世界") == 1
        assert "\ufffd" not in screen


def test_resize_while_streaming_leaves_no_duplicates(tmp_path: Path) -> None:
    with Tmux(tmp_path, width=100) as term:
        term.run("slow", "--show-thinking", "hide")
        term.keys("count", "Enter")
        term.wait_for("9 10 11")
        term.resize(60, 20)
        term.wait_counted(20)
        term.resize(90, 24)
        term.wait_counted(20)
        term.keys("C-c")
        screen = term.wait_for("interrupted$")
        numbers = re.findall(r"\d+", screen.split("count", 1)[1].split(" tok")[0])[:-1]
        assert numbers == [str(n) for n in range(1, len(numbers) + 1)]


def test_r18_sigterm_while_streaming(tmp_path: Path) -> None:
    with Tmux(tmp_path) as term:
        term.run("slow")
        term.keys("count", "Enter")
        term.wait_for("9 10 11")
        term.keys("C-z")
        term.wait_for("Stopped")
        term.keys("kill -TERM %1; fg; echo code=$?", "Enter")
        term.wait_for("^code=143")
        term.keys("echo visible", "Enter")
        screen = term.wait_for("^visible")
        assert "echo visible" in screen  # echo is on
        assert term.flag("cursor_flag") == "1"


def test_suspend_and_resume(tmp_path: Path) -> None:
    with Tmux(tmp_path) as term:
        term.run("slow")
        term.keys("count", "Enter")
        term.wait_for("9 10 11")
        term.keys("C-z")
        term.wait_for("Stopped")
        term.keys("fg", "Enter")
        term.wait_counted(5)  # it goes on
        term.keys("silent")
        term.wait_counted(10)
        term.keys("C-c")
        term.wait_for("interrupted$")
        term.wait_for(r"^>>> silent")
        term.keys("C-u", "C-z")
        term.wait_for(r"Stopped[^$]*\$ [^$]*Stopped")
        term.keys("fg", "Enter")
        term.wait_for(r"^>>>\s*\Z")
        term.keys("/exit", "Enter")
        term.wait_for(r"^\$$")
