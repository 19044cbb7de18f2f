"""Tool results, the turns after them, JSON under a grammar: the answers follow from the text."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

from nvdemo.chat import Sample
from nvdemo.dice import held_out
from nvdemo.mix import after_result, conversation
from nvdemo.tasks import (
    forced,
    tool_results,
    tools,
)
from tokenizers import Tokenizer

DEMO = Path(__file__).parents[2] / "nvcli" / "demo"


def _many(task, count: int = 300, seed: int = 31, unseen: bool = False) -> list[Sample]:
    return [conversation(seed, index, task, unseen) for index in range(count)]


def _last(sample: Sample) -> str:
    return str(sample.messages[-1]["content"])


def test_plain_results_are_answered_one_by_one() -> None:
    several = plain = 0
    for sample in _many(tool_results.tool_result, 400):
        results = [m["content"] for m in sample.messages if m["role"] == "tool"]
        calls = next(m["tool_calls"] for m in sample.messages if m["role"] == "assistant")
        assert len(calls) == len(results)
        several += len(results) > 1
        if sample.kind == "tool_result_plain":
            plain += len(results) > 1
            expected = [f"The result is {text}." for text in results]
        else:
            expected = [
                " and ".join(f"the {k.replace('_', ' ')} is {v}" for k, v in json.loads(r).items())
                for r in results
            ]
        places = [sample.answer.lower().index(text.lower()) for text in expected]
        assert len(places) == len(results)
        if len(results) > 1:
            for call in calls:
                (value,) = call["arguments"].values()
                assert f"{value}: The " in sample.answer
                assert str(value) in sample.messages[-len(results) - 2]["content"]
    assert several > 100
    assert plain > 40


def test_the_next_question_after_a_result_gets_its_own_call() -> None:
    again = plain = 0
    for sample in _many(after_result, 300):
        offered = [tool["function"]["name"] for tool in sample.tools]
        assert len(offered) == len(set(offered))
        past = [m["tool_calls"][0]["name"] for m in sample.messages if m.get("tool_calls")]
        assert past
        assert set(past) <= set(offered)
        if sample.kind == "tool_after_plain":
            plain += 1
            assert not sample.calls
            continue
        (call,) = sample.calls
        assert call["name"] in offered
        again += call["name"] in past
        for value in call["arguments"].values():
            assert str(value).lower() in _last(sample).lower()
    assert again > 50
    assert plain > 40


def test_addresses_are_arguments_and_unseen_ones_stay_unseen() -> None:
    for unseen in (False, True):
        for sample in _many(tools.mail_call, 60, unseen=unseen):
            (call,) = sample.calls
            addresses = [v for v in call["arguments"].values() if "@" in str(v)]
            assert addresses
            for address in addresses:
                assert re.fullmatch(r"[\w.-]+@[\w-]+\.\w+", address)
                assert address in _last(sample)
                first = re.split(r"[._-]|\d", address.split("@")[0])[0]
                assert held_out(first) == unseen


def test_no_calculator_beside_a_sum_to_be_done_without() -> None:
    for sample in _many(partial(after_result, needs_tool=False), 300):
        if sample.kind == "tool_after_plain" and re.search(r"\d [+×-] \d+ = ", sample.answer):
            assert "expression" not in str([t["function"]["description"] for t in sample.tools])


def test_forced_json_is_whole_and_its_values_follow_from_the_question() -> None:
    cuts = 0
    for sample in _many(forced.forced_value, 400):
        assert sample.prompt().endswith(sample.given)
        assert "json" not in _last(sample).lower()
        cuts += sample.cut
        if sample.cut:
            record = json.loads(sample.given + sample.answer.rstrip(",") + "}")
            assert sample.completion() == sample.answer
            assert sample.answer.endswith(",")
        else:
            record = json.loads(sample.given + sample.answer)
            assert sample.completion() == sample.answer + "<|im_end|>"
        value = list(record.values())[-1]
        spoken = value if isinstance(value, str) else json.dumps(value)
        question = _last(sample)
        if spoken not in question:  # a capital or a sum: known, not told
            a_sum = re.search(r"(\d+) \+ (\d+)", question)
            if a_sum:
                assert int(a_sum[1]) + int(a_sum[2]) == value
            else:
                assert re.search("capital|country", question, re.IGNORECASE) or value in str(
                    forced.COUNTRIES
                )
    assert cuts > 100


def test_forced_json_is_cut_where_the_tokenizer_cuts() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for sample in _many(forced.forced_value, 300):
        parts = [tokenizer.encode(text).ids for text in (sample.prompt(), sample.completion())]
        assert [*parts[0], *parts[1]] == tokenizer.encode(sample.prompt() + sample.completion()).ids
