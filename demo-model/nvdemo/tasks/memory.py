"""Recall: facts told in earlier turns, corrected, or never told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvdemo.chat import Message, Sample, one
from nvdemo.lexicon.words import ANIMALS
from nvdemo.tasks.copying import sentence
from nvdemo.tasks.profile import FACTS, Fact, Turn, draw, together

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvdemo.dice import Dice


def _messages(turns: list[Turn]) -> list[Message]:
    messages: list[Message] = []
    for question, reply in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": reply})
    return messages


def recall(
    dice: Dice, other: Callable[[], Turn], later: bool | None = None, joined: float = 0.4
) -> Sample:
    """One to three facts told in any turn, then a question for one or two of them.

    ``other`` makes the turns before, between and after; ``later`` says whether the first turn is
    one of these (left out: at times). ``joined`` is the chance that several facts are told in
    one turn; at 1 they are two or three, joined by "and". A fact may be corrected, or asked for
    once before.
    """
    kinds = dice.some(list(FACTS), dice.pick([2, 2, 3] if joined == 1 else [1, 1, 2, 2, 3]))
    if dice.chance(0.6) and "name" not in kinds:
        kinds[0] = "name"
    pet = dice.pick(ANIMALS)
    facts = [Fact(kind, pet, draw(dice, kind)) for kind in kinds]
    corrected = dice.pick(facts) if dice.chance(0.2) else None
    turns: list[Turn] = []

    def between(counts: list[int]) -> None:
        turns.extend([other() for _ in range(dice.pick(counts))])

    if later is None:
        later = dice.chance(0.6)
    if later:
        between([1, 1, 1, 2, 2, 3])
    if len(facts) > 1 and dice.chance(joined):
        turns.append(together(dice, facts, sentences=joined < 1 and dice.chance(0.3)))
    else:
        for number, fact in enumerate(facts):
            if number:
                between([0, 0, 1, 2])
            turns.append(fact.told(dice))
    if corrected:
        between([0, 0, 1])
        turns.append(corrected.corrected(dice))
    between([0, 0, 0, 1, 1, 2, 3])
    if dice.chance(0.2):
        turns.append(dice.pick(facts).asked(dice))
        between([0, 1, 1])
    wanted = dice.pick(facts)
    if "name" in kinds and dice.chance(0.5):
        wanted = next(fact for fact in facts if fact.kind == "name")
    question, answer, values = *wanted.asked(dice), [wanted.value]
    others = [fact for fact in facts if fact is not wanted]
    if others and dice.chance(0.15):
        second = dice.pick(others)
        more, more_answer = second.asked(dice)
        question = f"{question.rstrip('?.')}{dice.pick([' and ', '? And ', ', and ', '? '])}{more}"
        answer, values = f"{answer} {more_answer}", [*values, second.value]
    messages = _messages(turns)
    messages.append({"role": "user", "content": question})
    return Sample(
        "name_recall" if wanted.kind == "name" else "fact_recall",
        messages,
        answer,
        f"The user said: {', '.join(values)}.",
        check="contains",
        expected="|".join(values),
    )


def told(dice: Dice) -> Sample:
    """The reply to a fact that the user tells."""
    kind = dice.pick(list(FACTS))
    fact = Fact(kind, dice.pick(ANIMALS), draw(dice, kind))
    text, reply = fact.told(dice)
    return one("told", text, reply, f"The user says: {fact.value}.")


def told_together(dice: Dice, sentences: bool | None = None) -> Sample:
    """The reply to two or three facts in one turn: it names each of them."""
    pet = dice.pick(ANIMALS)
    kinds = dice.some(list(FACTS), dice.pick([2, 2, 2, 3]))
    if "name" not in kinds and dice.chance(0.5):
        kinds[0] = "name"
    facts = [Fact(kind, pet, draw(dice, kind)) for kind in kinds]
    if sentences is None:
        sentences = dice.chance(0.2)
    text, reply = together(dice, facts, sentences)
    return one("told", text, reply, f"The user says: {', '.join([f.value for f in facts])}.")


def correction(dice: Dice, other: Callable[[], Turn]) -> Sample:
    """The reply to a fact that the user tells anew because the first was wrong."""
    kind = dice.pick(["name", *FACTS])
    fact = Fact(kind, dice.pick(ANIMALS), draw(dice, kind))
    turns = [fact.told(dice), *[other() for _ in range(dice.pick([0, 0, 1]))]]
    question, reply = fact.corrected(dice)
    messages = _messages(turns)
    messages.append({"role": "user", "content": question})
    return Sample("told", messages, reply, f"The user says: {fact.value}.")


# Facts whose questions could be meant for one another.
_NEAR = {"code": {"number"}, "number": {"code", "age"}, "age": {"number"}}


def unknown_fact(dice: Dice, other: Callable[[], Turn], after: float = 0.6) -> Sample:
    """Asked for something that was never told, with the chance ``after`` when others were.

    ``other`` makes the turns that tell nothing.
    """
    kind = dice.pick(list(FACTS))
    pet, other_pet = dice.some(ANIMALS, 2)
    turns = [other() for _ in range(dice.pick([0, 0, 1, 1, 2, 3]))]
    if dice.chance(after):
        told_of = [k for k in FACTS if k not in {kind, *_NEAR.get(kind, set())}]
        kinds = dice.some(told_of, dice.pick([1, 1, 2, 3]))
        if dice.chance(0.5) and kind != "name" and "name" not in kinds:
            kinds[0] = "name"
        facts = [Fact(k, other_pet, draw(dice, k)) for k in kinds]
        if len(facts) > 1 and dice.chance(0.3):
            turns.append(together(dice, facts))
        else:
            turns.extend([fact.told(dice) for fact in facts])
        dice.shuffle(turns)
        if dice.chance(0.2):
            turns.append(dice.pick(facts).asked(dice))
    messages = _messages(turns)
    question = dice.user(FACTS[kind][2].replace("{pet}", pet))
    messages.append({"role": "user", "content": question})
    return Sample(
        "not_told", messages, "You have not told me that yet.", "I look back: it was not said."
    )


def last_message(dice: Dice, small_talk: list[Turn]) -> Sample:
    """The user's last message, repeated word for word."""
    turns = [*small_talk, (sentence(dice), "All right.")]
    dice.shuffle(turns)
    messages = _messages(turns)
    first = len(turns) > 1 and dice.chance(0.3)
    wanted = turns[0][0] if first else turns[-1][0]
    ask = "[What was|what's|Repeat|tell me|Show me|give me] my {x}[.|?|]"
    which = "first" if first else dice.pick(["last", "previous"])
    question = dice.user(ask, x=f"{which} {dice.pick(['message', 'question', 'line'])}")
    if not first and dice.chance(0.4):
        question = dice.user(
            "[What did I just say?|What did I say before?|Repeat what I said.|what did I write?|"
            "What did I ask before?]"
        )
    messages.append({"role": "user", "content": question})
    return Sample("last_message", messages, wanted, "I look back at the messages.")
