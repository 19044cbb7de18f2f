"""Exact copying: echo, spelling, picking out words and lines, joining and turning round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvdemo.chat import Sample, one
from nvdemo.lexicon.people import PEOPLE, TOWNS
from nvdemo.lexicon.words import (
    ADJECTIVES,
    ALL_WORDS,
    ANIMALS,
    COLOURS,
    LOWER_PIECES,
    NUMBER_WORDS,
    OBJECTS,
    PLACES,
    VERBS,
    VOCABULARY_WORDS,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvdemo.dice import Dice

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MIXED = LETTERS + LETTERS.upper() + "0123456789"
_SYMBOLS = _MIXED + "-_.:/@#%+=*"
_EXOTIC = "äöüéèñçßøåŁşžđαβγδλπбвгджяшאבגあいう日本語中文字한국어→✓★😀🚀🎉€£°½"


def sentence(dice: Dice) -> str:
    """A short plain sentence."""
    shapes: list[Callable[[], str]] = [
        lambda: (
            f"The {dice.pick(ADJECTIVES)} {dice.pick(ANIMALS)} {dice.pick(VERBS)}s in the "
            f"{dice.pick(PLACES)}."
        ),
        lambda: (
            f"{dice.own(PEOPLE)} has {dice.number(2, 99)} {dice.pick(COLOURS)} "
            f"{dice.pick(OBJECTS)}s."
        ),
        lambda: f"{dice.own(PEOPLE)} and {dice.own(PEOPLE)} live in {dice.own(TOWNS)}.",
        lambda: f"My {dice.pick(OBJECTS)} is {dice.pick(ADJECTIVES)} and {dice.pick(COLOURS)}!",
        lambda: (
            f"Please {dice.pick(VERBS)} the {dice.pick(OBJECTS)} at {dice.number(1, 12)} o'clock."
        ),
        lambda: f"the {dice.word()} of {dice.word().capitalize()} is {dice.pick(ADJECTIVES)}",
        lambda: f"{dice.word().capitalize()} {dice.pick(VERBS)} {dice.word()} {dice.word()}.",
    ]
    return dice.pick(shapes)()


def payload(dice: Dice) -> str:
    """Something to copy: words, made-up words, random strings, numbers, sentences, symbols."""
    roll = dice.random()
    if roll < 0.07:
        return " ".join([dice.pick(ALL_WORDS) for _ in range(dice.number(1, 8))])
    if roll < 0.15:
        return " ".join([dice.pick(VOCABULARY_WORDS) for _ in range(dice.number(1, 10))])
    if roll < 0.30:
        return " ".join([dice.word() for _ in range(dice.number(1, 5))])
    if roll < 0.42:
        return dice.string(
            4, 20, dice.pick([LETTERS, _MIXED, _SYMBOLS, LETTERS.upper() + "0123456789"])
        )
    if roll < 0.50:
        return dice.string(3, 16, "0123456789")
    if roll < 0.58:
        return "-".join([dice.string(2, 5, _MIXED) for _ in range(dice.number(2, 4))])
    if roll < 0.80:
        return " ".join([sentence(dice) for _ in range(dice.number(1, 3))])
    if roll < 0.86:
        return ", ".join(
            [
                dice.pick(
                    [
                        dice.own(PEOPLE),
                        dice.own(TOWNS),
                        dice.word().capitalize(),
                        str(dice.number(0, 9999)),
                    ]
                )
                for _ in range(dice.number(2, 6))
            ]
        )
    if roll < 0.91:
        words = [dice.word() for _ in range(dice.number(1, 4))]
        return " ".join([dice.pick([x, x.upper(), x.capitalize()]) for x in words])
    if roll < 0.95:
        return "".join([dice.pick(_EXOTIC) for _ in range(dice.number(2, 8))])
    mark = dice.pick(
        [
            "`{}`",
            "<{}>",
            "[{}]",
            "({})",
            "{{{}}}",
            "**{}**",
            "'{}'",
            "{}!",
            "{}?",
            "/{}",
            "{}.txt",
            "https://{}.example/",
            "{}@mail.example",
            "$ {}",
        ]
    )
    return mark.format(dice.word())


def echo(dice: Dice) -> Sample:
    text = payload(dice)
    if dice.chance(0.12):
        text = "\n".join([payload(dice).replace("\n", " ") for _ in range(dice.number(2, 4))])
    roll = dice.random()
    if roll < 0.62:
        question = dice.user(
            "[Repeat|repeat|Echo|echo|Say|Please repeat|copy|Copy|Write|Output|print|Repeat "
            "after me|"
            "repeat exactly|Say exactly|Can you repeat|Return|Type|Please say|Answer with|Reply "
            "with|"
            "I want you to say|Just say|Only say|Respond with][: |: |:\n| this: | the following: "
            "| the "
            "following text: | this text: | exactly: | back to me: ]{x}",
            x=text,
        )
    elif roll < 0.8:
        mark = dice.pick(['"{}"', "'{}'", '"{}"'])
        question = dice.user(
            "[Repeat {x}.|Say {x}|echo {x}|Please repeat {x} for me.|Write {x}, nothing else.|"
            "Can you say "
            "{x}?|Repeat the text {x}.|Answer with {x} only.|please print {x}|Reply only with "
            "{x}.]",
            x=mark.format(text),
        )
    elif roll < 0.9 and "\n" not in text:
        question = dice.user("[Say|say|echo|repeat|Repeat|print] {x}", x=text)
    else:
        question = f"{text}\n\n" + dice.user(
            "[Repeat this.|repeat the text above|echo|copy the text|Say it again.|Repeat that|"
            "print it|"
            "Repeat the text exactly.]"
        )
    return one("echo", question, text, dice.pick(["I repeat the text.", "I repeat the text."]))


def spelling(dice: Dice) -> Sample:
    roll, kind = dice.random(), "spelling"
    if roll < 0.2:
        word = dice.pick(ALL_WORDS)
    elif roll < 0.5:
        word = "".join([dice.pick(LOWER_PIECES) for _ in range(dice.number(1, 3))])
    elif roll < 0.57:
        word = dice.own(PEOPLE).lower()
    elif roll < 0.67:
        word = dice.string(3, 9, LETTERS)
    else:
        word, kind = dice.word(1, 4), "spelling_made_up"
    spelt = "-".join(word)
    if dice.chance(0.75):
        question = dice.user(
            "[Spell {x}.|spell {x}|How do you spell {x}?|Spell the word {x}.|Can you spell {x}?|"
            "spelling "
            "of {x}|Spell {x} letter by letter.|the letters of {x}|What are the letters of {x}?|"
            "{x}\n\n"
            "spell it]",
            x=dice.pick([word, word, f'"{word}"', f"'{word}'"]),
        )
        return one(kind, question, spelt, f"The letters of {word}.")
    question = dice.user(
        "[Reverse the word {x}.|{x} backwards|Write {x} backwards.|reverse {x}|What is {x} spelled "
        "backwards?|Spell {x} backwards.]",
        x=dice.pick([word, f'"{word}"']),
    )
    return one("reverse", question, word[::-1], f"{spelt}. From the end: {'-'.join(word[::-1])}.")


def letters(dice: Dice) -> Sample:
    word = dice.pick(ALL_WORDS)
    if dice.chance(0.4):
        last = dice.chance(0.5)
        question = dice.user(
            "[What is|Which is|tell me|give me] {x}[?|]",
            x=f"the {'last' if last else 'first'} letter of {word}",
        )
        return one("letters", question, word[-1] if last else word[0], "-".join(word))
    letter = dice.pick(word) if dice.chance(0.75) else dice.pick(LETTERS)
    count = word.count(letter)
    question = dice.user(
        "[How many|how many|count the] {x}[?|]",
        x=dice.pick(
            [
                f'"{letter}" are in "{word}"',
                f"{letter}'s are in {word}",
                f"times is the letter {letter} in {word}",
                f"{letter} does {word} have",
            ]
        ),
    )
    return one("letters", question, str(count), f"{'-'.join(word)}. {letter}: {count}.")


def picking(dice: Dice) -> Sample:
    """First or last word, line or item; the third of a list."""
    names = ["first", "second", "third", "fourth", "last"]
    at = dice.pick([0, 0, 1, 2, 3, 4, 4])
    count = dice.number(4, 7)
    items = [dice.pick(ALL_WORDS) if dice.chance(0.5) else dice.word() for _ in range(count)]
    join, noun = dice.pick([(" ", "word"), (", ", "item"), ("\n", "line"), ("\n", "line")])
    text = join.join(items)
    answer = items[-1] if at == 4 else items[at]
    ask = f"the {names[at]} {noun}"
    if dice.chance(0.5):
        question = (
            f"{text}\n\n"
            + dice.user("[What is|give me|print|show me|Which is|repeat|] {x}[?|.|]", x=ask).strip()
        )
    else:
        question = dice.user(
            "[What is|Give me|Which is|tell me|print|Show me] {x}", x=f"{ask} of: {text}"
        )
    return one("picking", question, answer, f"I look for {ask}.")


def joining(dice: Dice) -> Sample:
    """Lists from one separator to another, or back to front."""
    items = [
        dice.pick(ALL_WORDS) if dice.chance(0.6) else dice.word() for _ in range(dice.number(2, 6))
    ]
    if dice.chance(0.5):
        joins = {
            "commas": ", ",
            "spaces": " ",
            "new lines": "\n",
            "dashes": "-",
            "plus signs": "+",
            "semicolons": "; ",
            "slashes": "/",
        }
        name = dice.pick(list(joins))
        question = dice.user(
            "[Join|Write|put|Combine|Connect] {x}",
            x=f"these words with {name}: {dice.pick([' ', ', ']).join(items)}",
        )
        return one("joining", question, joins[name].join(items), f"The words with {name}.")
    join = dice.pick([", ", " ", "\n"])
    text = join.join(items)
    if dice.chance(0.5):
        question = dice.user(
            "[Reverse|reverse|Turn round] {x}",
            x=f"{dice.pick(['the order of', 'the list', 'the order', 'this list'])}: {text}",
        )
    else:
        question = f"{text}\n\n" + dice.user(
            "[reverse the order|Reverse the list.|from the end to the start|"
            "reverse the order of the list]"
        )
    return one("joining", question, join.join(items[::-1]), "From the last to the first.")


def letter_case(dice: Dice) -> Sample:
    group = dice.pick([ALL_WORDS, LOWER_PIECES])
    text = " ".join([dice.pick(group) for _ in range(dice.number(1, 5))])
    if dice.chance(0.6):
        question = dice.user(
            "[Write in capital letters|uppercase|to upper case|Make this uppercase|Write in "
            "upper case|in capitals|convert to uppercase]: {x}",
            x=text,
        )
        return one("letter_case", question, text.upper(), "In capital letters.")
    question = dice.user(
        "[Write in small letters|lowercase|to lower case|Make this lowercase|Write in lower "
        "case|convert to lowercase]: {x}",
        x=text.upper(),
    )
    return one("letter_case", question, text, "In small letters.")


def times(dice: Dice) -> Sample:
    """The same word several times."""
    count = dice.number(2, 8)
    word = dice.pick([dice.pick(ALL_WORDS), dice.word(), dice.own(PEOPLE)])
    number = dice.pick([str(count), NUMBER_WORDS[count]])
    question = dice.user(
        "[Say|say|Repeat|Write|write|print|repeat] {x}[.|]", x=f"{word} {number} times"
    )
    return one("times", question, " ".join([word] * count), f"{count} times {word}.")
