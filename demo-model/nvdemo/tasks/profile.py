"""Facts that a user tells of himself: how each is told, corrected, asked for and answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvdemo.lexicon.people import PEOPLE, TOWNS
from nvdemo.lexicon.words import COLOURS, FOODS, JOBS

if TYPE_CHECKING:
    from nvdemo.dice import Dice

Turn = tuple[str, str]  # what the user says, and the reply


def _name(dice: Dice) -> str:
    return dice.own(PEOPLE) if dice.chance(0.5) else dice.word().capitalize()


def town(dice: Dice) -> str:
    return dice.own(TOWNS) if dice.chance(0.5) else dice.word().capitalize()


# kind of fact: (how it is told, the reply, how it is asked, the answer)
FACTS: dict[str, tuple[str, str, str, str]] = {
    "name": (
        "[My name is|I am|I'm|Call me|my name's|Hello, my name is|Hi, I'm|people call me|hey I am] "
        "{x}[.|!|]",
        "Nice to meet you, {x}!",
        "[What is my name?|What's my name?|Who am I?|Do you remember my name?|Tell me my name.|"
        "my name?|"
        "What did I say my name was?|do you know my name|How am I called?|say my name|and what "
        "is my "
        "name?|what was my name]",
        "Your name is {x}.",
    ),
    "city": (
        "[I live in|I am from|My home is|I come from|my city is|I'm living in] {x}[.|!|]",
        "{x}, I will remember that.",
        "[Where do I live?|Which city do I live in?|Where am I from?|what is my city|where is my "
        "home?|"
        "In which town do I live?]",
        "You live in {x}.",
    ),
    "age": (
        "[I am|I'm] {x} years old[.|!|]",
        "{x} years, I will remember that.",
        "[How old am I?|What is my age?|my age?|do you know how old I am|tell me my age]",
        "You are {x} years old.",
    ),
    "pet": (
        "[My {pet}'s name is|my {pet} is called|I have a {pet} called|I have a {pet} named] "
        "{x}[.|!|]",
        "What a nice {pet}! I will remember {x}.",
        "[What is the name of my {pet}?|What's my {pet} called?|my {pet}'s name?|Who is my "
        "{pet}?|How is "
        "my {pet} called?]",
        "Your {pet} is called {x}.",
    ),
    "colour": (
        "[My favourite colour is|My favorite color is|I like the colour|the colour I like best is] "
        "{x}[.|!|]",
        "{x}, I will remember that.",
        "[What is my favourite colour?|What's my favorite color?|which colour do I like?|my "
        "favourite "
        "colour?|What colour do I like best?]",
        "Your favourite colour is {x}.",
    ),
    "job": (
        "[I work as a|My job is|I am a] {x}[.|!|]",
        "{x}, I will remember that.",
        "[What is my job?|What do I do for a living?|my job?|what do I work as?|What's my "
        "profession?]",
        "Your job: {x}.",
    ),
    "food": (
        "[My favourite food is|I like to eat|I love|my favorite food is] {x}[.|!|]",
        "{x}, I will remember that.",
        "[What is my favourite food?|What do I like to eat?|my favourite food?|what food do I "
        "like?]",
        "Your favourite food is {x}.",
    ),
    "number": (
        "[My lucky number is|Remember the number|the number is|My number is|please remember this "
        "number:]"
        " {x}[.|]",
        "{x}, I will remember that.",
        "[What is my number?|Which number did I tell you?|What was the number?|the number?|What "
        "is my "
        "lucky number?|repeat the number]",
        "The number is {x}.",
    ),
    "code": (
        "[The password is|The code word is|Remember this code:|the secret word is|My code is|"
        "remember the "
        "word] {x}[.|]",
        "I will remember {x}.",
        "[What is the password?|What is the code?|What was the code word?|what's the secret "
        "word?|tell me "
        "the code|What did I ask you to remember?]",
        "It is {x}.",
    ),
}


def draw(dice: Dice, kind: str) -> str:
    if kind in ("name", "pet"):
        return _name(dice)
    if kind == "city":
        return town(dice)
    if kind == "age":
        return str(dice.number(3, 99))
    if kind == "number":
        return str(dice.number(2, 99999))
    if kind == "code":
        return (
            dice.word()
            if dice.chance(0.5)
            else dice.string(4, 8, "abcdefghkmnpqrstuvwxyz0123456789")
        )
    return dice.pick({"colour": COLOURS, "job": JOBS, "food": FOODS}[kind])


_CORRECT = (
    "[no, |No, |sorry, |Sorry, |wait, |oh, |I was wrong: |Correction: |Actually, |actually |"
    "I made a mistake, |that is wrong, |no, I meant: |Not quite: ]{x}[.|!|]"
)
_CORRECTIONS = {
    "name": "[my name is|I am|it is|I'm called|my name's|call me] {x}",
    "city": "[I live in|it is|I am from] {x}",
    "age": "[I am|I'm] {x} years old",
    "pet": "[my {pet} is called|it is|my {pet}'s name is] {x}",
    "colour": "[my favourite colour is|it is] {x}",
    "job": "[I am a|my job is|I work as a] {x}",
    "food": "[my favourite food is|it is] {x}",
    "number": "[the number is|it is] {x}",
    "code": "[it is|the code is|the password is] {x}",
}


# One clause of a sentence that tells several facts.
_CLAUSES = {
    "name": "[my name is|I am|I'm|I am called|my name's] {x}",
    "city": "[I live in|I am from|I come from|my home is|my city is] {x}",
    "age": "[I am|I'm] {x} years old",
    "pet": "[my {pet} is called|I have a {pet} called|I have a {pet} named] {x}",
    "colour": "[my favourite colour is|my favorite color is|I like the colour] {x}",
    "job": "[I work as a|my job is] {x}",
    "food": "[my favourite food is|I like to eat|my favorite food is] {x}",
    "number": "[my lucky number is|my number is] {x}",
    "code": "[the password is|the code word is|my code is] {x}",
}


@dataclass(slots=True)
class Fact:
    kind: str
    pet: str
    value: str

    def fill(self, text: str) -> str:
        return text.replace("{pet}", self.pet)

    def told(self, dice: Dice) -> Turn:
        return dice.user(self.fill(FACTS[self.kind][0]), x=self.value), self.reply()

    def corrected(self, dice: Dice) -> Turn:
        """Told again with another value, which is the one that holds from now on."""
        old = self.value
        while self.value == old:
            self.value = draw(dice, self.kind)
        form = dice.say(self.fill(_CORRECTIONS[self.kind]), x=self.value)
        return dice.user(_CORRECT, x=form), self.reply()

    def asked(self, dice: Dice) -> Turn:
        return dice.user(self.fill(FACTS[self.kind][2])), self.answer()

    def reply(self) -> str:
        return self.fill(FACTS[self.kind][1]).replace("{x}", self.value)

    def answer(self) -> str:
        return self.fill(FACTS[self.kind][3]).replace("{x}", self.value)


def together(dice: Dice, facts: list[Fact], sentences: bool = False) -> Turn:
    """Several facts in one turn, joined by "and" or as sentences; the reply names each."""
    clauses = [dice.say(fact.fill(_CLAUSES[fact.kind]), x=fact.value) for fact in facts]
    if dice.chance(0.6):
        clauses[0] = clauses[0][0].upper() + clauses[0][1:]
    if sentences:
        text = ". ".join([clause[0].upper() + clause[1:] for clause in clauses])
    else:
        text = ", ".join(clauses[:-1]) + dice.pick([" and ", " and ", ", and "]) + clauses[-1]
    return dice.user("[|||hi, |Hello, ]{x}[.|!|]", x=text), " ".join([f.reply() for f in facts])
