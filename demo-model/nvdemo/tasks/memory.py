"""Recall: facts told in earlier turns, in a paragraph, or deep inside a long text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvdemo.chat import Message, Sample
from nvdemo.lexicon.people import PEOPLE, TOWNS
from nvdemo.lexicon.words import ANIMALS, COLOURS, FOODS, JOBS
from nvdemo.tasks.copying import sentence

if TYPE_CHECKING:
    from nvdemo.dice import Dice


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


def recall(dice: Dice, small_talk: list[tuple[str, str]]) -> Sample:
    """One to three facts told over the first turns, ``small_talk`` between, then a question."""
    kinds = dice.some(list(_FACTS), dice.number(1, 3))
    if dice.chance(0.5) and "name" not in kinds:
        kinds[0] = "name"
    pet = dice.pick(ANIMALS)
    facts = {kind: _draw(dice, kind) for kind in kinds}
    messages: list[Message] = []
    turns: list[tuple[str, str]] = []
    for kind, fact in facts.items():
        tell, reply, _, _ = _FACTS[kind]
        turns.append(
            (
                dice.user(tell.replace("{pet}", pet), x=fact),
                reply.replace("{pet}", pet).replace("{x}", fact),
            )
        )
    if len(turns) > 1 and dice.chance(0.25):
        told = [question.rstrip(".!") for question, _ in turns]
        turns = [(". ".join(told) + ".", turns[-1][1])]
    for extra in small_talk:
        turns.insert(dice.number(1, len(turns)), extra)
    for question, reply in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": reply})
    kind = dice.pick(kinds)
    if "name" in kinds and dice.chance(0.4):
        kind = "name"
    _, _, ask, answer = _FACTS[kind]
    messages.append({"role": "user", "content": dice.user(ask.replace("{pet}", pet))})
    answer = answer.replace("{pet}", pet).replace("{x}", facts[kind])
    return Sample(
        "name_recall" if kind == "name" else "fact_recall",
        messages,
        answer,
        f"The user said: {facts[kind]}.",
        check="contains",
        expected=facts[kind],
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


def unknown_fact(dice: Dice, small_talk: list[tuple[str, str]]) -> Sample:
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


def last_message(dice: Dice, small_talk: list[tuple[str, str]]) -> Sample:
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
