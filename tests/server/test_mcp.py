"""MCP tools of Responses: servers that behave, are slow, crash or talk nonsense; and who may be
reached at all."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nvcli.server.config import ServerConfig
from nvcli.text import Tokenizer
from tests.server.conftest import Serve, Served, parse_events
from tests.server.scripted_llm import Script
from tests.server.test_responses import create
from tests.waiting import PATIENCE_S, limits

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed")
PATH = "/v1/responses"
SERVER = str(Path(__file__).parent / "mcp_server.py")
NAMES = ["multiply", "read", "fail", "crash", "flood"]
Turns = Callable[..., Script]


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture
def turns(tokenizer: Tokenizer) -> Turns:
    """An answer for each turn: the first one when the prompt holds no result of a tool, ..."""
    mark = tokenizer.encode("<tool_response>")

    def script(*answers: str) -> Script:
        ids = [tokenizer.encode(answer) for answer in answers]

        def answer(prompt: tuple[int, ...]) -> list[int]:
            text = list(prompt)
            count = sum(text[i : i + len(mark)] == mark for i in range(len(text)))
            return ids[min(count, len(ids) - 1)]

        return answer

    return script


def write(folder: Path, *kinds: str) -> Path:
    entries = {
        kind: {"command": sys.executable, "args": [SERVER, kind, str(folder)]} for kind in kinds
    }
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": entries}))
    return path


def tool(label: str, **fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": label, "require_approval": "never", **fields}


def stream(served: Served, **fields: Any) -> list[Any]:
    return served.stream(PATH, {"model": "scripted", "input": "hi", **fields})


def check(events: list[Any]) -> dict[str, Any]:
    """Numbers, pairs of added and done, ids, arguments; the final response."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [e for e in events if e["type"] == "response.output_item.added"]
    done = [e for e in events if e["type"] == "response.output_item.done"]
    final: dict[str, Any] = events[-1]["response"]
    assert sorted(e["output_index"] for e in added) == list(range(len(added)))
    assert {e["item"]["id"]: e["output_index"] for e in added} == {
        e["item"]["id"]: e["output_index"] for e in done
    }
    done.sort(key=lambda event: event["output_index"])
    assert [event["item"] for event in done] == final["output"]
    for index, item in enumerate(final["output"]):
        own = [event for event in events if event.get("item_id") == item["id"]]
        assert {event["output_index"] for event in own} <= {index}
        if item["type"] == "mcp_call":
            deltas = [e["delta"] for e in own if e["type"].endswith("mcp_call_arguments.delta")]
            assert "".join(deltas) == item["arguments"]
            kinds = [e["type"].removeprefix("response.") for e in own if "delta" not in e]
            ending = "failed" if item["error"] else "completed"
            names = ["mcp_call.in_progress", "mcp_call_arguments.done", f"mcp_call.{ending}"]
            assert kinds == names
    ends = [e for e in events if e["type"].split(".")[-1] in ("completed", "failed", "incomplete")]
    assert len([e for e in ends if "response" in e]) == 1
    return final


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def serve_mcp(serve: Serve, script: Script, folder: Path, *names: str, **more: Any) -> Served:
    config = ServerConfig(mcp_file=write(folder, *names), **{"mcp_timeout": PATIENCE_S, **more})
    return serve(script, config=config, max_model_len=8192, num_blocks=2048)


