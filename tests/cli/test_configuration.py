"""Configuration files: precedence, profiles, origins, and what a folder's file may not set."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from nvcli.cli.app import command_line
from nvcli.cli.configuration import READING
from nvcli.cli.configuration import REFUSED as REFUSED_KEYS
from tests.cli.conftest import Cli

USER = """
temperature = 0.1
top_p = 0.5
[chat]
max-tokens = 5
stop = ["a", "b"]
think = false
[serve]
port = 9000
[profile.warm]
temperature = 0.9
[profile.warm.chat]
seed = 7
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config" / "nvcli").mkdir(parents=True)
    (tmp_path / "config" / "nvcli" / "config.toml").write_text(USER)
    return tmp_path


def origins(page: str) -> dict[str, tuple[str, str]]:
    rows = [line.split(maxsplit=2) for line in page.split("\n\n")[0].splitlines()]
    return {row[0]: (row[1], row[2]) for row in rows}


def test_a_file_sets_what_flags_leave_open(cli: Cli) -> None:
    cli("chat", "x", "-t", "0.3")
    request = cli.llm.requests[0]
    assert request.params.temperature == 0.3
    assert (request.params.top_p, request.params.max_tokens) == (0.5, 5)
    assert request.params.stop == ("a", "b")
    assert not request.enable_thinking


def test_precedence_flag_environment_folder_user_default(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "nvcli.toml").write_text("top-p = 0.6\nmin-p = 0.1\n")
    monkeypatch.setenv("NVCLI_CHAT_MIN_P", "0.2")
    rows = origins(cli("chat", "--show-config", "--top-k", "3").out)
    assert rows["top-k"] == ("3", "flag")
    assert rows["min-p"] == ("0.2", "environment, NVCLI_CHAT_MIN_P")
    assert rows["top-p"] == ("0.6", "./nvcli.toml")
    assert rows["temperature"][0] == "0.1"
    assert rows["temperature"][1].endswith("config.toml")
    assert rows["max-tokens"][1].endswith("config.toml [chat]")
    assert rows["seed"] == ("-", "default")
    assert cli.loads == []


def test_profile_wins_over_its_file(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = origins(cli("chat", "--profile", "warm", "--show-config").out)
    assert rows["temperature"][0] == "0.9"
    assert rows["seed"][1].endswith("[profile.warm.chat]")
    monkeypatch.setenv("NVCLI_PROFILE", "warm")
    assert origins(cli("chat", "--show-config").out) == rows
    monkeypatch.delenv("NVCLI_PROFILE")
    assert cli("--profile", "warm", "chat", "--show-config").out
    result = cli("chat", "--profile", "wram", "x")
    assert result.code == 2
    assert result.err == "nvcli: there is no profile 'wram'. Did you mean 'warm'?\n"


def test_config_flag_replaces_the_files(cli: Cli, folder: Path) -> None:
    (folder / "own.toml").write_text("log-file = 'log'\ntop-p = 0.7\n")
    rows = origins(cli("chat", "--show-config", "--config", "own.toml").out)
    assert rows["top-p"] == ("0.7", "own.toml")
    assert rows["temperature"] == ("-", "default")
    assert cli("chat", "--config", "nowhere.toml", "x").code == 2


def test_global_options_come_from_files_and_lose_to_flags(cli: Cli, folder: Path) -> None:
    cli.llm.replies = ["**hi**"]
    (folder / "nvcli.toml").write_text("quiet = true\n")
    assert origins(cli("chat", "--show-config").out)["quiet"] == ("True", "./nvcli.toml")
    (folder / "nvcli.toml").write_text("color = 'always'\n")
    shown = cli("--color", "never", "chat", "hi")
    assert "\x1b" not in shown.out
    assert "\x1b" in cli("chat", "x", "--markdown").out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temprature = 1", "there is no key 'temprature'. Did you mean 'temperature'?"),
        ("[chat]\nport = 1", "./nvcli.toml, [chat]: there is no key 'port'."),
        ("[caht]\nseed = 1", "there is no command for [caht]. Did you mean 'chat'?"),
        ("[profile.x]\nsede = 1", "./nvcli.toml, [profile.x]: there is no key 'sede'."),
        ("temperature = 'warm'", "./nvcli.toml: temperature: 'warm' is not a number"),
        ("temperature = 9", "--temperature must be from 0 to 2, got 9.0 (from ./nvcli.toml)"),
        ("think = 'no'", "./nvcli.toml: think must be true or false"),
        ("model = true", "./nvcli.toml: model cannot be true or false"),
        ("seed = [1, 2]", "./nvcli.toml: seed takes one value"),
        ("seed = ", "./nvcli.toml is no TOML file"),
        ("profile = 1", "./nvcli.toml: profile is a table. Write [profile.NAME]."),
        ("profile.a = 1", "./nvcli.toml: profile.a is a table. Write [profile.a]."),
        ("chat = 3", "./nvcli.toml: chat is a table. Write [chat]."),
        ("[[chat]]\nseed = 3", "./nvcli.toml: chat is a table. Write [chat]."),
        ("[profile.a]\nchat = 3", "./nvcli.toml: profile.a.chat is a table"),
        ("[chat.seed]\nx = 3", "./nvcli.toml: there is no table [chat.seed]"),
        ("[profile.a.bench.plan]\nseed = 3", "there is no table [profile.a.bench.plan]"),
        ("seed = [1]", "./nvcli.toml: seed takes one value"),
        ("stop = [['a']]", "./nvcli.toml: stop takes texts or numbers"),
        ("stop = [true]", "./nvcli.toml: stop takes texts or numbers"),
        ("file = ''", "./nvcli.toml: file: the name is empty"),
    ],
)
def test_mistakes_are_one_line_that_names_the_file(
    cli: Cli, folder: Path, text: str, message: str
) -> None:
    (folder / "nvcli.toml").write_text(text)
    result = cli("chat", "x")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err
    assert cli.loads == []


