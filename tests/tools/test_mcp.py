"""MCP servers as tools, over stdio and HTTP, against the SDK's own server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from nvcli.errors import NvcliError, UsageError
from nvcli.tools import Toolbox
from nvcli.tools.mcp import open_servers, read_servers
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed")
SERVER = str(Path(__file__).parent / "example_server.py")


def write(path: Path, servers: object) -> Path:
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


@pytest.fixture
def port() -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, SERVER, "http"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    yield int(process.stdout.readline())
    process.kill()
    process.communicate()


def check(path: Path) -> None:
    servers = open_servers(path, warn=lambda text: None)
    with Toolbox(servers, timeout_s=PATIENCE_S) as box:
        assert box.names == ["multiply", "fail", "hang"]
        assert box.specs[0].parameters["required"] == ["a", "b"]
        assert box.call("multiply", '{"a": 6, "b": 7}').text == "42"
        failed = box.call("fail", "{}")
        assert failed.is_error
        assert failed.text.startswith("error: Error executing tool fail")
        hurried = Toolbox(servers, timeout_s=0.5)
        assert hurried.call("hang", "{}").text.startswith("error: it did not answer in 0.5 s")


def test_stdio(tmp_path: Path) -> None:
    entry = {"command": sys.executable, "args": [SERVER], "env": {"X": "${HOME}"}}
    check(write(tmp_path / "mcp.json", {"example": entry}))


def test_http(tmp_path: Path, port: int) -> None:
    entry = {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"authorization": "Bearer x"}}
    check(write(tmp_path / "mcp.json", {"example": entry}))


def test_two_servers_with_one_name_and_a_disabled_one(tmp_path: Path) -> None:
    entry = {"command": sys.executable, "args": [SERVER]}
    path = write(
        tmp_path / "mcp.json", {"a": entry, "b": entry, "off": {**entry, "disabled": True}}
    )
    with Toolbox(open_servers(path, warn=lambda text: None)) as box:
        assert box.names == ["multiply", "fail", "hang", "b_multiply", "b_fail", "b_hang"]
        assert box.call("b_multiply", '{"a": 2, "b": 2}').text == "4"
    path = write(tmp_path / "mcp.json", {"a": entry})
    with Toolbox(open_servers(path, lambda text: None, ["fail"])) as box:  # a file's function
        assert box.names == ["multiply", "a_fail", "hang"]


def test_a_server_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "mcp.json", {"x": {"command": "/nowhere/server"}})
    with pytest.raises(NvcliError, match="the MCP server x cannot be used"):
        open_servers(path, warn=lambda text: None)
    path = write(tmp_path / "mcp.json", {"x": {"command": sys.executable, "args": ["-c", ""]}})
    with pytest.raises(NvcliError, match="the MCP server x cannot be used"):
        open_servers(path, warn=lambda text: None)
    path = write(tmp_path / "mcp.json", {"x": {"url": "http://127.0.0.1:9/mcp"}})
    with pytest.raises(NvcliError, match="the MCP server x cannot be used"):
        open_servers(path, warn=lambda text: None)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"mcpServers": {"a": {}}}'])
def test_files_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=str(path)):
        read_servers(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_servers(tmp_path / "gone.json")


ROUGH = """
import json, os, sys
def send(value):
    sys.stdout.write(json.dumps(value) + "\\n")
    sys.stdout.flush()
for line in sys.stdin:
    m = json.loads(line)
    if m.get("method") == "initialize":
        info = {"name": "rough", "version": "1"}
        version = m["params"]["protocolVersion"]
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif m.get("method") == "tools/list":
        names = ("fine", "crash", "flood")
        result = {"tools": [{"name": n, "inputSchema": {"type": "object"}} for n in names]}
    elif m.get("method") == "tools/call":
        name = m["params"]["name"]
        if name == "crash":
            os._exit(3)
        while name == "flood":
            sys.stdout.write("x" * 65536)
        result = {"content": [{"type": "text", "text": "fine"}]}
    elif "id" in m:
        send({"jsonrpc": "2.0", "id": m["id"], "error": {"code": -32601, "message": "no"}})
        continue
    else:
        continue
    send({"jsonrpc": "2.0", "id": m["id"], "result": result})
"""


def test_a_server_that_crashes_or_floods_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvcli.tools.mcp._PROBE_TIMEOUT_S", 1.0)
    script = tmp_path / "rough.py"
    script.write_text(ROUGH)
    path = write(tmp_path / "mcp.json", {"r": {"command": sys.executable, "args": [str(script)]}})
    servers = open_servers(path, warn=lambda text: None)
    with Toolbox(servers, timeout_s=PATIENCE_S) as box:
        assert box.call("fine", "{}").text == "fine"
        assert box.call("crash", "{}").is_error
        assert box.call("fine", "{}").text == "fine"
        hurried = Toolbox(servers, timeout_s=1)
        assert hurried.call("flood", "{}").text == "error: it did not answer in 1 s and was ended"
        assert box.call("fine", "{}").text == "fine"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"command": "x", "args": "y"}, "args must be a list of texts"),
        ({"command": ["x"]}, "command must be a text"),
        ({"command": "x", "env": ["A=1"]}, "env must hold texts by name"),
        ({"command": "x", "cwd": 3}, "cwd must be a text"),
        ({"url": "http://x", "type": "sse"}, "type 'sse' is not supported here, only http"),
        ({"command": "x", "type": "http"}, "type 'http' is not supported here, only stdio"),
        ({"url": "http://x", "headers": {"a": ["b"]}}, "headers must hold texts by name"),
    ],
)
def test_entries_that_cannot_be_used_are_named(tmp_path: Path, entry: object, message: str) -> None:
    with pytest.raises(UsageError, match=f"server x: {message}"):
        read_servers(write(tmp_path / "mcp.json", {"x": entry}))
