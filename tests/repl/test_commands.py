"""Typed lines: which are commands, and what each command does."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from nvcli.errors import NvcliError, UsageError
from nvcli.repl.commands import COMMANDS, completions, find_command, interpret, run_command
from nvcli.repl.screen import Screen
from nvcli.repl.session import Session
from nvcli.repl.shell import Shell
from tests.fakes import STARTUP, FakeLLM, Reply


def run_line(shell: Shell, line: str) -> str:
    """What it prints; a message is asked."""
    assert isinstance(shell.screen.out, io.StringIO)
    shell.screen.out.seek(0)
    shell.screen.out.truncate()
    action = interpret(line)
    if isinstance(action, str):
        list(shell.session.turn(action))
    else:
        run_command(shell, *action)
        while shell.pending:
            list(shell.pending.pop())
    return shell.screen.out.getvalue()


class Typed:
    """A shell and what its commands printed."""

    def __init__(self, *replies: Reply | str) -> None:
        self.llm = FakeLLM(replies or ("Paris.",))
        self.out = io.StringIO()
        self.shell = Shell(Session(self.llm), Screen(self.out, self.out))

    def __call__(self, line: str) -> str:
        """Run one line and return what it printed, or its error."""
        try:
            return run_line(self.shell, line)
        except NvcliError as exc:
            return f"error: {exc}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/help", ("help", "")),
        ("/set temperature 0.5", ("set", "temperature 0.5")),
        ("/system one\ntwo", ("system", "one\ntwo")),
        ("/retyr", ("retyr", "")),
        ("/usr/share/dict is missing", "/usr/share/dict is missing"),
        ("/* a comment */", "/* a comment */"),
        ("/1 is a fraction", "/1 is a fraction"),
        ("/", "/"),
        (" /help", " /help"),
        ("//help", "/help"),
        ("// a comment", "// a comment"),
        ("//server/share", "//server/share"),
        ("a /help", "a /help"),
    ],
)
def test_r8_commands_and_messages(line: str, expected: object) -> None:
    assert interpret(line) == expected


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("retyr", "Did you mean /retry?"), ("ret", "Did you mean /retry?"), ("zzz", "/help lists")],
)
def test_r8_unknown_commands_are_not_sent(name: str, suggestion: str) -> None:
    typed = Typed()
    answer = typed(f"/{name}")
    assert answer.startswith(f"error: unknown command /{name}. {suggestion}")
    assert typed.llm.requests == []


def test_names_and_aliases_are_unique_and_documented() -> None:
    names = [n for c in COMMANDS for n in (c.name, *c.aliases)]
    assert len(names) == len(set(names))
    page = Typed()("/help")
    assert all(f"/{c.name}" in page and c.help in page for c in COMMANDS)
    names = " ".join(c.name for c in COMMANDS)
    assert names == (
        "help exit clear undo retry edit continue system set unset show think thinking file save"
        " load sessions fork export copy last probs branch json schema tools model markdown"
        " multiline history stats context"
    )


def test_help_for_one() -> None:
    assert Typed()("/help exit") == "/exit\n  leave\n  also: /quit, /bye\n"
    assert Typed()("/help /undo").startswith("/undo [N]\n")
    assert "unknown command /nix" in Typed()("/help nix")


@pytest.mark.parametrize("name", ["exit", "quit", "bye"])
def test_exit(name: str) -> None:
    typed = Typed()
    typed(f"/{name}")
    assert typed.shell.is_over


def test_conversation_commands() -> None:
    typed = Typed("one", "two", "three")
    typed("first")
    typed("second")
    assert typed("/undo") == "Took back: second\n"
    assert typed("/undo 5") == "error: cannot undo 5: the conversation has 1 turn"
    assert typed("/undo x").startswith("error: /undo takes a number")
    typed("/retry temperature=0 top_k=3")
    assert typed.llm.requests[-1].params.top_k == 3
    assert [m.content for m in typed.shell.session.messages()] == ["first", "three"]
    assert typed("/retry hot").startswith("error: /retry takes settings like")
    assert typed("/clear") == "The conversation is empty.\n"
    assert typed("/retry") == "error: there is nothing to retry"
    assert typed("/clear all") == "error: /clear takes no arguments, got 'all'"


def test_system(tmp_path: Path) -> None:
    typed = Typed()
    assert typed("/system") == "There is no system prompt.\n"
    assert typed("/system Be brief.") == "Be brief.\n"
    (tmp_path / "s.txt").write_text("From a file.\n")
    assert typed(f"/system @{tmp_path / 's.txt'}") == "From a file.\n"
    assert typed("/system @/nowhere").startswith("error: cannot read /nowhere")
    assert typed("/system") == "From a file.\n"
    assert typed("/system none") == "There is no system prompt.\n"


def test_set_and_show() -> None:
    typed = Typed()
    assert "temperature         0.25 (set)\n" in typed("/set temperature 0.25")
    assert "stop                'END' (set)\n" in typed("/set stop END")
    assert "temperature         0.6\n" in typed("/set temperature default")
    assert typed("/set temperature").startswith("error: /set takes a setting and its value")
    assert typed("/set temperature 3").startswith("error: temperature must be from 0 to 2")
    assert typed("/show all").startswith("error: /show takes settings, prompt, model, messages")
    assert typed("/show model") == (
        "fake: up to 32 768 tokens\n"
        "cpu, float32, attention torch (the only one here)\n"
        "weights 1.00 GiB, KV cache 0.50 GiB for 1 600 tokens\n"
        "weights 0.10 s, KV cache 0.25 s\n"
    )
    given = vars(STARTUP) | {"weights_dtype": "float8_e4m3fn", "kv_cache_dtype": "bfloat16"}
    typed.llm.startup = SimpleNamespace(**given)
    assert "\nweights in float8_e4m3fn 1.00 GiB, KV cache 0.50 GiB in bfloat16 for" in typed(
        "/show model"
    )
    assert typed("/show prompt") == "Nothing was said yet.\n"
    typed("hi")
    assert typed("/show prompt") == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>\n\n"
    )
    assert typed("/show messages") == "[user]\nhi\n\n[assistant]\nParis.\n"


def test_show_messages_marks_what_was_interrupted() -> None:
    typed = Typed(Reply("one two"), Reply("x", reasoning="Hm. Hm."))
    for _ in range(2):
        turn = typed.shell.session.turn("q")
        next(turn)
        turn.close()
    assert typed("/show messages") == (
        "[user]\nq\n\n[assistant, interrupted]\none\n\n"
        "[user]\nq\n\n[assistant, interrupted, not sent again]\n"
    )


def test_think_and_thinking() -> None:
    typed = Typed(Reply("x", reasoning="Hm."))
    assert typed("/think") == "think: on\n"
    assert typed("/think budget 50") == "think: on, budget 50 tokens\n"
    assert typed("/think budget -1").startswith("error: thinking_budget must be ")
    assert typed("/think budget") == "think: on\n"
    assert typed("/think off") == "think: off\n"
    assert typed("/think maybe").startswith("error: /think takes on, off, budget N")
    assert typed("/think on") == "think: on\n"
    assert typed("/thinking fold") == "thinking: fold\n"
    assert typed("/thinking last") == "There was no thinking.\n"
    typed("q")
    assert typed("/thinking last") == "Hm.\n"
    typed.llm.supports_thinking = False
    assert typed("/think") == "think: this model has no thinking mode\n"


def test_stats_and_context() -> None:
    typed = Typed()
    assert typed("/stats") == "error: there is no answer yet"
    typed("q")
    assert typed("/stats last").endswith("· stop\n")
    assert typed("/stats off") == "stats: off\n"
    assert not typed.shell.show_stats
    page = typed("/context")
    assert re.search(r"used +4 of 32 768 tokens\n", page)
    assert re.search(r"KV cache +40 of 100 blocks hold reusable text \(16 tokens each\)\n", page)


def test_output_of_commands_is_filtered() -> None:
    assert Typed()("/system a\x1b[2J") == "a␛[2J\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/sy", ["/system"]),
        ("/th", ["/think ", "/thinking "]),
        ("/set temp", ["temperature"]),
        ("/set temperature 0", []),
        ("/thinking f", ["fold"]),
        ("/nope x", []),
        ("/q", []),
    ],
)
def test_completions(line: str, expected: list[str]) -> None:
    assert completions(line) == expected


def test_find_command_raises_for_prefixes() -> None:
    with pytest.raises(UsageError):
        find_command("hel")
