"""No command writes over what it reads: refused by name, before anything is opened or loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvcli.cli import declare
from nvcli.cli.app import command_line
from nvcli.cli.overwrites import NEITHER, READS, WRITES
from tests.cli.conftest import Cli

TEXT = '{"prompt": "keep me"}\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file by four names, in which one is."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    (folder / "in.jsonl").write_text(TEXT)
    (folder / "link.jsonl").symlink_to("in.jsonl")
    (folder / "hard.jsonl").hardlink_to("in.jsonl")
    (folder / "sub").mkdir()
    return folder


NAMES = ["in.jsonl", "./in.jsonl", "sub/../in.jsonl", "link.jsonl", "hard.jsonl"]
COMMANDS = [
    "chat -f {in} --stats-json {out} x",
    "chat -f other -f {in} --stats-json {out} x",
    "chat -f {in} -i --log-file {out} x",
    "chat -s @{in} --stats-json {out} x",
    "chat --schema {in} --stats-json {out} x",
    "chat --tools {in} --allow-tool * --stats-json {out} x",
    "chat --mcp {in} --allow-tool * --stats-json {out} x",
    "--log-file {out} chat -f {in} x",
    "chat --dry-run --log-file {out} -f {in} x",
    "tokens -f {in} --log-file {out}",
    "batch {in} -o {out}",
    "batch {in} -o {out} --force",
    "batch {in} -o {out} --append",
    "batch {in} -o {out} --dry-run",
    "batch-generate {in} -o {out} --force",
    "batch {in} --stats-json {out}",
    "batch other -s @{in} -o {out} --force",
    "batch other --schema {in} -o {out} --force",
    "serve --api-key-file {in} --ready-file {out}",
    "serve --mcp {in} --ready-file {out}",
    "serve --api-key-file {in} --log-file {out}",
    "bench throughput --data jsonl:{in} --out {out}",
    "bench serve --data sharegpt:{in} --out {out}",
    "bench serve --trace {in} --out {out}",
    "bench sweep --data jsonl:{in} --out other.csv --out {out}",
    "bench report {in} --out {out}",
    "bench compare {in} other --log-file {out}",
    "bench compare other {in} --log-file {out}",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_read_is_not_written(cli: Cli, here: Path, command: str) -> None:
    for name in NAMES:
        filled = command.replace("{in}", "in.jsonl").replace("{out}", name)
        result = cli(*filled.split(" "))
        assert (result.code, result.out) == (2, "")
        assert f" {Path(name)} is what " in result.err, filled
        assert result.err.endswith(" reads. Give another file.\n")
        assert (here / "in.jsonl").read_text() == TEXT
    assert not cli.loads
    kept = {"in.jsonl", "link.jsonl", "hard.jsonl", "sub"}
    assert set(os.listdir(here)) == kept, "no lock, no log"


def test_both_options_are_named(cli: Cli) -> None:
    chat = cli("chat", "-f", "in.jsonl", "--stats-json", "link.jsonl", "x")
    assert chat.err == ("nvcli: --stats-json link.jsonl is what --file reads. Give another file.\n")
    batch = cli("batch", "in.jsonl", "-o", "link.jsonl", "--force")
    assert batch.err == "nvcli: --output link.jsonl is what INPUT reads. Give another file.\n"


@pytest.mark.parametrize(
    "command",
    [
        "batch in.jsonl -o {one} --stats-json {two}",
        "chat --log-file {one} --stats-json {two} x",
        "bench throughput --out {one} --out {two}",
        "bench --out {one} --out {two}",
        "serve --ready-file {one} --log-file {two}",
    ],
)
@pytest.mark.parametrize("other", ["new.json", "./new.json", "sub/../new.json", "leads.json"])
def test_no_file_is_written_twice(cli: Cli, here: Path, command: str, other: str) -> None:
    """Also one that is not there yet."""
    (here / "leads.json").symlink_to("new.json")
    result = cli(*command.format(one="new.json", two=other).split(" "))
    assert result.code == 2
    assert " is what --" in result.err
    assert " writes. Give another file.\n" in result.err
    assert not (here / "new.json").exists()


@pytest.mark.parametrize("end", [".meta.json", ".lock", ".tmp"])
def test_what_batch_writes_beside_its_output(cli: Cli, here: Path, end: str) -> None:
    source = here / f"out.jsonl{end}"
    source.write_text(TEXT)
    result = cli("batch", source.name, "-o", "out.jsonl")
    assert result.code == 2
    assert f"out.jsonl{end}, which it writes too, is what INPUT reads" in result.err
    assert source.read_text() == TEXT


@pytest.mark.parametrize("command", ["chat -m model x", "batch in.jsonl --model ./model"])
def test_a_model_is_not_written_over(cli: Cli, here: Path, command: str) -> None:
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text("{}")
    result = cli(*command.split(" "), "--stats-json", "model/config.json")
    assert (result.code, (here / "model" / "config.json").read_text()) == (2, "{}")
    assert "--stats-json model/config.json is what --model reads" in result.err


@pytest.mark.parametrize(("name", "place"), [("nvcli.toml", "here"), ("config.toml", "nvcli")])
def test_the_configuration_is_not_written_over(
    cli: Cli, tmp_path: Path, name: str, place: str
) -> None:
    (tmp_path / place).mkdir(exist_ok=True)
    path = tmp_path / place / name
    path.write_text("seed = 3\n")
    result = cli("chat", "--stats-json", str(path), "x")
    assert (result.code, path.read_text()) == (2, "seed = 3\n")
    assert "is what the configuration reads" in result.err


@pytest.mark.parametrize("args", [["--config", "c.toml", "chat"], ["chat", "--config", "c.toml"]])
def test_a_configuration_that_is_named(cli: Cli, here: Path, args: list[str]) -> None:
    (here / "c.toml").write_text("seed = 3\n")
    result = cli(*args, "--stats-json", "./c.toml", "x")
    assert (result.code, (here / "c.toml").read_text()) == (2, "seed = 3\n")
    assert "--stats-json c.toml is what --config reads" in result.err
    assert cli(*args, "--stats-json", "nvcli.toml", "x").code == 0, "nobody reads it then"


def test_a_stored_run_is_not_written_over(cli: Cli, tmp_path: Path) -> None:
    from nvcli.bench.record import runs_folder

    runs_folder().mkdir(parents=True)
    path = runs_folder() / "abc123.jsonl"
    path.write_text(TEXT)
    result = cli("bench", "report", "abc", "--out", str(path))
    assert (result.code, path.read_text()) == (2, TEXT)
    assert "is what RUN reads" in result.err


def run(*args: str, **streams: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "nvcli", *args]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **streams}
    return subprocess.run(command, stderr=subprocess.PIPE, check=False, **streams)


def test_streams_are_files_too(here: Path) -> None:
    source = here / "in.jsonl"
    with source.open("rb") as file:
        for args in (
            ["batch", "-", "-o", "in.jsonl", "--force"],
            ["chat", "--stats-json", "hard.jsonl"],
        ):
            ran = run(*args, stdin=file)
            assert ran.returncode == 2
            assert b" is standard input. Give another file.\n" in ran.stderr
    with source.open("ab") as file:
        ran = run("batch", "in.jsonl", stdout=file)
        assert ran.returncode == 2
        assert b"standard output is what INPUT reads" in ran.stderr
        ran = run("batch", "other", "--stats-json", "link.jsonl", stdout=file)
        assert ran.returncode == 2
        assert b"--stats-json link.jsonl is standard output" in ran.stderr
        ran = run("chat", "x", "--stats-json", "/dev/stdout", stdout=file)
        assert ran.returncode == 2
        assert b"--stats-json /dev/stdout is standard output" in ran.stderr
    assert source.read_text() == TEXT


def test_what_is_no_file_may_be_given_twice(cli: Cli) -> None:
    cli.llm.replies = ["One."]
    args = ["--stats-json", "/dev/null", "--log-file", "/dev/null"]
    assert cli("chat", "-f", "/dev/null", *args, "x").code == 0


@pytest.mark.parametrize(
    "command",
    [
        "chat --stats-json - x",
        "batch in.jsonl --stats-json -",
        "serve --ready-file -",
        "chat --log-file - x",
        "bench --log-file -",
    ],
)
def test_a_hyphen_is_no_file(cli: Cli, here: Path, command: str) -> None:
    """It would make one of that name, where standard output is most likely meant."""
    result = cli(*command.split(" "))
    assert (result.code, result.out) == (2, "")
    assert result.err.endswith(" - names no file. Give a file.\n")
    assert not (here / "-").exists()


def test_every_option_that_names_a_file_has_its_place() -> None:
    def leaves(command: Any) -> Iterator[Any]:
        yield command
        for inner in getattr(command, "commands", {}).values():
            yield from leaves(inner)

    found = set()
    for command in leaves(command_line()):
        for param in command.params:
            kind = vars(param).get("type_descriptor") or param.type  # by Typer's version
            if "Path" in repr(kind) or param.metavar in declare.OF_FILES:
                found.add(param.name)
    known = {*READS, *WRITES, *NEITHER}
    assert found, "it is looked for"
    assert found <= known, "say in nvcli/cli/overwrites.py whether it is read or written"
    assert not set(READS) & set(WRITES)


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_a_folder_without_a_name_is_no_output(cli: Cli, name: str) -> None:
    """It was an unexpected error."""
    result = cli("batch", "in.jsonl", "-o", name, "--dry-run")
    assert (result.code, result.out) == (2, "")
    assert f"{name} is a folder" in result.err
