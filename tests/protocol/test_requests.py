"""Requests: each known field is read, or refused by name; nothing else raises."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvcli.batch.endpoints import read_embedding
from nvcli.cli.chat import check_sampling as check_cli_sampling
from nvcli.errors import InvalidParameterError, NvcliError, TemplateError
from nvcli.protocol import (
    GENERATION_FIELDS,
    ChatRequest,
    UnsupportedFieldError,
    parse_chat,
    parse_completion,
)
from nvcli.protocol.fields import Fields
from nvcli.protocol.messages import parse_messages_request
from nvcli.protocol.pooling import parse_embedding, parse_rerank, parse_score
from nvcli.protocol.responses import parse_responses
from nvcli.repl.settings import parse_setting
from nvcli.types import SamplingParams

USER = [{"role": "user", "content": "hi"}]
SCORE = {"queries": "a", "documents": "b"}
TEXTS = {"text_1": "a", "text_2": "b"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> ChatRequest:
    return parse_chat({"model": "m", "messages": USER, **fields})


def test_sampling_fields_reach_sampling() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "seed": 7,
        "n": 3,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "prompt_logprobs": 2,
    }
    assert chat(**fields, max_tokens=20).sampling == {**fields, "max_tokens": 20}


def test_only_what_was_given_is_returned() -> None:
    assert chat(temperature=None, stop=None, n=None).sampling == {}


def test_stop_and_bias_and_ids() -> None:
    request = chat(stop="x", logit_bias={"5": -100, "7": 2.5}, stop_token_ids=[1, 2])
    assert request.sampling == {
        "stop": ("x",),
        "logit_bias": {5: -100.0, 7: 2.5},
        "stop_token_ids": (1, 2),
    }
    assert chat(stop=["a"] * 16).sampling["stop"] == ("a",) * 16


def test_token_limits() -> None:
    assert chat(max_tokens=5).sampling["max_tokens"] == 5
    assert chat(max_completion_tokens=5, max_tokens=5).sampling["max_tokens"] == 5
    assert chat(max_tokens=5.0).sampling["max_tokens"] == 5
    with pytest.raises(InvalidParameterError, match="contradicts max_tokens"):
        chat(max_completion_tokens=5, max_tokens=6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 1.5),
        ("top_k", -2),
        ("n", 0),
        ("n", 129),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 17),
        ("stop", [1]),
        ("stop", "x" * 5000),
        ("seed", 2**64),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 5),
        ("min_p", 2),
        ("messages", []),
        ("messages", USER * 10_001),
        ("messages", "hi"),
        ("messages", None),
        ("model", 5),
        ("tools", []),
        ("tools", [{}]),
        ("tools", [{"type": "function", "function": {}}]),
        ("tool_choice", "auto"),
        ("top_logprobs", 3),
        ("reasoning_effort", "huge"),
        ("metadata", {str(i): "x" for i in range(17)}),
        ("metadata", {"a": 1}),
        ("response_format", {"type": "xml"}),
        ("continue_final_message", True),
        ("stream", "yes"),
        ("allowed_token_ids", []),
    ],
)
def test_bad_values_name_their_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        chat(**{field: value})
    assert caught.value.param is not None
    assert caught.value.param.startswith(field)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("documents", [{}]),
        ("chat_template", "{{ 1 }}"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("stream_interval", 5),
    ],
)
def test_what_is_not_there_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        chat(**{field: value})
    assert (caught.value.param, caught.value.code) == (field, "unsupported_field")


def test_tools() -> None:
    assert chat(tools=[TOOL]).tools.is_active
    assert not chat(tools=[TOOL], tool_choice="none").tools.is_active
    assert not chat(tool_choice="none").tools.is_active
    assert chat(functions=[{"name": "f"}]).tools.definitions == (
        {"type": "function", "function": {"name": "f"}},
    )
    with pytest.raises(UnsupportedFieldError, match=r"tools\[0\].type"):
        chat(tools=[{"type": "custom", "custom": {}}])


def test_media_parts_are_refused_by_place() -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(TemplateError) as caught:
        parse_chat({"messages": [*USER, {"role": "user", "content": parts}]})
    assert caught.value.param == "messages[1].content[1]"


def test_unknown_fields_are_listed_or_refused() -> None:
    assert chat(frobnicate=1, user="u", store=True).ignored_fields == ("frobnicate",)
    free = {"metadata": {"k": "v"}, "logit_bias": {"1": 1}, "chat_template_kwargs": {"k": "v"}}
    inner = {
        "stream_options": {"include_usage": True, "inculde_usage": True},
        "reasoning": {"effort": "low", "colour": "red"},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {}, "y": 1},
        },
    }
    assert set(chat(**free, **inner).ignored_fields) == {
        "stream_options.inculde_usage",
        "reasoning.colour",
        "response_format.json_schema.y",
    }
    with pytest.raises(InvalidParameterError, match=r"unknown field stream_options\.z"):
        parse_chat({"messages": USER, "stream_options": {"z": 1}}, is_strict=True)
    with pytest.raises(InvalidParameterError, match="unknown field frobnicate"):
        parse_chat({"messages": USER, "frobnicate": 1}, is_strict=True)


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_chat, {"messages": USER}),
        (parse_completion, {"prompt": "a"}),
        (parse_messages_request, {"messages": USER, "max_tokens": 1}),
        (parse_responses, {"input": "a"}),
        (partial(parse_embedding, hidden_size=64), {"input": "a"}),
        (partial(parse_rerank, returns_documents=True), {"query": "a", "documents": ["b"]}),
        (parse_score, {"text_1": "a", "text_2": "b"}),
    ],
)
def test_no_field_is_read_after_the_unknown_are_told(
    parse: Any, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = False
    get, unknown = Fields.get, Fields.unknown

    def get_before(fields: Fields, field: str) -> Any:
        assert not told, field
        return get(fields, field)

    def tell(fields: Fields, *, is_strict: bool = False) -> tuple[str, ...]:
        nonlocal told
        told = True
        return unknown(fields, is_strict=is_strict)

    monkeypatch.setattr(Fields, "get", get_before)
    monkeypatch.setattr(Fields, "unknown", tell)
    parse({**body, "stream_options": {"include_obfuscation": True}}, is_strict=False)
    assert told


def test_an_option_of_responses_is_known_to_a_strict_server() -> None:
    options = {"stream_options": {"include_obfuscation": True}}
    assert parse_responses({"input": "a", **options}, is_strict=True).include_obfuscation


@pytest.mark.parametrize("body", [None, [], 5, "x", True])
def test_a_body_is_an_object(body: Any) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(InvalidParameterError, match="must be a JSON object"):
            parse(body)


# --- thinking ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "enabled", "budget"),
    [
        ({}, None, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ({"enable_thinking": True}, True, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, True, 9),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, False, None),
        ({"thinking": False}, False, None),
        ({"reasoning": {"enabled": False}}, False, None),
        ({"reasoning": {"effort": "none"}}, False, None),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "low"}, True, 1024),
        ({"reasoning_effort": "high"}, True, None),
        ({"enable_thinking": False, "reasoning_effort": "high"}, False, None),
        ({"enable_thinking": True, "reasoning_effort": "none"}, True, None),
        ({"thinking_budget": 3}, None, 3),
        ({"thinking_token_budget": 4, "reasoning_effort": "low"}, True, 4),
    ],
)
def test_the_most_specific_switch_wins(
    fields: dict[str, Any], enabled: bool | None, budget: int | None
) -> None:
    request = chat(**fields)
    assert (request.thinking.enabled, request.thinking.budget) == (enabled, budget)
    assert request.sampling.get("thinking_budget") == budget


def test_contradicting_switches() -> None:
    with pytest.raises(InvalidParameterError, match="thinking contradicts enable_thinking"):
        chat(enable_thinking=True, thinking=False)


def test_hidden_reasoning() -> None:
    assert not chat(include_reasoning=False).thinking.is_shown
    assert not chat(reasoning={"exclude": True}).thinking.is_shown


def test_other_template_variables_are_kept() -> None:
    request = chat(chat_template_kwargs={"enable_thinking": True, "mood": "good"})
    assert request.template_variables == {"mood": "good"}


# --- completions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [1]], ("a", (1,))),
    ],
)
def test_prompts(prompt: Any, prompts: Any) -> None:
    assert parse_completion({"prompt": prompt}).prompts == prompts


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], None, 5, {}, [1.5], [True], [[1, "a"]]])
def test_bad_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidParameterError, match="prompt"):
        parse_completion({"prompt": prompt})


LIMITS = {
    "max_tokens": (
        lambda **more: chat(**more),
        lambda **more: parse_completion({"prompt": "a", **more}),
        lambda **more: parse_messages_request({"messages": USER, **more}),
        lambda **more: check_cli_sampling(more),
        lambda **more: parse_setting("max_tokens", str(more["max_tokens"])),
    ),
    "max_completion_tokens": (
        lambda **more: chat(**more),
        lambda **more: parse_completion({"prompt": "a", **more}),
    ),
    "max_output_tokens": (lambda **more: parse_responses({"input": "a", **more}),),
}


@pytest.mark.parametrize("limit", [0, -1, -(2**70)])
def test_a_limit_has_one_bound_and_one_message(limit: int) -> None:
    for name, readers in LIMITS.items():
        for read in readers:
            with pytest.raises(InvalidParameterError) as caught:
                read(**{name: limit})
            expected = f"{name} must be a whole number of at least 1, got {limit}"
            assert (caught.value.message, caught.value.param) == (expected, name)
            read(**{name: 1})
    if limit:  # 0 computes a prompt alone
        with pytest.raises(InvalidParameterError, match=r"^max_tokens .* at least 1, got -"):
            SamplingParams(max_tokens=limit)


def complete(**fields: Any) -> object:
    return parse_completion({"prompt": "a", **fields})


read_rerank = partial(parse_rerank, is_strict=False, returns_documents=False)

WHOLE_NUMBERS: list[tuple[Callable[..., Any], str]] = [
    *((chat, name) for name in ("max_tokens", "max_completion_tokens", "top_k", "min_tokens")),
    *((chat, name) for name in ("seed", "n", "prompt_logprobs", "priority", "thinking_budget")),
    *((complete, name) for name in ("max_tokens", "best_of", "logprobs")),
    (complete, "truncate_prompt_tokens"),
    (lambda **more: chat(logprobs=True, **more), "top_logprobs"),
    (lambda **more: parse_responses({"input": "a", **more}), "max_output_tokens"),
    (lambda **more: parse_messages_request({"messages": USER, "max_tokens": 9, **more}), "top_k"),
    (lambda **more: parse_embedding({"input": "a", **more}, hidden_size=64), "dimensions"),
    (lambda **more: read_rerank({"query": "a", "documents": ["b"], **more}), "top_n"),
]


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (math.inf, "a finite number"),  # 1e400 in JSON
        (-math.inf, "a finite number"),
        (math.nan, "a finite number"),
        (5.5, "a whole number, got 5.5"),
        ("5", "a whole number, got text"),
        (True, "a whole number, got a boolean"),
        ([5], "a whole number, got a list"),
    ],
)
def test_what_is_no_whole_number_is_told_as_what_it_is(value: object, rule: str) -> None:
    for read, name in WHOLE_NUMBERS:
        with pytest.raises(InvalidParameterError) as caught:
            read(**{name: value})
        assert (caught.value.message, caught.value.param) == (f"{name} must be {rule}", name)
    for name in ("stop_token_ids", "allowed_token_ids"):
        with pytest.raises(InvalidParameterError) as caught:
            chat(**{name: [1, value]})
        assert caught.value.message == f"{name}[1] must be {rule}"


def test_a_whole_number_may_be_written_as_a_float() -> None:
    for read, name in WHOLE_NUMBERS:
        low = 32.0 if name == "dimensions" else 1.0
        assert read(**{name: low}) == read(**{name: int(low)})
    ids = chat(stop_token_ids=[5.0, 6]).sampling["stop_token_ids"]
    assert (ids, {type(token_id) for token_id in ids}) == ((5, 6), {int})
    assert chat(max_tokens=1e20) == chat(max_tokens=10**20)
    for huge in (1e20, 10**20):
        with pytest.raises(
            InvalidParameterError, match=r"seed must be .*, got 100000000000000000000$"
        ):
            chat(seed=huge)
    with pytest.raises(InvalidParameterError, match=r"^priority must be from -2147483648 to 2147"):
        chat(priority=2**40)


@pytest.mark.parametrize("asks", [{"echo": True}, {"prompt_logprobs": 0}])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_request_about_the_prompt_may_ask_for_nothing_else(
    asks: dict[str, Any], name: str
) -> None:
    assert chat(**asks, **{name: 0}).sampling["max_tokens"] == 0
    assert parse_completion({"prompt": "a", **asks, name: 0}).sampling["max_tokens"] == 0
    with pytest.raises(InvalidParameterError, match=f"^{name} must be .* at least 1, got -1$"):
        chat(**asks, **{name: -1})


@pytest.mark.parametrize(
    ("parse", "body", "other"),
    [
        (parse_chat, {"messages": USER}, {"prompt": "b"}),
        (parse_chat, {"messages": USER}, {"input": "b"}),
        (parse_completion, {"prompt": "a"}, {"messages": USER}),
        (parse_completion, {"prompt": "a"}, {"input": "b"}),
        (parse_messages_request, {"messages": USER, "max_tokens": 1}, {"prompt": "b"}),
        (parse_responses, {"input": "a"}, {"messages": USER}),
        (read_embedding, {"input": "a"}, {"messages": USER}),
        (read_embedding, {"input": "a"}, {"content": "b"}),
        (read_embedding, {"messages": USER}, {"prompt": "b"}),
        (partial(parse_score, is_strict=False), SCORE, {"text_1": "c"}),
        (read_embedding, {"content": "a"}, {"prompt": "b"}),
        (partial(parse_score, is_strict=False), TEXTS, {"documents": ["c"]}),
    ],
)
def test_two_questions_in_one_request(
    parse: Callable[[object], object], body: dict[str, Any], other: dict[str, Any]
) -> None:
    """Only one of them would be answered, without a word about the other."""
    (name,) = other
    pair = {*body, name}
    with pytest.raises(InvalidParameterError, match=r"cannot be given beside") as caught:
        parse({**body, **other})
    assert caught.value.param in pair
    assert sum(key in caught.value.message.split() for key in pair) >= 2
    parse({**body, name: None})


def test_completion_fields() -> None:
    request = parse_completion({"prompt": "a", "echo": True, "logprobs": 2, "max_tokens": 0})
    assert request.sampling == {"logprobs": 2, "prompt_logprobs": 2, "max_tokens": 0}
    for fields in [
        {"max_tokens": 0},
        {"best_of": 1, "n": 2},
        {"best_of": 2, "stream": True},
        {"logprobs": 21},
    ]:
        with pytest.raises(InvalidParameterError):
            parse_completion({"prompt": "a", **fields})
    with pytest.raises(UnsupportedFieldError, match="suffix"):
        parse_completion({"prompt": "a", "suffix": "b"})


# --- anything at all -----------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*GENERATION_FIELDS, "messages", "prompt", "x"]), JSON))
def test_no_body_raises_anything_else(body: dict[str, Any]) -> None:
    errors = []
    for parse, question in ((parse_chat, {"messages": USER}), (parse_completion, {"prompt": "a"})):
        for given_body in (body, {**body, **question}):
            try:
                parse(given_body)
            except NvcliError as error:
                errors.append(error)
    for error in errors:
        assert error.http_status == 400
        assert len(str(error)) < 8000
        assert "\n" not in str(error)
