"""Simple facts: capitals, opposites, sounds, comparisons, days, months, colours and the like."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvdemo.chat import Sample, one
from nvdemo.lexicon import words as w
from nvdemo.lexicon.world import COUNTRIES, FAMILIAR, HOME_OF

if TYPE_CHECKING:
    from nvdemo.dice import Dice

_ANTONYMS: dict[str, str] = {}
for _left, _right in w.OPPOSITES:
    _ANTONYMS.setdefault(_left, _right)
for _left, _right in w.OPPOSITES:
    _ANTONYMS.setdefault(_right, _left)


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


ASK_CAPITAL = (
    "[What is the capital of {c}?|What's the capital of {c}?|what is the capital city of {c}?|"
    "Which city is the capital of {c}?|Name the capital of {c}.|Tell me the capital of {c}.|"
    "Capital of {c}?|capital of {c}|capital {c}|{c} capital|The capital of {c} is|Give me the "
    "capital of {c}.|Do you know the capital of {c}?|What city is {c}'s capital?|{c}'s capital?|"
    "{c}: capital?|What is {c}'s capital city?|which is the capital of {c}|{c}\n\nWhat is the "
    "capital?|{c}\n\ncapital|I want to know the capital of {c}.|what is capital of {c}|whats the "
    "capital of {c}|And the capital of {c}?|What about {c}? What is its capital?|Where is the "
    "seat of government of {c}? I mean the capital.]"
)


def capital(dice: Dice) -> Sample:
    country, city, _ = dice.pick(FAMILIAR if dice.chance(0.4) else COUNTRIES)
    bare = country.removeprefix("the ")
    asked = dice.pick([country, country, bare])
    if dice.chance(0.08):
        asked = dice.slip(asked)
    question = dice.user_any_case(ASK_CAPITAL, c=asked)
    return one(
        "capital",
        question,
        f"The capital of {country} is {city}.",
        f"The capital of {country}: {city}.",
        check="contains",
        expected=city,
    )


def capital_of(dice: Dice) -> Sample:
    _, city, _ = dice.pick(FAMILIAR if dice.chance(0.4) else COUNTRIES)
    country = HOME_OF[city]
    question = dice.user_any_case(
        "[{c} is the capital of which country?|Which country has the capital {c}?|What country "
        "is {c}"
        " the capital of?|Which country's capital is {c}?|{c} is the capital of|of which country "
        "is "
        "{c} the capital?|In which country is {c}?|Where is {c}?|Which country is {c} in?]",
        c=city,
    )
    return one(
        "capital_of",
        question,
        f"{city} is the capital of {country}.",
        f"{city} is in {country}.",
        check="contains",
        expected=country,
    )


def continent(dice: Dice) -> Sample:
    country, _, place = dice.pick(COUNTRIES)
    question = dice.user_any_case(
        "[Which continent is {c} in?|On which continent is {c}?|What continent is {c} on?|where "
        "is {c}"
        "?|Where in the world is {c}?|{c} is on which continent?|continent of {c}|Where is {c} "
        "located?]",
        c=country,
    )
    name = country[0].upper() + country[1:]
    return one("continent", question, f"{name} is in {place}.", f"The continent of {country}.")


def opposite(dice: Dice) -> Sample:
    word = dice.pick(list(_ANTONYMS))
    question = dice.user_any_case(
        "[What is the opposite of {x}?|opposite of {x}|What's the opposite of {x}?|{x}: "
        "opposite?|Tell"
        " me the opposite of {x}.|antonym of {x}|Give me an antonym for {x}.|the opposite of {x} "
        "is|"
        "What is the contrary of {x}?|what word is the opposite of {x}?|{x}\n\nopposite?]",
        x=dice.pick([word, word, f'"{word}"', f"'{word}'"]),
    )
    return one(
        "opposite",
        question,
        f"The opposite of {word} is {_ANTONYMS[word]}.",
        f"{word} and {_ANTONYMS[word]} are opposites.",
    )


def sound(dice: Dice) -> Sample:
    animal = dice.pick(list(w.SOUNDS))
    question = dice.user(
        "[What sound does {x} make?|What does {x} say?|Which sound does {x} make?|What noise "
        "does {x} "
        "make?|how does {x} sound?|what sound do you hear from {x}?|the sound of {x}|sound of "
        "{x}?]",
        x=dice.pick([article(animal), article(animal), f"the {animal}"]),
    )
    start = article(animal)
    return one(
        "sound",
        question,
        f"{start[0].upper()}{start[1:]} says {w.SOUNDS[animal]}.",
        f"The sound of {article(animal)}.",
    )


def baby(dice: Dice) -> Sample:
    animal = dice.pick(list(w.BABIES))
    question = dice.user(
        "[What is a baby {x} called?|What do you call a young {x}?|What is the name of a baby {x}?|"
        "baby {x}?|how do you call a baby {x}?|a young {x} is called]",
        x=animal,
    )
    return one(
        "baby",
        question,
        f"A baby {animal} is called {article(w.BABIES[animal])}.",
        f"The young of {article(animal)}.",
    )


def home(dice: Dice) -> Sample:
    animal = dice.pick(list(w.HOMES))
    question = dice.user(
        "[Where does {x} live?|What is the home of {x} called?|Where do you find {x}?|in what "
        "does {x} "
        "live?|home of {x}?]",
        x=article(animal),
    )
    start = article(animal)
    return one(
        "home",
        question,
        f"{start[0].upper()}{start[1:]} lives in {article(w.HOMES[animal])}.".replace(
            "a water", "water"
        ),
        f"The home of {article(animal)}.",
    )


def legs(dice: Dice) -> Sample:
    animal = dice.pick(list(w.LEGS))
    question = dice.user(
        "[How many legs does {x} have?|how many legs has {x}?|number of legs of {x}|How many "
        "legs are "
        "on {x}?|legs of {x}?]",
        x=article(animal),
    )
    start = article(animal)
    return one(
        "legs",
        question,
        f"{start[0].upper()}{start[1:]} has {w.LEGS[animal]} legs.",
        f"The legs of {article(animal)}.",
    )


def colour(dice: Dice) -> Sample:
    thing = dice.pick(list(w.COLOUR_OF))
    question = dice.user(
        "[What colour is|What color is|Which colour has|what is the colour of|what is the color of|"
        "tell me the colour of] [the |a |]{x}[?|]",
        x=thing,
    )
    if thing in {"blood", "coal", "milk", "salt", "snow", "grass", "chocolate"}:
        subject = thing.capitalize()
    elif thing in {"sky", "sun", "night"}:
        subject = f"The {thing}"
    else:
        subject = article(thing)[0].upper() + article(thing)[1:]
    return one("colour", question, f"{subject} is {w.COLOUR_OF[thing]}.", f"The colour of {thing}.")


def comparison(dice: Dice) -> Sample:
    scale, more, less = dice.pick(
        [
            (w.SIZES, "bigger", "smaller"),
            (w.SIZES, "larger", "smaller"),
            (w.WEIGHTS, "heavier", "lighter"),
            (w.SPEEDS, "faster", "slower"),
        ]
    )
    low = dice.number(0, len(scale) - 3)
    high = dice.number(low + 2, len(scale) - 1)
    asked, winner, loser = dice.pick(
        [(more, scale[high], scale[low]), (less, scale[low], scale[high])]
    )
    first, second = dice.pick([(winner, loser), (loser, winner)])
    if dice.chance(0.6):
        question = dice.user(
            "[Which is|What is|Who is|which one is|tell me what is] {q}[?|]",
            q=f"{asked}{dice.pick([', ', ': ', ' - ', ' ', '? '])}{article(first)} or "
            f"{article(second)}",
        )
        answer = f"{article(winner)} is {asked} than {article(loser)}."
        return one(
            "comparison", question, answer[0].upper() + answer[1:], f"{article(winner)} is {asked}."
        )
    question = dice.user(
        "[Is|is it true that|Would you say that] {q}[?|]",
        q=f"{article(first)} {asked} than {article(second)}",
    )
    if not question.lower().startswith("is "):
        question = question.replace(f"{article(first)} {asked}", f"{article(first)} is {asked}")
    verdict = "Yes" if first == winner else "No"
    return one(
        "comparison",
        question,
        f"{verdict}, {article(winner)} is {asked} than {article(loser)}.",
        f"{article(winner)} is {asked}.",
    )


def number_compare(dice: Dice) -> Sample:
    top = dice.pick([20, 100, 100, 1000])
    first, second = dice.some(range(top), 2)
    big = dice.chance(0.6)
    asked = dice.pick(["bigger", "larger", "greater"]) if big else dice.pick(["smaller", "less"])
    winner, loser = (max(first, second), min(first, second))
    if not big:
        winner, loser = loser, winner
    question = dice.user(
        "[Which is|What is|which number is|tell me which is] {q}[?|]",
        q=f"{asked}, {first} or {second}",
    )
    return one(
        "number_compare",
        question,
        f"{winner} is {asked} than {loser}.",
        f"{min(first, second)} < {max(first, second)}.",
    )
