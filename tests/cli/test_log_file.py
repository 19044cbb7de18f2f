"""`--log-file`: what a run says on standard error, and would say with -v, with time and level."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nvcli.repl.chat_llm
from nvcli import __version__
from nvcli.cli.chat import open_model
from nvcli.config import EngineConfig
from nvcli.logs import configure_logging
from nvcli.models.resolve import demo_folder
from nvcli.repl.screen import Screen
from tests.cli.conftest import Cli
from tests.fakes import STARTUP, FakeLLM

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) nvcli\.screen: (.*)")
DEVICE = ("INFO", "cpu, float32, attention torch (the only one here)")
NOTICE = "The small built-in demo model. For a real one: nvcli chat -m Qwen/Qwen3-0.6B"


def said(path: Path) -> list[tuple[str, str]]:
    """(level, text) of what a command said."""
    lines = path.read_text("utf-8").splitlines()
    return [(found[1], found[2]) for line in lines if (found := LINE.fullmatch(line))]


@pytest.mark.parametrize("flags", [[], ["-q"], ["-v"]])
def test_what_chat_says(cli: Cli, tmp_path: Path, flags: list[str]) -> None:
    log = tmp_path / "log"
    result = cli("chat", "x", "-t", "9", *flags, "--log-file", str(log))
    assert result.code == 2
    result = cli("chat", "x", *flags, "--log-file", str(log))
    assert (result.code, result.err) == (0, "")
    first, error, second, figures = said(log)
    assert first == second == ("INFO", f"nvcli chat, version {__version__}")
    assert error[0] == "ERROR"
    assert "temperature" in error[1]
    assert figures[0] == "INFO"
    assert figures[1].endswith(" · stop")


def test_what_nobody_sees_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(0, tmp_path / "log")
    err = io.StringIO()
    screen = Screen(io.StringIO(), err, is_quiet=True)
    screen.note("a\nnote \x1b[2J")
    screen.warn("a warning")
    screen.detail("a detail")
    configure_logging()
    assert err.getvalue() == capsys.readouterr().err == ""
    assert said(tmp_path / "log") == [
        ("INFO", "a note ␛[2J"),
        ("WARNING", "a warning"),
        ("INFO", "a detail"),
    ]


def test_what_is_shown_is_shown_once(cli: Cli, tmp_path: Path) -> None:
    result = cli("-vv", "chat", "x", "--log-file", str(tmp_path / "log"), terminals=("err",))
    assert result.err.count("· stop") == 1
    assert len(said(tmp_path / "log")) == 2


def test_how_it_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcli.repl.chat_llm, "ChatLLM", lambda config: FakeLLM(is_demo=True))
    configure_logging(0, tmp_path / "log")
    open_model(EngineConfig(model="demo"), Screen(io.StringIO(), io.StringIO()))
    configure_logging()
    assert said(tmp_path / "log")[0] == DEVICE
    assert said(tmp_path / "log")[-1] == ("INFO", NOTICE)


def test_what_batch_says(cli: Cli, tmp_path: Path) -> None:
    records, log = tmp_path / "in.jsonl", tmp_path / "log"
    records.write_text('{"prompt": "hi", "max_tokens": 1, "temprature": 0}\n{}\n')
    args = ["batch", str(records), "-m", str(demo_folder()), "--device", "cpu"]
    result = cli(*args, "-q", "--log-file", str(log))
    assert result.code == 4, result.err
    assert result.err.count("\n") == 1
    lines = said(log)
    assert [level for level, _ in lines[:2]] == ["INFO", "WARNING"]
    assert "temprature" in lines[1][1]
    assert lines[2][1].startswith("cpu, float32")
    assert lines[-2][1].startswith("2/2 records (100 %) · 1 failed")
    assert lines[-1][1].startswith("1 of 2 records failed at line 2")
    assert "cpu, float32" in cli(*args, "-v").err


def test_what_serve_says(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: object, load: Callable[[], Any], **says: Callable[[str], None]) -> int:
        load()
        says["note"]("serving demo on http://127.0.0.1:8000")
        says["warn"]("anybody can use it")
        return 0

    monkeypatch.setattr("nvcli.server.run.serve", run)
    monkeypatch.setattr("nvcli.cli.serve._load_engine", lambda *_: SimpleNamespace(startup=STARTUP))
    log = tmp_path / "log"
    result = cli("serve", "-q", "--log-file", str(log))
    assert (result.code, result.err) == (0, "")
    lines = said(log)
    assert lines[1] == DEVICE
    assert lines[-3:] == [
        ("INFO", NOTICE),
        ("INFO", "serving demo on http://127.0.0.1:8000"),
        ("WARNING", "anybody can use it"),
    ]
    assert DEVICE[1] in cli("serve", "-v").err


def test_where_a_bug_is(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: object, screen: object) -> None:
        raise RuntimeError("wires crossed")

    monkeypatch.setattr(Cli, "_open", staticmethod(fail))
    assert cli("chat", "x", "--log-file", str(tmp_path / "log")).code == 1
    text = (tmp_path / "log").read_text("utf-8")
    assert "DEBUG nvcli: unexpected error\nTraceback" in text
    assert "ERROR nvcli.screen: unexpected error: RuntimeError: wires crossed." in text
