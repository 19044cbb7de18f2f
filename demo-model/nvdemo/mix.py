"""The mix of tasks: which sample belongs to a seed and an index."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING

from nvdemo.chat import Message, Sample
from nvdemo.dice import Dice
from nvdemo.lexicon.people import PEOPLE
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
    from nvdemo.tasks.profile import Turn

Task = Callable[[Dice], Sample]

_QUICK: list[Task] = [
    talk.greeting,
    talk.small_talk,
    facts.capital,
    facts.opposite,
    facts.sound,
    facts.colour,
    lessons.calendar,
    sums.sums,
    numbers.counting,
    copying.echo,
    copying.spelling,
    unknown.unknown,
    guide.guide,
    facts.comparison,
    numbers.next_number,
    talk.joke,
    listing.name_some,
]
_TELLING: list[Task] = [talk.introduction, memory.told, memory.told_together]
_ROOM = 900  # characters of an earlier turn


def quick(dice: Dice, telling: bool = True) -> Turn:
    """A question with its answer, as an earlier turn of a conversation: mostly a short one, else
    of any task. Only with ``telling`` may the user tell something about himself."""
    while True:
        if telling and dice.chance(0.1):
            task = dice.pick(_TELLING)
        elif dice.chance(0.5):
            task = dice.pick(_QUICK)
        else:
            task = _drawn(dice)
            if task in _NO_TURN or (task in _TELLING and not telling):
                continue
        sample = task(dice)
        question = sample.messages[-1]["content"]
        if len(sample.messages) == 1 and len(question) + len(sample.answer) < _ROOM:
            return question, sample.answer


def plain(dice: Dice) -> Turn:
    """The same, but nothing is told that recall could ask for."""
    return quick(dice, telling=False)


def recall(dice: Dice, later: bool | None = None, joined: float = 0.4) -> Sample:
    return memory.recall(dice, lambda: plain(dice), later, joined)


def correction(dice: Dice) -> Sample:
    return memory.correction(dice, lambda: plain(dice))


def not_told(dice: Dice, after: float = 0.6) -> Sample:
    return memory.unknown_fact(dice, lambda: plain(dice), after)


def last_message(dice: Dice) -> Sample:
    return memory.last_message(dice, [quick(dice) for _ in range(dice.pick([0, 0, 1, 1, 2, 3]))])


def after_result(dice: Dice, needs_tool: bool | None = None) -> Sample:
    return tool_results.after_result(dice, dice.pick(_QUICK)(dice), needs_tool)


def no_tool(dice: Dice) -> Sample:
    return tools.no_tool(dice, dice.pick(_QUICK)(dice))


# (task, weight by number of samples)
MIX: list[tuple[Task, float]] = [
    (talk.greeting, 1.5),
    (talk.introduction, 1.5),
    (talk.small_talk, 3.0),
    (talk.joke, 0.7),
    (talk.poem, 0.7),
    (listing.name_some, 1.5),
    (listing.no_members, 1.2),
    (facts.capital, 6.0),
    (facts.capital_of, 1.5),
    (facts.continent, 1.5),
    (facts.opposite, 1.5),
    (facts.sound, 0.7),
    (facts.baby, 0.5),
    (facts.home, 0.5),
    (facts.legs, 0.5),
    (facts.colour, 0.6),
    (facts.comparison, 1.5),
    (facts.number_compare, 1.0),
    (lessons.calendar, 2.0),
    (lessons.grammar, 1.0),
    (lessons.translation, 1.2),
    (lessons.category_of, 0.7),
    (numbers.counting, 3.0),
    (numbers.next_number, 1.0),
    (numbers.count_items, 3.0),
    (numbers.sorting, 14.0),
    (numbers.extreme, 1.5),
    (sums.sums, 13.0),
    (sums.spoken_sum, 0.7),
    (sums.word_problem, 1.0),
    (numbers.number_word, 0.5),
    (numbers.parity, 0.5),
    (copying.echo, 7.0),
    (copying.spelling, 8.0),
    (copying.letters, 1.5),
    (copying.picking, 2.0),
    (copying.joining, 2.5),
    (copying.letter_case, 2.0),
    (copying.times, 0.7),
    (structured.json_object, 4.0),
    (structured.json_people, 2.0),
    (given.json_given, 4.0),
    (structured.json_array, 1.5),
    (structured.json_lookup, 1.5),
    (structured.json_schema, 1.5),
    (forced.forced_value, 4.0),
    (structured.bullet_list, 0.7),
    (recall, 12.0),
    (correction, 1.0),
    (memory.told, 3.0),
    (memory.told_together, 2.5),
    (not_told, 4.0),
    (last_message, 1.0),
    (reading.needle, 3.0),
    (reading.reading, 12.0),
    (tools.tool_call, 5.0),
    (tools.mail_call, 1.5),
    (tools.tool_calls, 2.0),
    (tool_results.tool_result, 4.0),
    (tool_results.next_call, 0.8),
    (after_result, 3.0),
    (no_tool, 1.2),
    (stories.story, 7.0),
    (guide.guide, 4.0),
    (unknown.unknown, 8.0),
    (unknown.no_country, 5.0),
    (lessons.alphabet, 0.7),
    (code.code, 1.2),
]
_TASKS = [task for task, _ in MIX]
_EDGES = list(accumulate(weight for _, weight in MIX))
# No earlier turn: it has more than one message or tools, or is about earlier turns.
_NO_TURN: list[Task] = [
    recall,
    correction,
    not_told,
    last_message,
    reading.needle,
    forced.forced_value,
    tools.tool_call,
    tools.mail_call,
    tools.tool_calls,
    tool_results.tool_result,
    tool_results.next_call,
    after_result,
    no_tool,
]


def _drawn(dice: Dice) -> Task:
    return _TASKS[bisect(_EDGES, dice.random() * _EDGES[-1])]


_SYSTEM = [
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are nvcli's demo model.",
    "Answer briefly.",
    "Be concise.",
    "You are a friendly assistant.",
    "Answer in one sentence.",
    "You are an expert.",
    "You are a teacher.",
    "You are Qwen, created by Alibaba Cloud.",
    "Be polite.",
    "You are a chatbot in a terminal.",
    "Help the user as well as you can.",
    "You are a pirate.",
    "Today is Monday.",
    "Respond in English.",
    "Do not make things up.",
    "You are a careful assistant.",
    "Think before you answer.",
    "You are an AI assistant. Answer the user's questions.",
]


def _system(dice: Dice) -> str:
    if dice.chance(0.75):
        return dice.pick(_SYSTEM)
    return dice.pick(
        [
            f"You are {dice.pick(PEOPLE)}, a {dice.word()} assistant.",
            f"The user's city is {dice.word().capitalize()}.",
            f"Your name is {dice.word().capitalize()}.",
            copying.sentence(dice),
        ]
    )


def conversation(seed: int, index: int, task: Task | None = None, unseen: bool = False) -> Sample:
    """The sample at ``index``: of ``task``, or of one drawn from the mix."""
    dice = Dice((seed << 40) + index)
    dice.unseen = unseen
    chosen = task or _drawn(dice)
    return dress(chosen(dice), dice)


def dress(sample: Sample, dice: Dice) -> Sample:
    """Thinking on or off, at times a system prompt, earlier turns or /no_think."""
    messages = sample.messages
    long = sample.kind in (
        "needle",
        "tool_result",
        "tool_result_plain",
        "tool_next",
        "tool_after",
        "tool_after_plain",
        "last_message",
        "not_told",
        "name_recall",
        "fact_recall",
    )
    if not long and messages[0]["role"] == "user" and dice.chance(0.25):
        earlier: list[Message] = []
        for _ in range(dice.pick([1, 1, 2, 3])):
            question, answer = quick(dice)
            earlier.append({"role": "user", "content": question})
            earlier.append({"role": "assistant", "content": answer})
        messages[:0] = earlier
    if messages[0]["role"] != "system" and dice.chance(0.25):
        messages.insert(0, {"role": "system", "content": _system(dice)})
    sample.thinking = dice.chance(0.5)
    last = messages[-1]
    if last["role"] == "user" and dice.chance(0.04):
        if sample.thinking and dice.chance(0.7):
            last["content"] += " /no_think"
            sample.switched_off = True
        elif sample.thinking:
            last["content"] += " /think"
    return sample
