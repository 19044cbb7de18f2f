"""Some members of a category, "name three planets"; or none, where the category is unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvdemo.chat import Sample, one
from nvdemo.dice import held_out
from nvdemo.lexicon import phrase_list
from nvdemo.lexicon import words as w
from nvdemo.lexicon.world import CITIES_ASKED, COUNTRIES_ASKED
from nvdemo.tasks.facts import article
from nvdemo.tasks.unknown import REFUSAL

if TYPE_CHECKING:
    from nvdemo.dice import Dice

# (one, several, the members in the order in which they are named)
MEMBERS: list[tuple[str, str, list[str]]] = [
    *[(name, w.PLURALS[name], members[1:]) for name, members in w.CATEGORIES.items()],
    ("planet", "planets", w.PLANETS),
    ("planet", "planets", w.PLANETS),
    ("day of the week", "days of the week", w.DAYS),
    ("weekday", "weekdays", w.DAYS[:5]),
    ("month", "months", w.MONTHS),
    ("month of the year", "months of the year", w.MONTHS),
    ("season", "seasons", w.SEASONS),
    ("country", "countries", COUNTRIES_ASKED),
    ("capital", "capitals", CITIES_ASKED),
    ("capital city", "capital cities", CITIES_ASKED),
    ("color", "colors", w.COLOURS[1:]),
    ("adjective", "adjectives", w.ADJECTIVES[1:]),
    ("verb", "verbs", w.VERBS[1:]),
]
# Categories of which the model knows no member; one in eight is kept for the evaluation.
UNKNOWN = phrase_list("""
    philosophers, rivers, mountains, singers, composers, painters, actors, films, movies, novels,
    poets, presidents, kings, queens, emperors, wars, battles, inventors, scientists, chemical
    elements, gases, metals, minerals, gemstones, stars, galaxies, moons of Jupiter, constellations,
    oceans, seas, lakes, deserts of Africa, islands of Greece, volcanoes, dinosaurs, dog breeds,
    cat breeds, mushrooms of the forest, spices, cheeses, wines, beers, cocktails, dances, sports,
    football clubs, car makers, airlines, banks, universities, newspapers, programming languages,
    operating systems, web browsers, databases, sorting algorithms, design patterns, symptoms of
    flu, vitamins, bones, muscles, organs, diseases, medicines, saints, Greek gods, Roman gods,
    religions, holidays, board games, card games, chess openings, video games, rock bands, operas,
    symphonies, musicals, musical instruments, tools of a carpenter, currencies, dialects,
    alphabets, flags, laws, human rights, political parties, prime ministers, astronauts,
    explorers, pirates
""")

_ASK = "[name|Name|list|give me|tell me|write|show me|Can you name|can you list] {x}[.|?|]"


def name_some(dice: Dice) -> Sample:
    single, several, members = dice.pick(MEMBERS)
    count = dice.number(1, min(8, len(members)))
    noun = single if count == 1 else several
    if count == 1 and dice.chance(0.6):
        asked = dice.pick([article(single), article(single), f"any {single}"])
    else:
        asked = f"{dice.pick([str(count), w.NUMBER_WORDS[count]])} {noun}"
    question = dice.user(_ASK, x=asked)
    return one("name_some", question, ", ".join(members[:count]), f"{count} {noun}.")


def no_members(dice: Dice) -> Sample:
    """Asked to name members of a category that the model does not know."""
    while True:
        noun = dice.pick(UNKNOWN) if dice.chance(0.8) else f"{dice.word()}s"
        if held_out(noun.rstrip("s")) == dice.unseen:
            break
    count = dice.number(2, 10)
    asked = f"{dice.pick([str(count), w.NUMBER_WORDS[count], 'some', 'a few'])} {noun}"
    return one(
        "refusal",
        dice.user(_ASK, x=asked),
        REFUSAL,
        "I do not know that.",
        check="contains",
        expected="-m Qwen/Qwen3-0.6B",
    )
