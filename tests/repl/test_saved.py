"""Conversations on disk: saved after each turn, loaded, forked, exported, accepted by batch."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from nvcli.errors import UsageError
from nvcli.protocol import parse_chat
from nvcli.repl import command_files, store
from nvcli.repl.session import Session
from nvcli.repl.store import SessionFile, session_names, session_path
from nvcli.types import FinishReason, Message, ToolCall
from tests.fakes import FakeLLM, Reply
from tests.repl.test_commands import Typed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state" / "nvcli" / "sessions"


@pytest.fixture
def typed() -> Typed:
    typed = Typed("One.", "Two.", "Three.")
    typed.shell.session.file = SessionFile("first")
    return typed


def ask(typed: Typed, text: str) -> None:
    typed(text)
    typed.shell.save()


def lines(name: str) -> list[list[str]]:
    records = [json.loads(line) for line in session_path(name).read_text().splitlines()]
    return [[m["content"] for m in record["messages"]] for record in records]


def test_a_line_a_turn_the_last_the_longest(typed: Typed, folder: Path) -> None:
    ask(typed, "a")
    ask(typed, "b")
    assert lines("first") == [["a", "One."], ["a", "One.", "b", "Two."]]
    assert stat.S_IMODE((folder / "first.jsonl").stat().st_mode) == 0o600
    for line in (folder / "first.jsonl").read_text().splitlines():
        assert parse_chat({"model": "x", **json.loads(line)}).messages


def test_undo_and_clear_are_saved(typed: Typed) -> None:
    ask(typed, "a")
    ask(typed, "b")
    typed("/undo")
    assert lines("first") == [["a", "One."]]
    typed("/clear")
    ask(typed, "c")
    assert lines("first") == [["a", "One."]]
    assert len(session_names()) == 2


def test_save_names_load_and_sessions(typed: Typed) -> None:
    assert "nothing was said" in typed("/save x")
    ask(typed, "a")
    assert typed("/save trip") == "Saved as trip.\n"
    assert session_names() == ["trip"]
    ask(typed, "b")
    assert len(lines("trip")) == 2
    other = Typed()
    other.shell.session.file = SessionFile("other")
    assert other("/load trip") == "trip: 2 turns.\nLast: b\n"
    assert [m.content for m in other.shell.session.messages()] == ["a", "One.", "b", "Two."]
    assert "trip" in other("/sessions")
    assert other("/load tirp") == "error: there is no session 'tirp'. Did you mean 'trip'?"
    assert "no name for a session" in other("/load ../../etc/passwd")
    assert "there is a session 'trip' already" in answered()("/save trip")


def answered() -> Typed:
    typed = Typed()
    typed("hi")
    return typed


def test_fork_leaves_the_original(typed: Typed) -> None:
    ask(typed, "a")
    typed("/fork copy")
    ask(typed, "b")
    assert lines("first") == [["a", "One."]]
    assert len(lines("copy")) == 2
    assert "takes a name" in typed("/fork")


def test_a_torn_line_and_damage(typed: Typed, folder: Path) -> None:
    ask(typed, "a")
    path = folder / "first.jsonl"
    path.write_text(path.read_text() + '{"messages": [{"role"')
    session = Session(FakeLLM())
    session.load("first")
    assert [m.content for m in session.messages()] == ["a", "One."]
    for text in [
        "",
        "[]\n",
        '{"messages": [1]}\n',
        "nonsense\n",
        '{"messages": [{"role": "x"}]}\n',
    ]:
        path.write_text(text)
        with pytest.raises(UsageError):
            session.load("first")


def test_hostile_text_stays_one_line_and_comes_back() -> None:
    text = "a\u2028b\u2029c\x85d\x1b[2J\ud800e"
    file = SessionFile("x")
    file.save([[Message("user", text), Message("assistant", "ok")]])
    raw = file.path.read_bytes()
    assert raw.count(b"\n") == 1
    assert len(raw.decode().splitlines()) == 1
    _, messages = SessionFile.load("x")
    assert messages[0].content == text.replace("\ud800", "\ufffd")


def test_tools_and_thinking_come_back() -> None:
    call = ToolCall(0, "c1", "add", '{"a": 1}')
    reply = Reply("", reasoning="Hm.", tool_calls=(call,), finish_reason=FinishReason.TOOL_CALLS)
    session = Session(FakeLLM([reply, Reply("Three.", reasoning="So.")]), system="Be brief")
    session.file = SessionFile("tools")
    list(session.turn("1+2?"))
    session.answer_calls(["3"])
    list(session.resume())
    session.save()
    other = Session(FakeLLM())
    other.load("tools")
    assert other.messages() == [
        Message("system", "Be brief"),
        Message("user", "1+2?"),
        Message("assistant", None, reasoning="Hm.", tool_calls=(call,)),
        Message("tool", "3", tool_call_id="c1"),
        Message("assistant", "Three.", reasoning="So."),
    ]


def test_a_full_disk_is_told_once(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_whole", fail)
    ask(typed, "a")
    assert "No space left on device" in typed.out.getvalue()
    ask(typed, "b")
    assert "not saved" not in typed.out.getvalue()


@pytest.mark.parametrize("kind", ["md", "txt", "json", "jsonl"])
def test_export(typed: Typed, tmp_path: Path, kind: str) -> None:
    assert "nothing was said" in typed(f"/export {tmp_path}/x.{kind}")
    ask(typed, "What?")
    assert typed(f"/export {tmp_path}/x.{kind}") == f"Wrote {tmp_path}/x.{kind}.\n"
    text = (tmp_path / f"x.{kind}").read_text()
    assert "What?" in text
    assert "One." in text
    if kind.startswith("json"):
        assert [m["role"] for m in json.loads(text)["messages"]] == ["user", "assistant"]
    assert "is there already" in typed(f"/export {tmp_path}/x.{kind}")
    assert "ends in" in typed("/export x.pdf")


def test_names_are_ordered_by_time(typed: Typed, folder: Path) -> None:
    for age, name in enumerate(["new", "middle", "old"]):
        SessionFile(name).save([[Message("user", "x"), Message("assistant", "y")]])
        os.utime(folder / f"{name}.jsonl", (1e9 - age, 1e9 - age))
    assert session_names() == ["new", "middle", "old"]
    assert store.latest_name() == "new"


def full_disk(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_name_that_cannot_be_written_loses_nothing(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(typed, "a")
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_whole", full_disk)
        for line in ("/save second", "/fork second", "/fork second"):  # told each time
            assert "error: the conversation is not saved in" in typed(line)
    assert lines("first") == [["a", "One."]]
    assert typed.shell.session.file is not None
    assert typed.shell.session.file.name == "first"
    assert typed("/save second") == "Saved as second.\n"
    assert session_names() == ["second"]


def test_half_a_line_of_a_full_disk_is_not_built_upon(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(typed, "a")

    def half(path: Path, lines: list[str]) -> None:
        with path.open("a") as out:
            out.write(lines[0][:10])
        full_disk()

    with monkeypatch.context() as patch:
        patch.setattr(store, "_append", half)
        ask(typed, "b")
    ask(typed, "c")
    assert [len(record) for record in lines("first")] == [2, 4, 6]


def test_export_leaves_no_empty_file(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(typed, "a")
    monkeypatch.setattr(command_files, "_text", full_disk)
    assert "No space left" in typed(f"/export {tmp_path}/x.txt")
    assert not (tmp_path / "x.txt").exists()


def test_a_dangling_link_hides_no_session(typed: Typed, folder: Path) -> None:
    ask(typed, "a")
    (folder / "gone.jsonl").symlink_to(folder / "nowhere")
    (folder / "folder.jsonl").mkdir()
    assert session_names() == ["first"]
