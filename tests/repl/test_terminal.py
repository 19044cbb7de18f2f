"""Typed script in, transcript out, on a pseudo-terminal with a scripted model."""

from __future__ import annotations

import io
import os
import re
import signal
import stat
import termios
from pathlib import Path

import pytest

from nvcli.repl import terminal
from nvcli.repl.prompt import is_large, unquote_block
from nvcli.repl.screen import Screen
from nvcli.repl.session import Session
from nvcli.repl.shell import Shell
from tests.fakes import FakeLLM
from tests.repl.driver import PtyChat

PASTE = "\x1b[200~{}\x1b[201~"


def test_a_conversation(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "plain") as chat:
        chat.say("2+2?", until="Two .*and .*two")
        chat.wait_for("thought ")
        chat.wait_for("Really")
        chat.wait_for(r"tok · .*stop")
        chat.say("/exit")
        assert chat.end() == 0
        assert chat.log.requests() == [["2+2?"]]
        history = tmp_path / "state" / "nvcli" / "history"
        assert stat.S_IMODE(history.stat().st_mode) == 0o600
        assert "+2+2?" in history.read_text()


def test_r1_a_paste_is_one_message(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "plain") as chat:
        chat.prompt()
        chat.type(PASTE.format("one\rtwo\rthree"))
        chat.type("\r")
        assert chat.log.wait(1) == [["one\ntwo\nthree"]]


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_large_paste_is_folded_and_sent_in_full(tmp_path: Path, end: str) -> None:
    text = "\n".join(f"line {n}" for n in range(120)) + end
    with PtyChat(tmp_path, "plain") as chat:
        chat.prompt()
        chat.type("look: " + PASTE.format(text.replace("\n", "\r")), until=r"\[pasted 120 lines\]")
        chat.type("\r")
        assert chat.log.wait(1) == [["look: " + text.rstrip("\n")]]


def test_r2_keys_typed_while_busy_become_one_draft(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "slow") as chat:
        chat.say("count", until="5 ")
        chat.type(
            "one\rtwo\rthree\r", until="20 "
        )  # a paste, as it arrives without bracketed paste
        chat.type("\x03", until="interrupted")
        chat.prompt()
        chat.wait_for("three")
        chat.type(" four\r")
        assert [messages[-1] for messages in chat.log.wait(2)] == ["count", "one\ntwo\nthree four"]


def test_several_lines_at_once_are_not_several_messages(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "plain") as chat:
        chat.say("one\rtwo\rthree")
        chat.prompt()
        chat.wait_for("three")
        assert chat.log.requests() == [["one"]]
        chat.type("\r")
        assert [messages[-1] for messages in chat.log.wait(2)] == ["one", "two\nthree"]


@pytest.mark.parametrize(
    ("script", "flags", "sign", "kept"),
    [
        ("slow-prefill", (), "", None),
        ("slow-thinking", (), "5 ", None),
        ("slow", (), "5 ", "1 2 3"),
        ("slow", ("--no-stream",), "", "1 "),
    ],
)
def test_r6_ctrl_c_stops_every_phase(
    tmp_path: Path, script: str, flags: tuple[str, ...], sign: str, kept: str | None
) -> None:
    with PtyChat(tmp_path, script, *flags) as chat:
        chat.say("first")
        chat.log.wait(1)
        if sign:
            chat.wait_for(sign)
        elif kept:
            chat.log.wait_taken(1)
        chat.type("\x03\x03\x03")  # an answer of 40 s, or one that does not begin
        noise = chat.wait_for("interrupted")
        chat.prompt()
        assert "Traceback" not in noise
        chat.type("second\r", until="Done")
        chat.prompt()
        messages = chat.log.requests()[1]
        if kept is None:
            assert messages == ["second"]
        else:
            assert messages[0::2] == ["first", "second"]
            assert messages[1].startswith(kept)
        chat.type("\x04")
        assert chat.end() == 0


def test_r8_commands_paths_and_escapes(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "plain") as chat:
        chat.say("/retyr", until=r"unknown command /retyr\. Did you mean /retry\?")
        for line in ("/usr/share/dict is missing", " /help", "//help"):
            chat.say(line, until="· stop")
        sent = [messages[-1] for messages in chat.log.requests()]
        assert sent == ["/usr/share/dict is missing", " /help", "/help"]


@pytest.mark.parametrize("new_line", ["\x1b\r", "\n"])
def test_new_line_keys(tmp_path: Path, new_line: str) -> None:
    with PtyChat(tmp_path, "plain") as chat:
        chat.say(f"one{new_line}two")
        assert chat.log.wait(1) == [["one\ntwo"]]


def test_block_of_several_lines(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "plain") as chat:
        chat.prompt()
        for line in ('"""one', "/exit"):
            chat.type(line + "\r", until=r"\.\.\.")
        chat.type('two"""\r')
        assert chat.log.wait(1) == [["one\n/exit\ntwo"]]


def test_keys_at_the_prompt(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "plain") as chat:
        chat.prompt()
        chat.type("\r\r")  # nothing to send
        chat.type("draft\x03")  # clears
        chat.type("\x03", until="Ctrl\\+D or /exit leaves")
        chat.say("/he\t", until="this list, or one command")
        assert chat.leave() == 0
        assert chat.log.requests() == []


