"""Odd terminals, closed streams, full disks and links in a ring: one line, or what there is."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvcli.logs import configure_logging
from nvcli.paths import module_environment
from nvcli.repl.screen import Screen
from nvcli.repl.wrap import cells
from tests.cli.conftest import Cli
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ring").symlink_to("ring")
    yield
    configure_logging()


def test_a_ring_of_links(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    result = cli("batch", "in.jsonl", "-o", "ring")
    assert result.code == 1
    assert "cannot write" in result.err
    assert "Too many levels of symbolic links" in result.err
    (tmp_path / "nvcli.toml").write_text('file = "ring"\n')
    assert "cannot read ring: Too many levels" in cli("chat", "x").err


def test_a_ready_file_takes_the_place_of_no_pipe(cli: Cli, tmp_path: Path) -> None:
    """It is put in place whole, by its name, and removed at the end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link", "/dev/null"):
        result = cli("serve", "--ready-file", name, "--port", "0")
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith(f"nvcli: cannot write {name}: it is no regular file")
    assert (tmp_path / "pipe").is_fifo()


def test_only_what_may_be_an_id_is_offered_to_be_fetched(cli: Cli) -> None:
    for name, is_id in (("/nope", False), ("nope/", False), ("a/b", True)):
        said = cli("tokens", "-m", name, "x").err
        assert ("nvcli models pull" in said) == is_id, said


@pytest.mark.parametrize(
    "args",
    [["tokens"], ["tokens", "-"], ["chat", "-f", "-", "x"], ["batch", "-", "--dry-run"]],
)
def test_a_closed_standard_input_that_is_asked_for(args: list[str]) -> None:
    """It was taken for an empty text: 0 tokens, or a question about nothing."""
    command = ["/bin/sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "nvcli", *args]
    ran = subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE_S)
    assert (ran.returncode, ran.stdout) == (2, b"")
    assert ran.stderr == b"nvcli: cannot read standard input: it is closed\n"


def test_a_terminal_that_does_not_know_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for ten columns."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("LINES", raising=False)
    controller, terminal = pty.openpty()
    with open(terminal, "w") as out, open(controller, "rb", buffering=0):
        assert Screen(out, out).size()[0] >= 80
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 7, 33, 0, 0))
        assert Screen(out, out).size() == (33, 7)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_log_on_a_full_disk(capsys: pytest.CaptureFixture[str]) -> None:
    """Once, without the traceback that `logging` prints for every line."""
    configure_logging(log_file=Path("/dev/full"))
    for number in range(3):
        logging.getLogger("nvcli.test").info("line %d", number)
    assert capsys.readouterr().err == (
        "nvcli: cannot write the log file: No space left on device\n"
    )


def test_the_card_has_a_log(cli: Cli) -> None:
    """`nvcli bench` without a verb is a command as well; it took no notice of the option."""
    result = cli("--log-file", "ring", "bench")
    assert result.code == 2
    assert "cannot write the log file ring: Too many levels of symbolic links" in result.err


def test_the_card_reads_the_configuration_and_takes_global_options(
    cli: Cli, tmp_path: Path
) -> None:
    """It benched the built-in model whatever the files said, and knew no -q."""
    file = tmp_path / "other.toml"
    file.write_text('model = "no-such-folder"\n[bench]\nseed = 7\n')
    for args in (["--config", str(file), "bench"], ["bench", "-q", "--config", str(file)]):
        result = cli(*args)
        assert result.code == 3
        assert "no-such-folder" in result.err
    shown = cli("bench", "--config", str(file), "--show-config").out
    assert f"{file} [bench]" in next(line for line in shown.splitlines() if "seed" in line)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--seed", "1", "latency"], "--seed goes after latency"),
        (["--show-config", "latency"], "--show-config goes after latency"),
        (["-q", "latency", "--seed", "x"], "nvcli bench latency --help"),  # -q is let be
        (["nosuch"], "there is no command 'nosuch'"),
    ],
)
def test_what_stands_before_a_verb_of_bench(cli: Cli, args: list[str], message: str) -> None:
    result = cli("bench", *args)
    assert result.code == 2
    assert message in result.err


@pytest.mark.torch
@pytest.mark.parametrize(
    "args", [["doctor"], ["models", "list"], ["models", "show", "demo"], ["chat", "--show-config"]]
)
@pytest.mark.parametrize("width", [24, 40, 200])
def test_narrow_terminals(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, args: list[str], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    narrow = cli(*args, terminals=("out",)).out
    for line in narrow.splitlines():
        longest = max(map(cells, line.split()), default=0)
        assert cells(line) <= width or longest > width - 21, line  # behind a doctor's two columns
    if args != ["doctor"]:  # which sees the terminal
        assert narrow.split() == cli(*args).out.split()


@pytest.mark.parametrize("option", ["--file", "--schema"])
def test_a_device_without_an_end(cli: Cli, option: str) -> None:
    """It was read until the machine had no memory."""
    result = cli("chat", option, "/dev/zero", "x")
    assert result.code == 2
    assert result.err == "nvcli: cannot read /dev/zero: it is longer than 256 MiB\n"


@pytest.mark.parametrize(
    ("args", "code"), [(["chat", "x"], 3), (["doctor"], 1), (["tokens", "x"], 0)]
)
def test_a_folder_that_is_gone(tmp_path: Path, args: list[str], code: int) -> None:
    """What comes with torch ended the process, with words and a code of its own."""
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    command = ["/bin/sh", "-c", script, "sh", sys.executable, "-P", "-m", "nvcli", *args]
    environment = module_environment()
    ran = subprocess.run(
        command, capture_output=True, check=False, cwd=tmp_path, env=environment, text=True
    )
    assert ran.returncode == code, ran.stderr
    said = "the folder that this was started in is gone"
    assert (said in ran.stdout + ran.stderr) == (code != 0)
    assert ran.stderr.count("\n") <= 1


def test_no_memory_is_no_bug(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("nvcli.cli.tokens.read_stdin", refuse)
    result = cli("tokens", "-")
    assert result.code == 1
    assert result.err == "nvcli: there is not enough memory, or ulimit allows too little\n"
