"""What clients send, and what a chat template is given for it."""

from __future__ import annotations

from typing import Any

import pytest

from nvcli.errors import TemplateError
from nvcli.text import parse_message, parse_messages
from nvcli.text.messages import normalize_messages, split_think_block
from nvcli.types import Message, ToolCall


def normalize(*raw: dict[str, Any]) -> list[dict[str, Any]]:
    return normalize_messages(parse_messages(list(raw)))


def calling(*ids: str) -> dict[str, Any]:
    calls = [{"id": i, "function": {"name": f"f_{i}", "arguments": "{}"}} for i in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize("content", [None, "", []])
def test_content_that_is_not_there_is_empty_text(content: object) -> None:
    raw = {"role": "assistant", "content": content}
    assert normalize(raw) == [{"role": "assistant", "content": ""}]
    assert normalize({"role": "user"}) == [{"role": "user", "content": ""}]


def test_text_parts_are_joined_with_nothing_between() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "input_text", "text": "b\n"},
        {"type": "refusal", "refusal": "no"},
    ]
    assert normalize({"role": "user", "content": parts})[0]["content"] == "ab\nno"
    assert normalize({"role": "assistant", "refusal": "no"})[0]["content"] == "no"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", None, 3, []])
def test_other_parts_are_refused_by_place(kind: object) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": kind}]
    with pytest.raises(TemplateError, match=r"messages\[1\]\.content\[1\]") as caught:
        normalize({"role": "user", "content": "x"}, {"role": "user", "content": parts})
    assert caught.value.param == "messages[1].content[1]"
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        (None, "messages"),
        ({}, "messages"),
        (["x"], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": "robot"}], "messages[0].role"),
        ([{"role": ["user"]}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "reasoning": 3}], "messages[0].reasoning"),
        ([{"role": "assistant", "tool_calls": 3}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [3]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"type": "custom"}]}],
            "messages[0].tool_calls[0].type",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([], "messages"),
    ],
)
def test_faults_name_their_place(raw: object, place: str) -> None:
    with pytest.raises(TemplateError) as caught:
        normalize_messages(parse_messages(raw))
    assert caught.value.param == place
    assert str(caught.value).startswith(f"{place}: ")
    assert len(str(caught.value)) < 300


def test_system_and_developer_become_one_block_at_the_front() -> None:
    turns = normalize(
        {"role": "developer", "content": "one"},
        {"role": "user", "content": "q"},
        {"role": "system", "content": [{"type": "text", "text": "two"}]},
        {"role": "user", "content": "r"},
    )
    assert [turn["role"] for turn in turns] == ["system", "user", "user"]
    assert turns[0]["content"] == "one\n\ntwo"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_both_names_of_reasoning(key: str) -> None:
    turns = normalize({"role": "assistant", "content": "a", key: "r"})
    assert turns == [{"role": "assistant", "content": "a", "reasoning_content": "r"}]


@pytest.mark.parametrize(
    ("content", "reasoning", "rest"),
    [
        ("<think>\nr\n</think>\n\na", "r", "a"),
        ("\n<think>r</think>a", "r", "a"),
        ("<think>\n\n</think>\n\na", "", "a"),
        ("<think>\ncut sho", "cut sho", ""),
        ("<think>r</think>a </think> b", "r", "a </think> b"),
        ("a <think> b </think>", None, "a <think> b </think>"),
        ("plain", None, "plain"),
    ],
)
def test_a_think_block_in_content_is_split_off(
    content: str, reasoning: str | None, rest: str
) -> None:
    assert split_think_block(content) == (reasoning, rest)
    turn = normalize({"role": "assistant", "content": content})[0]
    assert turn["content"] == rest
    assert turn.get("reasoning_content") == reasoning


def test_a_think_block_beside_given_reasoning_is_dropped() -> None:
    raw = {"role": "assistant", "content": "<think>x</think>a", "reasoning_content": "given"}
    assert normalize(raw)[0] == {"role": "assistant", "content": "a", "reasoning_content": "given"}


def test_a_continued_message_is_left_as_it_is() -> None:
    message = Message("assistant", "<think>\nso far")
    turns = normalize_messages([message], continue_final_message=True)
    assert turns == [{"role": "assistant", "content": "<think>\nso far"}]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"a": [1, "é"]}', {"a": [1, "é"]}),
        ("", {}),
        (" \n", {}),
        ("[1]", "[1]"),
        ("not json", "not json"),
        ('{"a": ' + "9" * 5000 + "}", '{"a": ' + "9" * 5000 + "}"),
        ("[" * 100_000, "[" * 100_000),
    ],
    ids=["object", "empty", "blank", "array", "text", "long number", "deep"],
)
def test_history_arguments(arguments: str, value: object) -> None:
    message = Message("assistant", tool_calls=(ToolCall(0, "a", "f", arguments),))
    call = normalize_messages([message])[0]["tool_calls"][0]
    assert call == {"id": "a", "type": "function", "function": {"name": "f", "arguments": value}}


def test_arguments_may_be_sent_as_an_object() -> None:
    function = {"name": "f", "arguments": {"x": "é"}}
    message = parse_message({"role": "assistant", "tool_calls": [{"function": function}]})
    assert message.tool_calls == (ToolCall(0, "", "f", '{"x": "é"}'),)


def test_tool_messages_follow_their_calls() -> None:
    turns = normalize(
        calling("a", "b"),
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "1"}]},
    )
    assert [turn.get("tool_call_id") for turn in turns] == [None, "b", "a"]
    assert turns[2]["content"] == "1"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool", "content": "x"}],
        [{"role": "tool", "content": "x", "tool_call_id": "a"}],
        [calling("a"), {"role": "tool", "content": "x", "tool_call_id": "wrong"}],
        [{"role": "tool", "content": "x", "tool_call_id": "a"}, calling("a")],
    ],
)
def test_a_tool_message_without_its_call_is_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(TemplateError, match=r"messages\[\d\]\.tool_call_id"):
        normalize(*messages)


def test_deprecated_functions_become_tools() -> None:
    turns = normalize(
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "1"},
    )
    assert turns[1] == {"role": "tool", "content": "1", "name": "f"}
    with pytest.raises(TemplateError, match="no earlier call of function 'g'"):
        normalize({"role": "function", "name": "g", "content": "1"})
