"""Values for the parameters and results of tools, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvdemo.lexicon.people import PEOPLE, TOWNS
from nvdemo.lexicon.words import (
    ADJECTIVES,
    COLOURS,
    DAYS,
    FOODS,
    OBJECTS,
    PLACES,
    VERBS,
    VOCABULARY_WORDS,
)

if TYPE_CHECKING:
    from nvdemo.dice import Dice

CHOICES: dict[str, list[str]] = {
    "colour": COLOURS,
    "day": DAYS,
    "food": FOODS,
    "money": ["USD", "EUR", "GBP", "JPY", "CHF", "SEK"],
    "language": ["French", "German", "Spanish", "Italian", "Greek"],
    "state": ["ok", "done", "sent", "failed"],
    "sky": ["sunny", "cloudy", "rainy", "clear", "snowy", "windy"],
}

_MAIL_HOSTS = ["example.com", "example.org", "mail.example", "example.net", "post.example"]
_ENDS = ["com", "org", "net", "io", "de", "eu"]


def email(dice: Dice) -> str:
    """An address of a person or a made-up name, at a known host or a made-up one."""
    first = dice.own(PEOPLE) if dice.chance(0.5) else dice.word()
    local = dice.pick([first, first, first.lower(), f"{first.lower()}{dice.number(1, 99)}"])
    if dice.chance(0.4):
        local = f"{first.lower()}{dice.pick('..._-')}{dice.word()}"
    host = dice.pick(_MAIL_HOSTS) if dice.chance(0.4) else f"{dice.word()}.{dice.pick(_ENDS)}"
    return f"{local}@{host}"


def make_value(dice: Dice, kind: str) -> Any:
    if kind == "integer":
        return dice.number(1, dice.pick([9, 60, 999, 9999]))
    if kind == "number":
        return round(dice.number(1, 9999) / 10, 1)
    if kind == "flag":
        return dice.chance(0.5)
    if kind == "town":
        return dice.pick(
            [
                dice.own(TOWNS),
                dice.own(TOWNS),
                dice.word().capitalize(),
                dice.pick(VOCABULARY_WORDS).capitalize(),
            ]
        )
    if kind in ("person", "name"):
        return dice.pick(
            [
                dice.own(PEOPLE),
                dice.own(PEOPLE),
                dice.word().capitalize(),
                dice.pick(VOCABULARY_WORDS).capitalize(),
            ]
        )
    if kind == "email":
        return email(dice)
    if kind == "recipient":
        return email(dice) if dice.chance(0.6) else make_value(dice, "person")
    if kind == "url":
        return f"https://{dice.word()}.{dice.pick(_ENDS)}/{dice.pick(['', dice.word()])}"
    if kind == "date":
        return f"{dice.number(1990, 2040)}-{dice.number(1, 12):02d}-{dice.number(1, 28):02d}"
    if kind == "sum":
        return f"{dice.number(1, 999)} {dice.pick('+-*/')} {dice.number(1, 999)}"
    if kind == "phrase":
        return dice.pick(
            [
                f"{dice.pick(ADJECTIVES)} {dice.pick(OBJECTS)}",
                dice.word(),
                f"{dice.pick(VERBS)} the {dice.pick(OBJECTS)}",
                f"{dice.word()} {dice.word()}",
            ]
        )
    if kind == "topic":
        return dice.pick(
            [
                f"{dice.pick(ADJECTIVES)} {dice.pick(FOODS)}",
                f"{dice.word()} in {dice.own(TOWNS)}",
                f"the {dice.pick(PLACES)} of {dice.own(TOWNS)}",
                dice.word(),
            ]
        )
    if kind == "path":
        return dice.pick(
            ["/tmp/{}.txt", "{}.md", "src/{}.py", "/home/{}", "data/{}.csv", "./{}"]
        ).format(dice.word())
    if kind == "symbol":
        return dice.string(3, 4, "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    if kind == "code":
        return dice.string(4, 8, "ABCDEFGHJKLMNPQRSTUVWXYZ23456789abcdefghkmnpqrstuvwxyz")
    if kind == "clock":
        return f"{dice.number(0, 23):02d}:{dice.number(0, 59):02d}"
    return dice.pick(CHOICES[kind]) if kind in CHOICES else dice.word()
