"""What one learns first at school: days, months, letters, word forms, some foreign words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvdemo.chat import Sample, one
from nvdemo.lexicon import words as w
from nvdemo.tasks.facts import article

if TYPE_CHECKING:
    from nvdemo.dice import Dice


def calendar(dice: Dice) -> Sample:
    names, noun, of = dice.pick(
        [
            (w.DAYS, "day", "the week"),
            (w.MONTHS, "month", "the year"),
            (w.MONTHS, "month", "the year"),
        ]
    )
    at = dice.number(0, len(names) - 1)
    after, before = names[(at + 1) % len(names)], names[at - 1]
    roll = dice.random()
    if roll < 0.3:
        question = dice.user_any_case(
            "[What comes after {x}?|What is after {x}?|Which one comes after {x}?|what follows "
            "{x}?|"
            "after {x} comes]",
            x=names[at],
        )
        return one(
            "calendar",
            question,
            f"{after} comes after {names[at]}.",
            f"After {names[at]}: {after}.",
        )
    if roll < 0.55:
        question = dice.user_any_case(
            "[What comes before {x}?|What is before {x}?|Which one comes before {x}?|what is just "
            "before {x}?|before {x} comes]",
            x=names[at],
        )
        return one(
            "calendar",
            question,
            f"{before} comes before {names[at]}.",
            f"Before {names[at]}: {before}.",
        )
    if roll < 0.75 and at < 10:
        question = dice.user(
            "[What is|Which is|What's|tell me|name] the {x}[?|.|]",
            x=f"{w.ORDINALS[at]} {noun} of {of}",
        )
        return one(
            "calendar",
            question,
            f"The {w.ORDINALS[at]} {noun} of {of} is {names[at]}.",
            f"Number {at + 1} of the {noun}s.",
        )
    if roll < 0.9:
        month = dice.number(0, 11)
        question = dice.user_any_case(
            "[How many days does {x} have?|How many days are in {x}?|how many days has {x}?|days "
            "in "
            "{x}]",
            x=w.MONTHS[month],
        )
        leap = " (29 in a leap year)" if month == 1 else ""
        return one(
            "calendar",
            question,
            f"{w.MONTHS[month]} has {w.MONTH_DAYS[month]} days{leap}.",
            f"The days of {w.MONTHS[month]}.",
        )
    subject, items = dice.pick(
        [
            ("days of the week", w.DAYS),
            ("months of the year", w.MONTHS),
            ("seasons", w.SEASONS),
            ("planets", w.PLANETS),
        ]
    )
    question = dice.user_any_case(
        "[List the|Name the|What are the|tell me the|write the|give me all|all] {x}[.|?|]",
        x=subject,
    )
    return one("calendar", question, ", ".join(items), f"The {subject}.")


def alphabet(dice: Dice) -> Sample:
    letters = "abcdefghijklmnopqrstuvwxyz"
    if dice.chance(0.3):
        question = dice.user(
            "[List|Say|Write|Tell me|give me|what is|recite] the [alphabet|letters of the "
            "alphabet][.|?|]"
        )
        return one("alphabet", question, ", ".join(letters), "The alphabet.")
    at = dice.number(0, 25)
    if dice.chance(0.5):
        at = dice.pick([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 25])
        name = "last" if at == 25 else w.ORDINALS[at]
        question = dice.user(
            "[What is|Which is|tell me|name] the {x} letter of the alphabet[?|]", x=name
        )
        return one(
            "alphabet",
            question,
            f"The {name} letter of the alphabet is {letters[at]}.",
            "a, b, c, ...",
        )
    step = dice.pick([1, -1])
    if not 0 <= at + step <= 25:
        step = -step
    side = "after" if step > 0 else "before"
    question = dice.user(
        "[Which letter comes|What letter is|letter] {x}[?|]",
        x=f"{side} {dice.pick([letters[at], letters[at].upper()])}",
    )
    return one(
        "alphabet",
        question,
        f"{letters[at + step]} comes {side} {letters[at]}.",
        f"{side} {letters[at]}: {letters[at + step]}.",
    )


def grammar(dice: Dice) -> Sample:
    if dice.chance(0.5):
        word = dice.pick(list(w.PLURAL_OF))
        question = dice.user(
            "[What is the plural of {x}?|plural of {x}|Give the plural of {x}.|one {x}, two|"
            "What's the "
            "plural of {x}?|{x}: plural?]",
            x=word,
        )
        return one(
            "plural",
            question,
            f"The plural of {word} is {w.PLURAL_OF[word]}.",
            f"One {word}, two {w.PLURAL_OF[word]}.",
        )
    word = dice.pick(list(w.PAST_OF))
    question = dice.user(
        "[What is the past tense of {x}?|past tense of {x}|Give the past tense of {x}.|the past "
        "of {x}?"
        "|What's the simple past of {x}?|{x}: past tense?]",
        x=word,
    )
    return one(
        "past",
        question,
        f"The past tense of {word} is {w.PAST_OF[word]}.",
        f"Today I {word}, yesterday I {w.PAST_OF[word]}.",
    )


def translation(dice: Dice) -> Sample:
    word = dice.pick(list(w.TRANSLATIONS))
    at = dice.number(0, 3)
    quoted = dice.pick([word, word, f'"{word}"', f"'{word}'"])
    language = w.LANGUAGES[at]
    question = dice.user(
        "[Translate {x}.|How do you say {x}?|what is {x}?|say {x}|translate: {x}|I need {x}.|"
        "word for "
        "{x}]",
        x=f"{quoted} {dice.pick(['to', 'into', 'in'])} {language}",
    )
    return one(
        "translation",
        question,
        f"{word} in {language} is: {w.TRANSLATIONS[word][at]}",
        f"The {language} word for {word}.",
    )


def category_of(dice: Dice) -> Sample:
    category = dice.pick(["animal", "fruit", "vegetable", "colour", "job"])
    word = dice.pick(
        [
            x
            for x in w.CATEGORIES[category]
            if sum(x in group for group in w.CATEGORIES.values()) == 1
        ]
    )
    asked = category if dice.chance(0.5) else dice.pick(["animal", "fruit", "colour", "job"])
    question = dice.user("[Is|is] {x}[?|]", x=f"{word} {article(asked)}")
    verdict = "Yes" if asked == category else "No"
    return one(
        "category",
        question,
        f"{verdict}, {word} is {article(category)}.",
        f"{word} is {article(category)}.",
    )