def test_a_call_is_made_and_the_model_goes_on(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    script = turns(
        "<think>\nhm\n</think>\n\nLet me see." + call("multiply", '{"a": 6, "b": 7}'), "It is 42."
    )
    served = serve_mcp(serve, script, tmp_path, "good")
    events = stream(served, tools=[tool("good")])
    final = check(events)
    assert kinds(final) == ["mcp_list_tools", "reasoning", "message", "mcp_call", "message"]
    listed, _, _, made, message = final["output"]
    assert [item["name"] for item in listed["tools"]] == NAMES
    assert listed["error"] is None
    assert made["output"] == "42"
    assert (made["name"], made["server_label"]) == ("multiply", "good")
    assert message["content"][0]["text"] == "It is 42."
    first, second = served.prompt(0), served.prompt(1)
    assert '"multiply"' in first
    assert second.startswith(first)  # all of it is in the prefix cache
    assert "<tool_response>\n42\n</tool_response>" in second
    usage = final["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens"] == sum(map(len, served.llm.prompts))
    names = [event["type"] for event in events[:6]]
    assert names[2:6] == [
        "response.output_item.added",
        "response.mcp_list_tools.in_progress",
        "response.mcp_list_tools.completed",
        "response.output_item.done",
    ]
    # The next response knows the list, and the model reads the call again.
    script = create(served, tools=[tool("good")], previous_response_id=final["id"])
    assert kinds(script) == ["message"]
    assert "<tool_response>\n42\n</tool_response>" in served.prompt()
    served.wait_idle()


def test_stream_and_reply_are_the_same(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    served = serve_mcp(serve, turns(call("read") + call("fail"), "Done."), tmp_path, "good")
    final = check(stream(served, tools=[tool("good")], seed=1))
    whole = create(served, tools=[tool("good")], seed=1)
    assert kinds(final) == kinds(whole) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    for streamed, plain in zip(final["output"], whole["output"], strict=True):
        assert {**streamed, "id": ""} == {**plain, "id": ""}
    failed = whole["output"][2]
    assert failed["status"] == "failed"
    assert failed["error"] == "Error executing tool fail"
    assert "error: Error executing tool fail" in served.prompt()


def test_functions_beside_a_server(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    """A client's own call ends the response; a name that is taken gets the label before it."""
    own = {"type": "function", "name": "read", "parameters": {"type": "object"}}
    script = turns(call("good_read", '{"name": "y"}') + call("read"), "Done.")
    served = serve_mcp(serve, script, tmp_path, "good")
    first = create(served, tools=[own, tool("good")])
    assert kinds(first) == ["mcp_list_tools", "mcp_call", "function_call"]
    made, asked = first["output"][1:]
    assert (made["name"], made["output"]) == ("read", "content of y")
    output = {"type": "function_call_output", "call_id": asked["call_id"], "output": "mine"}
    second = create(
        served, tools=[own, tool("good")], input=[output], previous_response_id=first["id"]
    )
    assert kinds(second) == ["message"]
    prompt = served.prompt()
    assert prompt.index("good_read") < prompt.index("content of y") < prompt.index("mine")


def test_approval(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    """OpenAI's default: every call is asked for, and made only when it was allowed."""
    served = serve_mcp(serve, turns(call("read", '{"name": "y"}'), "Done."), tmp_path, "good")
    asking = {"type": "mcp", "server_label": "good"}
    first = check(stream(served, tools=[asking]))
    assert kinds(first) == ["mcp_list_tools", "mcp_approval_request"]
    request = first["output"][1]
    assert (request["name"], json.loads(request["arguments"])) == ("read", {"name": "y"})

    def answer(approve: bool, **fields: Any) -> dict[str, Any]:
        item = {
            "type": "mcp_approval_response",
            "approval_request_id": request["id"],
            "approve": approve,
        }
        body = {"tools": [asking], "input": [item], "previous_response_id": first["id"]}
        return check(stream(served, **{**body, **fields}))

    second = answer(True)
    assert kinds(second) == ["mcp_call", "message"]
    assert second["output"][0]["approval_request_id"] == request["id"]
    assert second["output"][0]["output"] == "content of y"
    assert "<tool_response>\ncontent of y\n</tool_response>" in served.prompt()
    # It is not made a second time when the conversation goes on.
    third = create(served, tools=[asking], previous_response_id=second["id"])
    assert kinds(third) == ["message"]
    assert served.prompt().count("content of y") == 1
    declined = answer(False)
    assert kinds(declined) == ["message"]
    assert "The user did not allow this call." in served.prompt()
    for fields, param in (
        ({"tools": []}, "input[0].approval_request_id"),
        ({"tools": [{**asking, "allowed_tools": ["fail"]}]}, "input[0].approval_request_id"),
        ({"previous_response_id": None}, "input[0].approval_request_id"),
    ):
        item = {
            "type": "mcp_approval_response",
            "approval_request_id": request["id"],
            "approve": True,
        }
        body = {"model": "scripted", "tools": [asking], "input": [item]}
        response = served.post(PATH, {**body, "previous_response_id": first["id"], **fields})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


def test_approval_by_tool(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    served = serve_mcp(serve, turns(call("read") + call("fail"), "Done."), tmp_path, "good")
    approval = {"never": {"read_only": True}}
    first = create(served, tools=[tool("good", require_approval=approval)])
    assert kinds(first) == ["mcp_list_tools", "mcp_call", "mcp_approval_request"]
    assert first["output"][2]["name"] == "fail"


def test_allowed_tools_and_choice(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    served = serve_mcp(serve, turns(call("read"), "Done."), tmp_path, "good")
    first = create(served, tools=[tool("good", allowed_tools=["read", "fail"])])
    assert [item["name"] for item in first["output"][0]["tools"]] == ["read", "fail"]
    assert "multiply" not in served.prompt()
    chosen = {"type": "mcp", "server_label": "good", "name": "read"}
    create(served, tools=[tool("good")], tool_choice=chosen)
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [chosen]}
    create(served, tools=[tool("good")], tool_choice=choice)
    create(served, tools=[tool("good")], tool_choice="required")
    create(served, tools=[tool("good")], tool_choice="none")
    for fields in (
        {"tool_choice": {"type": "mcp", "server_label": "other"}},
        {"tool_choice": {"type": "mcp", "server_label": "good", "name": "nope"}},
        {"tools": [tool("good"), tool("good")]},
    ):
        response = served.post(
            PATH, {"model": "scripted", "input": "hi", "tools": [tool("good")], **fields}
        )
        assert response.status_code == 400, response.text


def test_limits_of_calls_and_tokens(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    served = serve_mcp(
        serve, turns(call("read"), call("read"), call("read"), "x"), tmp_path, "good"
    )
    limited = create(served, tools=[tool("good")], max_tool_calls=2)
    calls = [item for item in limited["output"] if item["type"] == "mcp_call"]
    assert [item["output"] for item in calls] == ["content of x", "content of x"]
    assert "<tools>" not in served.prompt()  # after the limit there are none
    used = limited["usage"]["output_tokens"]
    cut = create(served, tools=[tool("good")], max_output_tokens=used // 4)
    assert cut["status"] == "incomplete"
    assert cut["usage"]["output_tokens"] <= used // 4
    assert check(stream(served, tools=[tool("good")], max_output_tokens=10))["output"]


def test_a_slow_server(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    served = serve_mcp(serve, turns(call("multiply", '{"a": 2, "b": 3}'), "ok"), tmp_path, "held")
    threading.Timer(1.0, (tmp_path / "go").touch).start()
    assert create(served, tools=[tool("held")])["output"][1]["output"] == "6"


def test_a_server_that_is_too_slow(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    """The call fails, the response does not; the server is asked again later."""
    script = turns(call("multiply", '{"a": 2, "b": 3}'), "ok")
    served = serve_mcp(serve, script, tmp_path, "held")
    go = tmp_path / "go"
    go.touch()
    create(served, tools=[tool("held")])  # it runs
    go.unlink()
    for limit in limits():
        served.app.state.mcp._timeout_s = limit
        final = check(stream(served, tools=[tool("held")]))
        if final["status"] == "completed":  # its tools were listed in time
            break
    assert final["output"][1]["error"] == f"it did not answer in {limit:g} s"
    served.app.state.mcp._timeout_s = PATIENCE_S
    go.touch()
    assert create(served, tools=[tool("held")])["output"][1]["output"] == "6"


def test_a_server_that_crashes(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    """The call fails, the response goes on, and the next one has a new process."""
    served = serve_mcp(serve, turns(call("crash"), call("read"), "ok"), tmp_path, "good")
    final = check(stream(served, tools=[tool("good")]))
    assert kinds(final) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    assert final["output"][1]["error"]
    assert final["output"][2]["output"] == "content of x"
    assert len(list(tmp_path.glob("good-*"))) == 2


@pytest.mark.parametrize("kind", ["dumb", "garbage", "wrong"])
def test_a_server_that_talks_nonsense(
    serve: Serve, turns: Turns, tmp_path: Path, kind: str
) -> None:
    """OpenAI's 424; a stream tells of it in events. The engine was not troubled."""
    served = serve_mcp(serve, turns("x"), tmp_path, kind, mcp_timeout=1.0)
    body = {"model": "scripted", "input": "hi", "tools": [tool(kind)]}
    response = served.post(PATH, body)
    assert response.status_code == 424, response.text
    assert response.json()["error"]["code"] == "mcp_server_error"
    final = check(stream(served, tools=[tool(kind)]))
    assert final["status"] == "failed"
    assert final["output"][0]["error"]
    assert served.llm.requests == []
    assert served.chat()["choices"][0]["message"]["content"] == "x"


def test_a_flood_is_cut(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    served = serve_mcp(serve, turns(call("flood"), "ok"), tmp_path, "good")
    body = {"model": "scripted", "input": "hi", "tools": [tool("good")]}
    response = served.post(PATH, body)
    assert response.status_code == 400  # even what is left does not fit this context
    assert response.json()["error"]["code"] == "context_length_exceeded"
    final = check(stream(served, tools=[tool("good")]))
    assert final["status"] == "failed"
    assert len(final["output"][1]["output"]) < 21_000


def test_a_client_that_leaves_ends_the_call(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    script = turns(call("multiply", '{"a": 2, "b": 3}'), "x" * 200)
    served = serve_mcp(serve, script, tmp_path, "held")
    body = {"model": "scripted", "input": "hi", "stream": True, "tools": [tool("held")]}
    with served.client.stream("POST", PATH, json=body) as response:
        for line in response.iter_lines():
            if "mcp_call_arguments.done" in line:
                break
    served.wait_left()  # also of the call
    assert len(served.llm.requests) == 1
    assert len(served.app.state.responses) == 0


def test_a_timeout_covers_the_calls(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    script = turns(call("multiply", '{"a": 2, "b": 3}'), "ok")
    served = serve_mcp(serve, script, tmp_path, "held")
    go = tmp_path / "go"
    go.touch()
    create(served, tools=[tool("held")])  # it runs
    go.unlink()
    served.llm.requests.clear()
    body = {"model": "scripted", "input": "hi", "tools": [tool("held")]}
    for limit in limits():
        served.app.state.config = replace(served.app.state.config, request_timeout=limit)
        assert served.post(PATH, body).status_code == 504
        if served.llm.requests:  # the call had been asked for
            break
    assert len(served.llm.requests) == 1


def test_background_with_a_server(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    served = serve_mcp(serve, turns(call("read"), "ok"), tmp_path, "good")
    queued = create(served, tools=[tool("good")], background=True)
    followed = served.client.get(f"{PATH}/{queued['id']}", params={"stream": "true"})
    final = check(parse_events(followed.text))
    assert kinds(final) == ["mcp_list_tools", "mcp_call", "message"]


def test_many_responses_share_a_process(serve: Serve, turns: Turns, tmp_path: Path) -> None:
    served = serve_mcp(serve, turns(call("read"), "ok"), tmp_path, "good")
    found: list[Any] = []

    def ask() -> None:
        found.append(create(served, tools=[tool("good")])["output"][1]["output"])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["content of x"] * 8
    assert len(list(tmp_path.glob("good-*"))) == 1
