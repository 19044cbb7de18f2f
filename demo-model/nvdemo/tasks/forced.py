"""JSON whose shape a grammar enforces while the prompt does not show it, as under ``--schema``.

The grammar writes braces and keys, so these stand in the prompt; the sample is one value, up to
the comma or the brace after it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from nvdemo.chat import Sample
from nvdemo.lexicon.words import ANIMALS
from nvdemo.lexicon.world import COUNTRIES
from nvdemo.tasks.facts import ASK_CAPITAL
from nvdemo.tasks.profile import Fact, draw, together
from nvdemo.tasks.structured import distinct_keys, person, spoken, value

if TYPE_CHECKING:
    from nvdemo.dice import Dice

# Other keys that people give the same values.
ALIASES = {
    "name": ["name", "name", "person", "first_name", "who"],
    "age": ["age", "age", "years"],
    "city": ["city", "city", "town", "home", "place", "location"],
    "job": ["job", "profession", "occupation"],
    "pet": ["pet", "animal"],
    "colour": ["colour", "color"],
    "food": ["food", "favourite_food", "dish"],
}


def _keyed(dice: Dice, values: dict[str, Any]) -> dict[str, Any]:
    """Some of the values in any order, under one of the keys for each."""
    kept = dice.some(list(values), dice.number(1, len(values)))
    return {dice.pick(ALIASES[name]): values[name] for name in kept}


def _somebody(dice: Dice) -> tuple[dict[str, Any], str]:
    record, sentence = person(dice)
    return _keyed(dice, record), sentence


def _oneself(dice: Dice) -> tuple[dict[str, Any], str]:
    kinds = dice.some(["name", "city", "age", "colour", "job", "food"], dice.pick([2, 2, 3]))
    facts = [Fact(kind, dice.pick(ANIMALS), draw(dice, kind)) for kind in kinds]
    text, _ = together(dice, facts, sentences=dice.chance(0.3))
    values = {fact.kind: int(fact.value) if fact.kind == "age" else fact.value for fact in facts}
    return _keyed(dice, values), text


def _listed(dice: Dice) -> tuple[dict[str, Any], str]:
    record = {name: value(dice) for name in distinct_keys(dice, dice.number(1, 4))}
    link = dice.pick([" ", ": ", " is ", " = "])
    parts = [f"{name}{link}{spoken(item)}" for name, item in record.items()]
    return record, dice.pick([", ", "\n", ". "]).join(parts)


def _capital(dice: Dice) -> tuple[dict[str, Any], str]:
    country, city, _ = dice.pick(COUNTRIES)
    record = {dice.pick(["capital", "capital", "city", "answer", "name"]): city}
    if dice.chance(0.4):
        record = {"country": country.removeprefix("the "), **record}
    return record, dice.user(ASK_CAPITAL, c=country)


def _sum(dice: Dice) -> tuple[dict[str, Any], str]:
    a, b = dice.number(1, 99), dice.number(1, 99)
    question = dice.user("[What is|Calculate|compute|how much is|] {x}[?|]", x=f"{a} + {b}")
    return {dice.pick(["result", "sum", "answer", "total"]): a + b}, question.strip()


_SOURCES = [_somebody, _somebody, _somebody, _oneself, _oneself, _listed, _listed, _capital, _sum]


def cut_at(record: dict[str, Any], at: int) -> tuple[str, str]:
    """The JSON text before the value at ``at``, and the value with the mark that follows it.

    The parts meet where the tokenizer parts them too: after the quote that opens a string, else
    after the colon.
    """
    names = list(record)
    before = "".join(f'"{name}": {_text(record[name])}, ' for name in names[:at])
    written = " " + _text(record[names[at]]) + ("}" if at == len(names) - 1 else ",")
    head = f'{{{before}"{names[at]}":'
    if isinstance(record[names[at]], str):
        return head + written[:2], written[2:]
    return head, written


def _text(item: Any) -> str:
    return json.dumps(item, ensure_ascii=False)


def forced_value(dice: Dice) -> Sample:
    """One value of an object that a grammar shapes; the question names neither JSON nor keys."""
    record, question = dice.pick(_SOURCES)(dice)
    at = dice.number(0, len(record) - 1)
    given, answer = cut_at(record, at)
    told = spoken(next(iter(record.values())))
    thought = dice.pick(["I read the text.", f"The user says: {told}."])
    return Sample(
        "forced_json",
        [{"role": "user", "content": question}],
        answer,
        thought,
        check="starts",
        given=given,
        cut=at < len(record) - 1,
    )
