"""One-shot flags: code blocks, events, schemas, statistics, sessions, tools, dry runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvcli.cli.chat import with_extract_numbers
from nvcli.errors import RequestError
from nvcli.types import FinishReason, ToolCall
from tests.cli.conftest import Cli
from tests.fakes import FakeLLM, Reply

CODE = "Here:\n```py\nprint(1)\n```\nor\n```sh\nls\n```\n"
TOOLS = str(Path(__file__).parents[1] / "tools" / "example_tools.py")


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))


def test_extract(cli: Cli) -> None:
    cli.llm.replies = [CODE]
    assert cli("chat", "-x", "code").out == "print(1)\n"
    assert cli("chat", "code", "-x").out == "print(1)\n"
    assert cli("chat", "-x", "2", "code").out == "ls\n"
    assert cli("chat", "--extract=2", "code").out == "ls\n"
    result = cli("chat", "-x", "3", "code")
    assert (result.code, result.out) == (1, "")
    assert "only 2 code blocks" in result.err
    cli.llm.replies = ["none"]
    assert cli("chat", "-x", "code").code == 1
    assert cli("chat", "-x", "0", "code").code == 2
    assert with_extract_numbers(["-x", "a", "--", "-x"]) == ["--extract=1", "a", "--", "-x"]


def test_events(cli: Cli) -> None:
    cli.llm.replies = [Reply("4 is it", reasoning="two and")]
    lines = [json.loads(line) for line in cli("chat", "--stream-json", "2+2?").out.splitlines()]
    assert [e["type"] for e in lines] == [*["thinking"] * 2, *["text"] * 3, "done"]
    assert "".join(e["text"] for e in lines if e["type"] == "text") == "4 is it"
    assert lines[-1].keys() == {"type", "model", "finish_reason", "usage", "timings"}
    assert lines[-1]["finish_reason"] == "stop"


def test_schema_and_format(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"type": "array"}')
    cli("chat", "--schema", str(tmp_path / "s.json"), "x")
    cli("chat", "--schema", '{"type": "object"}', "x")
    cli("chat", "--format", "json", "x")
    cli("chat", "x")
    schemas = [request.schema for request in cli.llm.requests]
    assert schemas == [{"type": "array"}, {"type": "object"}, {"type": "object"}, None]
    cli.llm.replies = [Reply('{"a"', finish_reason=FinishReason.LENGTH)]
    assert "its JSON is incomplete" in cli("chat", "--format", "json", "x").err
    loads = len(cli.loads)
    for bad in ("{", "[]", "/nowhere"):
        assert cli("chat", "--schema", bad, "x").code == 2
    assert len(cli.loads) == loads


def test_statistics_file(cli: Cli, tmp_path: Path) -> None:
    cli("chat", "--stats-json", str(tmp_path / "s.json"), "x")
    found = json.loads((tmp_path / "s.json").read_text())
    assert found.keys() == {"command", "model", "usage", "timings", "engine"}
    assert (found["command"], found["model"]) == ("chat", "fake")
    assert cli("chat", "--stats-json", "/nowhere/x", "x").code == 1


def test_sessions(cli: Cli) -> None:
    cli.llm.replies = ["One.", "Two.", "Three.", "Four."]
    assert cli("chat", "-c", "x").err == "nvcli: there is no conversation to continue\n"
    cli("chat", "--session", "s", "-s", "Be brief", "a")
    cli("chat", "-c", "b")
    cli("chat", "--session", "s", "--no-save", "c")
    cli("chat", "--session", "s", "d")
    asked = [[m.content for m in request.prompt] for request in cli.llm.requests]
    assert asked[1] == ["Be brief", "a", "One.", "b"]
    assert asked[2] == ["Be brief", "a", "One.", "b", "Two.", "c"]
    assert asked[3] == ["Be brief", "a", "One.", "b", "Two.", "d"]
    assert cli("chat", "--session", "../x", "a").code == 2


def test_without_a_session_nothing_is_written(cli: Cli, tmp_path: Path) -> None:
    cli("chat", "x")
    assert list(tmp_path.iterdir()) == []


def test_dry_run_needs_only_the_tokenizer(cli: Cli) -> None:
    result = cli("chat", "--dry-run", "-s", "Be brief", "Hi", stdin=b"piped")
    assert "<|im_start|>user\npiped\n\nHi<|im_end|>" in result.out
    assert result.err.endswith(" tokens\n")
    found = json.loads(cli("chat", "--dry-run", "--json", "Hi").out)
    assert found.keys() == {"model", "prompt", "prompt_tokens"}
    assert cli("chat", "--dry-run", "--raw", "Hi").out == "Hi\n"
    assert cli.loads == []


def calling(*calls: tuple[str, str]) -> Reply:
    found = tuple(ToolCall(i, f"c{i}", name, text) for i, (name, text) in enumerate(calls))
    return Reply("", tool_calls=found, finish_reason=FinishReason.TOOL_CALLS)


def test_tools_that_are_allowed_run_and_answer(cli: Cli) -> None:
    cli.llm.replies = [calling(("add", '{"a": 2, "b": 3}'), ("greet", '{"name": "A"}')), "Five."]
    result = cli("chat", "--tools", TOOLS, "--allow-tool", "add", "2+3?")
    assert (result.code, result.out) == (0, "Five.\n")
    assert "tool: add(a=2, b=3)\n  5  (1 characters" in result.err
    assert 'tool: greet(name="A")\n  not allowed\n' in result.err
    last = cli.llm.requests[1].prompt
    assert [m.role for m in last] == ["user", "assistant", "tool", "tool"]
    assert [m.content for m in last[2:]] == ["5", "error: the user did not allow this call"]
    assert cli.llm.requests[0].tools[0]["function"]["name"] == "add"


def test_tools_as_events(cli: Cli) -> None:
    cli.llm.replies = [calling(("add", '{"a": 2}')), "Three."]
    out = cli("chat", "--tools", TOOLS, "--allow-tool", "*", "--stream-json", "x").out
    events = [json.loads(line) for line in out.splitlines()]
    assert [e["type"] for e in events] == ["tool_call", "tool_result", "text", "done"]
    assert (events[0]["name"], events[1]["text"]) == ("add", "3")


def test_tools_without_a_terminal_are_refused(cli: Cli) -> None:
    result = cli("chat", "--tools", TOOLS, "x")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "--allow-tool NAME" in result.err
    assert cli("chat", "--tools", TOOLS, "--allow-tool", "gone", "x").code == 2
    assert cli("chat", "--tools", "/nowhere.py", "--allow-tool", "*", "x").code == 2
    assert cli.loads == []


def test_each_call_is_asked_for_on_a_terminal(cli: Cli) -> None:
    cli.llm.replies = [calling(("add", '{"a": 2}')), calling(("add", '{"a": 2}')), "Done."]
    args = ["chat", "--no-stdin", "--tools", TOOLS, "x"]
    result = cli(*args, stdin=b"n\ny\n", terminals=("in", "err"))
    assert "  run add? [y]es, [n]o, [a]lways: " in result.err
    results = [m.content for m in cli.llm.requests[2].prompt if m.role == "tool"]
    assert results == ["error: the user did not allow this call", "3"]


def test_a_model_that_calls_for_ever_is_stopped(cli: Cli) -> None:
    cli.llm.replies = [calling(("add", '{"a": 2}'))]
    result = cli("chat", "--tools", TOOLS, "--allow-tool", "*", "x")
    assert result.code == 1
    assert "called tools 16 times" in result.err


@pytest.mark.parametrize(
    "args",
    [
        ["--json", "--stream-json"],
        ["--schema", "{}", "--format", "json"],
        ["-c", "--session", "x"],
        ["-x", "--json"],
        ["--raw", "--schema", "{}"],
        ["--raw", "-c"],
        ["--raw", "--tools", TOOLS],
        ["--dry-run", "-c"],
        ["--dry-run", "--stats-json", "s.json"],
        ["--dry-run", "--stats"],
        ["--dry-run", "--stream-json"],
        ["--dry-run", "-x"],
        ["--dry-run", "-i"],
        ["--dry-run", "--no-save"],
        ["--dry-run", "--no-history"],
        ["--dry-run", "--no-stream"],
        ["--dry-run", "--plain"],
        ["--dry-run", "--show-thinking", "full"],
        ["--dry-run", "--fail-on-length"],
    ],
)
def test_contradictions(cli: Cli, args: list[str]) -> None:
    result = cli("chat", *args, "x")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert cli.loads == []


def test_a_dry_run_leaves_what_is_set_for_other_runs(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCLI_CHAT_STATS", "1")
    monkeypatch.setenv("NVCLI_CHAT_NO_SAVE", "1")
    assert cli("chat", "--dry-run", "--raw", "Hi").out == "Hi\n"


def test_quiet_leaves_only_answers_and_errors(cli: Cli) -> None:
    cli.llm = FakeLLM([Reply("", reasoning="Hm.", finish_reason=FinishReason.LENGTH)])
    assert "the answer is empty" in cli("chat", "x").err
    assert cli("chat", "-q", "x").err == ""
    cli.llm = FakeLLM([Reply(error=RequestError("it broke"))])
    assert cli("chat", "-q", "x").err == "nvcli: it broke\n"


def test_the_statistics_file_is_checked_before_the_answer(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "no" / "s.json")
    before = sorted(tmp_path.iterdir())
    for place in ("no/s.json", "", "file/s.json", "link", "n" * 300):
        result = cli("chat", "--stats-json", str(tmp_path / place), "x")
        assert (result.code, result.out, result.err.count("\n")) == (1, "", 1), place
        assert result.err.startswith(f"nvcli: cannot write {tmp_path / place}: ")
    assert cli.loads == []
    assert sorted(tmp_path.iterdir()) == before
    assert cli("chat", "--stats-json", str(tmp_path / "file"), "x").code == 0
    assert json.loads((tmp_path / "file").read_text())["command"] == "chat"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--allow-tool", "add"], "--allow-tool needs tools"),
        (["--no-stdin", "--stdin-position", "after"], "--no-stdin and --stdin-position"),
        (["--stream-json", "--no-stream"], "--stream-json and --no-stream"),
        (["--json", "--markdown"], "--markdown is for people"),
        (["--schema", "[1]"], "a schema is a JSON object"),
        (["--raw", "--think-budget", "3"], "--raw and --think-budget"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    cli: Cli, args: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = cli("chat", *args, "x")
    assert (result.code, message in result.err) == (2, True), result.err
    assert cli.loads == []
    monkeypatch.setenv("NVCLI_CHAT_NO_STREAM", "1")  # a default may be idle
    assert cli("chat", "--stream-json", "x").code == 0
