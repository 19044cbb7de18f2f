"""Cases from public reports of other servers, by their numbers; the inputs are our own. Those about
grammars stand in test_grammar, about clients that leave in test_disconnect, about Responses in
test_responses, about embeddings in test_pooling, about signals in test_life.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import DEFAULTS, Serve

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ROOMY: dict[str, Any] = {"max_model_len": 2048, "num_blocks": 1024}


def content(chunks: list[dict[str, Any]], name: str = "content") -> str:
    return "".join(c["delta"].get(name) or "" for chunk in chunks for c in chunk["choices"])


def arguments(chunks: list[dict[str, Any]]) -> dict[int, str]:
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for call in choice["delta"].get("tool_calls", ()):
                text = call["function"]["arguments"]
                found[call["index"]] = found.get(call["index"], "") + text
    return found


def finish(chunks: list[dict[str, Any]]) -> list[str]:
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    return [reason for reason in reasons if reason is not None]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            '{"name": "look", "arguments": {"at": "北京，\\"城\\" 😀"}}',
            '{"at": "北京，\\"城\\" 😀"}',
        ),
        ('{"name": "look"}', "{}"),
        ('{"arguments": {"a": 1}, "name": "look"}', '{"a": 1}'),
        ('{"name": "look", "arguments": {"a": "</tool_call><tool_call>"}}', None),
    ],
    ids=["T1", "T3", "arguments first", "tags in a string"],
)
def test_streamed_arguments_parse_and_equal_those_of_the_body(
    serve: Serve, body: str, expected: str | None
) -> None:
    served = serve(f"<tool_call>\n{body}\n</tool_call>", **ROOMY)
    whole = served.chat(tools=[TOOL])["choices"][0]
    chunks = served.chat_stream(tools=[TOOL])
    (call,) = whole["message"]["tool_calls"]
    assert arguments(chunks) == {0: call["function"]["arguments"]}
    assert isinstance(json.loads(call["function"]["arguments"]), dict)
    if expected is not None:
        assert call["function"]["arguments"] == expected
    assert whole["finish_reason"] == "tool_calls"
    assert finish(chunks) == ["tool_calls"]


def test_t14_a_call_inside_thinking_ends_the_thinking(serve: Serve) -> None:
    served = serve(
        '<think>\nhm\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', **ROOMY
    )
    message = served.chat(tools=[TOOL])["choices"][0]["message"]
    assert message["reasoning"] == "hm"
    assert message["tool_calls"][0]["function"]["name"] == "look"


@pytest.mark.parametrize("text", ['{"a": 1}', "not json", "[1]", ""])
def test_t16_arguments_of_the_history_need_not_be_json(serve: Serve, text: str) -> None:
    served = serve("ok", **ROOMY)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": text}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    assert served.chat(messages=messages)["choices"][0]["message"]["content"] == "ok"


def test_malformed_calls_are_content_never_a_500(serve: Serve) -> None:
    served = serve("<tool_call>\nlook at that\n</tool_call>", **ROOMY)
    choice = served.chat(tools=[TOOL])["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert "look at that" in choice["message"]["content"]
    assert "tool_calls" not in choice["message"]


def test_r2_thinking_that_the_prompt_has_opened(serve: Serve) -> None:
    served = serve("hm\n</think>\n\nHello")
    messages = [*DEFAULTS["messages"], {"role": "assistant", "content": "<think>\n"}]
    fields = {"messages": messages, "continue_final_message": True}
    message = served.chat(**fields)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "Hello")


@pytest.mark.parametrize("fields", [{"max_tokens": 4}, {"max_completion_tokens": 4}])
def test_r5_thinking_that_was_cut_is_in_one_channel(serve: Serve, fields: Any) -> None:
    served = serve("<think>\nlong thoughts\n</think>\n\nHello")
    choice = served.chat(**fields)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["reasoning"] == "lo"
    assert not choice["message"]["content"]
    chunks = served.chat_stream(**fields)
    assert content(chunks, "reasoning") == "lo"
    assert content(chunks) == ""


def test_r6_a_stop_string_counts_in_the_content_only(serve: Serve) -> None:
    served = serve("<think>\na STOP b\n</think>\n\nHello STOP there")
    message = served.chat(stop="STOP")["choices"][0]["message"]
    assert message["reasoning"] == "a STOP b"
    assert message["content"] == "Hello "


@pytest.mark.parametrize("text", ["😀👩🏽‍🚀世界é", "a\ufffdb"])
def test_s1_no_half_characters(serve: Serve, text: str) -> None:
    chunks = serve(text).chat_stream()
    parts = [c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]]
    assert "".join(parts) == text
    assert ("\ufffd" in "".join(parts)) == ("\ufffd" in text)


def test_s3_a_stop_that_does_not_come_is_let_go(serve: Serve) -> None:
    chunks = serve("abcDEFGHx").chat_stream(stop="DEFGHIJ")
    assert content(chunks) == "abcDEFGHx"
    chunks = serve("abcDEFGHIJ").chat_stream(stop="DEFGHIJ")
    assert content(chunks) == "abc"
    assert not any(letter in content(chunks) for letter in "DEFGHIJ")


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 1}, {"stop": "l"}, {"n": 3}])
def test_s7_always_one_finish_reason(serve: Serve, fields: dict[str, Any]) -> None:
    chunks = serve("Hello").chat_stream(**fields)
    assert len(finish(chunks)) == fields.get("n", 1)


def test_u1_u3_usage_stands_alone_and_only_on_request(serve: Serve) -> None:
    served = serve("Hello")
    plain = served.chat_stream()
    assert all(chunk["choices"] and "usage" not in chunk for chunk in plain)
    asked = served.chat_stream(stream_options={"include_usage": True})
    assert [chunk["choices"] for chunk in asked if chunk["usage"]] == [[]]
    # The client's own tests send the options without a stream.
    assert served.chat(stream_options={"include_usage": True})["usage"]


def test_l1_the_bytes_of_half_characters_are_raw(serve: Serve) -> None:
    entries = serve("😀").chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert len(entries) == 4
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "😀"
    assert all(entry["top_logprobs"] == [] for entry in entries)


def test_l5_echo_has_the_prompts_logprobs(serve: Serve) -> None:
    body = {"model": "scripted", "prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
    choice = serve("x").post("/v1/completions", body).json()["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"][1:])
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_v2_numbers_that_are_none(serve: Serve, value: str) -> None:
    raw = json.dumps({**DEFAULTS, "temperature": 1}).replace(": 1}", f": {value}}}")
    headers = {"content-type": "application/json"}
    response = serve("x").client.post(CHAT, content=raw.encode(), headers=headers)
    assert response.status_code == 400
    json.loads(response.text)


def test_v4_ids_out_of_range_with_min_tokens(serve: Serve) -> None:
    served = serve("x")
    body = {**DEFAULTS, "stop_token_ids": [151_936], "min_tokens": 1}
    assert served.post(CHAT, body).status_code == 400
    assert served.chat()["choices"]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "Be terse."}],
        [{"role": "developer", "content": "Be terse."}, {"role": "user", "content": "hi"}],
        [
            {"role": "user", "content": "hi"},
            {"role": "system", "content": "Be terse."},
            {"role": "user", "content": "hi"},
        ],
        [{"role": "assistant", "content": "Be terse."}],
    ],
)
def test_v15_developer_and_other_odd_histories(serve: Serve, messages: Any) -> None:
    served = serve("ok")
    assert served.chat(messages=messages)["choices"][0]["message"]["content"] == "ok"
    prompt = served.prompt()
    assert "Be terse." in prompt
    if messages[0]["role"] != "assistant":
        assert prompt.startswith("<|im_start|>system\nBe terse.<|im_end|>\n")


def test_c4_a_seeded_request_is_sampled_by_its_seed(serve: Serve) -> None:
    served = serve("x")
    served.chat(seed=42)
    served.chat()
    seeds = [request.params.seed for request in served.llm.requests]
    assert seeds == [42, None]


def test_earlier_reasoning_does_not_reach_the_prompt(serve: Serve) -> None:
    served = serve("ok", **ROOMY)
    for field in ("reasoning", "reasoning_content", None):
        answer = {"role": "assistant", "content": "Hello"}
        if field is None:
            answer["content"] = "<think>\nsecret\n</think>\n\nHello"
        else:
            answer[field] = "secret"
        user = {"role": "user", "content": "hi"}
        served.chat(messages=[user, answer, user])
        assert "secret" not in served.prompt()
        assert "Hello" in served.prompt()


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning": {"enabled": False}, "reasoning_effort": "high"}, False),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False),
        ({"enable_thinking": False, "reasoning": {"effort": "high"}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
def test_which_switch_wins(serve: Serve, fields: dict[str, Any], thinks: bool) -> None:
    served = serve("ok")
    served.chat(**fields)
    assert served.prompt().endswith("<think>\n\n</think>\n\n") != thinks
    params = served.llm.requests[-1].params
    assert params.temperature == (0.6 if thinks else 0.7)  # follows the state, where left out


def test_hidden_reasoning(serve: Serve) -> None:
    served = serve("<think>\nhm\n</think>\n\nHello")
    for fields in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        message = served.chat(**fields)["choices"][0]["message"]
        assert "reasoning" not in message
        assert content(served.chat_stream(**fields), "reasoning") == ""


def test_an_empty_think_block_is_no_reasoning(serve: Serve) -> None:
    message = serve("<think>\n\n</think>\n\nHello").chat()["choices"][0]["message"]
    assert message["reasoning"] is None
    assert message["content"] == "Hello"


def test_truncation_is_told(serve: Serve) -> None:
    served = serve("ok")
    response = served.post(CHAT, {**DEFAULTS, "truncate_prompt_tokens": 10})
    assert int(response.headers["x-nvcli-truncated-prompt-tokens"]) > 0
    assert response.json()["usage"]["prompt_tokens"] == 10
