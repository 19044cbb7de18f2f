"""Counting, sorting, sums with a worked thought, and small questions about lists of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvdemo.chat import Sample, one
from nvdemo.lexicon.words import (
    ALL_WORDS,
    ANIMALS,
    COLOURS,
    FRUITS,
    NUMBER_WORDS,
    OBJECTS,
)

if TYPE_CHECKING:
    from nvdemo.dice import Dice

_JOINS = [", ", ", ", " ", ",", "\n", "; ", " and "]


def counting(dice: Dice) -> Sample:
    roll = dice.random()
    if roll < 0.35:
        first, last, step = 1, dice.number(2, 30), 1
        if dice.chance(0.15):
            last = dice.pick([40, 50, 60, 100, 100, 120, dice.number(31, 120)])
        task = dice.user(
            "[Count to {x}.|count up to {x}|count to {x}|Please count to {x}.|Can you count"
            " to {x}?|Count from one to {x}.|list the numbers up to {x}|numbers to {x}|let "
            "us count to {x}]",
            x=last,
        )
    elif roll < 0.7:
        first = dice.number(0, 150)
        last, step = first + dice.number(1, 20), 1
        task = dice.user(
            "[Count|count|Please count|can you count|List the numbers|Write the numbers|"
            "print the numbers|numbers|say the numbers] {x}[.|]",
            x=dice.pick(
                [
                    f"from {first} to {last}",
                    f"{first} to {last}",
                    f"from {first} up to {last}",
                    f"from {first} through {last}",
                ]
            ),
        )
    elif roll < 0.85:
        last = 0 if dice.chance(0.3) else dice.number(0, 90)
        first, step = last + dice.number(1, 15), -1
        task = dice.user(
            "[Count|count|please count|Can you count] {x}[.|]",
            x=dice.pick(
                [
                    f"down from {first} to {last}",
                    f"backwards from {first} to {last}",
                    f"from {first} down to {last}",
                    f"from {first} to {last}",
                ]
            ),
        )
    else:
        step = dice.pick([2, 2, 5, 10, 3])
        first = dice.pick([0, 0, step, dice.number(1, 9)])
        last = first + step * dice.number(2, 10)
        noun = {2: "twos", 3: "threes", 5: "fives", 10: "tens"}[step]
        task = dice.user(
            "[Count|count|please count] {x}[.|]",
            x=f"{dice.pick([f'by {noun}', f'in {noun}', f'in steps of {step}'])} from "
            f"{first} to {last}",
        )
    numbers = list(range(first, last + (1 if step > 0 else -1), step))
    return one(
        "counting",
        task,
        ", ".join(map(str, numbers)),
        f"From {numbers[0]} to {numbers[-1]} in steps of {step}.",
    )


def next_number(dice: Dice) -> Sample:
    if dice.chance(0.5):
        number = dice.number(0, 999)
        step = dice.pick([1, 1, -1]) if number else 1
        question = dice.user(
            "[What number comes {x}?|Which number is {x}?|what comes {x}?|number {x}]",
            x=f"{'after' if step > 0 else 'before'} {number}",
        )
        return one(
            "next_number", question, str(number + step), f"{number} {'+' if step > 0 else '-'} 1."
        )
    step, first = dice.pick([1, 2, 3, 4, 5, 10, -1, -2]), dice.number(8, 40)
    row = [first + step * i for i in range(5)]
    shown = ", ".join(map(str, row[:4]))
    question = dice.user(
        "[What comes next: {x}?|Continue: {x}|next number: {x}|{x}, ...?|complete the "
        "series {x}|Which number is next in {x}?]",
        x=shown,
    )
    return one(
        "next_number",
        question,
        str(row[4]),
        f"Steps of {step}: {row[3]} {'+' if step > 0 else '-'} {abs(step)} = {row[4]}.",
    )


def count_items(dice: Dice) -> Sample:
    """How many lines, words, items or letters; with a thought that counts them off."""
    roll = dice.random()
    count = dice.number(1, 10) if dice.chance(0.85) else dice.number(11, 16)
    if roll < 0.35:
        items = [
            dice.pick(ALL_WORDS) if dice.chance(0.7) else dice.word(1, 2) for _ in range(count)
        ]
        if dice.chance(0.3):
            items = [f"{a} {dice.pick(ALL_WORDS)}" for a in items]
        if dice.chance(0.3):
            items = [item.capitalize() for item in items]
        if dice.chance(0.2):
            items = [dice.pick("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in items]
        text = "\n".join(items)
        ask = dice.user(
            "[count lines|Count the lines.|How many lines are there?|how many lines|number "
            "of lines?|How many lines does this text have?|count the lines above]"
        )
        question, noun = f"{text}\n\n{ask}", "line"
        if dice.chance(0.25):
            question = f"{ask.rstrip('?.')}:\n{text}"
    elif roll < 0.6:
        items = dice.some(dice.pick([ALL_WORDS, FRUITS, ANIMALS, OBJECTS, COLOURS]), count)
        ask = dice.user(
            "[How many words are in: {x}|count the words: {x}|How many words: {x}|{x}\n\n"
            "how many words?|{x}\n\ncount words|number of words in: {x}]",
            x=" ".join(items),
        )
        question, noun = ask, "word"
    elif roll < 0.8:
        items = dice.some(dice.pick([ALL_WORDS, FRUITS, ANIMALS, OBJECTS, COLOURS]), count)
        question = dice.user(
            "[How many items are in this list: {x}|count the items: {x}|How many: {x}|"
            "{x}\n\nhow many items?|How long is this list: {x}|How many things are "
            "there: {x}]",
            x=", ".join(items),
        )
        noun = "item"
    else:
        word = dice.pick(ALL_WORDS)
        items = list(word)
        question = dice.user(
            "[How many letters does {x} have?|How many letters are in {x}?|count the "
            "letters of {x}|number of letters in {x}|letters in {x}?]",
            x=dice.pick([word, f'"{word}"']),
        )
        noun = "letter"
    total = len(items)
    thought = ", ".join([f"{i + 1} {item}" for i, item in enumerate(items)])
    verb = "is" if total == 1 else "are"
    return one(
        "count_items", question, f"There {verb} {total} {noun}{'s' if total > 1 else ''}.", thought
    )


def _numbers(dice: Dice) -> list[int]:
    top = dice.pick([9, 20, 99, 99, 99, 999])
    count = dice.number(2, 8)
    values = [dice.number(0, top) for _ in range(count)]
    return values


_ALIKE: dict[int, list[list[str]]] = {
    size: [
        group
        for group in (
            [word for word in ALL_WORDS if word[:size] == start]
            for start in sorted({word[:size] for word in ALL_WORDS})
        )
        if len(group) >= least
    ]
    for size, least in ((1, 7), (2, 3))
}


def _alike(dice: Dice) -> list[str]:
    """Words that begin alike: with one letter, with two, or pairs of such among others."""
    roll = dice.random()
    if roll < 0.5:
        return dice.pick(_ALIKE[1])
    if roll < 0.75:
        return dice.pick(_ALIKE[2])
    return [word for group in dice.some(_ALIKE[2], 3) for word in dice.some(group, 3)]


def sorting(dice: Dice, alike: float = 0.5) -> Sample:
    """Numbers or words to sort; ``alike`` is the share of word lists that begin alike."""
    join = dice.pick(_JOINS)
    if dice.chance(0.4):
        values = _numbers(dice)
        down = dice.chance(0.3)
        how = (
            dice.pick(
                [
                    " in descending order",
                    " from large to small",
                    " from high to low",
                    " descending",
                    " from biggest to smallest",
                ]
            )
            if down
            else dice.pick(
                [
                    "",
                    "",
                    " in ascending order",
                    " from small to large",
                    " ascending",
                    " numerically",
                ]
            )
        )
        noun = dice.pick(["these numbers", "the numbers", "this list", "numbers", "", "this"])
        items = [str(v) for v in values]
        result = [str(v) for v in sorted(values, reverse=down)]
        kind, thought = "sort_numbers", "From large to small." if down else "From small to large."
    else:
        group = dice.pick([ALL_WORDS, ALL_WORDS, FRUITS, ANIMALS, OBJECTS, COLOURS])
        if dice.chance(alike):
            group = _alike(dice)
        items = dice.some(group, dice.number(2, 7))
        how = dice.pick(
            [
                "",
                " alphabetically",
                " in alphabetical order",
                " by the alphabet",
                " from a to z",
                "",
            ]
        )
        noun = dice.pick(["these words", "the words", "this list", "words", "", "this"])
        result = sorted(items)
        kind, thought = "sort_words", "In the order of the alphabet."
    shown = join.join(items)
    noun = f" {noun}" if noun else ""
    if dice.chance(0.2):
        question = f"{shown}\n\n" + dice.user(
            "[sort|Sort|please sort|order|can you sort]{x}", x=noun + how
        )
    else:
        question = dice.user(
            "[Sort|sort|Please sort|Can you sort|order|Put in order|arrange|I need you to sort]{x}",
            x=f"{noun}{how}: {shown}",
        )
    if dice.chance(0.1):
        question = dice.user("[What is|give me] {x} [sorted|in sorted order]?", x=shown)
        if kind == "sort_numbers":
            result = [str(v) for v in sorted(map(int, items))]
            thought = "From small to large."
    out = "\n" if join == "\n" else ", "
    return one(kind, question, out.join(result), thought)


def extreme(dice: Dice) -> Sample:
    values = [dice.number(0, dice.pick([20, 99, 999])) for _ in range(dice.number(3, 7))]
    low = dice.chance(0.5)
    word = (
        dice.pick(["smallest", "lowest"]) if low else dice.pick(["largest", "biggest", "highest"])
    )
    shown = dice.pick([", ", " ", ", "]).join(map(str, values))
    question = dice.user(
        "[What is|Find|Give me|which is|tell me] {x}", x=f"the {word} number: {shown}"
    )
    best = min(values) if low else max(values)
    return one("extreme", question, f"The {word} number is {best}.", f"{best} is the {word}.")


def number_word(dice: Dice) -> Sample:
    value = dice.number(0, 20)
    if dice.chance(0.5):
        question = dice.user(
            "[Write {x} as a word.|{x} in words|spell the number {x}|how do you write {x} "
            "in letters?]",
            x=value,
        )
        return one("number_word", question, NUMBER_WORDS[value], f"The number {value} as a word.")
    question = dice.user(
        "[Write {x} as a number.|{x} in digits|{x} as a number|which digit is {x}?]",
        x=NUMBER_WORDS[value],
    )
    return one("number_word", question, str(value), f"{NUMBER_WORDS[value]} in digits.")


def parity(dice: Dice) -> Sample:
    value = dice.number(0, 999)
    odd = value % 2 == 1
    asked = dice.pick(["even", "odd"])
    question = dice.user(
        "[Is|is] {x}[?|]",
        x=dice.pick([f"{value} {asked}", f"{value} odd or even", f"{value} an {asked} number"]),
    )
    return one(
        "parity",
        question,
        f"{value} is {'odd' if odd else 'even'}.",
        f"The last digit is {value % 10}.",
    )
