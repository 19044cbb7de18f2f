"""The output router: each transcript gives the same channels however its text is cut into tokens.

A transcript is a list of texts and tags. `Pieces` is a vocabulary made for it: every tag is one
token, and the text between is cut wherever the test says, within a character too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvcli.errors import RequestError
from nvcli.text import OutputRouter, RouterDelta, RouterState, Tokenizer
from nvcli.text.parsers import start_state
from nvcli.types import FinishReason, ToolCall, fold_tool_calls

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>")
THINK, END_THINK, CALL, END_CALL, TURN, END_TURN = range(len(TAGS))
LENGTH, STOP, TOOL_CALLS = FinishReason.LENGTH, FinishReason.STOP, FinishReason.TOOL_CALLS


class Pieces:
    """A vocabulary that grows: the tags, then every piece of text that a test needs."""

    def __init__(self) -> None:
        self.bytes = [tag.encode() for tag in TAGS]

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self.bytes):
            raise RequestError(f"token id {token_id} is outside the tokenizer")
        return self.bytes[token_id]

    def run_bytes(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> bytes:
        shown = [i for i in token_ids if not (skip_special_tokens and self.is_special(i))]
        return b"".join(map(self.token_bytes, shown))

    def is_special(self, token_id: int) -> bool:
        return token_id in (TURN, END_TURN)

    def id_of(self, token: str) -> int | None:
        return TAGS.index(token) if token in TAGS else None

    def encode(self, text: str) -> list[int]:
        return self.cut(text, [])

    def cut(self, text: str, places: Sequence[int]) -> list[int]:
        """Ids for text and tags; `places` are offsets, in bytes of each text, to cut at."""
        ids = []
        for part in split_tags(text):
            if part in TAGS:
                ids.append(TAGS.index(part))
                continue
            data = part.encode()
            edges = sorted({0, len(data), *(p for p in places if p < len(data))})
            for start, end in pairwise(edges):
                ids.append(len(self.bytes))
                self.bytes.append(data[start:end])
        return ids


def split_tags(text: str) -> list[str]:
    parts = [text]
    for tag in TAGS:
        parts = [
            piece
            for part in parts
            for i, half in enumerate([part] if part in TAGS else part.split(tag))
            for piece in ([tag, half] if i else [half])
            if piece
        ]
    return parts


@dataclass
class Result:
    text: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]
    finish_reason: FinishReason | None
    deltas: list[RouterDelta]
    router: OutputRouter

    @property
    def named(self) -> list[tuple[str, str]]:
        return [(call.name, call.arguments) for call in self.calls]

    @property
    def channels(self) -> tuple[object, ...]:
        return self.text, self.reasoning, self.named, self.finish_reason, self.router.stop


def run(
    text: str,
    places: Sequence[int] = (),
    *,
    prompt: str = "<|im_start|>assistant\n",
    reason: FinishReason = STOP,
    **options: Any,
) -> Result:
    vocabulary = Pieces()
    options = {"parse_tools": True, **options}
    router = OutputRouter(vocabulary, vocabulary.encode(prompt), **options)
    deltas = [router.feed(token_id) for token_id in vocabulary.cut(text, places)]
    deltas.append(router.finish(reason))
    reasoning = [delta.reasoning for delta in deltas if delta.reasoning is not None]
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    return Result(
        "".join(delta.text for delta in deltas),
        "".join(reasoning) if reasoning else None,
        fold_tool_calls([call for delta in deltas for call in delta.tool_calls]),
        deltas[-1].finish_reason,
        deltas,
        router,
    )


def call(name: str = "f", arguments: str = '{"a": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# --- transcripts: text, what comes out -----------------------------------------------------------

PLAIN = "<|im_start|>assistant\n"
NO_THINK = PLAIN + "<think>\n\n</think>\n\n"
OPEN_THINK = PLAIN + "<think>\n"

F = ("f", '{"a": 1}')  # what `call()` is read as


class Transcript:
    """An output, and what comes out of it."""

    def __init__(
        self,
        output: str,
        *,
        text: str = "",
        reasoning: str | None = None,
        calls: Sequence[tuple[str, str]] = (),
        finish: FinishReason | None = None,
        prompt: str = PLAIN,
    ) -> None:
        self.output, self.prompt = output, prompt
        self.finish = finish or (TOOL_CALLS if calls else STOP)
        self.channels = (text, reasoning, list(calls), self.finish, None)

    def run(self, places: Sequence[int]) -> tuple[object, ...]:
        reason = LENGTH if self.finish is LENGTH else STOP
        return run(self.output, places, prompt=self.prompt, reason=reason).channels


TRANSCRIPTS = {
    "content": Transcript("Hi 世界 🚀\n", text="Hi 世界 🚀\n"),
    "thinking": Transcript("<think>\nhm\n\nso\n</think>\n\nHi", text="Hi", reasoning="hm\n\nso"),
    "thinking opened by the prompt": Transcript(
        "hm\n</think>\n\nHi", text="Hi", reasoning="hm", prompt=OPEN_THINK
    ),
    "thinking switched off": Transcript("\nHi</think>", text="\nHi</think>", prompt=NO_THINK),
    "empty think block": Transcript("<think>\n\n</think>\n\nHi", text="Hi"),
    "think block only": Transcript("<think>\nhm\n</think>\n\n", reasoning="hm"),
    "second think is text": Transcript(
        "<think>a</think>b<think>c</think>d", text="b<think>c</think>d", reasoning="a"
    ),
    "late think is text": Transcript("b<think>c</think>", text="b<think>c</think>"),
    "think inside thinking": Transcript(
        "a<think>b</think>c", text="c", reasoning="a<think>b", prompt=OPEN_THINK
    ),
    "one call": Transcript(call(), calls=[F]),
    "text and call": Transcript("Let me.\n" + call(), text="Let me.", calls=[F]),
    "thinking and call": Transcript(
        "<think>\nhm\n</think>\n\n" + call(), reasoning="hm", calls=[F]
    ),
    "call while thinking (T14)": Transcript(
        "hm\n" + call(), reasoning="hm", calls=[F], prompt=OPEN_THINK
    ),
    "several calls": Transcript(
        call("f") + "\n" + call("g", "{}") + "\n" + call("h", '{"x": [{}]}'),
        calls=[F, ("g", "{}"), ("h", '{"x": [{}]}')],
    ),
    "text after the call": Transcript(call() + "\nDone.\n", text="Done.\n", calls=[F]),
    "text around the call": Transcript("A\n" + call() + "\nB", text="A\nB", calls=[F]),
    "Chinese arguments (T1)": Transcript(
        call("查", '{"城市": "北京 🚀", "e": "\\u00e9"}'),
        calls=[("查", '{"城市": "北京 🚀", "e": "\\u00e9"}')],
    ),
    "no arguments (T3)": Transcript('<tool_call>{"name": "f"}</tool_call>', calls=[("f", "{}")]),
    "empty arguments (T3)": Transcript(call("f", "{}"), calls=[("f", "{}")]),
    "null arguments": Transcript(call("f", "null"), calls=[("f", "{}")]),
    "blank string arguments": Transcript(call("f", '""'), calls=[("f", "{}")]),
    "arguments first": Transcript(
        '<tool_call>{"arguments": {"name": "no"}, "name": "f"}</tool_call>',
        calls=[("f", '{"name": "no"}')],
    ),
    "string arguments": Transcript(
        call("f", json.dumps('{"a": "é\\n"}')), calls=[("f", '{"a": "é\\n"}')]
    ),
    "other keys": Transcript(
        '<tool_call>{"id": 7, "x": [{"name": 1}], "name": "f", "y": null, "arguments": {}, '
        '"z": "}"}'
        "</tool_call>",
        calls=[("f", "{}")],
    ),
    "tags in a string": Transcript(
        call("f", '{"a": "x</tool_call>y<tool_call>z<think>", "b": "\\"}</tool_call>{"}'),
        calls=[("f", '{"a": "x</tool_call>y<tool_call>z<think>", "b": "\\"}</tool_call>{"}')],
    ),
    "raw newline in a string": Transcript(
        call("f", '{"code": "a\n\tb"}'), calls=[("f", '{"code": "a\\n\\tb"}')]
    ),
    "layout is kept": Transcript(
        call("f", '{\n  "a" :1.50e3,\n "b":[ true ]}'),
        calls=[("f", '{\n  "a" :1.50e3,\n "b":[ true ]}')],
    ),
    "last brace forgotten": Transcript(
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', calls=[F]
    ),
    "one brace too many": Transcript(call("f", '{"a": 1}}'), calls=[F]),
    "end tag forgotten": Transcript(
        '<tool_call>{"name": "f", "arguments": {}}', calls=[("f", "{}")]
    ),
    "end tag forgotten between": Transcript(
        '<tool_call>{"name": "f", "arguments": {}}\n' + call("g"),
        calls=[("f", "{}"), ("g", '{"a": 1}')],
    ),
    "no JSON": Transcript("<tool_call>\nfoo\n</tool_call>", text="<tool_call>\nfoo\n</tool_call>"),
    "empty call": Transcript("<tool_call></tool_call>", text="<tool_call></tool_call>"),
    "call without a name": Transcript(
        '<tool_call>{"arguments": {}}</tool_call>', text='<tool_call>{"arguments": {}}</tool_call>'
    ),
    "name that is no text": Transcript(
        '<tool_call>{"name": 3}</tool_call>', text='<tool_call>{"name": 3}</tool_call>'
    ),
    "malformed, then a call": Transcript(
        "<tool_call>foo</tool_call>\n" + call(), text="<tool_call>foo</tool_call>", calls=[F]
    ),
    "only an end tag": Transcript("a</tool_call>b", text="a</tool_call>b"),
    "malformed after the name": Transcript(
        call("f", '{"a": tru}'),
        text=call("f", '{"a": tru}'),
        calls=[("f", '{"a": tru}')],
        finish=STOP,
    ),
    "arguments that are a list": Transcript(
        call("f", "[1]"), text=call("f", "[1]"), calls=[("f", "")], finish=STOP
    ),
    "NaN": Transcript(
        call("f", '{"a": NaN}'),
        text=call("f", '{"a": NaN}'),
        calls=[("f", '{"a": NaN}')],
        finish=STOP,
    ),
    "long number": Transcript(
        call("f", '{"a": ' + "9" * 5000 + "}"), calls=[("f", '{"a": ' + "9" * 5000 + "}")]
    ),
    "cut while thinking (R5)": Transcript("<think>\nhm\n", reasoning="hm", finish=LENGTH),
    "cut in a call (T8)": Transcript(
        '<tool_call>{"name": "f", "arguments": {"a": "x', calls=[("f", '{"a": "x')], finish=LENGTH
    ),
    "cut before the name": Transcript('Hi\n<tool_call>{"na', text="Hi", finish=LENGTH),
    "cut after a call": Transcript(call() + "\nDo", text="Do", calls=[F], finish=LENGTH),
    "special tokens are hidden": Transcript("a<|im_end|>b", text="ab"),
}


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_transcripts_at_every_split_point(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    size = len(transcript.output.encode())
    step = max(1, size // 200)
    for places in ([], *([place] for place in range(1, size, step)), range(size)):
        assert transcript.run(places) == transcript.channels


@settings(max_examples=300)
@given(
    name=st.sampled_from(sorted(set(TRANSCRIPTS) - {"long number"})),
    places=st.lists(st.integers(0, 120), max_size=12),
)
def test_transcripts_at_several_split_points(name: str, places: list[int]) -> None:
    assert TRANSCRIPTS[name].run(places) == TRANSCRIPTS[name].channels


PARTS = st.sampled_from(
    [
        *TAGS,
        call(),
        call("查", '{"é": "}"}'),
        '{"name": "f", "arguments": ',
        '{"a": "',
        '"}',
        "}",
        "\n",
        "\n\n",
        "text",
        "世🚀",
        '\\"',
        "STOP",
        "ST",
    ]
)


@settings(max_examples=500)
@given(
    parts=st.lists(PARTS, max_size=14),
    places=st.lists(st.integers(0, 60), max_size=8),
    prompt=st.sampled_from([PLAIN, NO_THINK, OPEN_THINK]),
    reason=st.sampled_from([STOP, LENGTH, FinishReason.ABORT]),
    stop=st.sampled_from([(), ("STOP",), ("STOP", "\n\n", "TO")]),
    parse_tools=st.booleans(),
)
def test_any_output_is_the_same_at_any_split(
    parts: list[str],
    places: list[int],
    prompt: str,
    reason: FinishReason,
    stop: tuple[str, ...],
    parse_tools: bool,
) -> None:
    output = "".join(parts)
    options: dict[str, Any] = {"stop": stop, "parse_tools": parse_tools}
    whole = run(output, prompt=prompt, reason=reason, **options)
    pieces = run(output, places, prompt=prompt, reason=reason, **options)
    # A stop string cuts the stream at the token that completes it; calls after it in the same
    # token do not exist, so both agree on everything.
    assert pieces.channels == whole.channels
    check_invariants(pieces)
    if not parse_tools:
        assert pieces.calls == ()


def check_invariants(result: Result) -> None:
    assert [call.index for call in result.calls] == list(range(len(result.calls)))
    ids = [call.id for call in result.calls]
    assert len(set(ids)) == len(ids)
    for call_id in ids:
        assert call_id.startswith("call_")
        assert len(call_id) == len("call_") + 24
    if result.finish_reason is TOOL_CALLS:
        assert result.calls
        for item in result.calls:
            assert isinstance(json.loads(item.arguments), dict)
    seen: set[int] = set()
    for delta in result.deltas:
        assert delta.reasoning != ""
        for item in delta.tool_calls:
            if item.index in seen:
                assert item.id == ""
                assert item.name == ""
                assert item.arguments != ""
            else:
                assert item.id
                assert item.name
                assert item.arguments == ""
                seen.add(item.index)


# --- streaming -----------------------------------------------------------------------------------


def test_a_call_streams_its_name_and_then_its_raw_arguments() -> None:
    output = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
    result = run(output, range(200))
    deltas = [item for delta in result.deltas for item in delta.tool_calls]
    assert deltas[0].name == "f"
    assert deltas[0].arguments == ""
    assert [item.arguments for item in deltas[1:]] == list('{"a": "b"}')
    first = next(i for i, delta in enumerate(result.deltas) if delta.tool_calls)
    # The name goes out with the quote that ends it: token 0 is the tag, then one byte each.
    assert first == len('\n{"name": "f"')


def test_two_calls_in_one_go_are_two_calls() -> None:
    """T5: both are complete; each has its own id."""
    result = run(call("f") + call("g"))
    assert result.named == [("f", '{"a": 1}'), ("g", '{"a": 1}')]
    check_invariants(result)


def test_reasoning_and_content_come_at_once_without_newlines() -> None:
    result = run("<think>\n\na\n\nb\n</think>\n\nc", range(100))
    shown = [(d.reasoning, d.text) for d in result.deltas if d.reasoning or d.text]
    assert shown == [("a", ""), ("\n\nb", ""), (None, "c")]


def test_without_tools_newlines_are_not_held() -> None:
    deltas = run("a\nb", range(10), parse_tools=False).deltas
    assert [delta.text for delta in deltas] == ["a", "\n", "b", ""]
    deltas = run("a\nb", range(10), parse_tools=True).deltas
    assert [delta.text for delta in deltas] == ["a", "", "\nb", ""]


def test_a_character_cut_by_a_tag_or_the_end() -> None:
    vocabulary = Pieces()
    vocabulary.bytes.append("🚀".encode()[:2])
    half = len(vocabulary.bytes) - 1
    router = OutputRouter(vocabulary, parse_tools=True)
    assert router.feed(half).text == ""
    assert router.feed(CALL).text == "\ufffd"
    router = OutputRouter(vocabulary)
    router.feed(half)
    assert router.finish(LENGTH) == RouterDelta("\ufffd", finish_reason=LENGTH)


def test_an_unknown_id_ends_only_that_request() -> None:
    router = OutputRouter(Pieces())
    for bad in (-1, 999, 2**31):
        with pytest.raises(RequestError):
            router.feed(bad)
    assert router.num_tokens == 0
    assert router.state is RouterState.UNDECIDED


# --- stop strings --------------------------------------------------------------------------------


@pytest.mark.parametrize("include", [True, False])
def test_stop_strings_cut_the_content(include: bool) -> None:
    output = "<think>\nDEFGHIJ</think>\n\nABC DEFGHIJ KL"
    for place in range(40):
        result = run(output, [place], stop=["DEFGHIJ"], include_stop_str_in_output=include)
        assert result.text == ("ABC DEFGHIJ" if include else "ABC ")
        assert result.reasoning == "DEFGHIJ"  # R6: reasoning is not searched
        assert result.router.stop == "DEFGHIJ"
        assert result.finish_reason is STOP


def test_a_stop_of_newlines_does_not_match_the_markup() -> None:
    result = run("<think>\na\n\nb\n</think>\n\nAnswer\n\nmore", stop=["\n\n"])
    assert (result.text, result.reasoning) == ("Answer", "a\n\nb")
    assert result.router.stop == "\n\n"


def test_tool_arguments_are_not_searched() -> None:
    result = run(call("f", '{"a": "STOP"}'), stop=["STOP"])
    assert result.named == [("f", '{"a": "STOP"}')]
    assert result.router.stop is None


def test_a_held_prefix_is_released_before_a_call_and_at_the_end() -> None:
    assert run("ab ST" + call(), stop=["STOP"]).text == "ab ST"
    assert run("ab STO", range(9), stop=["STOP"]).text == "ab STO"


def test_a_stop_after_a_call_keeps_the_call() -> None:
    result = run(call() + "\nDone STOP", stop=["STOP"])
    assert result.text == "Done "
    assert result.finish_reason is TOOL_CALLS


def test_stop_strings_wait_for_min_tokens() -> None:
    result = run("abab", range(9), stop=["b"], min_tokens=3)
    assert result.text == "aba"
    assert result.router.num_tokens == 4


def test_a_stop_in_text_that_only_the_end_releases() -> None:
    result = run('a <tool_call>{"x": "STOP', stop=["STOP"])
    assert result.text == 'a <tool_call>{"x": "'
    assert result.router.stop == "STOP"


def test_nothing_follows_a_stop() -> None:
    vocabulary = Pieces()
    router = OutputRouter(vocabulary, stop=["b"])
    first, second = vocabulary.encode("abc")[0], vocabulary.encode("d")[0]
    assert router.feed(first) == RouterDelta("a")
    assert router.stop == "b"
    assert router.feed(second) == RouterDelta()
    assert router.finish() == RouterDelta(finish_reason=STOP)


# --- state and counts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        (PLAIN, RouterState.UNDECIDED),
        (NO_THINK, RouterState.CONTENT),
        (OPEN_THINK, RouterState.REASONING),
        (PLAIN + "Once upon", RouterState.CONTENT),
        (NO_THINK + "Once upon" * 50, RouterState.CONTENT),
        (PLAIN + "x" * 500, RouterState.CONTENT),
        ("<|im_start|>user\n<think><|im_end|>\n" + PLAIN, RouterState.UNDECIDED),
        ("<|im_start|>user\n<think><|im_end|>\n", RouterState.CONTENT),
        ("<|im_start|>user\nq", RouterState.CONTENT),
        ("", RouterState.UNDECIDED),
    ],
)
def test_the_start_is_read_from_the_prompt(prompt: str, state: RouterState) -> None:
    vocabulary = Pieces()
    for places in ([], range(len(prompt))):
        assert start_state(vocabulary, vocabulary.cut(prompt, places)) is state


def test_the_start_with_rendered_prompts(any_tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "what is <think>?"}]

    def start(**options: Any) -> RouterState:
        return start_state(any_tokenizer, any_tokenizer.encode_chat(messages, **options))

    assert start() is RouterState.UNDECIDED
    assert start(enable_thinking=False) is RouterState.CONTENT
    messages.append({"role": "assistant", "content": "It is"})
    assert start(continue_final_message=True) is RouterState.CONTENT


def test_raw_completions_are_all_content() -> None:
    output = "<think>\na</think>\n\n" + call()
    result = run(output, parse_reasoning=False, parse_tools=False)
    assert result.text == output
    assert result.reasoning is None
    assert result.calls == ()


def test_tags_are_text_without_tools_and_spelled_tags_always() -> None:
    assert run("a" + call(), parse_tools=False).text == "a" + call()
    vocabulary = Pieces()
    router = OutputRouter(vocabulary, parse_tools=True)
    shown = ""
    for text in ("<thi", "nk>a</th", "ink><tool", "_call>"):
        shown += router.feed(vocabulary.encode(text)[0]).text
    assert shown == "<think>a</think><tool_call>"
    assert router.state is RouterState.CONTENT


def test_reasoning_tokens_are_those_between_the_tags() -> None:
    result = run("<think>\nab\n</think>\n\nc", range(30))
    assert result.router.num_reasoning_tokens == len("\nab\n")
    assert result.router.num_tokens == len("\nab\n") + len("\n\nc") + 2
    assert run("hi").router.num_reasoning_tokens == 0


def test_in_reasoning_and_the_forced_close(any_tokenizer: Tokenizer) -> None:
    prompt = any_tokenizer.encode_chat([{"role": "user", "content": "q"}])
    router = OutputRouter(any_tokenizer, prompt)
    assert not router.in_reasoning
    for token_id in any_tokenizer.encode("<think>\nhm"):
        router.feed(token_id)
    assert router.in_reasoning
    close = router.think_close_token_ids
    assert any_tokenizer.decode(close) == "</think>\n\n"
    assert close[0] == any_tokenizer.end_think_id
    assert [router.feed(token_id) for token_id in close] == [RouterDelta()] * len(close)
    assert not router.in_reasoning
    text = "".join(router.feed(token_id).text for token_id in any_tokenizer.encode("Hi"))
    assert text + router.finish().text == "Hi"


def test_a_real_transcript(any_tokenizer: Tokenizer) -> None:
    output = "<think>\n想一想 🚀\n</think>\n\nOne moment.\n" + call("查", '{"城市": "北京"}')
    prompt = any_tokenizer.encode_chat([{"role": "user", "content": "q"}])
    router = OutputRouter(any_tokenizer, prompt, parse_tools=True)
    deltas = [router.feed(token_id) for token_id in any_tokenizer.encode(output + "<|im_end|>")]
    deltas.append(router.finish())
    assert "".join(delta.text for delta in deltas) == "One moment."
    assert "".join(delta.reasoning or "" for delta in deltas) == "想一想 🚀"
    calls = fold_tool_calls([item for delta in deltas for item in delta.tool_calls])
    assert [(item.name, item.arguments) for item in calls] == [("查", '{"城市": "北京"}')]
    assert deltas[-1].finish_reason is TOOL_CALLS


def test_a_vocabulary_without_the_tags_has_content_only() -> None:
    class Bare(Pieces):
        def id_of(self, token: str) -> int | None:
            return None

    vocabulary = Bare()
    router = OutputRouter(vocabulary, parse_tools=True)
    assert router.state is RouterState.CONTENT
    assert router.think_close_token_ids == ()
    assert "".join(router.feed(i).text for i in vocabulary.cut("a<think>b", [])) == "a<think>b"


@given(
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text('ab世"\\', max_size=3), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    ascii_only=st.booleans(),
    indent=st.none() | st.integers(0, 3),
    places=st.lists(st.integers(0, 200), max_size=6),
)
def test_any_json_arguments_pass_unchanged(
    value: object, ascii_only: bool, indent: int | None, places: list[int]
) -> None:
    arguments = json.dumps({"v": value}, ensure_ascii=ascii_only, indent=indent)
    result = run(call("f", arguments), places)
    assert result.named == [("f", arguments)]
    assert result.finish_reason is TOOL_CALLS


@given(st.data())
@settings(max_examples=200)
def test_a_run_of_ids_gives_what_they_give_one_by_one(data: st.DataObject) -> None:
    pieces = Pieces()
    parts = data.draw(
        st.lists(st.one_of(st.text(max_size=8), st.sampled_from(TAGS)), max_size=8), label="parts"
    )
    places = data.draw(st.lists(st.integers(0, 20), max_size=6), label="cuts")
    ids = pieces.cut("".join(parts), places)
    options = {
        "parse_reasoning": data.draw(st.booleans(), label="parse_reasoning"),
        "parse_tools": data.draw(st.booleans(), label="parse_tools"),
        "stop": data.draw(st.sampled_from([(), ("a",)]), label="stop"),
        "make_call_id": lambda: "call",
    }
    one_by_one, in_runs = OutputRouter(pieces, **options), OutputRouter(pieces, **options)
    left = list(ids)
    while left:
        run = left[: data.draw(st.integers(1, 5), label="run")]
        left = left[len(run) :]
        wanted = [one_by_one.feed(token_id) for token_id in run]
        delta = in_runs.feed_run(run)
        found = [in_runs.feed(token_id) for token_id in run] if delta is None else [delta]
        assert "".join(d.text for d in found) == "".join(d.text for d in wanted)
        assert "".join(d.reasoning or "" for d in found) == "".join(
            d.reasoning or "" for d in wanted
        )
        assert in_runs.state is one_by_one.state
        assert in_runs.num_tokens == one_by_one.num_tokens
        assert in_runs.num_reasoning_tokens == one_by_one.num_reasoning_tokens
    assert in_runs.finish().text == one_by_one.finish().text


def test_a_run_with_an_unknown_id_does_nothing() -> None:
    pieces = Pieces()
    router = OutputRouter(pieces, parse_reasoning=False)
    ids = pieces.cut("abc", [1])
    assert router.feed_run([*ids, 10_000]) is None
    assert router.num_tokens == 0
    delta = router.feed_run(ids)
    assert delta is not None
    assert delta.text == "abc"
