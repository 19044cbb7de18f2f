"""`--attach`: a running server gives the same output as a model in this process."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvcli.cli import chat as chat_command
from nvcli.cli.conversation import ModelSwitch
from nvcli.client import ServerModel
from nvcli.config import EngineConfig
from nvcli.errors import ModelError
from nvcli.repl.screen import Screen
from tests.fakes import FakeLLM
from tests.waiting import PATIENCE_S, run_command, until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.torch
GREEDY = ["--no-think", "-t", "0"]


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A runtime folder with the socket of a server of the built-in model."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "nvcli").mkdir()
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "nvcli", "serve", "--ready-file", str(ready), "--uds"]
    process = subprocess.Popen(
        [*command, str(folder / "nvcli" / "serve.sock")], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    until(lambda: ready.exists() or process.poll() is not None, "the server is ready")
    assert ready.exists()
    yield folder
    process.send_signal(signal.SIGTERM)
    process.wait(PATIENCE_S)


def chat(
    runtime: Path, *args: str, command: str = "chat", **more: Any
) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "XDG_RUNTIME_DIR": str(runtime),
        "XDG_STATE_HOME": str(runtime / "state"),
        "XDG_CONFIG_HOME": str(runtime),
    }
    return run_command(
        [sys.executable, "-m", "nvcli", command, *args],
        cwd=ROOT,
        env={**env, **more},
        stdin=subprocess.DEVNULL,
    )


def socket(runtime: Path) -> str:
    return str(runtime / "nvcli" / "serve.sock")


def test_same_output_as_in_the_process(runtime: Path) -> None:
    question = [*GREEDY, "What is the capital of France?"]
    here = chat(runtime, "--attach", "never", *question)
    there = chat(runtime, "--attach", socket(runtime), *question)
    assert (there.returncode, there.stdout, there.stderr) == (0, here.stdout, here.stderr)
    assert "Paris" in there.stdout
    assert chat(runtime, "--attach", "uds", *question).stdout == here.stdout


def test_json_has_the_same_shape(runtime: Path) -> None:
    args = ["--json", "-t", "0", "What is the capital of France?"]
    here = json.loads(chat(runtime, "--attach", "never", *args).stdout)
    there = json.loads(chat(runtime, "--attach", socket(runtime), *args).stdout)
    assert there.keys() == here.keys()
    assert there["usage"].keys() == here["usage"].keys()
    assert there["timings"].keys() == here["timings"].keys()
    for key in ("model", "text", "thinking", "finish_reason"):
        assert there[key] == here[key]
    assert there["usage"]["completion_tokens"] == here["usage"]["completion_tokens"]


def test_auto_takes_the_own_socket_without_loading(runtime: Path) -> None:
    """Verbose loading would tell its stages; a server's model has none."""
    attached = chat(runtime, "-v", *GREEDY, "Hi")
    assert "weights" not in attached.stderr
    loaded = chat(runtime, "-v", *GREEDY, "--max-num-seqs", "2", "Hi")  # an engine flag
    assert "weights" in loaded.stderr
    nobody = chat(runtime, "-v", *GREEDY, "Hi", XDG_RUNTIME_DIR="/nowhere")
    assert "weights" in nobody.stderr
    assert attached.stdout == loaded.stdout == nobody.stdout


def test_batch_uses_the_server_and_goes_on_without_it(runtime: Path, tmp_path: Path) -> None:
    source, there, here = (tmp_path / name for name in ("in.jsonl", "there.jsonl", "here.jsonl"))
    source.write_text("".join(f'{{"prompt":"Say {i}"}}\n' for i in range(6)))
    flags = ["--seed", "3", "--no-think", "-n", "8", "--progress", "none", "--stats-json"]

    def batch(out: Path, *more: str, **env: str) -> dict[str, Any]:
        stats = tmp_path / "stats.json"
        args = [str(source), "-o", str(out), *flags, str(stats), *more]
        done = chat(runtime, *args, command="batch", **env)
        assert (done.returncode, done.stderr) == (0, "")
        found: dict[str, Any] = json.loads(stats.read_text())
        return found

    assert batch(there)["engine"] is None  # it is the server's
    assert batch(here, "--attach", "never")["engine"] is not None
    texts = [
        [json.loads(line)["text"] for line in f.read_text().splitlines()] for f in (here, there)
    ]
    assert texts[0] == texts[1]
    there.write_text("".join(there.read_text().splitlines(keepends=True)[:2]))
    assert batch(there, "--resume", XDG_RUNTIME_DIR="/nowhere")["records"]["resumed"] == 2
    assert [json.loads(line)["text"] for line in there.read_text().splitlines()] == texts[0]
    gone = chat(runtime, str(source), "--attach", "http://127.0.0.1:9", command="batch")
    assert (gone.returncode, gone.stdout) == (1, "")
    assert gone.stderr.count("\n") == 1


