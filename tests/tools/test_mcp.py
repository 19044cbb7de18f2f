"""MCP servers as tools, over stdio and HTTP, against the SDK's own server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvcli.errors import NvcliError, UsageError
from nvcli.tools import Toolbox
from nvcli.tools.mcp import open_servers, read_servers

pytest.importorskip("mcp")
SERVER = str(Path(__file__).parent / "example_server.py")


def write(path: Path, servers: object) -> Path:
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, SERVER, str(number)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", number)) == 0:
                break
        time.sleep(0.05)
    yield number
    process.kill()
    process.wait()


def check(path: Path) -> None:
    servers = open_servers(path, warn=lambda text: None)
    with Toolbox(servers, timeout_s=3) as box:
        assert box.names == ["multiply", "fail", "hang"]
        assert box.specs[0].parameters["required"] == ["a", "b"]
        assert box.call("multiply", '{"a": 6, "b": 7}').text == "42"
        failed = box.call("fail", "{}")
        assert failed.is_error
        assert failed.text.startswith("error: Error executing tool fail")
        assert box.call("hang", "{}").text == "error: it did not answer in 3 s"


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
