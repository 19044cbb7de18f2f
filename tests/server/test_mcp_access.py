"""Which MCP servers a request may reach: those the operator allowed, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nvcli.errors import NvcliError, UsageError
from nvcli.protocol.mcp import McpTools
from nvcli.protocol.responses import parse_responses
from nvcli.server.config import ServerConfig
from nvcli.server.mcp import McpHub, ServerNotAllowedError
from tests.server.conftest import Serve
from tests.server.test_mcp import (
    PATH,
    SERVER,
    Turns,
    call,
    check,
    kinds,
    stream,
    tool,
    turns,
    write,
)
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed")
__all__ = ["turns"]  # the fixture


@pytest.fixture
def http_server() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, SERVER, "http"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.kill()
    process.communicate()


def test_a_url_the_operator_allowed(serve: Serve, turns: Turns, http_server: str) -> None:
    config = ServerConfig(mcp_allow=(http_server,), mcp_timeout=PATIENCE_S)
    served = serve(turns(call("read"), "ok"), config=config, max_model_len=8192, num_blocks=2048)
    secret = {"headers": {"X-Key": "sekret"}, "authorization": "sekret"}
    mine = tool("mine", server_url=f"{http_server}/mcp", **secret)
    events = stream(served, tools=[mine])
    final = check(events)
    assert kinds(final) == ["mcp_list_tools", "mcp_call", "message"]
    assert "sekret" not in json.dumps(events)
    assert "sekret" not in served.client.get(f"{PATH}/{final['id']}").text
    elsewhere = tool("mine", server_url=f"{http_server}/nowhere")
    response = served.post(PATH, {"model": "scripted", "input": "hi", "tools": [elsewhere]})
    assert response.status_code == 424


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        ((), "http://127.0.0.1:1/mcp"),
        (("https://tools.example/mcp",), "http://tools.example/mcp"),
        (("https://tools.example/mcp",), "https://tools.example/mcp-evil"),
        (("https://tools.example/mcp",), "https://tools.example/"),
        (("https://tools.example/mcp",), "https://tools.example:8443/mcp"),
        (("https://tools.example/mcp",), "https://tools.example.evil/mcp"),
        (("https://tools.example/mcp",), "https://tools.example@evil/mcp"),
        (("https://tools.example/mcp",), "https://evil\\@tools.example/mcp"),
        (("https://tools.example/mcp",), "https://tools.example/mcp/../admin"),
        (("https://tools.example/mcp",), "https://tools.example/mcp/%2e%2e/admin"),
        (("https://tools.example/mcp",), "https://tools.example/mcp/%2E./admin"),
        (("https://tools.example/mcp",), "https://tools.example/mcp\r\nHost: evil"),
        (("https://tools.example/mcp",), "https://tools.example:x/mcp"),
        (("https://tools.example/mcp",), "file:///etc/passwd"),
        (("https://tools.example/mcp",), "https://tools.exámple/mcp"),
        (("https://tools.example/mcp",), "https://[tools.example/mcp"),
        (("https://tools.example/mcp",), ""),
        (("https://tools.example/mcp",), "x" * 5000),
    ],
)
def test_a_url_that_was_not_allowed(tmp_path: Path, allowed: tuple[str, ...], url: str) -> None:
    hub = McpHub(write(tmp_path, "good"), allowed, timeout_s=1)
    with pytest.raises(ServerNotAllowedError) as caught:
        hub.check(McpTools(label="mine", place="tools[0]", url=url))
    assert caught.value.param == "tools[0].server_url"
    assert len(str(caught.value)) < 200


def test_a_url_that_was_not_allowed_is_a_400(serve: Serve, turns: Turns) -> None:
    served = serve(turns("x"), config=ServerConfig(mcp_allow=("http://127.0.0.1:1/a",)))
    body = {"model": "scripted", "input": "hi", "tools": [tool("m", server_url="http://[::1]/a")]}
    response = served.post(PATH, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("mcp_server_not_allowed", "tools[0].server_url")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"server_label": "other"}, "tools[0].server_label"),
        ({"server_label": None}, "tools[0].server_label"),
        ({"server_label": "a b"}, "tools[0].server_label"),
        ({"headers": {"x": "y"}}, "tools[0].headers"),
        ({"authorization": "y"}, "tools[0].headers"),
        ({"headers": {"x": "y\r\nz: w"}}, "tools[0].headers"),
        ({"headers": {"Host": "evil"}}, "tools[0].headers"),
        ({"headers": {"x": 5}}, "tools[0].headers.x"),
        ({"connector_id": "connector_gmail"}, "tools[0].connector_id"),
        ({"require_approval": "maybe"}, "tools[0].require_approval"),
        ({"allowed_tools": 5}, "tools[0].allowed_tools"),
        ({"server_url": 5}, "tools[0].server_url"),
    ],
)
def test_bad_entries(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    hub = McpHub(write(tmp_path, "good"), [], timeout_s=1)
    body = {"model": "x", "input": "hi", "tools": [{**tool("good"), **fields}]}
    with pytest.raises(NvcliError) as caught:
        hub.check(parse_responses(body).mcp[0])
    assert caught.value.http_status == 400
    assert caught.value.param == param


def test_what_a_url_may_be_under() -> None:
    hub = McpHub(None, ["https://Tools.Example/mcp/", "http://h:81"], timeout_s=1)
    from nvcli.server.mcp import _is_under

    for url in (
        "https://tools.example/mcp",
        "https://tools.example:443/mcp/a?b=c",
        "http://h:81/x",
    ):
        assert any(_is_under(url, prefix) for prefix in hub._prefixes), url


def test_the_operators_options(tmp_path: Path) -> None:
    for prefix in ("tools.example", "https://", "ftp://x", "https://a@b/"):
        with pytest.raises(UsageError, match="mcp-allow"):
            McpHub(None, [prefix], timeout_s=1)
    with pytest.raises(UsageError, match="cannot read"):
        McpHub(tmp_path / "gone.json", [], timeout_s=1)
