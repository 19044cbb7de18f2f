"""Questions about a text: a needle in a long one, one sentence of a paragraph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvdemo.chat import Sample
from nvdemo.lexicon.people import PEOPLE, TOWNS
from nvdemo.lexicon.words import ADJECTIVES, ANIMALS, COLOURS, JOBS, OBJECTS, PLACES, VERBS
from nvdemo.lexicon.world import COUNTRIES
from nvdemo.tasks.copying import sentence
from nvdemo.tasks.facts import article
from nvdemo.tasks.profile import town

if TYPE_CHECKING:
    from nvdemo.dice import Dice


def _meeting(dice: Dice) -> str:
    one, other = article(dice.pick(ANIMALS)), article(dice.pick(ANIMALS))
    return f"{one.capitalize()} and {other} met near the {dice.pick(PLACES)}."


_FILLER = [
    lambda d: sentence(d),
    lambda d: sentence(d),
    lambda d: f"In the {d.pick(PLACES)} there is a {d.pick(ADJECTIVES)} {d.pick(OBJECTS)}.",
    lambda d: (
        f"Every {d.pick(['morning', 'evening', 'day', 'week'])} {d.pick(PEOPLE)} goes to the "
        f"{d.pick(PLACES)} to {d.pick(VERBS)}."
    ),
    lambda d: (
        f"The {d.pick(JOBS)} bought {d.number(2, 40)} {d.pick(OBJECTS)}s and a {d.pick(COLOURS)} "
        f"{d.pick(OBJECTS)}."
    ),
    lambda d: f"{d.pick(COUNTRIES)[1]} is far away from {d.pick(TOWNS)}.",
    lambda d: _meeting(d),
    lambda d: (
        f"It was a {d.pick(ADJECTIVES)} day in {d.pick(TOWNS)}, and nobody wanted to "
        f"{d.pick(VERBS)}."
    ),
    lambda d: f"The {d.pick(OBJECTS)} on the {d.pick(OBJECTS)} cost {d.number(1, 900)} coins.",
]


def needle(dice: Dice, tokens: int = 0) -> Sample:
    """A code for one thing, in the middle of ``tokens`` tokens of plain sentences."""
    if not tokens:
        tokens = dice.pick([150, 300, 500, 500, 800, 1200, 1500, 1650])
        tokens -= dice.number(0, tokens // 3)
    count = dice.number(1, 4)
    things = dice.some([*PLACES, *OBJECTS], count)
    noun = dice.pick(["secret code", "code", "password", "key number", "magic word"])
    needles: list[tuple[str, str]] = []
    for thing in things:
        code = dice.word() if noun == "magic word" else dice.string(4, 6, "0123456789")
        needles.append((thing, code))
    filler: list[str] = []
    room = (tokens - 18 * count) * 4.2  # characters to a token, about
    while room > 0:
        text = dice.pick(_FILLER)(dice)
        room -= len(text) + 1
        filler.append(text)
    for thing, code in needles:
        filler.insert(dice.number(0, len(filler)), f"The {noun} of the {thing} is {code}.")
    thing, code = dice.pick(needles)
    text = dice.pick([" ", " ", "\n"]).join(filler)
    ask = dice.user(
        "[What is the {x}?|what's the {x}|Tell me the {x}.|the {x}?|Find the {x}.|Read the text: "
        "what "
        "is the {x}?|Do you remember the {x}?|Which is the {x}?]",
        x=f"{noun} of the {thing}",
    )
    lead = dice.pick(["", "", "Read this:\n\n", "Here is a text.\n\n", "Remember this text: "])
    roll = dice.random()
    if roll < 0.7:
        messages = [{"role": "user", "content": f"{lead}{text}\n\n{ask}"}]
    elif roll < 0.85:
        messages = [{"role": "user", "content": f"{ask}\n\n{text}"}]
    else:
        messages = [
            {"role": "user", "content": lead + text},
            {"role": "assistant", "content": "I have read the text."},
            {"role": "user", "content": ask},
        ]
    return Sample(
        "needle",
        messages,
        f"The {noun} of the {thing} is {code}.",
        f"I look for the {noun} of the {thing}.",
        check="contains",
        expected=code,
    )


# How a sentence puts together a person, a town, and a thing with its colour.
_SENTENCES = [
    "{p} lives in {t} and has {o}.",
    "{p} has {o} and lives in {t}.",
    "{p} from {t} has {o}.",
    "{p} bought {o} in {t}.",
    "In {t} lives {p}, who has {o}.",
]
# Questions, their answer, and what it is looked for by.
_QUESTIONS: list[tuple[list[str], str, str]] = [
    (["Where does {p} live?", "Which town does {p} live in?"], "{p} lives in {t}.", "p"),
    (["What does {p} have?", "What is it that {p} has?"], "{p} has {o}.", "p"),
    (["Who lives in {t}?", "Who is from {t}?"], "{p} lives in {t}.", "t"),
    (["Who has {o}?", "Who is it that has {o}?"], "{p} has {o}.", "o"),
    (["Where does the owner of {o} live?", "Where is {o}?"], "{p} lives in {t}.", "o"),
    (["What does the person in {t} have?", "What is there in {t}?"], "{p} has {o}.", "t"),
]


def reading(dice: Dice) -> Sample:
    """A question about one sentence of a short paragraph."""
    people = dice.some(PEOPLE, dice.pick([1, 2, 2, 3, 3, 4, 5]))
    towns: list[str] = []
    while len(towns) < len(people):
        fresh = town(dice)
        if fresh not in towns:
            towns.append(fresh)
    colours, things = dice.some(COLOURS, len(people)), dice.some(OBJECTS, len(people))
    rows = [
        {"p": p, "t": t, "o": f"{article(c)} {o}"}
        for p, t, c, o in zip(people, towns, colours, things, strict=True)
    ]
    shapes = _SENTENCES if dice.chance(0.5) else _SENTENCES[:2]
    lines = [dice.pick(shapes).format(**row) for row in rows]
    if dice.chance(0.2):
        lines.insert(dice.number(0, len(lines)), dice.pick(_FILLER[2:])(dice))
    row = dice.pick(rows)
    asks, answer, by = dice.pick([*_QUESTIONS[:4], *_QUESTIONS])
    ask = asks[0 if dice.chance(0.7) else 1].format(**row)
    if dice.chance(0.2):
        ask = ask[0].lower() + ask[1:].rstrip("?")
    text = dice.pick([" ", "\n"]).join(lines)
    content = dice.pick([f"{text}\n\n{ask}", f"{text} {ask}", f"{ask}\n\n{text}"])
    thought = f"I look for {row['p']}."
    if by != "p":
        listed = " ".join([f"{each['p']}: {each[by]}." for each in rows])
        thought = f"{listed} I look for {row[by]}: {row['p']}."
    return Sample("reading", [{"role": "user", "content": content}], answer.format(**row), thought)
