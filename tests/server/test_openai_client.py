"""The official `openai` client with strict response validation against the running server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from nvcli.server.config import ServerConfig
from tests.server.conftest import Serve, Served

if TYPE_CHECKING:
    from openai import OpenAI  # takes a second: only where it is used

USER: Any = [{"role": "user", "content": "hi"}]
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string"}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "世界"}}\n</tool_call>'
THINK = "<think>\nhm\n</think>\n\n"


class Answer(BaseModel):
    color: str
    count: int


def client_of(served: Served) -> OpenAI:
    from openai import OpenAI

    return OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    )


@pytest.fixture
def connect(serve: Serve) -> Any:
    clients: list[OpenAI] = []

    def start(answer: str, **options: Any) -> OpenAI:
        client = client_of(serve(answer, max_model_len=2048, num_blocks=1024, **options))
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.close()


def test_chat(connect: Any) -> None:
    client = connect(THINK + "Hello!")
    answer = client.chat.completions.create(
        model="scripted", messages=USER, n=2, logprobs=True, top_logprobs=3
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello!"] * 2
    assert answer.choices[0].message.reasoning_content == "hm"
    assert answer.choices[0].logprobs.content[0].token == "H"
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


def test_chat_stream_and_its_helper(connect: Any) -> None:
    client = connect(THINK + "Hello!")
    chunks = list(
        client.chat.completions.create(
            model="scripted", messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello!"
    assert chunks[-1].usage.total_tokens > 0
    with client.chat.completions.stream(model="scripted", messages=USER) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello!"
    assert any(event.type == "content.done" for event in events)


def test_tools_streamed(connect: Any) -> None:
    client = connect(THINK + "Look:\n" + CALL + "\n" + CALL)
    with client.chat.completions.stream(model="scripted", messages=USER, tools=[LOOK]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert [json.loads(c.function.arguments) for c in choice.message.tool_calls] == [
        {"at": "世界"}
    ] * 2
    whole = client.chat.completions.create(model="scripted", messages=USER, tools=[LOOK])
    assert len({call.id for call in whole.choices[0].message.tool_calls}) == 2


def test_parse(connect: Any) -> None:
    client = connect(THINK + '{"color": "red", "count": 3}')
    parsed = client.chat.completions.parse(model="scripted", messages=USER, response_format=Answer)
    assert parsed.choices[0].message.parsed == Answer(color="red", count=3)
    response = client.responses.parse(model="scripted", input="hi", text_format=Answer)
    assert response.output_parsed == Answer(color="red", count=3)


def test_a_developer_message_alone(connect: Any) -> None:
    client = connect("Hello!")
    messages = [{"role": "developer", "content": "string", "name": "name"}]
    answer = client.chat.completions.create(model="scripted", messages=messages)
    assert answer.choices[0].message.content == "Hello!"


def test_stored_chat_completions(connect: Any) -> None:
    client = connect("Hello!")
    made = client.chat.completions.create(
        model="scripted", messages=USER, store=True, metadata={"a": "b"}
    )
    assert client.chat.completions.retrieve(made.id).id == made.id
    assert [c.id for c in client.chat.completions.list()] == [made.id]
    # The client's own type allows only the assistant's messages here; OpenAI returns all.
    lenient = type(client)(base_url=client.base_url, api_key="none")
    assert next(iter(lenient.chat.completions.messages.list(made.id))).content == "hi"
    lenient.close()
    client.chat.completions.update(made.id, metadata={"c": "d"})
    assert client.chat.completions.delete(made.id).deleted


def test_completions(connect: Any) -> None:
    client = connect("Hello!")
    answer = client.completions.create(model="scripted", prompt=["a", "b"], echo=True, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[2].text == "bHello!"
    assert client.completions.create(model="scripted", prompt="a", logprobs=2).choices[0].logprobs
    # The client's own type has no null for the finish reason of a chunk; OpenAI sends it.
    lenient = type(client)(base_url=client.base_url, api_key="none")
    chunks = list(lenient.completions.create(model="scripted", prompt="a", stream=True))
    lenient.close()
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello!"


def test_models(connect: Any) -> None:
    client = connect("x")
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"


def test_responses(connect: Any) -> None:
    import openai

    client = connect(THINK + "Look:\n" + CALL)
    flat: Any = {"type": "function", **LOOK["function"]}
    response = client.responses.create(
        model="scripted",
        input="hi",
        tools=[flat],
        reasoning={"summary": "auto"},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
    )
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output_text == "Look:"
    assert client.responses.retrieve(response.id).id == response.id
    again = client.responses.create(
        model="scripted",
        tools=[flat],
        previous_response_id=response.id,
        input=[
            {
                "type": "function_call_output",
                "call_id": response.output[2].call_id,
                "output": "a tree",
            }
        ],
    )
    assert len(list(client.responses.input_items.list(again.id))) == 5
    assert client.responses.input_tokens.count(model="scripted", input="x").input_tokens > 0
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_responses_stream(connect: Any) -> None:
    client = connect(THINK + "Look:\n" + CALL)
    flat: Any = {"type": "function", **LOOK["function"]}
    with client.responses.stream(
        model="scripted", input="hi", tools=[flat], reasoning={"summary": "auto"}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.function_call_arguments.delta" in kinds
    assert final.output[2].arguments == '{"at": "世界"}'
    events = list(client.responses.create(model="scripted", input="hi", stream=True))
    assert events[-1].response.output_text.startswith("Look:")


def test_background_responses(connect: Any) -> None:
    client = connect("x" * 300, delay_s=0.2)
    response = client.responses.create(model="scripted", input="hi", background=True)
    assert response.status == "queued"
    assert client.responses.cancel(response.id).status == "cancelled"


@pytest.mark.parametrize(
    ("error", "fields"),
    [("BadRequestError", {"temperature": 9}), ("NotFoundError", {"model": "other"})],
)
def test_errors(connect: Any, error: str, fields: Any) -> None:
    import openai

    client = connect("x")
    with pytest.raises(getattr(openai, error)) as caught:
        client.chat.completions.create(**{"model": "scripted", "messages": USER, **fields})
    assert caught.value.request_id
    assert caught.value.body["message"]


def test_a_wrong_key_and_a_broken_stream(connect: Any, serve: Serve) -> None:
    import openai

    client = connect("x", config=ServerConfig(api_keys=("k",)))
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    steps = iter(range(1000))
    failing = client_of(serve("Hello!", fail_when=lambda _: next(steps) > 4))
    with pytest.raises(openai.APIError):
        list(failing.chat.completions.create(model="scripted", messages=USER, stream=True))
    failing.close()
