"""Seeded choices and a small phrase grammar.

A phrase is text with ``[one|two|]`` for alternatives (they nest) and ``{name}`` for fields.
``Dice.user`` also writes as people type: lower case, no full stop, a slip of the finger. Only
the literal parts are spoilt; the fields are what the answer depends on.
"""

from __future__ import annotations

import random
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from nvdemo.lexicon import word_list

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

# A compiled phrase: text, a field (as a 1-tuple with its name) or a list of alternatives.
Node = str | tuple[str] | list["Phrase"]
Phrase = list[Node]

_SYLLABLES = [
    c + v
    for c in word_list("b c d f g h j k l m n p r s t v w z br dr gl kr pl st tr sh th")
    for v in word_list("a e i o u ai ea oo")
]
_ENDINGS = ["", "", "n", "r", "l", "s", "th", "x", "nd", "rk", "m", "t"]
_OPENERS = [
    "hey, ",
    "please ",
    "ok, ",
    "can you help me? ",
    "hi! ",
    "quick question: ",
    "so, ",
    "hey nvcli, ",
    "Please, ",
    "Hello, ",
    "Hi, ",
    "now ",
    "Okay. ",
    "well, ",
]
_CLOSERS = [" please", " thanks", ", please", " Thanks!", " thank you", " pls", " ok?"]


@lru_cache(maxsize=20_000)
def compile_phrase(text: str) -> Phrase:
    phrase, end = _parse(text, 0, top=True)
    if end != len(text):
        raise ValueError(f"unbalanced phrase: {text!r}")
    return phrase


def _parse(text: str, at: int, top: bool) -> tuple[Phrase, int]:
    phrase: Phrase = []
    start = at
    while at < len(text):
        char = text[at]
        if char in "[{" or (not top and char in "|]"):
            if start < at:
                phrase.append(text[start:at])
            if char in "|]":
                return phrase, at
            if char == "{":
                end = text.index("}", at)
                phrase.append((text[at + 1 : end],))
                at = end + 1
            else:
                options: list[Phrase] = []
                while text[at] != "]":
                    option, at = _parse(text, at + 1, top=False)
                    options.append(option)
                phrase.append(options)
                at += 1
            start = at
        else:
            at += 1
    if start < at:
        phrase.append(text[start:at])
    return phrase, at


def held_out(value: str) -> bool:
    """Whether a made-up value belongs to the evaluation only (one in eight does)."""
    return zlib.crc32(value.lower().encode()) % 8 == 0


class Dice(random.Random):
    """The choices of one conversation; ``unseen`` draws names and strings never trained on."""

    unseen = False

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.random() * len(options))]

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def number(self, low: int, high: int) -> int:
        return low + int(self.random() * (high - low + 1))

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """``count`` different options in random order."""
        return self.sample(options, min(count, len(options)))

    def own(self, options: Sequence[str]) -> str:
        """An option of this split: training never sees the ones that are held out."""
        while True:
            value = self.pick(options)
            if held_out(value) == self.unseen:
                return value

    def word(self, low: int = 2, high: int = 3) -> str:
        """A made-up word of this split."""
        while True:
            parts = [self.pick(_SYLLABLES) for _ in range(self.number(low, high))]
            value = "".join(parts) + self.pick(_ENDINGS)
            if held_out(value) == self.unseen:
                return value

    def string(self, low: int, high: int, alphabet: str) -> str:
        """A random string of this split."""
        while True:
            value = "".join([self.pick(alphabet) for _ in range(self.number(low, high))])
            if held_out(value) == self.unseen:
                return value

    def say(self, text: str, /, **fields: object) -> str:
        """The phrase with its alternatives chosen and its fields filled in."""
        out: list[str] = []
        self._expand(compile_phrase(text), fields, out)
        return "".join(out)

    def _expand(self, phrase: Phrase, fields: dict[str, object], out: list[str]) -> None:
        for node in phrase:
            if isinstance(node, str):
                out.append(node)
            elif isinstance(node, tuple):
                out.append(str(fields[node[0]]))
            else:
                self._expand(self.pick(node), fields, out)

    def user(self, text: str, /, **fields: object) -> str:
        """The phrase as a user might type it; the fields stay as they are."""
        return self._typed(text, fields, fold=False)

    def user_any_case(self, text: str, /, **fields: object) -> str:
        """The same where the fields may change case too."""
        return self._typed(text, fields, fold=True)

    def _typed(self, text: str, fields: dict[str, object], fold: bool) -> str:
        marks: list[str] = []
        self._expand(compile_phrase(text), dict.fromkeys(fields, "\0"), marks)
        literal = "".join(marks)
        names = self._field_order(literal, text, fields)
        roll = self.random()
        if roll < 0.07 and literal[:1] != "\0":
            literal = self.pick(_OPENERS) + literal[:1].lower() + literal[1:]
        elif roll < 0.12 and literal[-1:] not in "\0\"'`\n:":
            literal = literal.rstrip("?.!") + self.pick(_CLOSERS)
        roll = self.random()
        change: Callable[[str], str] = str
        if roll < 0.20:
            change = str.lower
        elif roll < 0.24:
            change = str.upper
        literal = change(literal)
        if 0.14 < roll < 0.38 and literal[-1:] in "?.!":
            literal = literal[:-1]
        if roll > 0.93:
            literal = self.slip(literal)
        if not names:
            return literal
        values = [change(value) if fold else value for value in names]
        pieces = literal.split("\0")
        return "".join([a + b for a, b in zip(pieces, [*values, ""], strict=True)])

    def _field_order(self, literal: str, text: str, fields: dict[str, object]) -> list[str]:
        """The values in the order of their marks; a field inside alternatives must be the only
        one of its phrase, which the single-field case covers."""
        count = literal.count("\0")
        if len(fields) == 1 or count == 0:
            return [str(value) for value in fields.values()] * count
        order = [node[0] for node in compile_phrase(text) if isinstance(node, tuple)]
        if len(order) != count:
            raise ValueError(f"fields inside alternatives: {text!r}")
        return [str(fields[name]) for name in order]

    def slip(self, literal: str) -> str:
        """One typing slip inside a word of four letters or more."""
        at = self.number(1, max(1, len(literal) - 3))
        window = literal[at - 1 : at + 3]
        if len(window) < 4 or not window.isalpha():
            return literal
        roll = self.random()
        if roll < 0.4:
            return literal[:at] + literal[at + 1] + literal[at] + literal[at + 2 :]
        if roll < 0.7:
            return literal[:at] + literal[at + 1 :]
        return literal[:at] + literal[at] + literal[at:]
