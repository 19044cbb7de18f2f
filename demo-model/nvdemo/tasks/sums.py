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
    """From the table; by tens and ones; two numbers of two digits by two rows and their sum."""
    if a < 10:
        return f"{a} x {b} = {a * b}."
    if b < 10:
        return f"{_row(a, b)} So {a} x {b} = {a * b}."
    tens, ones = b // 10 * 10, b % 10
    if not ones:
        return f"{_row(a, tens)} So {a} x {b} = {a * b}."
    rows = f"{_row(a, tens)} {_row(a, ones)} {_add(a * tens, a * ones)}"
    return f"{b} = {tens} + {ones}. {rows} So {a} x {b} = {a * b}."


def _row(a: int, b: int) -> str:
    """Two digits times a digit or a full ten."""
    tens, ones = a // 10 * 10, a % 10
    if not ones:
        return f"{a} x {b} = {a * b}."
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


_RANGES = [
    (0, 9),
    (10, 99),
    (10, 99),
    (10, 99),
    (0, 99),
    (100, 999),
    (100, 999),
    (1000, 9999),
    (10_000, 999_999),
]
_DIGITS = [(1, 9), (10, 99), (10, 99), (100, 999), (100, 999), (1000, 9999), (10_000, 999_999)]


def _operands(dice: Dice) -> tuple[int, int]:
    """Two numbers of one range, or with different counts of digits; at times one is round."""
    low, high = dice.pick(_RANGES)
    if dice.chance(0.6):
        return dice.number(low, high), dice.number(low, high)
    while True:
        a, b = dice.number(*dice.pick(_DIGITS)), dice.number(*dice.pick(_DIGITS))
        if dice.chance(0.15):
            a = dice.pick([10, 20, 50, 100, 100, 200, 300, 500, 1000, 1000, 2000, 10_000])
        if len(str(a)) != len(str(b)):
            return a, b


def _factors(dice: Dice) -> tuple[int, int]:
    roll = dice.random()
    if roll < 0.3:
        return dice.number(2, 12), dice.number(2, 12)
    if roll < 0.55:
        return dice.number(11, 99), dice.number(2, 9)
    return dice.number(10, 99), dice.number(10, 99)


def _kind(a: int, b: int, sign: str) -> str:
    digits = (len(str(a)), len(str(b)))
    if sign == "x":
        return "product_two_digits" if digits == (2, 2) else "sum_other"
    if sign == "/":
        return "sum_other"
    if digits == (2, 2):
        return "sum_two_digits"
    if digits[0] != digits[1]:
        return "sum_mixed"
    return "difference_three_digits" if digits == (3, 3) and sign == "-" else "sum_other"


def sums(dice: Dice, sign: str = "") -> Sample:
    """``sign`` is one of + - x /; left out: any."""
    a, b = _operands(dice)
    sign = sign or dice.pick("+++++++++------xxxxx/")
    if sign == "+":
        shown, result, thought = dice.pick(["+", "+", "+", "plus"]), a + b, _add(a, b)
    elif sign == "-":
        if a < b and dice.chance(0.85):
            a, b = b, a
        shown, result, thought = dice.pick(["-", "-", "-", "minus"]), a - b, _subtract(a, b)
    elif sign == "x":
        a, b = _factors(dice)
        shown, result = dice.pick(["x", "*", "times", "×"]), a * b
        thought = _multiply(a, b)
    else:
        result, b = dice.number(1, 12), dice.number(2, 12)
        a = result * b
        shown, thought = dice.pick(["/", ":", "divided by"]), f"{b} x {result} = {a}."
    space = "" if dice.chance(0.3) and len(shown) == 1 else " "
    question = dice.user(_ASK_SUM, x=f"{a}{space}{shown}{space}{b}")
    written = "×" if sign == "x" else sign
    return one(_kind(a, b, sign), question, f"{a} {written} {b} = {result}", thought)


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
