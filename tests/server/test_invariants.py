"""The invariants of streams and bodies over random answers, in both modes; every answer is a list
of ids that a scripted device gives, so each check is exact.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvcli.server.config import ServerConfig
from nvcli.text import Tokenizer
from tests.server.conftest import DEFAULTS, Served
from tests.server.scripted_llm import ScriptedLLM

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
WORDS = [
    "hello",
    " the",
    "\n",
    "\n\n",
    "世界",
    "\U0001f600",
    "👩🏽‍🚀",
    "<thi",
    "STOP",
    "ST",
    "é",
    "</think",
    "{",
]
CALLS = [
    '<tool_call>\n{"name": "look", "arguments": {"at": "<tool_call> é世"}}\n</tool_call>',
    '<tool_call>{"arguments": {"a": [1, {"b": "}"}]}, "name": "look"}</tool_call>',
    '<tool_call>\n{"name": "look"}\n</tool_call>',
    '<tool_call>\n{"name": "look", "arguments": "{\\"x\\": 1}"}\n</tool_call>',
    "<tool_call>\nnot json\n</tool_call>",
    '<tool_call>\n{"name": "look", "arguments": {"a": ',
]
words = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)


@st.composite
def answers(draw: st.DrawFn) -> str:
    """Thinking or not, text, calls between texts, sometimes a second think tag in the text."""
    text = ""
    if draw(st.booleans()):
        text += (
            "<think>\n" + draw(words) + draw(st.sampled_from(["\n</think>\n\n", "</think>", ""]))
        )
    for _ in range(draw(st.integers(0, 3))):
        text += draw(words)
        if draw(st.booleans()):
            text += draw(st.sampled_from(CALLS))
    return text + draw(st.sampled_from(["", "<think>", "end"]))


class Rig:
    """One server whose next answer can be set."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.answer: list[int] = []
        self.tokenizer = tokenizer
        llm = ScriptedLLM(tokenizer, lambda _: self.answer)
        self.served = Served(llm, ServerConfig())

    def say(self, token_ids: list[int]) -> None:
        self.answer = token_ids


@pytest.fixture(scope="module")
def rig(tokenizer: Tokenizer) -> Any:
    rig = Rig(tokenizer)
    yield rig
    rig.served.close()


def cut(token_ids: list[int], bytes_after: int) -> list[int]:
    """Ids with raw bytes of no character behind them."""
    return token_ids + [0xE4] * bytes_after