def test_schema_tools_and_events(runtime: Path, tmp_path: Path) -> None:
    schema = '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}'
    at = ["--attach", socket(runtime), *GREEDY]
    found = chat(runtime, *at, "--schema", schema, "--max-tokens", "40", "Say a")
    assert json.loads(found.stdout)["a"] == 1
    tools = tmp_path / "tools.py"
    tools.write_text(
        'def get_weather(city: str) -> str:\n    """Get the weather of a city."""\n'
        '    return f"Sunny in {city}"\n'
    )
    args = ["--tools", str(tools), "--allow-tool", "*", "--stream-json", "weather in Paris?"]
    here = chat(runtime, "--attach", "never", *GREEDY, *args)
    there = chat(runtime, *at, *args)

    kinds = [kind for kind, _ in told(there.stdout)]
    assert kinds == ["tool_call", "tool_result", "text", "done"]
    assert told(there.stdout) == told(here.stdout)


def told(events: str) -> list[tuple[str, str]]:
    """What `--stream-json` tells, in order. A server that is late joins tokens into one event, so
    pieces of one text are one here."""
    found: list[tuple[str, str]] = []
    for event in map(json.loads, events.splitlines()):
        kind, text = event["type"], event.get("text", "") + event.get("arguments", "")
        if found and kind in ("text", "thinking") and found[-1][0] == kind:
            text = found.pop()[1] + text
        found.append((kind, text))
    return found


def test_conversation_goes_on(runtime: Path) -> None:
    at = ["--attach", socket(runtime), *GREEDY]
    chat(runtime, *at, "--session", "bob", "My name is Bob.")
    assert "Bob" in chat(runtime, *at, "-c", "What is my name?").stdout


def test_raw_has_the_room_that_is_left(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's default of 16 tokens is not ours."""
    server = ServerModel("http://localhost", uds=socket(runtime))
    bodies: list[dict[str, Any]] = []
    monkeypatch.setattr(server, "_events", lambda path, body: bodies.append(body))
    server.stream("Once upon a time", raw=True)
    server.stream("Once", server.sampling(max_tokens=5), raw=True)
    count = server.count_tokens("Once upon a time")
    assert [body["max_tokens"] for body in bodies] == [server.max_model_len - count, 5]
    server.close()


def test_a_dry_run_asks_the_server_that_was_named(runtime: Path) -> None:
    dry = ["--dry-run", "--json", "Hi"]
    assert chat(runtime, "--attach", socket(runtime), *dry).stdout == chat(runtime, *dry).stdout
    gone = chat(runtime, "--attach", "http://127.0.0.1:9", *dry)
    assert (gone.returncode, gone.stdout) == (1, "")


def test_another_model_in_a_conversation_with_a_server(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's own, or one that is loaded here; when that fails the server stays."""
    broken = tmp_path / "broken"
    broken.mkdir()
    server = ServerModel("http://localhost", uds=socket(runtime))
    monkeypatch.setattr(chat_command, "connect", lambda options, screen: server)
    screen = Screen(io.StringIO(), io.StringIO())
    options = chat_command.ChatOptions(config=EngineConfig(model="demo"))
    switch = ModelSwitch(options, screen)
    with pytest.raises(ModelError):
        switch.open(str(broken))
    assert switch.llm is server
    assert server.count_tokens("still there") > 0
    again = switch.open("demo")
    assert isinstance(again, ServerModel)
    fake = FakeLLM()
    monkeypatch.setattr(chat_command, "open_model", lambda config, screen: fake)
    monkeypatch.setattr(chat_command, "find_model", lambda name: None)
    assert switch.open("elsewhere") is fake
    switch.close()


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--attach", "http://127.0.0.1:9"], 1, "cannot reach http://127.0.0.1:9"),
        (["--attach", "/nowhere.sock"], 1, "cannot reach the socket /nowhere.sock"),
        (["--attach", "soon"], 2, "--attach takes auto, never, uds, a URL"),
    ],
)
def test_no_server_is_one_line(runtime: Path, args: list[str], code: int, message: str) -> None:
    found = chat(runtime, *args, "Hi")
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (code, "", 1)
    assert message in found.stderr


def test_refusals_of_the_server(runtime: Path) -> None:
    other = chat(runtime, "--attach", socket(runtime), "-m", "Qwen/Other", "Hi")
    assert (other.returncode, "does not serve Qwen/Other" in other.stderr) == (2, True)
    long = chat(runtime, "--attach", socket(runtime), "word " * 4000)
    assert (long.returncode, long.stdout, long.stderr.count("\n")) == (1, "", 1)
    assert "tokens" in long.stderr
