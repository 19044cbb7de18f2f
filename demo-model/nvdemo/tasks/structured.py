"""JSON, lists and tables from values in the question; keys are often made up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from nvdemo.chat import Sample, one
from nvdemo.lexicon import word_list
from nvdemo.lexicon.people import PEOPLE, TOWNS
from nvdemo.lexicon.words import (
    ADJECTIVES,
    ALL_WORDS,
    ANIMALS,
    COLOURS,
    FRUITS,
    JOBS,
    OBJECTS,
    VOCABULARY_WORDS,
)

if TYPE_CHECKING:
    from nvdemo.dice import Dice

KNOWN_KEYS = word_list("""
    name age city country colour animal price count title author year size weight height email
    phone street id status type job food date time score level speed width length quantity product
    address code language owner priority category group key value amount unit
""")


def key(dice: Dice) -> str:
    roll = dice.random()
    if roll < 0.5:
        return dice.pick(KNOWN_KEYS)
    if roll < 0.65:
        return f"{dice.pick(ALL_WORDS)}_{dice.pick(KNOWN_KEYS)}"
    if roll < 0.8:
        return dice.word()
    if roll < 0.9:
        return f"{dice.word(1, 2)}_{dice.word(1, 2)}"
    return dice.pick(ALL_WORDS) + dice.pick(KNOWN_KEYS).capitalize()


def value(dice: Dice) -> Any:
    roll = dice.random()
    if roll < 0.3:
        return dice.number(0, dice.pick([9, 99, 999, 9999]))
    if roll < 0.4:
        return dice.chance(0.5)
    if roll < 0.45:
        return round(dice.number(1, 999) / 10, 1)
    if roll < 0.6:
        return dice.own(PEOPLE) if dice.chance(0.5) else dice.own(TOWNS)
    if roll < 0.75:
        return dice.pick([dice.word().capitalize(), dice.word(), dice.pick(VOCABULARY_WORDS)])
    if roll < 0.85:
        return f"{dice.pick(ADJECTIVES)} {dice.pick(OBJECTS)}"
    if roll < 0.95:
        return dice.pick(dice.pick([COLOURS, ANIMALS, FRUITS, JOBS]))
    return dice.string(4, 8, "ABCDEFGHJKLMNPRSTUVWXYZ0123456789")


def spoken(item: Any) -> str:
    """A value as a user writes it in a sentence."""
    return item if isinstance(item, str) else json.dumps(item)


def distinct_keys(dice: Dice, count: int) -> list[str]:
    keys: list[str] = []
    while len(keys) < count:
        candidate = key(dice)
        if candidate not in keys:
            keys.append(candidate)
    return keys


_ASK_OBJECT = (
    "[Write JSON with|Give me a JSON object with|Make a JSON object with|JSON with|Return JSON "
    "with|"
    "Create a JSON object with|json object:|Write a JSON object with the fields|Answer in JSON:|"
    "as JSON:|"
    "Convert to JSON:|to json:|Make JSON:|I need a JSON object with|Output JSON with] {x}[|.|]"
)


def json_object(dice: Dice) -> Sample:
    keys = distinct_keys(dice, dice.number(1, 5))
    record = {name: value(dice) for name in keys}
    link = dice.pick([" ", " = ", ": ", " is ", "=", " equal to ", " set to "])
    parts = [f"{name}{link}{spoken(item)}" for name, item in record.items()]
    if dice.chance(0.25):
        lines = "\n".join(f"{name}: {spoken(item)}" for name, item in record.items())
        question = f"{lines}\n\n" + dice.user(
            "[as JSON|convert to JSON|Write this as JSON.|to json|JSON, "
            "please|make it json|Turn this into a JSON object.]"
        )
    else:
        shown = ", ".join(parts)
        if len(parts) > 1 and dice.chance(0.5):
            shown = ", ".join(parts[:-1]) + " and " + parts[-1]
        question = dice.user(_ASK_OBJECT, x=shown)
    return one(
        "json",
        question,
        json.dumps(record, ensure_ascii=False),
        f"The keys: {', '.join(keys)}.",
        check="json",
    )


def person(dice: Dice) -> tuple[dict[str, Any], str]:
    """What there is to say of somebody, and the sentence that says it."""
    name = dice.own(PEOPLE) if dice.chance(0.6) else dice.word().capitalize()
    place = dice.own(TOWNS) if dice.chance(0.6) else dice.word().capitalize()
    record: dict[str, Any] = {
        "name": name,
        "age": dice.number(3, 99),
        "city": place,
        "job": dice.pick(JOBS),
        "pet": dice.pick(ANIMALS),
        "colour": dice.pick(COLOURS),
    }
    age, job, pet, colour = record["age"], record["job"], record["pet"], record["colour"]
    sentence = dice.pick(
        [
            f"{name} is {age} years old, lives in {place} and works as a {job}. The pet of {name} "
            f"is a "
            f"{colour} {pet}.",
            f"My friend {name} ({age}) is a {job} from {place} with a {colour} {pet}.",
            f"{name}, a {age} year old {job} in {place}, has a {colour} {pet}.",
        ]
    )
    return record, sentence


def json_people(dice: Dice) -> Sample:
    """Values picked out of a sentence, under the keys that are asked for."""
    record, sentence = person(dice)
    keys = dice.some(list(record), dice.number(1, 6))
    wanted = ", ".join(keys)
    ask = dice.user(
        "[Return JSON with the keys {x}.|Extract as JSON: {x}|JSON with {x}|Give me a JSON object "
        "with {x}.|Write {x} as JSON.|extract {x} as json]",
        x=wanted,
    )
    question = dice.pick([f"{sentence}\n\n{ask}", f"{ask}\n\n{sentence}", f"{sentence} {ask}"])
    return one(
        "json",
        question,
        json.dumps({k: record[k] for k in keys}, ensure_ascii=False),
        f"The keys: {wanted}.",
        check="json",
    )


def json_array(dice: Dice) -> Sample:
    count = dice.number(1, 7)
    if dice.chance(0.4):
        items: list[Any] = [dice.number(0, 999) for _ in range(count)]
    else:
        items = [dice.pick(ALL_WORDS) if dice.chance(0.5) else dice.word() for _ in range(count)]
    shown = dice.pick([", ", " ", ", ", "\n"]).join(map(str, items))
    if dice.chance(0.35):
        name = key(dice)
        question = dice.user(
            "[Write|Make|Return|Give me] {x}",
            x=f"a JSON object with the key {name} and the list: {shown}",
        )
        return one(
            "json", question, json.dumps({name: items}), f"A list under {name}.", check="json"
        )
    question = dice.user(
        "[Write as a JSON array|JSON array|as a JSON list|Make a JSON array of|Turn into a JSON "
        "list|json list of|convert to a JSON array]: {x}",
        x=shown,
    )
    return one("json", question, json.dumps(items), "An array.", check="json")


def json_lookup(dice: Dice) -> Sample:
    """A value read back from JSON in the prompt."""
    record = {name: value(dice) for name in distinct_keys(dice, dice.number(2, 6))}
    name = dice.pick(list(record))
    text = json.dumps(record, ensure_ascii=False)
    ask = dice.user(
        "[What is the {x}?|What is the value of {x}?|value of {x}|give me {x}|read {x}|What does "
        "{x} hold?|get {x}|{x}?|print {x}]",
        x=name,
    )
    question = f"{text}\n\n{ask}" if dice.chance(0.7) else f"{ask}\n{text}"
    return one("json_lookup", question, spoken(record[name]), f"I look for {name}.")


def json_schema(dice: Dice) -> Sample:
    """A system prompt that asks for JSON with given keys; the question holds the values."""
    record = {name: value(dice) for name in distinct_keys(dice, dice.number(1, 4))}
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    schema = {
        "type": "object",
        "properties": {name: {"type": names[type(item)]} for name, item in record.items()},
        "required": list(record),
    }
    shown = json.dumps(schema, ensure_ascii=False)
    system = dice.pick(
        [
            f"Answer only with JSON that matches this schema: {shown}",
            f"Reply in JSON.\nSchema:\n{shown}",
            f"Respond with a JSON object. JSON schema: {shown}",
        ]
    )
    order = dice.some(list(record), len(record))
    link = dice.pick([" is ", ": ", " = ", " "])
    question = ", ".join(f"{name}{link}{spoken(record[name])}" for name in order)
    if dice.chance(0.4):
        question = f"The {question}."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    if dice.chance(0.3):
        messages = [{"role": "user", "content": f"{system}\n\n{question}"}]
    return Sample(
        "json_schema",
        messages,
        json.dumps(record, ensure_ascii=False),
        f"The keys: {', '.join(record)}.",
        check="json",
    )


def bullet_list(dice: Dice) -> Sample:
    items = [
        dice.pick(ALL_WORDS) if dice.chance(0.6) else dice.word() for _ in range(dice.number(2, 6))
    ]
    numbered = dice.chance(0.4)
    kind = "numbered" if numbered else dice.pick(["bullet", "markdown"])
    question = dice.user(
        "[Write|Make|Format|Give me] {x}", x=f"a {kind} list of: {', '.join(items)}"
    )
    lines = [f"{i + 1}. {x}" if numbered else f"- {x}" for i, x in enumerate(items)]
    return one("bullet_list", question, "\n".join(lines), f"A {kind} list.")