def fold(chunks: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """The choices of a stream, with the rules of streams checked on the way."""
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len({chunk["created"] for chunk in chunks}) == 1
    folded: list[dict[str, Any]] = [
        {"role": [], "content": "", "reasoning": "", "calls": {}, "finish": [], "logprobs": []}
        for _ in range(n)
    ]
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        for choice in chunk["choices"]:
            assert {"index", "delta", "logprobs", "finish_reason"} <= set(choice)
            into, delta = folded[choice["index"]], choice["delta"]
            assert not into["finish"], "something came after the finish reason"
            assert into["role"] or "role" in delta, "the role comes first"
            if "role" in delta:
                into["role"].append(delta["role"])
            into["content"] += delta.get("content") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            into["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", ()):
                seen = into["calls"].get(call["index"])
                if seen is None:
                    assert call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    into["calls"][call["index"]] = {**call["function"], "id": call["id"]}
                else:
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                    seen["arguments"] += call["function"]["arguments"]
            if choice["logprobs"] is not None:
                into["logprobs"] += choice["logprobs"]["content"]
            if choice["finish_reason"] is not None:
                assert delta == {}
                into["finish"].append(choice["finish_reason"])
    return folded


@settings(max_examples=150)
@given(
    answer=answers(),
    tail=st.integers(0, 2),
    n=st.integers(1, 2),
    has_tools=st.booleans(),
    stop=st.sampled_from([None, "STOP", ["STOP", "世"]]),
    max_tokens=st.sampled_from([None, 3, 9, 30]),
    has_logprobs=st.booleans(),
)
def test_a_stream_folded_is_the_body(
    rig: Rig,
    answer: str,
    tail: int,
    n: int,
    has_tools: bool,
    stop: Any,
    max_tokens: int | None,
    has_logprobs: bool,
) -> None:
    rig.say(cut(rig.tokenizer.encode(answer), tail))
    fields: dict[str, Any] = {"n": n, "seed": 1, "stream_options": {"include_usage": True}}
    if has_tools:
        fields["tools"] = [TOOL]
    if stop is not None:
        fields["stop"] = stop
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    if has_logprobs:
        fields |= {"logprobs": True, "top_logprobs": 2}
    body = rig.served.chat(**fields)
    chunks = rig.served.chat_stream(**fields)

    usage = chunks.pop()
    assert usage["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks)
    assert {**usage["usage"], "prompt_tokens_details": None} == {
        **body["usage"],
        "prompt_tokens_details": None,
    }
    counts = body["usage"]
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
    prompt_ids = rig.served.llm.prompts[-1]
    assert counts["prompt_tokens"] == len(prompt_ids)

    assert [choice["index"] for choice in body["choices"]] == list(range(n))
    for folded, choice in zip(fold(chunks, n), body["choices"], strict=True):
        message = choice["message"]
        assert folded["role"] == ["assistant"]
        assert folded["finish"] == [choice["finish_reason"]]
        assert choice["finish_reason"] in ("stop", "length", "tool_calls")
        assert folded["content"] == (message["content"] or "")
        assert folded["reasoning"] == (message["reasoning"] or "")
        calls = message.get("tool_calls", [])
        assert [c["arguments"] for c in folded["calls"].values()] == [
            call["function"]["arguments"] for call in calls
        ]
        if choice["finish_reason"] == "tool_calls":
            for call in calls:
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
                assert call["function"]["name"] == "look"
        if has_logprobs:
            assert folded["logprobs"] == choice["logprobs"]["content"]
            for entry in choice["logprobs"]["content"]:
                assert entry["logprob"] <= 0
                assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
            data = b"".join(bytes(e["bytes"]) for e in choice["logprobs"]["content"])
            text = message["content"] or ""
            is_exact = stop is None and not has_tools and "\ufffd" not in text
            if is_exact:
                assert data.decode() == text
        if tail == 0 and choice["finish_reason"] != "length":  # at max_tokens, or the context's end
            assert "\ufffd" not in folded["content"] + folded["reasoning"]


@settings(max_examples=30)
@given(
    texts=st.lists(words.filter(bool), min_size=1, max_size=3),
    n=st.integers(1, 2),
    echo=st.booleans(),
    logprobs=st.sampled_from([None, 0, 3]),
)
def test_completions_stream_and_body_agree(
    rig: Rig, texts: list[str], n: int, echo: bool, logprobs: int | None
) -> None:
    rig.say(rig.tokenizer.encode("A 世 b<think> 😀"))
    fields: dict[str, Any] = {"model": "scripted", "prompt": texts, "n": n, "echo": echo}
    fields |= {"max_tokens": 40, "seed": 3}
    if logprobs is not None:
        fields["logprobs"] = logprobs
    body = rig.served.ask("/v1/completions", fields)
    events = rig.served.stream("/v1/completions", fields)
    assert events.pop() == "[DONE]"
    assert len(body["choices"]) == len(texts) * n
    for index, choice in enumerate(body["choices"]):
        assert choice["index"] == index
        prompt = texts[index // n]
        assert choice["text"] == (prompt if echo else "") + "A 世 b<think> 😀"
        parts = [c for e in events for c in e["choices"] if c["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == ["stop"]
        assert parts[-1]["finish_reason"] == "stop"
        if logprobs is not None:
            merged: dict[str, list[Any]] = {key: [] for key in choice["logprobs"]}
            for part in parts:
                for key, values in (part["logprobs"] or {}).items():
                    merged[key] += values
            assert merged == choice["logprobs"]
            if echo:
                assert choice["logprobs"]["token_logprobs"][0] is None
                assert choice["logprobs"]["top_logprobs"][0] is None
            ids = rig.tokenizer.encode(prompt) if echo else []
            ids = ids + rig.tokenizer.encode("A 世 b<think> 😀")
            assert len(choice["logprobs"]["tokens"]) == len(ids)
            offset = 0
            decoded = b""
            for token_id, where in zip(ids, choice["logprobs"]["text_offset"], strict=True):
                assert where == len(decoded.decode("utf-8", "ignore"))
                decoded += rig.tokenizer.token_bytes(token_id)
                offset = where
            assert offset <= len(choice["text"])


@settings(max_examples=50)
@given(data=st.binary(max_size=200))
def test_any_bytes_as_a_body_give_a_json_error(rig: Rig, data: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        response = rig.served.post_text(path, data)
        assert 200 <= response.status_code < 500
        assert isinstance(response.json(), dict)
        assert len(response.content) < 8192


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = [
    "messages",
    "prompt",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "seed",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "response_format",
    "tools",
    "tool_choice",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "chat_template_kwargs",
    "enable_thinking",
    "thinking",
    "reasoning",
    "reasoning_effort",
    "metadata",
    "stream_options",
    "truncate_prompt_tokens",
    "truncation_side",
    "priority",
    "cache_salt",
    "echo",
    "suffix",
    "best_of",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "presence_penalty",
    "prompt_logprobs",
    "user",
    "functions",
    "function_call",
    "modalities",
    "audio",
    "store",
    "service_tier",
    "verbosity",
    "tokens",
    "content",
]


@settings(max_examples=60)
@given(name=st.sampled_from(FIELDS), value=json_values)
def test_any_value_of_any_field_is_answered(rig: Rig, name: str, value: Any) -> None:
    rig.say(rig.tokenizer.encode("ok"))
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        question = DEFAULTS if "chat" in path else {"model": "scripted", "prompt": "x"}
        body = {**question, "max_tokens": 4, name: value}
        response = rig.served.post_text(path, json.dumps(body))
        assert response.status_code in (200, 400, 404), response.text
        if "text/event-stream" not in response.headers["content-type"]:
            assert isinstance(response.json(), dict)
    rig.served.wait_idle()
