"""What the evaluation asks: a suite for each row of its table, and the bars."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from nvdemo.mix import (
    Task,
    after_result,
    conversation,
    correction,
    last_message,
    no_tool,
    not_told,
    recall,
)
from nvdemo.tasks import (
    code,
    copying,
    facts,
    forced,
    given,
    guide,
    lessons,
    listing,
    memory,
    numbers,
    reading,
    stories,
    structured,
    sums,
    talk,
    tool_results,
    tools,
    unknown,
)

if TYPE_CHECKING:
    from nvdemo.chat import Sample

SEED = 900_002


@dataclass(frozen=True)
class Suite:
    """``kind`` keeps the samples of one kind of a task; ``thinking`` those of one mode."""

    name: str
    task: Task
    bar: float = 0.0
    kind: str = ""
    thinking: bool | None = None
    unseen: bool = True
    seed: int = SEED


SUITES = [
    Suite("echo", copying.echo, 0.95),
    Suite("capitals", facts.capital, 0.95),
    Suite("counting", numbers.counting, 0.95),
    Suite("counting lines, words, letters (thinking)", numbers.count_items, 0.0, thinking=True),
    Suite("counting lines, words, letters", numbers.count_items, 0.0, thinking=False),
    Suite("sorting numbers", numbers.sorting, 0.95, "sort_numbers"),
    Suite("sorting words", partial(numbers.sorting, alike=0.5), 0.95, "sort_words"),
    Suite("JSON objects", structured.json_object, 0.95),
    Suite("JSON from a sentence", structured.json_people, 0.95),
    Suite("JSON from keys and values, free phrasing", given.json_given, 0.95),
    Suite("JSON arrays", structured.json_array, 0.95),
    Suite("JSON, unseen schema", structured.json_schema, 0.90),
    Suite("JSON look-up", structured.json_lookup),
    Suite(
        "tool name and arguments, known tools",
        partial(tools.tool_call, made=0.0),
        0.95,
        unseen=False,
    ),
    Suite("tool name and arguments, unseen tools", partial(tools.tool_call, made=1.0), 0.90),
    Suite("next tool call after a result", tool_results.next_call),
    Suite("several tool calls", tools.tool_calls),
    Suite("answer from a tool's result", tool_results.tool_result),
    Suite("no tool needed", no_tool),
    Suite("name recall, told in the first turn", partial(recall, later=False), 0.95, "name_recall"),
    Suite(
        "name recall, told in a later turn (thinking)",
        partial(recall, later=True),
        0.95,
        "name_recall",
        True,
    ),
    Suite(
        "name recall, told in a later turn",
        partial(recall, later=True),
        0.95,
        "name_recall",
        False,
    ),
    Suite("asked for what was never told", not_told),
    Suite("reply to what the user tells", memory.told),
    Suite("reply to a correction", correction),
    Suite("recall of other facts", recall, 0.0, "fact_recall"),
    Suite("the user's earlier message", last_message),
    Suite("needle at 500 tokens", partial(reading.needle, tokens=500), 0.95),
    Suite("needle at 1,500 tokens", partial(reading.needle, tokens=1500), 0.95),
    Suite("reading a paragraph", reading.reading),
    Suite("two-digit sums with thinking", sums.sums, 0.90, "sum_two_digits", True),
    Suite("two-digit sums without thinking", sums.sums, 0.0, "sum_two_digits", False),
    Suite("other sums with thinking", sums.sums, 0.0, "sum_other", True),
    Suite("word problems", sums.word_problem),
    Suite("refusals that name a real model", unknown.unknown, 0.95),
    Suite("refusals, capitals of invented countries", unknown.no_country),
    Suite("greetings", talk.greeting),
    Suite("small talk", talk.small_talk),
    Suite("questions about nvcli", guide.guide),
    Suite("opposites", facts.opposite),
    Suite("calendar", lessons.calendar),
    Suite("comparisons", facts.comparison),
    Suite("translations of single words", lessons.translation),
    Suite("spelling", copying.spelling),
    Suite("picking words and lines", copying.picking),
    Suite("joining and turning round lists", copying.joining),
    Suite("programs", code.code),
    Suite("stories: whole sentences, no repeats, the hero asked for", stories.story),
]

# What the first three runs were never asked: a row and a seed for each.
_NEW = [
    Suite("sums, different counts of digits (thinking)", sums.sums, 0.0, "sum_mixed", True),
    Suite("sums, different counts of digits", sums.sums, 0.0, "sum_mixed", False),
    Suite(
        "products of two-digit numbers (thinking)",
        partial(sums.sums, sign="x"),
        0.0,
        "product_two_digits",
        True,
    ),
    Suite(
        "differences of three-digit numbers without thinking",
        partial(sums.sums, sign="-"),
        0.0,
        "difference_three_digits",
        False,
    ),
    Suite("asked for what was never told, after other facts", partial(not_told, after=1.0)),
    Suite(
        "name recall, two facts in one turn (thinking)",
        partial(recall, joined=1.0),
        0.95,
        "name_recall",
        True,
    ),
    Suite(
        "name recall, two facts in one turn",
        partial(recall, joined=1.0),
        0.95,
        "name_recall",
        False,
    ),
    Suite('reply to facts joined by "and"', partial(memory.told_together, sentences=False)),
    Suite("reading a paragraph (thinking)", reading.reading, thinking=True),
    Suite("reading a paragraph without thinking", reading.reading, thinking=False),
    Suite(
        "answer from a result in plain words",
        partial(tool_results.tool_result, counts=(1,)),
        0.0,
        "tool_result_plain",
    ),
    Suite("answer from several results", partial(tool_results.tool_result, counts=(2, 2, 3))),
    Suite(
        "answer from several results in plain words",
        partial(tool_results.tool_result, counts=(2, 2, 3)),
        0.0,
        "tool_result_plain",
    ),
    Suite("next question after a tool's result", partial(after_result, needs_tool=True), 0.95),
    Suite("next question needs no tool", partial(after_result, needs_tool=False)),
    Suite("tool call with an e-mail address", tools.mail_call, 0.95),
    Suite("JSON values, schema not shown", forced.forced_value, 0.95),
    Suite("naming members of a category", listing.name_some),
    Suite("refusals, members of unknown categories", listing.no_members, 0.95),
    Suite("spelling made-up words", copying.spelling, 0.0, "spelling_made_up"),
]
SUITES += [replace(suite, seed=SEED + 1 + number) for number, suite in enumerate(_NEW)]


def samples_of(suite: Suite, count: int) -> list[Sample]:
    found: list[Sample] = []
    index = 0
    while len(found) < count:
        sample = conversation(suite.seed, index, suite.task, suite.unseen)
        index += 1
        if suite.kind and sample.kind != suite.kind:
            continue
        if (
            suite.thinking is not None
            and (sample.thinking and not sample.switched_off) != suite.thinking
        ):
            continue
        found.append(sample)
    return found
