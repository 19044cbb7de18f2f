"""Structured output and forced tools with a real engine: a tiny random model, whose every token is
a surprise, must still write what the grammar says, behind its thinking.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvcli.llm import LLM
from nvcli.server.config import ServerConfig
from tests.server.conftest import Served
from tests.text.tiny_tokenizer import write_tokenizer
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.torch

MODEL = "tiny"
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"$ref": "#/$defs/kind"},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["kind", "count", "tags"],
    "additionalProperties": False,
    "$defs": {"kind": {"enum": ["red", "green", "é世"]}},
}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("look", at={"enum": ["here", "there"]}),
    tool("wait", seconds={"type": "integer", "minimum": 1, "maximum": 9}),
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(scope="module", params=[False, True], ids=["depth0", "depth1"])
def served(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("tiny")

    def tokenizer(path: Path) -> None:
        write_tokenizer(path, vocab_size=300)

    write_tiny_checkpoint(
        folder,
        vocab=310,
        eos_token_id=[276, 274],
        layers=1,
        max_position_embeddings=2048,
        write_tokenizer=tokenizer,
    )
    llm = LLM(
        str(folder), device="cpu", num_blocks=512, max_num_seqs=4, run_ahead=request.param, seed=1
    )
    served = Served(llm, ServerConfig(served_model_names=(MODEL,)))
    yield served
    served.close()


def ask(served: Served, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": USER, "max_tokens": 300, "temperature": 1.5, **fields}
    choice: dict[str, Any] = served.ask("/v1/chat/completions", body)["choices"][0]
    return choice


def check(value: Any) -> None:
    assert value["kind"] in ("red", "green", "é世")
    assert 0 <= value["count"] <= 99
    assert set(value["tags"]) <= {"a", "b"}
    assert len(value["tags"]) <= 2
    assert len(value) == 3


JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize("seed", range(4))
def test_a_json_schema_is_kept_without_thinking(served: Served, seed: int) -> None:
    choice = ask(served, response_format=JSON_SCHEMA, seed=seed, enable_thinking=False)
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning"] is None
    check(json.loads(choice["message"]["content"]))


@pytest.mark.parametrize("seed", range(4))
def test_the_grammar_waits_for_the_end_of_thinking(served: Served, seed: int) -> None:
    """R9: the reasoning is free, the answer behind it is not."""
    choice = ask(
        served,
        response_format=JSON_SCHEMA,
        seed=seed,
        thinking_budget=12,
        logit_bias={str(think_id(served)): 100},
    )
    assert choice["finish_reason"] == "stop", choice
    assert choice["message"]["reasoning"] is not None
    check(json.loads(choice["message"]["content"]))


def think_id(served: Served) -> int:
    token_id = served.llm.tokenizer.id_of("<think>")
    assert token_id is not None
    return int(token_id)


def test_a_strict_schema_with_what_cannot_be_enforced_is_a_400(served: Served) -> None:
    bad = {"name": "x", "strict": True, "schema": {"type": "array", "uniqueItems": True}}
    response_format = {"type": "json_schema", "json_schema": bad}
    body = {"model": MODEL, "messages": USER, "response_format": response_format}
    response = served.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert "uniqueItems" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "objec"}},
            }
        },
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "yaml"}},
        {"guided_regex": "("},
        {"guided_json": "{"},
        {"guided_choice": []},
        {"guided_choice": [""]},
        {"guided_grammar": "start: nowhere"},
        {"guided_grammar": "root ::= ("},
        {"guided_grammar": "start: start"},
        {"guided_regex": "[^\\s\\S]"},
        {"guided_json": {"$ref": "#"}},
        {"guided_json": False},
        {"guided_json": {"enum": []}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"guided_regex": "a", "guided_choice": ["b"]},
        {"tools": [tool("x", a={"type": "nope"})]},
        {"tools": [tool("x"), tool("x")]},
        {"tools": [tool("x")], "tool_choice": {"type": "function", "function": {"name": "y"}}},
        {"tools": [tool("x")], "tool_choice": "sometimes"},
        {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
    ],
)
def test_a_malformed_grammar_is_a_400_with_the_reason(
    served: Served, fields: dict[str, Any]
) -> None:
    """J1."""
    response = served.post("/v1/chat/completions", {"model": MODEL, "messages": USER, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"]
    assert error["param"]


def test_a_schema_that_refers_to_itself_is_kept(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
        "additionalProperties": False,
    }
    choice = ask(served, structured_outputs={"json": schema}, seed=1, enable_thinking=False)
    if choice["finish_reason"] == "stop":
        json.loads(choice["message"]["content"])


def test_json_object_is_an_object_and_ends(served: Served) -> None:
    """J6: no endless white space, no list."""
    for seed in range(3):
        choice = ask(
            served, response_format={"type": "json_object"}, seed=seed, enable_thinking=False
        )
        text = choice["message"]["content"]
        assert text.lstrip().startswith("{")
        assert not re.search(r"[ \n]{60}", re.sub(r'"[^"]*"?', "", text))
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": r"[a-c]{3}/\d"}, r"[a-c]{3}/\d"),
        ({"structured_outputs": {"regex": "x|yy"}}, "x|yy"),
        ({"guided_choice": ["yes", 'no "quoted"', "a/b"]}, r'yes|no "quoted"|a/b'),
        ({"structured_outputs": {"choice": ["世界"]}}, "世界"),
        ({"guided_grammar": 'start: "a" b+\nb: "b"{1,3} "c"'}, "a(b{1,3}c)+"),
        ({"guided_grammar": 'root ::= "x" [0-9] "y"'}, r"x\dy"),
    ],
)
def test_other_grammars(served: Served, fields: dict[str, Any], pattern: str) -> None:
    choice = ask(served, **fields, seed=2, enable_thinking=False, max_tokens=60)
    assert choice["finish_reason"] in ("stop", "length")
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, choice["message"]["content"])


def test_completions_take_grammars_too(served: Served) -> None:
    body = {"model": MODEL, "prompt": "x", "guided_choice": ["one", "two"], "n": 3, "max_tokens": 9}
    choices = served.post("/v1/completions", body).json()["choices"]
    assert {choice["text"] for choice in choices} <= {"one", "two"}


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in choice["message"]["tool_calls"]
    ]


def check_call(name: str, arguments: Any) -> None:
    if name == "look":
        assert arguments in ({"at": "here"}, {"at": "there"})
    elif name == "wait":
        assert arguments.keys() == {"seconds"}
        assert 1 <= arguments["seconds"] <= 9
    else:
        assert name == "stop"
        assert arguments == {}


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_required_calls_a_tool_behind_the_thinking(served: Served, thinks: bool, seed: int) -> None:
    """T12."""
    fields: dict[str, Any] = {"enable_thinking": False}
    if thinks:
        fields = {"thinking_budget": 6, "logit_bias": {str(think_id(served)): 100}}
    choice = ask(
        served, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed, **fields
    )
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["reasoning"] is not None) == thinks
    ((name, arguments),) = calls_of(choice)
    check_call(name, arguments)


@pytest.mark.parametrize("name", ["look", "wait", "stop"])
@pytest.mark.parametrize("shape", ["named", "function_call", "allowed", "allowed_flat"])
def test_a_named_tool_is_called(served: Served, name: str, shape: str) -> None:
    reference = {"type": "function", "function": {"name": name}}
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": reference}
    if shape == "function_call":
        functions = [entry["function"] for entry in TOOLS]
        fields = {"functions": functions, "function_call": {"name": name}}
    elif shape == "allowed":
        inner = {"mode": "required", "tools": [reference]}
        fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": inner}
    elif shape == "allowed_flat":
        flat = {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": name}],
        }
        fields["tool_choice"] = flat
    choice = ask(served, **fields, parallel_tool_calls=False, enable_thinking=False)
    assert choice["finish_reason"] == "tool_calls"
    ((called, arguments),) = calls_of(choice)
    assert called == name
    check_call(called, arguments)


def test_parallel_calls_are_all_valid_and_bounded(served: Served) -> None:
    choice = ask(served, tools=TOOLS, tool_choice="required", enable_thinking=False, max_tokens=400)
    for name, arguments in calls_of(choice)[:-1]:
        check_call(name, arguments)


def test_auto_may_answer_in_text_but_a_call_is_valid(served: Served) -> None:
    call_id = served.llm.tokenizer.id_of("<tool_call>")
    choice = ask(
        served,
        tools=TOOLS,
        parallel_tool_calls=False,
        enable_thinking=False,
        logit_bias={str(call_id): 100},
    )
    assert choice["finish_reason"] == "tool_calls"
    ((name, arguments),) = calls_of(choice)
    check_call(name, arguments)
    text = ask(served, tools=TOOLS, enable_thinking=False, logit_bias={str(call_id): -100})
    assert "tool_calls" not in text["message"]
    assert text["message"]["content"]


def test_the_schema_counts_only_when_no_tool_is_called(served: Served) -> None:
    call_id = str(served.llm.tokenizer.id_of("<tool_call>"))
    fields = {"tools": TOOLS, "response_format": JSON_SCHEMA, "enable_thinking": False}
    choice = ask(served, **fields, parallel_tool_calls=False, logit_bias={call_id: 100})
    check_call(*calls_of(choice)[0])
    choice = ask(served, **fields, logit_bias={call_id: -100})
    check(json.loads(choice["message"]["content"]))


def test_a_tool_call_that_was_cut_ends_with_length(served: Served) -> None:
    """T8, in both modes."""
    fields = {"tools": TOOLS, "tool_choice": "required", "enable_thinking": False, "max_tokens": 12}
    assert ask(served, **fields)["finish_reason"] == "length"
    body = {"model": MODEL, "messages": USER, **fields}
    events = served.stream("/v1/chat/completions", body)
    reasons = [c["finish_reason"] for e in events[:-1] for c in e["choices"]]
    assert [reason for reason in reasons if reason] == ["length"]


def test_min_tokens_and_ignore_eos_do_not_break_a_grammar(served: Served) -> None:
    for fields in ({"min_tokens": 50}, {"ignore_eos": True}):
        choice = ask(served, guided_choice=["one"], enable_thinking=False, **fields)
        assert choice["message"]["content"] == "one"
        assert choice["finish_reason"] == "stop"


def test_contradicting_restrictions_end_one_request(served: Served) -> None:
    body = {"model": MODEL, "messages": USER, "guided_choice": ["one"], "enable_thinking": False}
    response = served.post("/v1/chat/completions", {**body, "allowed_token_ids": [1]})
    assert response.status_code == 400
    assert ask(served, guided_choice=["one"], enable_thinking=False)["message"]["content"] == "one"


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a{1000000}"},
        {"guided_grammar": 'root ::= "a"{100000}'},
        {"guided_grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
    ],
    ids=["expressions", "items", "nesting"],
)
def test_a_grammar_that_is_too_much_is_told_so(served: Served, fields: dict[str, Any]) -> None:
    """Also where its first mask could be made; it was blamed on other restrictions."""
    body = {"model": MODEL, "messages": USER, "enable_thinking": False, **fields}
    response = served.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert re.search("too (complex|deep)", response.json()["error"]["message"]), response.text


def test_a_grammar_that_is_too_long_is_not_converted(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llguidance import gbnf_to_lark

    monkeypatch.setattr(gbnf_to_lark, "gbnf_to_lark", lambda _: pytest.fail("it was converted"))
    text = 'root ::= "a"' + ' "a"' * 200_000
    body = {"model": MODEL, "messages": USER, "guided_grammar": text}
    response = served.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert "800,012 characters" in response.json()["error"]["message"]


def test_streams_of_constrained_answers_equal_their_bodies(served: Served) -> None:
    fields = {"response_format": JSON_SCHEMA, "seed": 5, "enable_thinking": False, "n": 2}
    body = {"model": MODEL, "messages": USER, "max_tokens": 300, "temperature": 1.5, **fields}
    whole = served.post("/v1/chat/completions", body).json()["choices"]
    events = served.stream("/v1/chat/completions", body)[:-1]
    for choice in whole:
        text = "".join(
            c["delta"].get("content") or ""
            for e in events
            for c in e["choices"]
            if c["index"] == choice["index"]
        )
        assert text == choice["message"]["content"]
        check(json.loads(text))


# --- every combination -------------------------------------------------------------------------

CHOICES: list[Any] = [
    None,
    "none",
    "auto",
    "required",
    {"type": "function", "function": {"name": "wait"}},
    *(
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": mode,
                "tools": [{"type": "function", "function": {"name": "look"}}],
            },
        }
        for mode in ("auto", "required")
    ),
]
FORMATS: list[Any] = [
    None,
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
]
COMBINATIONS = [
    {
        "enable_thinking": thinks,
        "tool_choice": choice,
        "response_format": shape,
        "parallel_tool_calls": is_parallel,
    }
    for thinks in (True, False)
    for choice in CHOICES
    for shape in FORMATS
    for is_parallel in (True, False)
]


def check_combination(served: Served, fields: dict[str, Any], seed: int) -> None:
    """What was asked for holds, and the stream is the body, to the last log-probability."""
    choice, shape = fields["tool_choice"], fields["response_format"]
    body = {
        "model": MODEL,
        "messages": USER,
        "tools": TOOLS,
        "max_tokens": 300,
        "thinking_budget": 8,
        "seed": seed,
        "logprobs": True,
        "top_logprobs": 2,
        **fields,
    }
    whole = served.post("/v1/chat/completions", body)
    assert whole.status_code == 200, whole.text
    reply = whole.json()["choices"][0]
    message, end = reply["message"], reply["finish_reason"]
    calls = message.get("tool_calls") or []
    mode = choice["type"] if isinstance(choice, dict) else choice
    if mode == "allowed_tools":
        mode = choice["allowed_tools"]["mode"]
    if mode == "none":
        assert not calls
    if mode in ("required", "function") and end != "length":
        assert calls
        assert end == "tool_calls"
    for made in calls if end != "length" else ():
        assert isinstance(json.loads(made["function"]["arguments"]), dict)
    if isinstance(choice, dict):
        allowed = "wait" if choice["type"] == "function" else "look"
        assert {made["function"]["name"] for made in calls} <= {allowed}
    if not fields["parallel_tool_calls"]:
        assert len(calls) <= 1
    if end == "stop" and not calls and shape is not None and shape["type"] != "text":
        assert isinstance(json.loads(message["content"]), dict)
    content = ""
    logprobs: list[Any] = []
    ends, arguments = [], {}
    for event in served.stream("/v1/chat/completions", body)[:-1]:
        (part,) = event["choices"]
        content += part["delta"].get("content") or ""
        for call in part["delta"].get("tool_calls", ()):
            known = arguments.get(call["index"], "")
            arguments[call["index"]] = known + call["function"]["arguments"]
        logprobs += (part["logprobs"] or {"content": []})["content"]
        ends += [part["finish_reason"]] if part["finish_reason"] else []
    assert content == (message["content"] or "")
    assert list(arguments.values()) == [made["function"]["arguments"] for made in calls]
    assert ends == [end]
    others = reply["logprobs"]["content"]
    assert [lp["bytes"] for lp in logprobs] == [lp["bytes"] for lp in others]
    for one, other in zip(logprobs, others, strict=True):  # prompts from the cache round otherwise
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
    if "\ufffd" not in content:  # a random model also writes bytes that are no text
        assert b"".join(bytes(lp["bytes"]) for lp in logprobs) == content.encode()


@pytest.mark.parametrize("number", range(0, len(COMBINATIONS), 19))
def test_combinations_of_thinking_tools_and_format(served: Served, number: int) -> None:
    check_combination(served, COMBINATIONS[number], number)


@pytest.mark.soak
def test_every_combination_of_thinking_tools_and_format(served: Served) -> None:
    for seed in range(3):
        for fields in COMBINATIONS:
            check_combination(served, fields, seed)
