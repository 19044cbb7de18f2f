"""Completion scripts: equal to the shipped files, and driven in the real shells with Tab."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from nvcli.cli.command_table import command_rows
from nvcli.cli.completion_scripts import FILES, SCRIPTS
from tests.cli.conftest import Cli
from tests.waiting import PATIENCE_S, run_command

ROOT = Path(__file__).parents[2]
COMPLETIONS = ROOT / "completions"


@pytest.mark.parametrize("shell", SCRIPTS)
def test_shipped_scripts_are_what_the_command_prints(cli: Cli, shell: str) -> None:
    path = COMPLETIONS / FILES[shell]
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(SCRIPTS[shell](command_rows()), encoding="utf-8")
    assert cli("completion", shell).out == path.read_text(encoding="utf-8")


def test_every_option_of_every_command_is_in_every_script() -> None:
    for shell, name in FILES.items():
        text = (COMPLETIONS / name).read_text("utf-8")
        for row in command_rows():
            for option in row.options:
                for flag in option.flags:
                    short = flag.startswith("--") or shell != "fish"
                    assert (flag if shell != "fish" else flag.lstrip("-")) in text, (shell, short)


def test_unknown_shell_is_one_line(cli: Cli) -> None:
    assert cli("completion", "tcsh").err == (
        "nvcli: there is no completion for 'tcsh'. Name bash, zsh or fish.\n"
    )
    assert cli("completion").code == 2


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A place with an `nvcli` command, a cached model, a session, a profile and a file."""
    command = tmp_path / "bin" / "nvcli"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m nvcli "$@"\n')
    command.chmod(0o755)
    repository = tmp_path / "hub" / "models--Example--Tiny-Qwen"
    (repository / "snapshots" / "1").mkdir(parents=True)
    (repository / "snapshots" / "1" / "config.json").write_text("{}")
    sessions = tmp_path / "state" / "nvcli" / "sessions"
    sessions.mkdir(parents=True)
    (sessions / "holiday.jsonl").write_text("")
    (sessions / "my long talk.jsonl").write_text("")
    (tmp_path / "config" / "nvcli").mkdir(parents=True)
    (tmp_path / "config" / "nvcli" / "config.toml").write_text("[profile.quick]\nseed = 1\n")
    (tmp_path / "notes.txt").write_text("")
    return {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TERM": "xterm",
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "HERE": str(tmp_path),
    }


CASES = [
    ("nvcli com", "nvcli completion"),
    ("nvcli chat --temper", "nvcli chat --temperature"),
    ("nvcli chat --device cu", "nvcli chat --device cuda"),
    ("nvcli chat -m Exam", "nvcli chat -m Example/Tiny-Qwen"),
    ("nvcli chat --profile q", "nvcli chat --profile quick"),
    ("nvcli chat -f not", "nvcli chat -f notes.txt"),
    ("nvcli completion fi", "nvcli completion fish"),
    ("nvcli batch --order comp", "nvcli batch --order completion"),
    ("nvcli models show Exam", "nvcli models show Example/Tiny-Qwen"),
    ("nvcli chat --session hol", "nvcli chat --session holiday"),
    ("nvcli chat --session=hol", "nvcli chat --session=holiday"),
    (
        "nvcli -q --color never chat -n 5 --device cp",
        "nvcli -q --color never chat -n 5 --device cpu",
    ),
    ("nvcli chat --session my", "nvcli chat --session my\\ long\\ talk"),
]


def type_and_tab(argv: list[str], env: dict[str, str], setup: str, typed: str, want: str) -> None:
    """Start a shell on a pseudo-terminal, type a line, press Tab; it must show `want`."""
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(env["HERE"])
        os.execvpe(argv[0], argv, env)
    output = ""

    def shown() -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\r\b]", "", output)

    def read_until(text: str) -> None:
        nonlocal output
        deadline = time.monotonic() + PATIENCE_S
        while text not in shown():
            left = deadline - time.monotonic()
            assert left > 0, f"no {text!r} in {output!r}"
            if select.select([fd], [], [], left)[0]:
                output += os.read(fd, 65536).decode("utf-8", "replace")

    try:
        os.write(fd, f"{setup}; PS1='now''> '; echo re''ady\n".encode())
        read_until("ready\n")
        output = output.rpartition("ready")[2]
        read_until("now> ")  # before its prompt a shell may drop what is typed
        output = ""
        os.write(fd, f"{typed}\t".encode())
        read_until(want)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(fd)


@pytest.mark.parametrize(("typed", "want"), CASES)
def test_bash_completes_on_tab(environment: dict[str, str], typed: str, want: str) -> None:
    setup = f"PS1='$ '; source {COMPLETIONS / 'nvcli.bash'}"
    type_and_tab(["bash", "--norc", "--noprofile", "-i"], environment, setup, typed, want)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(("typed", "want"), CASES)
def test_zsh_completes_on_tab(environment: dict[str, str], typed: str, want: str) -> None:
    dump = f"{environment['HERE']}/dump"
    setup = f"PS1='$ '; fpath=({COMPLETIONS} $fpath); autoload -U compinit; compinit -u -d {dump}"
    end = re.split("[ =]", typed)[-1]
    added = want.removeprefix(typed)  # zsh prints what is added, not the line again
    type_and_tab(["zsh", "-f", "-i"], environment, setup, typed, end + added)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(("typed", "want"), CASES)
def test_fish_completes(environment: dict[str, str], typed: str, want: str) -> None:
    script = f"source {COMPLETIONS / 'nvcli.fish'}; complete -C '{typed}'"
    result = run_command(
        ["fish", "--no-config", "-c", script], env=environment, cwd=environment["HERE"], check=True
    )
    words = [line.split("\t")[0] for line in result.stdout.splitlines()]
    assert want.replace("\\ ", "\0").rsplit(" ", 1)[1].replace("\0", " ") in words
    assert result.stderr == ""
