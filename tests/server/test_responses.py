"""Responses: events and items, the store, chains, background, cancel, truncation."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings

from nvcli.server.config import ServerConfig
from nvcli.text import Tokenizer
from tests.server.conftest import Serve, Served
from tests.server.scripted_llm import ScriptedLLM
from tests.server.test_invariants import answers
from tests.waiting import until

PATH = "/v1/responses"
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "世"}}\n</tool_call>'
REQUIRED_KEYS = """id object created_at completed_at status incomplete_details model
previous_response_id instructions output error tools tool_choice truncation parallel_tool_calls text
top_p presence_penalty frequency_penalty top_logprobs temperature reasoning usage max_output_tokens
max_tool_calls store background service_tier metadata safety_identifier prompt_cache_key"""


def create(served: Served, **fields: Any) -> dict[str, Any]:
    return served.ask(PATH, {"model": "scripted", "input": "hi", **fields})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def stream(served: Served, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "scripted", "input": "hi", **fields, "stream": True}
    return events_of(served.post(PATH, body))


def check_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The rules of section 8; returns the final response."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] in ("response.completed", "response.incomplete")
    ends = [e for e in events if e["type"].rsplit(".")[-1] in ("completed", "incomplete", "failed")]
    assert ends == [last]
    open_item: dict[str, Any] | None = None
    open_part = None
    text: dict[str, str] = {}
    done: list[dict[str, Any]] = []
    for event in events[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert open_item is None
            open_item = event["item"]
            assert event["output_index"] == len(done)
            continue
        assert open_item is not None, kind
        assert event["output_index"] == len(done)
        if kind == "response.output_item.done":
            assert open_part is None
            assert event["item"]["id"] == open_item["id"]
            done.append(event["item"])
            open_item = None
            continue
        assert event["item_id"] == open_item["id"]
        if kind == "response.content_part.added":
            open_part = event["part"]
            assert event["content_index"] == 0
        elif kind == "response.content_part.done":
            assert event["part"]["text"] == text.get(open_item["id"], "")
            open_part = None
        elif kind.endswith(".delta") and "summary" not in kind:
            assert open_part is not None or open_item["type"] == "function_call"
            text[open_item["id"]] = text.get(open_item["id"], "") + event["delta"]
            if kind == "response.output_text.delta":
                assert isinstance(event["logprobs"], list)
        elif kind in ("response.output_text.done", "response.reasoning_text.done"):
            assert event["text"] == text.get(open_item["id"], "")
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == text.get(open_item["id"], "")
            assert event["name"] == open_item["name"]
    assert open_item is None
    assert last["response"]["output"] == done
    final: dict[str, Any] = last["response"]
    return final


def without_ids(response: dict[str, Any]) -> Any:
    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            skip = ("id", "call_id", "created_at", "completed_at", "cached_tokens")
            return {k: clean(v) for k, v in value.items() if k not in skip}
        return [clean(v) for v in value] if isinstance(value, list) else value

    return clean(response)


@pytest.fixture(scope="module")
def rig(tokenizer: Tokenizer) -> Any:
    answer: list[int] = []
    served = Served(ScriptedLLM(tokenizer, lambda _: answer), ServerConfig())
    yield answer, served
    served.close()


@settings(max_examples=60)
@given(answer=answers())
def test_events_are_in_order_and_fold_to_the_response(rig: Any, answer: str) -> None:
    scripted, served = rig
    scripted[:] = served.llm.tokenizer.encode(answer)
    fields = {"tools": [LOOK], "seed": 1}
    final = check_events(stream(served, **fields))
    whole = create(served, **fields)
    assert without_ids(final) == without_ids(whole)
    assert set(REQUIRED_KEYS.split()) <= set(whole)


def test_thinking_text_and_a_call(serve: Serve) -> None:
    served = serve(f"<think>\nhm. ok\n</think>\n\nLook:\n{CALL}\n{CALL}")
    final = check_events(stream(served, tools=[LOOK], reasoning={"summary": "auto"}))
    kinds = [item["type"] for item in final["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, call, _ = final["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm. ok"}]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "hm. ok"}]
    assert message["content"][0]["text"] == "Look:"
    assert call["arguments"] == '{"at": "世"}'
    usage = final["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0


def test_a_cut_response_is_incomplete(serve: Serve) -> None:
    served = serve("Hello there")
    final = check_events(stream(served, max_output_tokens=3))
    assert final["status"] == "incomplete"
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert final["output"][0]["status"] == "incomplete"


def test_an_empty_answer_still_has_a_message(serve: Serve) -> None:
    final = check_events(stream(serve("")))
    assert final["output"][0]["content"][0]["text"] == ""


def test_logprobs_are_included_on_request(serve: Serve) -> None:
    served = serve("Héllo 世")
    include = ["message.output_text.logprobs"]
    whole = create(served, include=include, top_logprobs=2)
    part = whole["output"][0]["content"][0]
    assert b"".join(bytes(lp["bytes"]) for lp in part["logprobs"]).decode() == part["text"]
    assert len(part["logprobs"][0]["top_logprobs"]) == 2
    final = check_events(stream(served, include=include, top_logprobs=2))
    assert final["output"][0]["content"] == whole["output"][0]["content"]


def test_a_chain_keeps_calls_and_their_output(serve: Serve) -> None:
    """P4; instructions are not inherited."""
    served = serve(f"<think>\nhm\n</think>\n\n{CALL}")
    first = create(served, tools=[LOOK], instructions="Be terse.")
    assert "Be terse." in served.prompt()
    call = first["output"][-1]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "a tree"}
    second = create(served, tools=[LOOK], input=[output], previous_response_id=first["id"])
    prompt = served.prompt()
    assert "Be terse." not in prompt
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "世"}}\n</tool_call>' in prompt
    assert "<tool_response>\na tree\n</tool_response>" in prompt
    assert "hm" in prompt  # reasoning of a tool loop stays
    items = served.client.get(f"{PATH}/{second['id']}/input_items", params={"order": "asc"}).json()
    kinds = [item["type"] for item in items["data"]]
    assert kinds == ["message", "reasoning", "function_call", "function_call_output"]
    assert items["data"][2] == call
    page = served.client.get(f"{PATH}/{second['id']}/input_items", params={"limit": 2}).json()
    assert [item["type"] for item in page["data"]] == ["function_call_output", "function_call"]
    assert page["has_more"] is True
    after = {"limit": 9, "after": page["last_id"]}
    rest = served.client.get(f"{PATH}/{second['id']}/input_items", params=after).json()
    assert len(rest["data"]) == 2


def test_items_by_hand_and_by_reference(serve: Serve) -> None:
    served = serve("Hello")
    first = create(served)
    message_id = first["output"][0]["id"]
    items = [
        {"role": "developer", "content": "A"},
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "B"}]},
        {"role": "user", "content": "one"},
        {"type": "item_reference", "id": message_id},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "T"}],
        },
        {"role": "user", "content": "two"},
    ]
    create(served, input=items, tools=[LOOK])
    prompt = served.prompt()
    assert "A\n\nB" in prompt
    assert prompt.index("one") < prompt.index("Hello") < prompt.index("\nT\n") < prompt.index("two")
    create(served, input=[{"role": "developer", "content": "only"}])


def test_sealed_reasoning_comes_back(serve: Serve) -> None:
    served = serve("<think>\nsecret plan\n</think>\n\n" + CALL)
    first = create(served, tools=[LOOK], store=False, include=["reasoning.encrypted_content"])
    reasoning, call = first["output"]
    assert "secret" not in reasoning["encrypted_content"]
    carried = {
        "type": "reasoning",
        "summary": [],
        "encrypted_content": reasoning["encrypted_content"],
    }
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
    items = [{"role": "user", "content": "hi"}, carried, call, output]
    create(served, tools=[LOOK], input=items, store=False)
    assert "secret plan" in served.prompt()
    carried["encrypted_content"] = "AAAA"
    response = served.post(PATH, {"model": "scripted", "input": items})
    assert response.status_code == 400


def test_get_delete_and_replay(serve: Serve) -> None:
    served = serve("Hello")
    events = stream(served)
    response_id = events[-1]["response"]["id"]
    assert served.client.get(f"{PATH}/{response_id}").json() == events[-1]["response"]
    again = events_of(served.client.get(f"{PATH}/{response_id}", params={"stream": "true"}))
    assert again == events
    params = {"stream": "true", "starting_after": 3}
    assert events_of(served.client.get(f"{PATH}/{response_id}", params=params)) == events[4:]
    for bad in ("x", "--1", "\u0663", "1.0", "", "1" * 10):
        params = {"stream": "true", "starting_after": bad}
        error = served.client.get(f"{PATH}/{response_id}", params=params).json()["error"]
        assert error["param"] == "starting_after"
    assert served.client.post(f"{PATH}/{response_id}/cancel").status_code == 400
    assert served.client.delete(f"{PATH}/{response_id}").json()["deleted"] is True
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        assert served.client.request(method, f"{PATH}/{response_id}{path}").status_code == 404
    unstored = create(served, store=False)
    assert served.client.get(f"{PATH}/{unstored['id']}").status_code == 404
    body = {"model": "scripted", "input": "x", "previous_response_id": response_id}
    error = served.post(PATH, body)
    assert error.status_code == 400
    assert error.json()["error"]["code"] == "previous_response_not_found"
    assert served.client.post(f"{PATH}/compact", json={}).status_code == 404


def wait_for(served: Served, response_id: str, status: str) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        body: dict[str, Any] = served.client.get(f"{PATH}/{response_id}").json()
        return body if body["status"] == status else None

    return until(found, f"it is {status}") or {}


def test_background(serve: Serve) -> None:
    served = serve("Hello there", delay_s=0.01)
    queued = create(served, background=True)
    assert queued["status"] == "queued"
    followed = events_of(served.client.get(f"{PATH}/{queued['id']}", params={"stream": "true"}))
    assert [event["type"] for event in followed[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert followed[-1]["type"] == "response.completed"
    done = wait_for(served, queued["id"], "completed")
    assert done["output"][0]["content"][0]["text"] == "Hello there"
    assert done["background"] is True
    served.wait_left()


def test_a_background_response_outlives_its_client_and_can_be_cancelled(serve: Serve) -> None:
    served = serve("x" * 400, delay_s=0.2)
    body = {"model": "scripted", "input": "hi", "background": True, "stream": True}
    with served.client.stream("POST", PATH, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        response_id = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
    assert wait_for(served, response_id, "in_progress")
    until(lambda: served.llm.stats().num_running == 1)
    cancelled = served.client.post(f"{PATH}/{response_id}/cancel").json()
    assert cancelled["status"] == "cancelled"
    served.wait_left()
    assert served.client.get(f"{PATH}/{response_id}").json()["status"] == "cancelled"


def test_leaving_ends_a_response(serve: Serve) -> None:
    served = serve("x" * 400, delay_s=0.2)
    body = {"model": "scripted", "input": "hi", "stream": True}
    with served.client.stream("POST", PATH, json=body) as response:
        lines = response.iter_lines()
        next(lines)
    served.wait_left()
    assert len(served.app.state.responses) == 0
    assert served.app.state.bridge.num_aborted == 1


def test_a_failure_in_the_middle_is_told(serve: Serve) -> None:
    """S10."""
    steps = iter(range(100))
    served = serve("Hello there", fail_when=lambda _: next(steps) == 5)
    events = stream(served)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert any(event["type"] == "response.output_item.done" for event in events)
    assert create(served)["status"] == "completed"


def test_truncation(serve: Serve) -> None:
    served = serve("ok")
    items = [{"role": "user", "content": f"{i} " + "x" * 100} for i in range(8)]
    body = {"model": "scripted", "input": items}
    response = served.post(PATH, body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    create(served, input=items, truncation="auto")
    prompt = served.prompt()
    assert "7 xxx" in prompt
    assert "0 xxx" not in prompt


def test_input_tokens(serve: Serve) -> None:
    served = serve("ok")
    counted = served.post(
        f"{PATH}/input_tokens", {"model": "scripted", "input": "hello you"}
    ).json()
    assert counted["object"] == "response.input_tokens"
    assert counted["input_tokens"] == create(served, input="hello you")["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_tool"),
        (
            {"tools": [{"type": "mcp", "server_label": "x", "server_url": "http://x"}]},
            "tools[0].type",
            "unsupported_tool",
        ),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type", "unsupported_tool"),
        ({"conversation": "c"}, "conversation", "unsupported_field"),
        ({"prompt": {"id": "x"}}, "prompt", "unsupported_field"),
        ({"background": True, "store": False}, "background", "invalid_parameter"),
        ({"include": ["everything"]}, "include", "invalid_parameter"),
        ({"input": []}, "input", "invalid_parameter"),
        ({"input": 5}, "input", "invalid_parameter"),
        (
            {"input": [{"type": "message", "role": "x", "content": ""}]},
            "input[0].role",
            "invalid_messages",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "invalid_messages",
        ),
        ({"input": [{"type": "computer_call"}]}, "input[0].type", "unsupported_field"),
        ({"input": [{"type": "item_reference", "id": "nope"}]}, "input[0].id", "invalid_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_parameter"),
        (
            {"text": {"format": {"type": "json_schema"}}},
            "text.format.json_schema",
            "invalid_parameter",
        ),
        ({"truncation": "maybe"}, "truncation", "invalid_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_parameter"),
        ({"input": [{"role": "user"}]}, "input[0].content", "invalid_parameter"),
        ({"input": "word " * 3000}, "input", "context_length_exceeded"),
        (
            {
                "instructions": "x",
                "input": [
                    {"role": "user", "content": "x"},
                    {"type": "function_call_output", "call_id": "nope", "output": "x"},
                ],
            },
            "input[1].call_id",
            "invalid_parameter",
        ),
    ],
)
def test_bad_requests(serve: Serve, fields: dict[str, Any], param: str, code: str) -> None:
    response = serve("x").post(PATH, {"model": "scripted", "input": "hi", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert len(response.content) < 8192


def test_what_may_be_said_without_tools(serve: Serve) -> None:
    served = serve("ok")
    for choice in ("auto", "none"):
        assert create(served, tools=[], tool_choice=choice)["tool_choice"] == choice
    assert create(served, max_output_tokens=10**12)["status"] == "completed"


def test_a_bad_input_gives_a_bounded_error(serve: Serve) -> None:
    """V9."""
    items = [{"type": "x" * 5000, "role": ["y" * 5000] * 50}] * 50
    response = serve("x").post(PATH, {"model": "scripted", "input": items})
    assert response.status_code == 400
    assert len(response.content) < 8192