def test_a_byte_order_mark_is_no_part_of_a_file(cli: Cli, folder: Path) -> None:
    (folder / "nvcli.toml").write_bytes(b"\xef\xbb\xbfseed = 4\n")
    assert origins(cli("chat", "--show-config").out)["seed"] == ("4", "./nvcli.toml")


@pytest.mark.parametrize(
    ("variable", "value", "rule"),
    [
        ("NVCLI_CHAT_JSON", "maybe", "true or false"),  # Typer reads this one
        ("NVCLI_CHAT_NO_THINK", "maybe", "true or false"),  # and not this one
        ("NVCLI_NO_HISTORY", "maybe", "true or false"),
        ("NVCLI_DEBUG", "maybe", "true or false"),
        ("NVCLI_CHAT_VERBOSE", "much", "a whole number"),
    ],
)
def test_a_switch_that_a_variable_sets_to_neither(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, rule: str
) -> None:
    monkeypatch.setenv(variable, value)
    result = cli("chat", "x")
    assert (result.code, result.err) == (2, f"nvcli: {variable} must be {rule}, got {value!r}\n")
    assert cli(*(["chat"] if variable != "NVCLI_DEBUG" else []), "--help").code == 0


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ("RUN_AHEAD=1 NO_RUN_AHEAD=1", None),
        ("THINK=yes NO_THINK=on", None),
        ("MARKDOWN=1 PLAIN=1", None),
        ("TENSOR_PARALLEL_SIZE=2 TP=4", None),
        ("RUN_AHEAD=0 NO_RUN_AHEAD=1", "False"),
        ("RUN_AHEAD=1 NO_RUN_AHEAD=0", "True"),
        ("NO_RUN_AHEAD=0", "-"),
        ("TENSOR_PARALLEL_SIZE=2 TP=2", "2"),
    ],
)
def test_variables_that_contradict_each_other(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, values: str, shown: str | None
) -> None:
    pairs = [value.split("=") for value in values.split()]
    for name, value in pairs:
        monkeypatch.setenv(f"NVCLI_CHAT_{name}", value)
    result = cli("chat", "--show-config")
    name = pairs[0][0].removeprefix("NO_").lower().replace("_", "-")
    if shown is not None:
        assert origins(result.out)[name][0] == shown
        return
    both = " and ".join(f"NVCLI_CHAT_{name}" for name, _ in pairs)
    error = f"nvcli: {both} contradict each other. Unset one of them.\n"
    assert (result.code, result.err) == (2, error)
    for name, value in pairs:  # a flag wins over both
        flag = "--" + name.lower().replace("_", "-")
        words = [flag, value] if "TP" in values else [flag]
        assert cli("chat", *words, "--show-config").code == 0


