"""Recall: facts told in earlier turns, in a paragraph, or deep inside a long text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvdemo.chat import Message, Sample
from nvdemo.lexicon.people import PEOPLE, TOWNS
from nvdemo.lexicon.words import ANIMALS, COLOURS, FOODS, JOBS
from nvdemo.tasks.copying import sentence

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvdemo.dice import Dice

Turn = tuple[str, str]  # what the user says, and the reply


def _name(dice: Dice) -> str:
    return dice.own(PEOPLE) if dice.chance(0.5) else dice.word().capitalize()


def town(dice: Dice) -> str:
    return dice.own(TOWNS) if dice.chance(0.5) else dice.word().capitalize()


# kind of fact: (how it is told, the reply, how it is asked, the answer)
_FACTS: dict[str, tuple[str, str, str, str]] = {
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


def _draw(dice: Dice, kind: str) -> str:
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


@dataclass(slots=True)
class _Fact:
    kind: str
    pet: str
    value: str

    def fill(self, text: str) -> str:
        return text.replace("{pet}", self.pet)

    def told(self, dice: Dice) -> Turn:
        tell, reply, _, _ = _FACTS[self.kind]
        return (
            dice.user(self.fill(tell), x=self.value),
            self.fill(reply).replace("{x}", self.value),
        )

    def corrected(self, dice: Dice) -> Turn:
        """Told again with another value, which is the one that holds from now on."""
        old = self.value
        while self.value == old:
            self.value = _draw(dice, self.kind)
        form = dice.say(self.fill(_CORRECTIONS[self.kind]), x=self.value)
        reply = self.fill(_FACTS[self.kind][1]).replace("{x}", self.value)
        return dice.user(_CORRECT, x=form), reply

    def asked(self, dice: Dice) -> Turn:
        return dice.user(self.fill(_FACTS[self.kind][2])), self.answer()

    def answer(self) -> str:
        return self.fill(_FACTS[self.kind][3]).replace("{x}", self.value)


def recall(dice: Dice, other: Callable[[], Turn], later: bool | None = None) -> Sample:
    """One to three facts told in any turn, then a question for one or two of them.

    ``other`` makes the turns before, between and after; ``later`` says whether the first turn is
    one of these (left out: at times). A fact may be corrected, or asked for once before.
    """
    kinds = dice.some(list(_FACTS), dice.pick([1, 1, 2, 2, 3]))
    if dice.chance(0.6) and "name" not in kinds:
        kinds[0] = "name"
    pet = dice.pick(ANIMALS)
    facts = [_Fact(kind, pet, _draw(dice, kind)) for kind in kinds]
    corrected = dice.pick(facts) if dice.chance(0.2) else None
    turns: list[Turn] = []

    def between(counts: list[int]) -> None:
        turns.extend([other() for _ in range(dice.pick(counts))])

    if later is None:
        later = dice.chance(0.6)
    if later:
        between([1, 1, 1, 2, 2, 3])
    if len(facts) > 1 and dice.chance(0.2):
        told = [fact.told(dice) for fact in facts]
        turns.append((". ".join([text.rstrip(".!") for text, _ in told]) + ".", told[-1][1]))
    else:
        for number, fact in enumerate(facts):
            if number:
                between([0, 0, 1, 2])
            turns.append(fact.told(dice))
    if corrected:
        between([0, 0, 1])
        turns.append(corrected.corrected(dice))
    between([0, 0, 0, 1, 1, 2, 3])
    if dice.chance(0.2):
        turns.append(dice.pick(facts).asked(dice))
        between([0, 1, 1])
    wanted = dice.pick(facts)
    if "name" in kinds and dice.chance(0.5):
        wanted = next(fact for fact in facts if fact.kind == "name")
    question, answer, values = *wanted.asked(dice), [wanted.value]
    others = [fact for fact in facts if fact is not wanted]
    if others and dice.chance(0.15):
        second = dice.pick(others)
        more, more_answer = second.asked(dice)
        question = f"{question.rstrip('?.')}{dice.pick([' and ', '? And ', ', and ', '? '])}{more}"
        answer, values = f"{answer} {more_answer}", [*values, second.value]
    messages: list[Message] = []
    for text, reply in turns:
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": reply})
    messages.append({"role": "user", "content": question})
    return Sample(
        "name_recall" if wanted.kind == "name" else "fact_recall",
        messages,
        answer,
        f"The user said: {', '.join(values)}.",
        check="contains",
        expected="|".join(values),
    )


def told(dice: Dice) -> Sample:
    """The reply to a fact that the user tells."""
    kind = dice.pick(list(_FACTS))
    pet, fact = dice.pick(ANIMALS), _draw(dice, kind)
    tell, reply, _, _ = _FACTS[kind]
    return Sample(
        "told",
        [{"role": "user", "content": dice.user(tell.replace("{pet}", pet), x=fact)}],
        reply.replace("{pet}", pet).replace("{x}", fact),
        f"The user says: {fact}.",
    )


def correction(dice: Dice, other: Callable[[], Turn]) -> Sample:
    """The reply to a fact that the user tells anew because the first was wrong."""
    kind = dice.pick(["name", *_FACTS])
    fact = _Fact(kind, dice.pick(ANIMALS), _draw(dice, kind))
    turns = [fact.told(dice), *[other() for _ in range(dice.pick([0, 0, 1]))]]
    question, reply = fact.corrected(dice)
    messages: list[Message] = []
    for text, answer in turns:
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": question})
    return Sample("told", messages, reply, f"The user says: {fact.value}.")


def unknown_fact(dice: Dice, small_talk: list[Turn]) -> Sample:
    """Asked for something that was never told."""
    kind = dice.pick([k for k in _FACTS if k not in ("pet", "code", "number")])
    messages: list[Message] = []
    for question, reply in small_talk:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": reply})
    messages.append({"role": "user", "content": dice.user(_FACTS[kind][2])})
    return Sample(
        "not_told", messages, "You have not told me that yet.", "I look back: it was not said."
    )


def last_message(dice: Dice, small_talk: list[Turn]) -> Sample:
    """The user's last message, repeated word for word."""
    turns = [*small_talk, (sentence(dice), "All right.")]
    dice.shuffle(turns)
    messages: list[Message] = []
    for question, reply in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": reply})
    first = len(turns) > 1 and dice.chance(0.3)
    wanted = turns[0][0] if first else turns[-1][0]
    ask = "[What was|what's|Repeat|tell me|Show me|give me] my {x}[.|?|]"
    which = "first" if first else dice.pick(["last", "previous"])
    question = dice.user(ask, x=f"{which} {dice.pick(['message', 'question', 'line'])}")
    if not first and dice.chance(0.4):
        question = dice.user(
            "[What did I just say?|What did I say before?|Repeat what I said.|what did I write?|"
            "What did I ask before?]"
        )
    messages.append({"role": "user", "content": question})
    return Sample("last_message", messages, wanted, "I look back at the messages.")
