"""Help pages, usage errors and exit codes, compared whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvcli import errors
from nvcli.cli import chat
from nvcli.cli.command_table import command_rows
from nvcli.errors import NvcliError
from tests.cli.conftest import Cli

SNAPSHOTS = Path(__file__).parent / "snapshots"


PAGES = [" ".join(["nvcli", *row.path]) for row in command_rows()]
ELSEWHERE = ("nvcli batch", "nvcli serve")  # compared with their commands' other tests


def check(name: str, text: str) -> None:
    """Compare with the stored page; UPDATE_SNAPSHOTS=1 writes it anew."""
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", PAGES)
def test_help_page(cli: Cli, command: str, flag: str) -> None:
    result = cli(*command.split()[1:], flag)
    assert (result.code, result.err) == (0, "")
    assert "\nExamples:\n" in result.out
    if command not in ELSEWHERE:
        name = "-".join(command.split()[1:] or ["nvcli"])
        check(f"help-{name}", result.out)


def test_bare_command_shows_help(cli: Cli) -> None:
    assert cli().out == cli("--help").out


@pytest.mark.parametrize("name", ["GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"])
def test_piped_help_is_plain(cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert "\x1b" not in cli("chat", "--help").out
    assert "\x1b" not in cli("chat", "--nope").err


def test_help_on_a_terminal_has_bold_headings_unless_no_color(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "\x1b[1mExamples:\x1b[0m" in cli("--help", terminals=("out",)).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in cli("--help", terminals=("out",)).out


def test_version(cli: Cli) -> None:
    assert cli("--version").out == "nvcli 0.1.0\n"


USAGE_ERRORS = [
    ["caht"],
    ["What is the capital of France?"],
    ["--nope"],
    ["chat", "--temprature", "1", "x"],
    ["chat", "-Z", "x"],
    ["chat", "x", "y"],
    ["chat", "-m"],
    ["chat", "-t", "warm", "x"],
    ["chat", "-t", "5", "x"],
    ["chat", "--top-p", "0", "x"],
    ["chat", "--top-k", "1.5", "x"],
    ["chat", "-n", "-1", "x"],
    ["chat", "--stop", "", "x"],
    ["chat", "--max-model-len", "32q", "x"],
    ["chat", "--max-num-seqs", "0", "x"],
    ["chat", "--gpu-memory-utilization", "2", "x"],
    ["chat", "--kv-cache-dtype", "fp4", "x"],
    ["chat", "--device", "tpu", "x"],
    ["chat", "--color", "blue", "x"],
    ["chat", "--stdin-position", "up", "x"],
    ["chat", "--show-thinking", "some", "x"],
    ["chat", "--no-think", "--think-budget", "5", "x"],
    ["chat", "--raw", "-s", "Be brief", "x"],
    ["chat", "--raw", "--think", "x"],
    ["chat", "--temp", "1", "x"],
    ["chat", "--seet", "1", "x"],
    ["chat", "--top-k", "-5", "x"],
    ["chat", "--profile", "nope", "x"],
    ["-m", "demo", "chat", "x"],
    ["serve", "--temp", "1"],
    ["serve", "--tp", "0"],
    ["serve", "--gpu-memory-utilization", "2"],
    ["serve", "--block-size", "0"],
    ["serve", "--block-size", "0", "--device", "cpu"],
    ["serve", "--block-size", "-1", "--attention-backend", "triton"],
    ["serve", "--block-size", "99999999999", "--attention-backend", "fa2"],
    ["serve", "--max-queue", "-1"],
    ["serve", "--port", "99999"],
    ["serve", "--allowed-hosts", "x"],
    ["serve", "--allowed-host", "http://x"],
    ["batch", "--max-num-seqs", "0", "x"],
    ["bench", "serve", "--url", "x"],
    ["chat", "-i", "x"],
    ["chat", "--json", "-i", "x"],
    ["chat", "-f", "/nowhere/notes.txt", "x"],
    ["chat", "-f", "/", "x"],
    ["chat", "-s", "@/nowhere/system.txt", "x"],
    ["chat", "--log-file", "/nowhere/log", "x"],
    ["chat"],
    ["chat", " \n "],
]


def test_usage_errors_are_one_line_and_load_nothing(cli: Cli) -> None:
    page = []
    for args in USAGE_ERRORS:
        result = cli(*args)
        assert (result.code, result.out) == (2, ""), args
        assert result.err.count("\n") == 1, args
        page.append(f"$ {' '.join(['nvcli', *args])!r}\n{result.err}")
    assert cli.loads == []
    check("usage-errors", "".join(page))


def every_error() -> list[type[NvcliError]]:
    found, todo = [], [NvcliError]
    while todo:
        cls = todo.pop()
        found.append(cls)
        todo += [c for c in cls.__subclasses__() if c.__module__ == errors.__name__]
    return sorted(found, key=lambda c: c.__name__)


@pytest.mark.parametrize("cls", every_error())
def test_every_error_is_a_line_and_its_exit_code(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, cls: type[NvcliError]
) -> None:
    def fail(config: object, screen: object) -> None:
        raise cls("it broke\nhere", hint="Do that.", param="x")

    monkeypatch.setattr(Cli, "_open", staticmethod(fail))
    result = cli("chat", "x")
    assert result.code == cls.exit_code
    is_silent = cls is errors.ClosedPipeError
    assert result.err == ("" if is_silent else "nvcli: it broke here. Do that.\n")
    assert 400 <= cls.http_status < 600
    assert cls.code == cls.code.lower()


def test_exit_codes_and_statuses() -> None:
    rows = [f"{c.__name__:<28} {c.exit_code:>3} {c.http_status} {c.code}" for c in every_error()]
    check("error-tree", "\n".join(rows) + "\n")


def test_unexpected_error_is_one_line_that_names_debug(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: object, screen: object) -> None:
        raise RuntimeError("wires\ncrossed \x1b[2J")

    monkeypatch.setattr(Cli, "_open", staticmethod(fail))
    result = cli("chat", "x")
    assert result.code == 1
    assert result.err == (
        "nvcli: unexpected error: RuntimeError: wires crossed ␛[2J."
        " This is a bug; --debug shows where.\n"
    )
    assert "Traceback" in cli("--debug", "chat", "x").err
    assert "Traceback" in cli("chat", "x", "--debug").err


def test_keyboard_interrupt_while_loading_is_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: object, screen: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Cli, "_open", staticmethod(fail))
    result = cli("chat", "x")
    assert (result.code, result.err) == (130, "nvcli: interrupted\n")


def test_log_file_gets_the_log(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    def load(config: object, screen: object) -> None:
        logging.getLogger("nvcli.engine").debug("a detail")
        logging.getLogger("nvcli.engine").info("progress")
        return Cli(monkeypatch).llm

    monkeypatch.setattr(chat, "open_model", load)
    monkeypatch.setattr(Cli, "_open", staticmethod(load))
    result = cli("chat", "x", "--log-file", str(tmp_path / "log"))
    assert result.err == ""
    assert "DEBUG nvcli.engine: a detail" in (tmp_path / "log").read_text()
    monkeypatch.setenv("NVCLI_LOG", str(tmp_path / "log2"))
    assert cli("-v", "chat", "x").err == "nvcli: progress\n"
    assert "a detail" in (tmp_path / "log2").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", ""], "--host is empty"),  # to the system that is every address
        (["--served-model-name", ""], "--served-model-name is empty"),
        (["--cors-origin", "http://a", "--cors-origin", ""], "--cors-origin is empty"),
        (["--allowed-host", ""], "--allowed-host is empty"),
        (["--uds", "a.sock", "--port", "8000"], "--uds and --port contradict each other"),
        (["--uds", "a.sock", "--host", "::1"], "--uds and --host contradict each other"),
        (["--ready-file", "/nowhere/ready"], "cannot write /nowhere/ready: there is no folder"),
        (["--ready-file", "/"], "cannot write /: it is a folder"),
    ],
)
def test_a_server_that_could_not_do_as_told_loads_nothing(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    monkeypatch.setattr("nvcli.cli.serve._load_engine", lambda *_: pytest.fail("it was loaded"))
    result = cli("serve", *flags)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err
