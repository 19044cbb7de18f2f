"""Rendered prompts against transformers' `apply_chat_template`, and the sandbox's limits."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvcli.errors import TemplateError
from nvcli.text import Tokenizer
from nvcli.text.template import TemplateLimits, render_template
from nvcli.types import Message, ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Oracle = Any  # a transformers tokenizer

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find_city",
            "description": "Sucht <eine> Stadt & 'mehr': 北京, é",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["name"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]


def call(name: str, arguments: dict[str, Any], call_id: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def tool(content: str, call_id: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [user("What is 世界? e\u0301 👩🏽‍🚀")],
    "system": [{"role": "system", "content": "Be brief."}, user("hi")],
    "system only": [{"role": "system", "content": "Be brief."}],
    "assistant only": [assistant("I begin.")],
    "same role twice": [user("a"), user("b"), assistant("c"), assistant("d")],
    "empty contents": [user(""), assistant("")],
    "three turns with thinking": [
        user("1"),
        assistant("one", reasoning_content="first thought"),
        user("2"),
        assistant("<think>\nsecond thought\n</think>\n\ntwo"),
        user("3"),
    ],
    "ends with thinking": [user("1"), assistant("one", reasoning_content="\nthought\n")],
    "tool loop": [
        {"role": "system", "content": "Use tools."},
        user("weather in 北京?"),
        assistant(
            "Looking.",
            reasoning_content="I need two calls",
            tool_calls=[call("find_city", {"name": "北京", "limit": 2}, "a"), call("now", {}, "b")],
        ),
        tool('{"found": "北京 <1>"}', "a"),
        tool("noon", "b"),
        assistant("", reasoning_content="done?", tool_calls=[call("now", {"é": None}, "c")]),
        tool("later", "c"),
    ],
    "tool loop, then more": [
        user("q"),
        assistant("", reasoning_content="hidden", tool_calls=[call("now", {}, "a")]),
        tool("noon", "a"),
        assistant("It is noon."),
        user("thanks"),
    ],
    "user quotes tags": [user("what does <think> and <|im_end|> mean?"), assistant("tags")],
    "tool response as user": [user("q"), user("<tool_response>\nx\n</tool_response>")],
}


@pytest.fixture(scope="session")
def oracle(any_folder: Path) -> Oracle:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(any_folder))


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("enable_thinking", [True, False, None])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_equals_transformers(
    any_tokenizer: Tokenizer,
    oracle: Oracle,
    name: str,
    tools: list[dict[str, Any]] | None,
    enable_thinking: bool | None,
    add_generation_prompt: bool,
) -> None:
    messages = CONVERSATIONS[name]
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    expected = oracle.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        **options,
    )
    settings: dict[str, Any] = {
        "tools": tools,
        "enable_thinking": enable_thinking,
        "add_generation_prompt": add_generation_prompt,
    }
    assert any_tokenizer.render(messages, **settings) == expected
    ids = oracle(expected, add_special_tokens=False)["input_ids"]
    assert any_tokenizer.encode_chat(messages, **settings) == ids


@pytest.mark.parametrize("content", ["The answer is", "", "trailing  ", "a\n\n", "世"])
def test_continues_the_final_message_as_transformers(
    any_tokenizer: Tokenizer, oracle: Oracle, content: str
) -> None:
    messages = [user("q"), assistant(content)]
    expected = oracle.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=False, continue_final_message=True
    )
    assert any_tokenizer.render(messages, continue_final_message=True) == expected
    assert expected.endswith(content.rstrip("\n") if not content.strip() else content)


def test_a_message_that_the_template_drops_cannot_be_continued(tokenizer: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="cannot be continued"):
        tokenizer.render([user("q")], continue_final_message=True, chat_template="nothing")


def plain_texts() -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(
    contents=st.lists(
        st.tuples(plain_texts(), plain_texts(), st.none() | plain_texts()), min_size=1
    ),
    enable_thinking=st.booleans(),
)
def test_any_conversation_equals_transformers(
    tokenizer: Tokenizer,
    tiny_oracle: Oracle,
    contents: list[tuple[str, str, str | None]],
    enable_thinking: bool,
) -> None:
    messages: list[dict[str, Any]] = []
    for question, answer, reasoning in contents:
        extra = {} if reasoning is None else {"reasoning_content": reasoning}
        messages += [user(question), assistant(answer, **extra)]
    expected = tiny_oracle.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=enable_thinking
    )
    assert tokenizer.render(messages, enable_thinking=enable_thinking) == expected


@pytest.fixture(scope="session")
def tiny_oracle(tiny_folder: Path) -> Oracle:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(tiny_folder))


SNIPPETS = {
    "tojson": "{{ {'b': '<é&>', 'a': [1, none, true]} | tojson }}",
    "tojson options": "{{ {'b': 1, 'a': 'é'} | tojson(indent=2, sort_keys=true, "
    "ensure_ascii=true) }}",
    "separators": "{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "loop controls": "{% for i in [1,2,3,4] %}{% if i == 2 %}{% continue %}{% endif %}"
    "{% if i == 4 %}{% break %}{% endif %}{{ i }}{{ loop.length }}{% else %}x{% endfor %}",
    "generation tag": "a{% generation %}{% set x = 1 %}b{{ x }}{% endgeneration %}c",
    "block trimming": "  {% if true %}\n  a\n  {% endif %}\n b\n",
    "named tokens": "{{ eos_token }}{{ pad_token }}{{ bos_token is defined }}",
    "variables": "{{ documents is defined }}{{ tools is none }}{{ custom }}",
    "macro and call": "{% macro m(x) %}[{{ x }}{{ caller() }}]{% endmacro %}"
    "{% call m(1) %}y{% endcall %}",
    "recursive loop": "{% for i in [[1,[2]],[3]] recursive %}"
    "{% if i is sequence %}({{ loop(i) }})"
    "{% else %}{{ i }}{% endif %}{% endfor %}",
    "operators": "{{ 'a' ~ 1 ~ none }}{{ 'ab' * 3 }}"
    "{{ '%05d|%s' % (42, 'x') }}{{ 2 ** 10 }}{{ [1] + [2] }}",
    "strings": "{{ ' a,b '.strip().split(',')[-1] }}{{ 'x'.center(5, '-') }}"
    "{{ '{:>4}'.format(7) }}",
    "filters": "{{ ['b','a'] | sort | join('-') | upper }}"
    "{{ 'aXa' | replace('X', 'y') }}{{ 3.7 | int }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}"
    "{% endfor %}{{ ns.n }}",
    "large numbers": "{{ 1700000000 | string }}{{ dict(at=1700000000).at }}{{ '%d' % 1700000000 }}",
    "attributes": "{{ messages[0].content }}{{ messages[0]['role'] }}{{ messages[0].get('name') }}",
    "filtered loop": "{% for m in messages if m.role == 'user' %}"
    "{{ loop.index }}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", SNIPPETS)
def test_constructs_render_as_in_transformers(
    tokenizer: Tokenizer, tiny_oracle: Oracle, name: str
) -> None:
    messages = [user("hi")]
    expected = tiny_oracle.apply_chat_template(
        messages, chat_template=SNIPPETS[name], tokenize=False, custom="c"
    )
    assert tokenizer.render(messages, chat_template=SNIPPETS[name], custom="c") == expected


def test_strftime_now(tokenizer: Tokenizer) -> None:
    template = "{{ strftime_now('%Y') }}"
    assert tokenizer.render([user("x")], chat_template=template) == datetime.now().strftime("%Y")


# --- faults and limits ---------------------------------------------------------------------------

FAULTS = {
    "raise_exception": ("{{ raise_exception('no roles') }}", "no roles"),
    "syntax": ("{% if", "end of template"),
    "undefined": ("{{ messages[9].x.y }}", "no element 9"),
    "type": ("{{ 1 + 'a' }}", "TypeError"),
    "include": ("{% include 'x' %}", "no loader"),
    "dunder": ("{{ messages.__class__.__mro__ }}", "unsafe"),
    "globals": ("{{ raise_exception.__globals__.keys() }}", "unsafe"),
    "mutation": ("{{ messages.append(1) }}", "unsafe"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "json of a function": ("{{ raise_exception | tojson }}", "not JSON serializable"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line(tokenizer: Tokenizer, name: str) -> None:
    template, reason = FAULTS[name]
    with pytest.raises(TemplateError, match=reason) as caught:
        tokenizer.render([user("x")], chat_template=template)
    assert "\n" not in str(caught.value)


LIMITS = TemplateLimits(max_steps=20_000, max_seconds=1.0, max_characters=100_000)
BOMBS = {
    "loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(9999) %}{% for b in range(99999) if false %}{% endfor %}"
    "{% endfor %}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}"
    "{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "output": "{% for a in range(9999) %}{{ 'x' * 1000 }}{% endfor %}",
    "doubling with +": "{% set n = namespace(s='ab') %}{% for i in range(99) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling with ~": "{% set n = namespace(s='ab') %}{% for i in range(99) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "string times": "{{ 'x' * 10**9 }}",
    "list times": "{{ 10**9 * [1] }}",
    "power": "{% set n = 9 ** 9 %}{{ n ** n }}",
    "center": "{{ 'x'.center(10**9) }}",
    "center filter": "{{ 'x' | center(10**9) }}",
    "ljust": "{{ 'x'.ljust(width=10**9) }}",
    "percent width": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "format width": "{{ '{:999999999}'.format(1) }}",
    "format nested width": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "replace": "{{ ('a' * 50000).replace('a', 'b' * 50000) }}",
    "replace filter": "{{ ('a' * 50000) | replace('a', 'b' * 50000) }}",
    "lazy join": "{{ range(99999) | map('string') | map('center', 9999) | join }}",
    "join method": "{{ ''.join(range(99999) | map('string') | map('center', 9999)) }}",
    "indent": "{{ [[1]] | tojson(indent=10**9) }}",
    "to_bytes": "{{ (1).to_bytes(10**9, 'big') }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_cannot_run_away(name: str) -> None:
    start = time.thread_time()
    with pytest.raises(TemplateError, match="chat template"):
        render_template(BOMBS[name], {}, LIMITS)
    assert time.thread_time() - start < 60  # left alone they would work for hours


def test_limits_are_per_rendering() -> None:
    template = "{% for a in range(15000) %}{% endfor %}done"
    limits = replace(LIMITS, max_seconds=60.0)
    for _ in range(3):
        assert render_template(template, {}, limits) == "done"


def test_a_rendering_has_only_so_much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: float(next(seconds)))
    limits = TemplateLimits(max_seconds=50.0)
    assert render_template("{% for a in range(20) %}{% endfor %}done", {}, limits) == "done"
    with pytest.raises(TemplateError, match="it took longer than 50 s"):
        render_template("{% for a in range(99) %}{% endfor %}", {}, limits)


# --- our own additions ---------------------------------------------------------------------------


def test_earlier_reasoning_never_reaches_the_prompt(any_tokenizer: Tokenizer) -> None:
    messages = []
    for i in range(3):
        messages += [user(f"q{i}"), Message("assistant", f"a{i}", reasoning=f"secret {i}")]
    text = any_tokenizer.render([*messages, user("last")])
    assert "secret" not in text
    assert "<think>" not in text


def test_reasoning_inside_a_tool_loop_stays(any_tokenizer: Tokenizer) -> None:
    text = any_tokenizer.render(
        [
            Message("user", "q"),
            Message(
                "assistant", None, reasoning="kept", tool_calls=(ToolCall(0, "a", "now", "{}"),)
            ),
            Message("tool", "noon", tool_call_id="a"),
        ]
    )
    assert "<think>\nkept\n</think>" in text


def test_arguments_as_json_text_render_as_a_mapping(any_tokenizer: Tokenizer) -> None:
    def render(arguments: str) -> str:
        calls = (ToolCall(0, "a", "now", arguments),)
        return any_tokenizer.render([user("q"), Message("assistant", None, tool_calls=calls)])

    assert '"arguments": {"x": "é", "y": [1]}}' in render('{"x":"\\u00e9","y":[1]}')
    assert '"arguments": {}}' in render("")
    assert '"arguments": {broken}' in render("{broken")  # text that does not parse stays as it is


@pytest.mark.parametrize("roles", [["developer"], ["developer", "user"], ["user", "developer"]])
def test_developer_acts_as_system(any_tokenizer: Tokenizer, roles: list[str]) -> None:
    text = any_tokenizer.render([{"role": role, "content": f"by {role}"} for role in roles])
    assert text.startswith("<|im_start|>system\nby developer<|im_end|>\n")
    assert "<|im_start|>developer" not in text


def test_variables_reach_the_template_and_reserved_names_do_not(tokenizer: Tokenizer) -> None:
    template = "{{ enable_thinking }}{{ documents|length }}"
    text = tokenizer.render([user("x")], chat_template=template, documents=[1, 2])
    assert text == "True2"
    with pytest.raises(TemplateError, match="messages cannot be set"):
        tokenizer.render([user("x")], messages=[])


@pytest.mark.parametrize("render", ["render", "encode_chat"])
def test_no_messages_is_an_error(tokenizer: Tokenizer, render: str) -> None:
    method: Callable[[list[Message]], object] = getattr(tokenizer, render)
    with pytest.raises(TemplateError, match="messages: is empty"):
        method([])


def test_the_small_template_writes_what_qwen3s_writes(
    tokenizer: Tokenizer, qwen3_folder: Path
) -> None:
    real = Tokenizer.from_folder(qwen3_folder)
    for messages in CONVERSATIONS.values():
        for tools in (None, TOOLS):
            for thinking in (True, False):
                options: dict[str, Any] = {"tools": tools, "enable_thinking": thinking}
                assert tokenizer.render(messages, **options) == real.render(messages, **options)