@pytest.mark.parametrize("by_flag", [True, False])
def test_no_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_flag: bool) -> None:
    if not by_flag:
        monkeypatch.setenv("NVCLI_NO_HISTORY", "1")
    with PtyChat(tmp_path, "plain", *(["--no-history"] if by_flag else [])) as chat:
        chat.say("secret", until="stop")
        chat.leave()
    assert not (tmp_path / "state").exists()


def test_history_that_cannot_be_kept_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way")
    with PtyChat(tmp_path, "plain") as chat:
        chat.wait_for("nvcli: the history is not kept")
        chat.say("x", until="stop")


def test_interactive_answers_the_pipe_then_reads_keys(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "plain", "-i", "Summarize", stdin=b"text\n") as chat:
        chat.wait_for("stop")
        chat.say("more")
        assert [m[-1] for m in chat.log.wait(2)] == ["text\n\nSummarize", "more"]


def test_file_goes_with_the_first_message(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text\n")
    with PtyChat(tmp_path, "plain", "-f", str(tmp_path / "a.txt")) as chat:
        chat.say("what?", until="stop")
        chat.say("and?")
        sent = [m[-1] for m in chat.log.wait(2)]
        assert sent == ["```a.txt\ntext\n```\n\nwhat?", "and?"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("phase", ["prompt", "answer"])
def test_r18_signals_restore_the_terminal(
    tmp_path: Path, phase: str, number: int, code: int
) -> None:
    with PtyChat(tmp_path, "slow") as chat:
        chat.prompt()
        if phase == "answer":
            chat.type("count\r", until="5 ")
        os.kill(chat.pid, number)
        assert chat.end() == code
        assert termios.tcgetattr(chat.fd)[3] == chat.mode[3]
        assert chat.output.rfind("\x1b[?2004l") > chat.output.rfind("\x1b[?2004h")
        assert "Traceback" not in chat.output
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", chat.output)
        assert plain.endswith("\n")  # the shell's prompt begins a line
        if phase == "answer":
            assert "1 2 3 4 5" in plain.rstrip().splitlines()[-1]


@pytest.mark.parametrize("phase", ["prompt", "answer"])
def test_a_terminal_that_closes_ends_the_conversation(tmp_path: Path, phase: str) -> None:
    with PtyChat(tmp_path, "slow") as chat:
        chat.prompt()
        if phase == "answer":
            chat.type("count\r", until="5 ")
        assert chat.hang_up() == 129


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/file ~nosuch-user/x", "cannot read ~nosuch-user/x"),
        ("look at @~nosuch-user/x", "stop"),  # it names no file, so it is text
        ("/undo " + "9" * 5000, "/undo takes a number of turns"),
        ("/branch " + "9" * 5000, "/branch takes a token's number"),
        ("/edit", "the editor 'vi \"x' is no command"),
        ("/export ~nosuch-user/x.md", "cannot write"),
    ],
)
def test_no_line_ends_the_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.setenv("EDITOR", 'vi "x')
    monkeypatch.delenv("VISUAL", raising=False)
    with PtyChat(tmp_path, "plain") as chat:
        chat.say("first", until="stop")
        chat.say(line, until=message)
        chat.prompt()
        chat.type("\x15\x04")
        assert chat.end() == 0


def say(monkeypatch: pytest.MonkeyPatch, shell: Shell, *lines: str) -> str:
    """A conversation without a terminal; what it prints."""
    typed = iter(lines)

    class Prompt:
        def __init__(self, *args: object, **more: object) -> None:
            pass

        def read(self, draft: str) -> tuple[str, str]:
            return next(typed), ""

    monkeypatch.setattr(terminal, "Prompt", Prompt)
    with open(os.devnull) as keyboard:
        terminal.converse(shell, keyboard)
    assert isinstance(shell.screen.out, io.StringIO)
    return shell.screen.out.getvalue()


@pytest.fixture
def shell() -> Shell:
    out = io.StringIO()
    return Shell(Session(FakeLLM()), Screen(out, out))


def test_a_bug_in_a_command_does_not_end_the_conversation(
    monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    monkeypatch.setattr(shell.session.llm, "stats", lambda: 1 / 0)
    said = say(monkeypatch, shell, "/context", "/exit")
    assert "unexpected error: ZeroDivisionError" in said
    assert shell.is_over


def test_ctrl_c_in_a_command_or_beside_an_answer_does_not_end_the_conversation(
    monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shell.session.llm, "stats", interrupt)  # a command waits for it
        patch.setattr(shell.session, "turn", interrupt)  # before an answer
        with pytest.raises(StopIteration):  # it asks for more
            say(patch, shell, "/context", "hello")
    with monkeypatch.context() as patch:
        patch.setattr(shell, "save", interrupt)  # behind an answer
        with pytest.raises(StopIteration):
            say(patch, shell, "hello")
    assert say(monkeypatch, shell, "and?", "/exit").count("interrupted") == 3
    assert [turn.user for turn in shell.session.turns] == ["hello", "and?"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"""a\nb"""', "a\nb"),
        ('"""\na\n"""\n', "a"),
        ('""""""', ""),
        ('"""', '"""'),
        ('say """x"""', 'say """x"""'),
        ("plain ", "plain "),
    ],
)
def test_unquote_block(text: str, expected: str) -> None:
    assert unquote_block(text) == expected


def test_what_is_folded() -> None:
    assert not is_large("x\n" * 19)
    assert is_large("x\n" * 20)
    assert is_large("x" * 5000)
