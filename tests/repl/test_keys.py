"""Keys and choices in a real terminal: thinking, editor, tools, files, narrow and dumb ones."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.repl.driver import PtyChat, Tmux, has_tmux

TOOLS = str(Path(__file__).parents[1] / "tools" / "example_tools.py")
needs_tmux = pytest.mark.skipif(not has_tmux, reason="tmux is not installed")


def test_ctrl_t_answers_now(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "slow-thinking") as chat:
        chat.say("go", until="m30 ")
        chat.type("\x14", until=r"thought .* tok")
        shown = chat.wait_for("stop")
        assert "m2000 " not in chat.output  # the last thought
        assert "x" in shown
        chat.prompt()
        chat.type("\x14\x04")  # at the prompt it does nothing
        assert chat.end() == 0


def test_ctrl_o_folds_and_shows_the_thinking(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "slow-thinking", "--show-thinking", "full") as chat:
        chat.say("go", until="m30 ")
        chat.type("\x0f", until=r"thinking \d.* tok")
        chat.type("\x14", until="stop")
        chat.prompt()
        chat.type("\x0f")
        chat.wait_for("1 2 3 4 5 6")  # the last thinking, in full, in one piece
        chat.wait_for(">>>")
        chat.type("\x04")
        chat.end()


def test_ctrl_g_edits_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "edit.py"
    script.write_text(
        "import pathlib, sys\np = pathlib.Path(sys.argv[1])\np.write_text(p.read_text().upper())\n"
    )
    monkeypatch.setenv("EDITOR", f"{sys.executable} {script}")
    monkeypatch.delenv("VISUAL", raising=False)
    with PtyChat(tmp_path, "plain") as chat:
        chat.prompt()
        chat.type("shout", until="shout")
        chat.type("\x07", until="SHOUT")
        chat.type("\r", until="stop")
        assert chat.log.wait(1) == [["SHOUT"]]


def test_a_call_is_shown_and_asked_for(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "tools", "--tools", TOOLS) as chat:
        chat.say("2+1?", until=r"tool: add\(a=2\)")
        chat.wait_for(r"\[a\]lways: ")
        chat.type("y\n", until="It is 3")
        chat.wait_for("stop")
        assert chat.log.wait(2)[1][-1] == "3"
        chat.say("/tools", until=r"add  \(.*asks\)")


def test_what_was_typed_before_a_question_is_no_answer(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "two-calls", "--tools", TOOLS) as chat:
        chat.say("go", until=r"run add\? .*\[a\]lways: ")
        chat.type("y\ny\ny\n", until=r"run greet\? .*\[a\]lways: ")
        assert "It is 3" not in chat.output
        chat.type("n\n", until="not allowed")
        chat.wait_for("It is 3")
        assert chat.log.wait(2)[1][-2:] == ["3", "error: the user did not allow this call"]


def test_ctrl_c_at_a_question_ends_the_turn(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "two-calls", "--tools", TOOLS) as chat:
        chat.say("go", until=r"run add\? .*\[a\]lways: ")
        chat.type("\x03")
        shown = chat.wait_for("interrupted; /retry asks again")
        assert "greet" not in shown
        chat.say("next", until="It is 3")
        assert chat.log.wait(2)[1] == ["next"]


def test_ctrl_c_ends_a_tool_that_hangs(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "hanging-tool", "--tools", TOOLS, "--allow-tool", "*") as chat:
        chat.say("go", until=r"tool: hang\(\)")
        chat.wait_for("it hangs")  # the tool says so: it runs
        chat.type("\x03", until="interrupted")
        chat.wait_for("It hung")


def test_a_mention_sends_the_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("remember the milk")
    with PtyChat(tmp_path, "plain") as chat:
        chat.say(f"sum up @{tmp_path}/notes.txt", until=r"notes\.txt: \d+ bytes, \d+ tokens")
        chat.wait_for("stop")
        (message,) = chat.log.wait(1)[0]
        assert message == "```notes.txt\nremember the milk\n```\n\nsum up notes.txt"


def test_multiline_and_session(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "plain") as chat:
        chat.say("/multiline on", until="Alt\\+Enter sends")
        chat.say("one\rtwo\x1b", until="stop")
        assert chat.log.wait(1) == [["one\ntwo"]]
        chat.say("/sessions", until="1 turn  one")
        chat.leave()
    with PtyChat(tmp_path, "plain", "-c") as chat:
        chat.wait_for("1 turn, the last: one")
        chat.say("three", until="stop")
        assert chat.log.wait(2)[1][0] == "one\ntwo"


def test_nothing_is_saved_with_no_save(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "plain", "--no-save") as chat:
        chat.say("secret", until="stop")
        chat.leave()
    assert not (tmp_path / "state" / "nvcli" / "sessions").exists()


def test_a_full_context_offers_a_choice(tmp_path: Path) -> None:
    with PtyChat(tmp_path, "small-context") as chat:
        chat.say("one", until="the context is nearly full")
        chat.say("two", until=r"\[d\]rop the oldest turns")
        chat.type("\n")
        chat.prompt()
        chat.wait_for("two")  # the message is still there
        chat.type("\r", until=r"\[d\]rop the oldest turns")
        chat.type("d\n", until="dropped 1 turn")
        chat.wait_for("fine")
        assert chat.log.wait(4)[-1] == ["two"]


def test_a_dumb_terminal_gets_no_escapes_from_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with PtyChat(tmp_path, "plain") as chat:
        chat.wait_for(">>>")
        chat.wait_raw()
        chat.type("hi\r")
        shown = chat.wait_for("stop")
        answer = shown[shown.index("Two and two") :]
        assert "\x1b" not in answer
        assert "**answer**" in answer
        chat.wait_for(">>>")
        chat.wait_raw()
        chat.type("/exit\r")
        assert chat.end() == 0


@needs_tmux
@pytest.mark.parametrize("script", ["emoji-list", "emoji-slow"])
def test_forty_columns_and_wide_characters(tmp_path: Path, script: str) -> None:
    """At once, and in pieces that are each drawn: tmux draws the astronaut wider than she was
    measured, which must leave nothing behind."""
    with Tmux(tmp_path, width=40, height=20) as term:
        term.run(script)
        term.keys("hi", "Enter")
        screen = term.wait_for("stop$")
        assert screen.count("漢字") == 12
        assert screen.count("x = '世'") == 1
        assert "\ufffd" not in screen


@needs_tmux
def test_a_paste_of_200_kb(tmp_path: Path) -> None:
    text = "\n".join(f"line {n} " + "x" * 60 for n in range(3000))
    with Tmux(tmp_path) as term:
        term.run("plain")
        term.paste(text)
        term.wait_for(r"\[pasted 3000 lines\]")
        term.keys("Enter")
        term.wait_for("stop$")
        assert term.log.wait(1) == [[text]]


@needs_tmux
@pytest.mark.parametrize(
    "command",
    ["PS1='zsh> ' zsh -f", "fish --no-config -C 'function fish_prompt; echo -n \"fish> \"; end'"],
    ids=["zsh", "fish"],
)
def test_in_other_shells(tmp_path: Path, command: str) -> None:
    shell = "zsh" if "zsh" in command else "fish"
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    with Tmux(tmp_path) as term:
        term.keys(f"exec env {command}", "Enter")
        term.wait_for(rf"^{shell}>\s*\Z")
        term.run("slow")
        term.keys("count", "Enter")
        term.wait_for("9 10 11")
        term.keys("C-c")
        term.wait_for("interrupted$")
        term.wait_for(r"^>>>\s*\Z")
        term.keys("C-d")
        term.wait_for(rf"^{shell}>\s*\Z")
        term.keys("echo vis''ible", "Enter")
        term.wait_for("^visible")
