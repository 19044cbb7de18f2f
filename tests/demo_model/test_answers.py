"""The text for what the third run was not taught, its answers worked out a second time here."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import pytest
from nvdemo.chat import Sample
from nvdemo.dice import Dice, held_out
from nvdemo.lexicon import words
from nvdemo.mix import MIX, after_result, conversation, not_told, recall
from nvdemo.suites import SUITES, samples_of
from nvdemo.tasks import (
    copying,
    forced,
    listing,
    memory,
    profile,
    reading,
    sums,
    tools,
)

_OPERATIONS = {
    "+": int.__add__,
    "-": int.__sub__,
    "×": int.__mul__,
    "x": int.__mul__,
    "/": int.__floordiv__,
}

_TERMS = r"\d+(?: [+\-×x/] \d+)*"


def _value(text: str) -> int:
    first, *more = re.split(r" ([+\-×x/]) ", text)
    value = int(first)
    for sign, term in zip(more[::2], more[1::2], strict=True):
        value = _OPERATIONS[sign](value, int(term))
    return value


def _many(task, count: int = 300, seed: int = 31, unseen: bool = False) -> list[Sample]:
    return [conversation(seed, index, task, unseen) for index in range(count)]


def _last(sample: Sample) -> str:
    return str(sample.messages[-1]["content"])


def test_sums_and_every_equation_of_their_thoughts_are_right() -> None:
    kinds: Counter[str] = Counter()
    for sample in _many(sums.sums, 2000):
        kinds[sample.kind] += 1
        for text in (sample.answer, sample.thought):
            for left, right in re.findall(rf"({_TERMS}) = (-?{_TERMS})", text):
                assert _value(left) == _value(right), (left, right, sample.thought)
        shown = [int(digits) for digits in re.findall(r"\d+", _last(sample))]
        a, b = (int(digits) for digits in re.findall(r"\d+", sample.answer)[:2])
        assert [a, b] == shown[-2:]
    assert kinds["sum_mixed"] > 400
    assert kinds["product_two_digits"] > 100
    assert kinds["difference_three_digits"] > 40
    assert kinds["sum_two_digits"] > 200


def test_a_shorter_number_is_taken_from_a_longer_one() -> None:
    assert sums._subtract(100, 38).endswith("So 100 - 38 = 62.")
    assert sums._multiply(47, 38).endswith("So 47 x 38 = 1786.")
    assert sums._multiply(40, 50).endswith("40 x 50 = 2000.")
    assert sums._add(4027, 592).endswith("So 4027 + 592 = 4619.")


# A word of each kind of fact that its questions and its replies have, and no other kind's.
_MARKS = {
    "name": r"name|who am i|called",
    "city": r"live|city|from|home|town",
    "age": r"\bold\b|\bage\b",
    "colour": r"colou?r",
    "job": r"job|living|work|profession",
    "food": r"food|eat",
    "number": r"number",
    "code": r"password|code|secret|remember",
}
_REPLIES = {"name": r"Nice to meet you", "age": r"\d years, I will", "pet": r"What a nice"}


def test_nothing_asked_for_as_not_told_was_told() -> None:
    after_others = 0
    for sample in _many(partial(not_told, after=1.0), 400, unseen=True):
        question = _last(sample).lower()
        replies = " ".join(m["content"] for m in sample.messages if m["role"] == "assistant")
        assert sample.answer == "You have not told me that yet."
        after_others += "I will remember" in replies or "Nice to meet you" in replies
        for kind, mark in _REPLIES.items():
            asked = kind != "pet" and re.search(_MARKS[kind], question)
            if asked and not any(animal in question for animal in words.ANIMALS):
                assert not re.search(mark, replies), sample.messages
        told = {
            kind
            for message in sample.messages[:-1]
            if message["role"] == "user"
            for kind in ("colour", "food")
            if re.search(f"my favou?rite ({_MARKS[kind]})", message["content"].lower())
        }
        if "favourite" in question or "favorite" in question:
            assert not any(re.search(_MARKS[kind], question) for kind in told)
    assert after_others == 400


def test_the_kind_asked_for_is_never_among_those_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(memory, "draw", lambda dice, kind: (told.append(kind), "x7")[1])
    for index in range(300):
        told.clear()
        sample = memory.unknown_fact(Dice(index), lambda: ("hi", "Hello!"), after=1.0)
        question = _last(sample).lower()
        kinds = [kind for kind, mark in _MARKS.items() if re.search(mark, question)]
        if len(kinds) == 1 and not any(animal in question for animal in words.ANIMALS):
            assert kinds[0] not in told
        assert told


def test_the_reply_to_joined_facts_names_each() -> None:
    for unseen in (False, True):
        for sample in _many(partial(memory.told_together, sentences=False), 200, unseen=unseen):
            values = sample.thought.removeprefix("The user says: ").rstrip(".").split(", ")
            assert len(values) in (2, 3)
            assert " and " in _last(sample).lower()
            for value in values:
                assert value in sample.answer
                assert value in _last(sample)


def test_joined_facts_are_recalled() -> None:
    joined = 0
    for sample in _many(partial(recall, joined=1.0), 200):
        said = " ".join(m["content"] for m in sample.messages[:-1] if m["role"] == "user")
        for value in sample.expected.split("|"):
            assert value in said
            assert value in sample.answer
        joined += " and " in said
    assert joined == 200


def test_clauses_are_there_for_every_fact() -> None:
    dice = Dice(3)
    for kind in profile.FACTS:
        facts = [profile.Fact(kind, "cat", profile.draw(dice, kind)) for _ in range(2)]
        text, reply = profile.together(dice, facts)
        assert all(fact.value in text and fact.value in reply for fact in facts)
        assert "{" not in text + reply


def test_reading_answers_follow_from_one_sentence() -> None:
    for sample in _many(reading.reading, 400):
        lines = re.split(r"(?<=[.?])[ \n]+|\n\n", _last(sample))
        person = sample.answer.split()[0]
        (line,) = [
            text
            for text in lines
            if re.search(rf"\b{person}\b(?!.*\?)", text)
            and ("has" in text or "bought" in text)
            and text.endswith(".")
        ]
        rest = re.sub(r"^\w+ (lives in|has) ", "", sample.answer).rstrip(".")
        assert rest in line
        assert person in sample.thought
        if not sample.thought.startswith("I look"):
            for text in sample.thought.split(" I look for ")[0].split(". "):
                who, what = text.rstrip(".").split(": ")
                assert any(who in each and what in each for each in lines)


def test_members_belong_to_their_category() -> None:
    several = {plural: members for _, plural, members in listing.MEMBERS}
    single = {name: members for name, _, members in listing.MEMBERS}
    for sample in _many(listing.name_some, 400):
        count, noun = sample.thought.rstrip(".").split(" ", 1)
        named = sample.answer.split(", ")
        assert len(named) == int(count) == len(set(named))
        assert set(named) <= set((single if count == "1" else several)[noun])
    assert not set(listing.UNKNOWN) & {*several, *single}


def test_unknown_categories_of_the_evaluation_are_never_trained_on() -> None:
    def nouns(unseen: bool) -> set[str]:
        found = set()
        for index in range(1500):
            dice = Dice(index)
            dice.unseen = unseen
            text = listing.no_members(dice).messages[-1]["content"].lower()
            found |= {noun for noun in listing.UNKNOWN if f" {noun.lower()}" in text}
        return found

    trained, kept = nouns(False), nouns(True)
    exact = {noun for noun in listing.UNKNOWN if held_out(noun.rstrip("s"))}
    assert exact
    assert exact <= kept
    assert not trained & exact


def test_words_are_spelt_letter_by_letter() -> None:
    made_up = 0
    for sample in _many(copying.spelling, 400):
        word = sample.answer if sample.kind == "reverse" else sample.answer.replace("-", "")
        assert (word[::-1] if sample.kind == "reverse" else word) in _last(sample)
        made_up += sample.kind == "spelling_made_up"
    assert made_up > 60


def test_suites_have_rows_and_questions_of_their_own() -> None:
    assert len({suite.name for suite in SUITES}) == len(SUITES)
    seeds = Counter(suite.seed for suite in SUITES)
    new = [suite for suite in SUITES if seeds[suite.seed] == 1]
    assert len(new) == 20
    assert {suite.bar for suite in new} == {0.0, 0.95}
    for suite in new:
        assert len({s.prompt() for s in samples_of(suite, 20)}) > 12


def test_the_new_tasks_are_in_the_mix() -> None:
    tasks = [task for task, _ in MIX]
    new = [forced.forced_value, listing.name_some, listing.no_members, memory.told_together]
    assert all(task in tasks for task in [*new, tools.mail_call, after_result])