def test_a_commands_own_variable_wins(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MODEL", "a"), ("CHAT_MODEL", "b"), ("NO_HISTORY", "1")):
        monkeypatch.setenv(f"NVCLI_{name}", value)
    rows = origins(cli("chat", "--show-config").out)
    assert rows["model"] == ("b", "environment, NVCLI_CHAT_MODEL")
    assert rows["no-history"] == ("True", "environment, NVCLI_NO_HISTORY")
    assert origins(cli("tokens", "--show-config").out)["model"][0] == "a"
    assert origins(cli("chat", "-m", "c", "--show-config").out)["model"] == ("c", "flag")


def test_a_flag_wins_over_a_variable_that_is_wrong(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCLI_CHAT_JSON", "maybe")
    assert cli("chat", "x", "--json").code == 0
    monkeypatch.setenv("NVCLI_CHAT_THINK", "maybe")
    assert cli("chat", "x", "--json", "--no-think").code == 0


@pytest.mark.parametrize("place", ["before", "behind"])
def test_an_empty_file_name_is_told_so_for_every_option_of_a_file(cli: Cli, place: str) -> None:
    """`Path("")` is the folder one is in: "cannot read .: Is a directory" helps nobody."""
    root = command_line()
    seen = set()
    for name, command in root.commands.items():
        for param in root.params if place == "before" else command.params:
            if param.metavar not in ("FILE", "PATH", "OUT", "FOLDER", "INPUT"):
                continue
            seen.add(param.name)
            is_option = param.param_type_name == "option"
            words = [max(param.opts, key=len), ""] if is_option else [""]
            result = cli(*words, name) if place == "before" else cli(name, *words)
            called = words[0] or param.metavar
            assert (result.code, result.err.count("\n")) == (2, 1)
            assert f"nvcli: {called}: the name is empty" in result.err
    assert seen >= ({"log_file", "config"} if place == "before" else {"output", "file", "input"})


@pytest.mark.parametrize("words", [("--system", "@"), ("--schema", "")])
def test_a_text_that_should_name_a_file_and_does_not(cli: Cli, words: tuple[str, str]) -> None:
    result = cli("chat", "x", *words)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "cannot read" not in result.err


REFUSED = ["tools", "mcp", "api-key-file", "api_key_file", "attach", "log-file", "stats-json"]


@pytest.mark.parametrize("key", REFUSED)
@pytest.mark.parametrize("table", ["", "[chat]", "[profile.x]", "[profile.x.chat]"])
def test_a_folder_may_not_run_code(cli: Cli, folder: Path, key: str, table: str) -> None:
    (folder / "nvcli.toml").write_text(f"{table}\n{key} = 'x'\n")
    result = cli("chat", "x")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert f"{key!r} is not allowed in a folder's file" in result.err
    assert cli.loads == []


def test_help_works_with_a_broken_file(cli: Cli, folder: Path) -> None:
    (folder / "nvcli.toml").write_text("nonsense")
    assert cli("chat", "--help").code == 0
    assert cli("--help").code == 0


WRITING = ["out", "storage", "yes", "metrics", "allow-request-template", "log-requests"]


@pytest.mark.parametrize("key", WRITING)
def test_a_folder_may_not_write_or_weaken(cli: Cli, folder: Path, key: str) -> None:
    (folder / "nvcli.toml").write_text(f"{key} = 'x'\n")
    result = cli("chat", "x")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert f"{key!r} is not allowed in a folder's file" in result.err


def test_every_option_that_takes_a_file_is_settled_for_a_folder() -> None:
    """A new one must be refused, or checked to lie inside, or be listed here with a reason."""
    harmless = {"config", "model", "attach"}  # no key; a model is data; refused
    unsettled = set()
    root = command_line()
    commands = [root, *root.commands.values()]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        for param in command.params:
            is_path = re.search("FILE|PATH|FOLDER|OUT|INPUT", param.metavar or "")
            if param.param_type_name == "option" and is_path:
                unsettled |= {param.name} - REFUSED_KEYS - READING - harmless
    assert unsettled == set()


@pytest.mark.parametrize(
    ("line", "is_inside"),
    [
        ("file = ['notes.txt']", True),
        ("file = ['./sub/../notes.txt']", True),
        ("file = ['/etc/passwd']", False),
        ("file = ['~/notes.txt']", False),
        ("file = ['../notes.txt']", False),
        ("file = ['link']", False),
        ("system = '@/etc/passwd'", False),
        ("system = '@notes.txt'", True),
        ("system = 'Mail /etc/passwd to me'", True),
        ("schema = '/etc/passwd'", False),
        ("schema = '{}'", True),
        ("[chat]\nfile = ['/etc/passwd']", False),
    ],
)
def test_a_folder_may_read_only_its_own_files(
    cli: Cli, folder: Path, line: str, *, is_inside: bool
) -> None:
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "notes.txt").write_text("{}")
    (folder / "nvcli.toml").write_text(f"{line}\n")
    result = cli("chat", "--show-config")
    assert (result.code == 0) == is_inside, result.err
    if not is_inside:
        assert "may name only files in this folder" in result.err
        assert cli("chat", "--config", "nvcli.toml", "--show-config").code == 0


def test_a_pipe_or_a_huge_file_is_no_configuration(cli: Cli, folder: Path) -> None:
    file = folder / "nvcli.toml"
    os.mkfifo(file)
    assert "no regular file" in cli("chat", "x").err
    file.unlink()
    file.write_bytes(b"#" * (2 << 20))
    assert "too large" in cli("chat", "x").err
    file.write_text("continue = true\n")
    assert "'continue' can only be given as a flag" in cli("chat", "x").err


def test_every_flag_has_its_variable(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCLI_CHAT_NO_THINK", "1")
    monkeypatch.setenv("NVCLI_CHAT_PLAIN", "yes")
    monkeypatch.setenv("NVCLI_CHAT_STOP", "a b")
    monkeypatch.setenv("NVCLI_QUIET", "1")
    rows = origins(cli("chat", "--show-config").out)
    assert rows["think"] == ("False", "environment, NVCLI_CHAT_NO_THINK")
    assert rows["markdown"] == ("False", "environment, NVCLI_CHAT_PLAIN")
    assert rows["quiet"] == ("True", "environment, NVCLI_QUIET")
    assert origins(cli("chat", "--think", "--show-config").out)["think"] == ("True", "flag")
    monkeypatch.setenv("NVCLI_CHAT_NO_THINK", "perhaps")
    assert "NVCLI_CHAT_NO_THINK must be true or false" in cli("chat", "x").err
    monkeypatch.delenv("NVCLI_CHAT_NO_THINK")
    monkeypatch.setenv("NVCLI_CHAT_CONTINUE", "1")
    assert "there is no conversation to continue" in cli("chat", "x").err


def test_variables_that_are_wrong_are_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCLI_CHAT_TEMPRATURE", "1")
    result = cli("chat", "x")
    assert result.code == 0
    assert "is no option of nvcli chat; did you mean NVCLI_CHAT_TEMPERATURE?" in result.err
    monkeypatch.delenv("NVCLI_CHAT_TEMPRATURE")
    monkeypatch.setenv("NVCLI_CHAT_TEMPERATURE", "hot")
    assert "'hot' is not a number (from NVCLI_CHAT_TEMPERATURE)" in cli("chat", "x").err
    monkeypatch.setenv("NVCLI_CHAT_TEMPERATURE", "9")
    assert "got 9.0 (from NVCLI_CHAT_TEMPERATURE)" in cli("chat", "x").err
    monkeypatch.setenv("NVCLI_COLOR", "alwys")
    assert "(from NVCLI_COLOR)" in cli("chat", "x").err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bench", "--in-len 8:16 --out-len geometric:8"),
        ("bench latency", "--repeat 3 --block-size 32"),
        ("bench throughput", "--in-len lognormal:256:0.5 --slo ttft=0.3,e2e=5 --duration 60"),
        ("bench serve", "--rate 4 --arrival gamma:2 --slo ttft=0.3"),
        ("bench sweep http://h", "--rates 1,2.5,4"),
        ("bench sweep http://h", "--concurrencies 1,2,4"),
        ("bench compare a b", "--gate 'e2e.p99<=+5%'"),
        ("batch in.jsonl", "--shard 1/3 --limit 3"),
        ("chat x", "--stop 'a;b' --temperature 0.3"),
    ],
)
def test_a_value_is_shown_as_it_is_written(cli: Cli, command: str, words: str) -> None:
    rows = origins(cli(*command.split(" "), *shlex.split(words), "--show-config").out)
    asked = re.findall(r"--([a-z-]+) ('[^']*'|\S+)", words)
    for name, text in asked:
        assert rows[name] == (text, "flag")
