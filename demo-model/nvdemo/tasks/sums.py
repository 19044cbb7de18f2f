"""Sums with a worked thought: digit by digit, in figures, in words and in little stories."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvdemo.chat import Sample, one
from nvdemo.lexicon.words import FRUITS, NUMBER_WORDS, OBJECTS

if TYPE_CHECKING:
    from nvdemo.dice import Dice

_PLACES = [
    "Ones",
    "Tens",
    "Hundreds",
    "Thousands",
    "Ten thousands",
    "Hundred thousands",
    "Millions",
]


def _add(a: int, b: int) -> str:
    """Column addition, digit by digit."""
    left, right = str(a)[::-1], str(b)[::-1]
    carry, steps = 0, []
    for i in range(max(len(left), len(right))):
        x = int(left[i]) if i < len(left) else 0
        y = int(right[i]) if i < len(right) else 0
        total = x + y + carry
        plus = f" + {carry}" if carry else ""
        step = f"{_PLACES[i]}: {x} + {y}{plus} = {total}"
        carry = total // 10
        steps.append(step + (f", write {total % 10}, carry 1." if carry else "."))
    return " ".join(steps) + f" So {a} + {b} = {a + b}."


def _subtract(a: int, b: int) -> str:
    if a < b:
        return f"{a} < {b}, so I turn it round. {_subtract(b, a)} With a minus: -{b - a}."
    left, right = str(a)[::-1], str(b)[::-1]
    borrow, steps = 0, []
    for i in range(len(left)):
        x = int(left[i])
        y = int(right[i]) if i < len(right) else 0
        minus = f" - {borrow}" if borrow else ""
        value = x - y - borrow
        if value < 0:
            steps.append(
                f"{_PLACES[i]}: {x} - {y}{minus} < 0, borrow: {x + 10} - {y}{minus} = {value + 10}."
            )
            borrow = 1
        else:
            steps.append(f"{_PLACES[i]}: {x} - {y}{minus} = {value}.")
            borrow = 0
    return " ".join(steps) + f" So {a} - {b} = {a - b}."


def _multiply(a: int, b: int) -> str:
    if a < 10 or b >= 10:
        return f"{a} x {b} = {a * b}."
    tens, ones = a // 10 * 10, a % 10
    return (
        f"{tens} x {b} = {tens * b}. {ones} x {b} = {ones * b}. {tens * b} + {ones * b} = {a * b}."
    )


_ASK_SUM = (
    "[What is {x}?|what's {x}|{x}|{x} =|{x} = ?|{x}?|Calculate {x}.|calculate {x}|compute {x}|"
    "How much "
    "is {x}?|Solve {x}|Work out {x}.|Can you tell me what {x} is?|What does {x} make?|please "
    "compute "
    "{x}|result of {x}|Tell me {x}.]"
)


def sums(dice: Dice) -> Sample:
    roll = dice.random()
    low, high = dice.pick(
        [
            (0, 9),
            (10, 99),
            (10, 99),
            (10, 99),
            (10, 99),
            (0, 99),
            (100, 999),
            (1000, 9999),
            (10_000, 999_999),
        ]
    )
    a, b = dice.number(low, high), dice.number(low, high)
    wide = f"{a}|{b}"
    tight = dice.chance(0.3)
    if roll < 0.45:
        sign, result, thought = dice.pick(["+", "+", "+", "plus"]), a + b, _add(a, b)
    elif roll < 0.75:
        if a < b and dice.chance(0.85):
            a, b = b, a
        sign, result, thought = dice.pick(["-", "-", "-", "minus"]), a - b, _subtract(a, b)
    elif roll < 0.92:
        a = dice.number(2, 12) if dice.chance(0.6) else dice.number(11, 99)
        b = dice.number(2, 9) if a > 12 else dice.number(2, 12)
        sign, result, thought = dice.pick(["x", "*", "times", "×"]), a * b, _multiply(a, b)
    else:
        result, b = dice.number(1, 12), dice.number(2, 12)
        a = result * b
        sign, thought = dice.pick(["/", ":", "divided by"]), f"{b} x {result} = {a}."
    space = "" if tight and len(sign) == 1 else " "
    question = dice.user(_ASK_SUM, x=f"{a}{space}{sign}{space}{b}")
    two = len(wide) == 5 and min(a, b) >= 10 and max(a, b) <= 99 and roll < 0.75
    spoken = {
        "plus": "+",
        "minus": "-",
        "x": "×",
        "*": "×",
        "times": "×",
        ":": "/",
        "divided by": "/",
    }.get(sign, sign)
    return one(
        "sum_two_digits" if two else "sum_other", question, f"{a} {spoken} {b} = {result}", thought
    )


def spoken_sum(dice: Dice) -> Sample:
    """A sum in words: "five plus three"."""
    a, b = dice.number(0, 20), dice.number(0, 20)
    if dice.chance(0.6):
        sign, result, thought = "+", a + b, _add(a, b)
    else:
        a, b = max(a, b), min(a, b)
        sign, result, thought = "-", a - b, _subtract(a, b)
    words = {"+": ["plus", "and", "added to"], "-": ["minus", "less"]}[sign]
    question = dice.user(_ASK_SUM, x=f"{NUMBER_WORDS[a]} {dice.pick(words)} {NUMBER_WORDS[b]}")
    return one("sum_other", question, f"{a} {sign} {b} = {result}", thought)


def word_problem(dice: Dice) -> Sample:
    thing = dice.pick([*FRUITS[:8], *OBJECTS[:40]])
    plural = thing + ("es" if thing.endswith(("s", "x", "sh", "ch")) else "s")
    if thing.endswith("y") and thing[-2] not in "aeiou":
        plural = thing[:-1] + "ies"
    a, b = dice.number(2, 40), dice.number(1, 20)
    if dice.chance(0.5):
        question = dice.user(
            "[I have|Anna has|My friend has|You have|Tom has] {x}",
            x=f"{a} {plural} and "
            + dice.pick(["gets", "buys", "finds", "gets another"])
            + f" {b} more. How many {plural} are there now?",
        )
        return one("word_problem", question, f"There are {a + b} {plural}.", _add(a, b))
    a += b
    question = dice.user(
        "[I have|Anna has|My friend has|You have|Tom has] {x}",
        x=f"{a} {plural} and "
        + dice.pick(["loses", "sells", "gives away", "eats"])
        + f" {b}. How many {plural} are left?",
    )
    return one("word_problem", question, f"There are {a - b} {plural} left.", _subtract(a, b))
