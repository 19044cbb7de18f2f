"""MCP tools of chat completions: one answer out of several turns."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import DEFAULTS, Serve, Served
from tests.server.test_mcp import Turns, call, serve_mcp, tool, turns

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed")
CHAT = "/v1/chat/completions"
__all__ = ["turns"]  # the fixture


def fold(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    folded: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "ends": []}
    assert len({chunk["id"] for chunk in chunks}) == 1
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            folded["content"] += delta.get("content") or ""
            folded["reasoning"] += delta.get("reasoning") or ""
            for part in delta.get("tool_calls", ()):
                made = folded["calls"].setdefault(part["index"], ["", ""])
                made[0] += part["function"].get("name", "")
                made[1] += part["function"]["arguments"]
            if choice["finish_reason"] is not None:
                folded["ends"].append(choice["finish_reason"])
        if not chunk["choices"]:
            folded["usage"] = chunk["usage"]
    assert sum("role" in c["delta"] for chunk in chunks for c in chunk["choices"]) == 1
    return folded


def both(served: Served, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reply's choice with its usage, and the stream of the same, folded."""
    reply = served.chat(**fields)
    stream = fold(served.chat_stream(stream_options={"include_usage": True}, **fields))
    message = reply["choices"][0]["message"]
    assert stream["content"] == (message["content"] or "")
    assert stream["reasoning"] == (message["reasoning"] or "")
    assert stream["ends"] == [reply["choices"][0]["finish_reason"]]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert stream["usage"][key] == reply["usage"][key]
    calls = message.get("tool_calls", [])
    names = [[made["function"]["name"], made["function"]["arguments"]] for made in calls]
    assert list(stream["calls"].values()) == names
    return reply, stream


def test_the_answer_of_two_turns(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    script = turns(
        "<think>\nhm\n</think>\n\nLet me see. " + call("multiply", '{"a": 6, "b": 7}'), "It is 42."
    )
    served = serve_mcp(serve, script, tmp_path, "good")
    reply, _ = both(served, tools=[tool("good")])
    choice = reply["choices"][0]
    assert choice["message"]["content"].split() == ["Let", "me", "see.", "It", "is", "42."]
    assert choice["message"]["reasoning"] == "hm"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    first, second = served.prompt(0), served.prompt(1)
    assert second.startswith(first)
    assert "<tool_response>\n42\n</tool_response>" in second
    assert reply["usage"]["prompt_tokens"] == sum(map(len, served.llm.prompts[:2]))
    assert served.chat(tools=[tool("good")], store=True)["metadata"] == {}
    served.wait_idle()


def test_a_call_of_the_clients_ends_it(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    own = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    script = turns(call("read"), call("read") + call("look") + call("look", '{"a": 1}'))
    served = serve_mcp(serve, script, tmp_path, "good")
    reply, stream = both(served, tools=[own, tool("good")])
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    assert stream["calls"] == {0: ["look", "{}"], 1: ["look", '{"a": 1}']}


def test_limits(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    served = serve_mcp(serve, turns(call("read"), "x" * 100), tmp_path, "good")
    length = len(served.llm.tokenizer.encode(call("read"))) + 1
    for limit in (5, length, length + 10):
        reply, _ = both(served, tools=[tool("good")], max_tokens=limit)
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] <= limit


def test_a_server_that_crashes_or_cannot_be_used(
    serve: Serve, turns: Turns, tmp_path: Path
) -> None:
    served = serve_mcp(serve, turns(call("crash"), "Sorry."), tmp_path, "good", "garbage")
    assert both(served, tools=[tool("good")])[0]["choices"][0]["message"]["content"] == "Sorry."
    served.app.state.mcp._timeout_s = 1.0
    body = {**DEFAULTS, "tools": [tool("garbage")]}
    response = served.post(CHAT, body)
    assert response.status_code == 424
    text = served.post(CHAT, {**body, "stream": True}).text
    assert json.loads(text.split("\n\n")[0].removeprefix("data: "))["error"]["code"]
    assert text.endswith("data: [DONE]\n\n")


def test_leaving_ends_it(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    script = turns("Let me see." + call("multiply", '{"a": 2, "b": 3}'), "x")
    served = serve_mcp(serve, script, tmp_path, "held")
    body = {**DEFAULTS, "stream": True, "tools": [tool("held")]}
    with served.client.stream("POST", CHAT, json=body) as response:
        next(response.iter_lines())
    served.wait_left()
    assert len(served.llm.requests) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "mcp", "server_label": "good"}]}, "tools[0].require_approval"),
        ({"tools": [tool("other")]}, "tools[0].server_label"),
        ({"tools": [tool("good"), tool("good")]}, "tools"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.server_label"),
    ],
)
def test_bad_requests(
    serve: Serve, turns: Turns, tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    served = serve_mcp(serve, turns("x"), tmp_path, "good")
    response = served.post(CHAT, {**DEFAULTS, "tools": [tool("good")], **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_without_servers_they_are_refused(serve: Serve) -> None:
    response = serve("x").post(CHAT, {**DEFAULTS, "tools": [tool("good")]})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_tool"
