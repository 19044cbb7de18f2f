"""JSON from keys in one list and their values in another."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from nvdemo.chat import Sample, one
from nvdemo.lexicon.people import PEOPLE
from nvdemo.lexicon.words import ANIMALS, COLOURS, FRUITS, JOBS, OBJECTS
from nvdemo.lexicon.world import COUNTRIES
from nvdemo.tasks.profile import town
from nvdemo.tasks.structured import distinct_keys, spoken, value

if TYPE_CHECKING:
    from nvdemo.dice import Dice


def _familiar(dice: Dice) -> dict[str, Any]:
    """Values that belong together, under the keys that fit them."""
    if dice.chance(0.4):
        country, city, continent = dice.pick(COUNTRIES)
        record: dict[str, Any] = {"city": city, "country": country.removeprefix("the ")}
        if dice.chance(0.2):
            record["continent"] = continent
        if dice.chance(0.2):
            record = {{"city": "capital"}.get(name, name): item for name, item in record.items()}
        return record
    if dice.chance(0.3):
        return {"city": town(dice), "country": dice.pick(COUNTRIES)[0].removeprefix("the ")}
    person = dice.own(PEOPLE) if dice.chance(0.6) else dice.word().capitalize()
    if dice.chance(0.6):
        record = {"name": person, "age": dice.number(1, 99)}
        if dice.chance(0.4):
            record[dice.pick(["city", "town"])] = town(dice)
        return record
    return dice.pick(
        [
            {"name": person, "job": dice.pick(JOBS)},
            {"animal": dice.pick(ANIMALS), "colour": dice.pick(COLOURS)},
            {"colour": dice.pick(COLOURS), "object": dice.pick(OBJECTS)},
            {"fruit": dice.pick(FRUITS), "price": dice.number(1, 99)},
            {"title": f"The {dice.pick(OBJECTS)}", "author": person},
            {"product": dice.pick(OBJECTS), "quantity": dice.number(1, 99)},
        ]
    )


def _listed(dice: Dice, parts: list[str]) -> str:
    """The parts with commas, at times with "and" before the last."""
    if len(parts) > 1 and dice.chance(0.7):
        return ", ".join(parts[:-1]) + " and " + parts[-1]
    return ", ".join(parts)


def json_given(dice: Dice) -> Sample:
    """Keys in one list and their values in another, in free phrasing: "for Paris, France"."""
    if dice.chance(0.6):
        record = _familiar(dice)
    else:
        record = {name: value(dice) for name in distinct_keys(dice, dice.number(1, 4))}
    names = list(record)
    values = [spoken(item) for item in record.values()]
    quote = dice.pick(["", "", "", '"', "`"])
    keys = _listed(dice, [f"{quote}{name}{quote}" for name in names])
    if len(names) > 1 and dice.chance(0.15):  # the keys may come in another order than usual
        order = dice.some(range(len(names)), len(names))
        names, values = [names[i] for i in order], [values[i] for i in order]
        keys = _listed(dice, [f"{quote}{name}{quote}" for name in names])
        record = {name: record[name] for name in names}
    given = ", ".join(values) if dice.chance(0.6) else _listed(dice, values)
    noun = dice.pick(["keys", "keys", "keys", "fields", "properties", "attributes"])
    noun = noun if len(names) > 1 else {"properties": "property"}.get(noun, noun[:-1])
    what = dice.pick(["a JSON object", "a JSON object", "JSON", "a json object", "JSON code"])
    shape = dice.pick(
        [
            f"{what} with the {noun} {keys} for {given}",
            f"{what} with the {noun} {keys} for {given}",
            f"{what} with {keys} for {given}",
            f"{what} with the {noun} {keys} for this: {given}",
            f"{what} with the {noun} {keys}: {given}",
            f"{what} for {given} with the {noun} {keys}",
            f"{what} with the {noun} {keys} and the values {given}",
            f"{what} that has the {noun} {keys}, for {given}",
            f"{what} describing {given}; {noun}: {keys}",
        ]
    )
    question = dice.user(
        "[Write|Write|Make|Create|Give me|Return|Output|Show me|I need|Generate|Can you write] "
        "{x}[.|.|]",
        x=shape,
    )
    return one(
        "json",
        question,
        json.dumps(record, ensure_ascii=False),
        f"The keys: {', '.join(names)}.",
        check="json",
    )
