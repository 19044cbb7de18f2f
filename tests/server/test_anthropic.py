"""Anthropic's messages, with the official client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from nvcli.protocol.messages import parse_messages_request
from nvcli.server.config import ServerConfig
from tests.server.conftest import Serve, Served

if TYPE_CHECKING:
    from anthropic import Anthropic  # takes two seconds: only where it is used

PATH = "/v1/messages"
USER: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "世界"}}\n</tool_call>'
THINK = "<think>\nhm\n</think>\n\n"


@pytest.fixture
def connect(serve: Serve) -> Any:
    from anthropic import Anthropic

    clients: list[Anthropic] = []

    def start(answer: str, **options: Any) -> tuple[Anthropic, Served]:
        served = serve(answer, max_model_len=2048, num_blocks=1024, **options)
        client = Anthropic(
            base_url=served.url, api_key="none", max_retries=0, _strict_response_validation=True
        )
        clients.append(client)
        return client, served

    yield start
    for client in clients:
        client.close()


def create(client: Anthropic, **fields: Any) -> Any:
    return client.messages.create(
        **{"model": "scripted", "max_tokens": 200, "messages": USER, **fields}
    )


def test_a_message(connect: Any) -> None:
    client, served = connect("Hello!")
    message = create(client, system=[{"type": "text", "text": "Be terse."}])
    assert message.content[0].text == "Hello!"
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == 7
    prompt = served.prompt()
    assert "Be terse." in prompt
    assert prompt.endswith("<think>\n\n</think>\n\n")  # thinking is off unless asked for
    counted = client.messages.count_tokens(model="scripted", messages=USER, system="Be terse.")
    assert counted.input_tokens == len(served.llm.prompts[-1])


def test_thinking_text_and_tool_use_streamed_and_whole(connect: Any) -> None:
    client, _ = connect(THINK + "Look:\n" + CALL)
    fields: Any = {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = create(client, **fields)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert whole.stop_reason == "tool_use"
    assert whole.content[2].input == {"at": "世界"}
    with client.messages.stream(
        model="scripted", max_tokens=200, messages=USER, **fields
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [
        (b.type, getattr(b, "text", None), getattr(b, "input", None)) for b in final.content
    ] == [(b.type, getattr(b, "text", None), getattr(b, "input", None)) for b in whole.content]
    assert final.content[0].thinking == "hm"
    assert final.content[0].signature == whole.content[0].signature
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_tool_loop_keeps_its_thinking(connect: Any) -> None:
    client, served = connect("done")
    messages: Any = [
        *USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "secret plan", "signature": "x"},
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "世"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "a tree"}],
                }
            ],
        },
    ]
    create(client, messages=messages, tools=[TOOL])
    prompt = served.prompt()
    assert "secret plan" in prompt
    assert '{"at": "世"}' in prompt
    assert "<tool_response>\na tree\n</tool_response>" in prompt


def test_an_answer_that_has_begun_is_continued(connect: Any) -> None:
    client, served = connect("lo")
    messages: Any = [*USER, {"role": "assistant", "content": "Hel"}]
    assert create(client, messages=messages).content[0].text == "lo"
    assert served.prompt().endswith("Hel")


def test_ends(connect: Any) -> None:
    client, _ = connect("one STOP two")
    stopped = create(client, stop_sequences=["STOP"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    assert stopped.content[0].text == "one "
    assert create(client, max_tokens=2).stop_reason == "max_tokens"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tool_choice": {"type": "any"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}},
        {"extra_body": {"temperature": 9}},
        {"stop_sequences": [""]},
        {"extra_body": {"mcp_servers": [{"type": "url", "url": "https://x.example", "name": "x"}]}},
        {"extra_body": {"context_management": {"edits": []}}},
        {"extra_body": {"output_format": {"type": "text"}}},
        {"output_config": {"effort": "huge"}},
        {"output_config": {"format": {"type": "json_schema"}}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "foo"}}}},
        {
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "extra_body": {"output_format": {"type": "json_schema", "schema": {}}},
        },
    ],
)
def test_bad_requests(connect: Any, fields: dict[str, Any]) -> None:
    import anthropic

    client, _ = connect("x")
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(client, **fields)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert caught.value.request_id == body["request_id"]


def test_a_result_of_no_call_is_named(connect: Any) -> None:
    import anthropic

    client, _ = connect("x")
    result = {"type": "tool_result", "tool_use_id": "nope", "content": "x"}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\].content\[0\].tool_use_id"):
        create(client, messages=[*USER, {"role": "user", "content": [result]}])


def test_output_config(connect: Any) -> None:
    class Answer(pydantic.BaseModel):
        a: int

    client, _ = connect('{"a": 3}')
    parsed = client.messages.parse(
        model="scripted", max_tokens=200, messages=USER, output_format=Answer
    )
    assert parsed.parsed_output == Answer(a=3)
    schema = Answer.model_json_schema()
    shape = {"type": "json_schema", "schema": schema}
    body = {"messages": USER, "max_tokens": 9}
    for fields in ({"output_config": {"format": shape}}, {"output_format": shape}):
        request = parse_messages_request({**body, **fields})
        assert request.structure is not None
        assert request.structure.part["json_schema"]["properties"] == schema["properties"]
        assert request.ignored_fields == ()


@pytest.mark.parametrize(
    ("thinking", "budget"),
    [
        ({"type": "adaptive"}, 1024),
        ({"type": "enabled", "budget_tokens": 20}, 20),
        ({"type": "disabled"}, None),
        (None, None),
    ],
)
def test_effort_bounds_thinking_that_has_no_budget(thinking: Any, budget: int | None) -> None:
    body = {"messages": USER, "max_tokens": 9, "thinking": thinking}
    request = parse_messages_request({**body, "output_config": {"effort": "low"}})
    assert request.sampling.get("thinking_budget") == budget


def test_models(connect: Any) -> None:
    client, _ = connect("x")
    assert [model.id for model in client.models.list()] == ["scripted"]
    model = client.models.retrieve("scripted")
    assert (model.display_name, model.max_input_tokens) == ("scripted", 2048)


def test_other_errors(connect: Any) -> None:
    import anthropic

    client, _ = connect("x")
    with pytest.raises(anthropic.NotFoundError):
        create(client, model="other")
    locked, _ = connect("x", config=ServerConfig(api_keys=("k",)))
    with pytest.raises(anthropic.AuthenticationError):
        create(locked)
    opened = locked.with_options(api_key="k")
    assert create(opened).content[0].text == "x"


def test_a_failure_in_the_middle_is_an_error_event(connect: Any) -> None:
    import anthropic

    steps = iter(range(1000))
    client, served = connect("Hello!", fail_when=lambda _: next(steps) > 4)
    with pytest.raises(anthropic.APIError):
        list(create(client, stream=True))
    served.wait_idle()
