"""The commands that change how a conversation goes on: files, editor, JSON, tools, clipboard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nvcli.errors import UsageError
from nvcli.repl import command_turns
from nvcli.repl.command_turns import code_blocks
from nvcli.repl.editor import edit_text
from nvcli.repl.files import expand_mentions
from nvcli.repl.session import ANY_OBJECT
from nvcli.types import FinishReason
from tests.fakes import FakeLLM, Reply
from tests.repl.test_commands import Typed


def test_file_reports_size_and_tokens(tmp_path: Path) -> None:
    typed = Typed()
    (tmp_path / "a.txt").write_text("one two")
    (tmp_path / "with space.txt").write_text("three")
    shown = typed(f'/file {tmp_path}/a.txt "{tmp_path}/with space.txt"')
    assert "a.txt: 20 bytes, 4 tokens" in shown
    assert len(typed.shell.attachments) == 2
    assert typed("/file /nowhere").startswith("error: cannot read /nowhere")
    assert len(typed.shell.attachments) == 2


def test_mentions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b c.txt").write_text("x")
    (tmp_path / "d").mkdir()
    assert expand_mentions("see @a.txt.") == ("see a.txt.", [Path("a.txt")])
    assert expand_mentions('see @"b c.txt"!') == ("see b c.txt!", [Path("b c.txt")])
    assert expand_mentions("@a.txt and @a.txt") == ("a.txt and a.txt", [Path("a.txt")])
    for text in ("me@a.txt", "@nobody", "@d", "a @ b", "@@a.txt", "@"):
        assert expand_mentions(text) == (text, [])
    assert expand_mentions(r"\@a.txt") == ("@a.txt", [])


def test_edit_asks_again_with_the_new_text() -> None:
    typed = Typed("Berlin.", "Rome.")
    typed("capital of Germany?")
    typed.shell.edit = lambda text: text.replace("Germany", "Italy") + "\n"
    typed("/edit")
    assert [t.user for t in typed.shell.session.turns] == ["capital of Italy?"]
    assert typed.shell.session.turns[0].output.text == "Rome."
    typed.shell.edit = lambda text: " \n"
    assert "nothing was changed" in typed("/edit")
    assert "cannot go back 5" in typed("/edit 5")


def test_editor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "edit.py"
    script.write_text(
        "import sys, pathlib\np = pathlib.Path(sys.argv[1])\np.write_text(p.read_text().upper())"
    )
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", f"{sys.executable} {script}")
    assert edit_text("quiet") == "QUIET"
    monkeypatch.setenv("EDITOR", "/nowhere/editor")
    with pytest.raises(UsageError, match="cannot start the editor"):
        edit_text("x")
    monkeypatch.setenv("VISUAL", "false")
    with pytest.raises(UsageError, match="ended with 1"):
        edit_text("x")


def test_json_and_schema(tmp_path: Path) -> None:
    typed = Typed()
    assert typed("/json on") == "json: on\n"
    typed("x")
    assert typed.llm.requests[-1].schema is ANY_OBJECT
    (tmp_path / "s.json").write_text('{"type": "object"}')
    typed(f"/schema {tmp_path}/s.json")
    assert typed("/json") == "json: on, by a schema\n"
    typed("/schema off")
    typed("x")
    assert typed.llm.requests[-1].schema is None
    assert "is no JSON" in typed('/schema {"a"')
    assert "cannot read" in typed("/schema /nowhere")


def test_unset_and_switches() -> None:
    typed = Typed()
    typed("/set temperature 0.5")
    assert "(set)" not in typed("/unset temperature")
    assert "no setting" in typed("/unset warmth")
    assert typed("/markdown off") == "markdown: off\n"
    assert not typed.shell.markdown
    assert typed("/multiline on").startswith("multiline: on; Alt+Enter sends")
    assert typed("/history") == "error: no history is kept"


def test_copy_and_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_turns, "_CLIPBOARDS", ())
    typed = Typed("Text\n```py\na = 1\n```\nand\n~~~\nb\n~~~\n")
    assert "no answer yet" in typed("/copy")
    typed("x")
    assert "no clipboard" in typed("/copy")
    typed.shell.screen.out_is_terminal = True
    assert "\x1b]52;c;YSA9IDE=\x07" in typed("/copy code 1")
    assert "has 2 code blocks, not 3" in typed("/copy code 3")
    other = Typed("```py\na = 1\n```\n")
    other("x")
    assert "has 1 code block, not 2" in other("/copy code 2")
    assert typed("/last").startswith("Text\n```py\n")


def test_code_blocks() -> None:
    assert code_blocks("```\na\n\nb\n```\n````md\n```\nx\n```\n````") == ["a\n\nb", "```\nx\n```"]
    assert code_blocks("```\nnever closed") == []
    assert code_blocks("```\n```") == [""]


def test_model_keeps_the_transcript() -> None:
    typed = Typed("One.")
    typed("a")
    assert typed("/model other") == "error: the model cannot be changed here\n".rstrip()
    other = FakeLLM(["Two."], model_name="other")
    typed.shell.open_model = lambda name: other
    assert typed("/model other") == "model: other, 32 768 tokens\n"
    typed("b")
    assert [m.content for m in other.requests[0].prompt] == ["a", "One.", "b"]


def test_tokens_of_a_server_are_not_here() -> None:
    typed = Typed(Reply("One.", finish_reason=FinishReason.LENGTH))
    typed("a")
    for command in ("/probs", "/branch 1", "/continue"):
        assert "runs in a server" in typed(command)


def test_drop_oldest() -> None:
    typed = Typed("word " * 10)
    for text in "abc":
        typed(text)
    typed.llm.max_model_len = 40
    assert typed.shell.session.drop_oldest(10) == 1
    assert [t.user for t in typed.shell.session.turns] == ["b", "c"]
