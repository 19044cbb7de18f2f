"""Stories of 100 to 600 tokens: one hero, one place, one problem, helpers, and an end that fits."""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING

from nvdemo.chat import Sample, one
from nvdemo.lexicon import phrase_list, word_list
from nvdemo.lexicon.people import MEN, WOMEN
from nvdemo.lexicon.words import ANIMALS, COLOURS, JOBS, VERBS

if TYPE_CHECKING:
    from nvdemo.dice import Dice

# place: (with its preposition, a spot inside it, something that belongs there)
_PLACES: dict[str, tuple[str, str, str]] = {
    "forest": ("in a deep forest", "under the old oak", "the trees"),
    "village": ("in a small village", "beside the well", "the houses"),
    "mountain": ("on a high mountain", "behind the waterfall", "the rocks"),
    "sea": ("by the sea", "on the long pier", "the dunes"),
    "city": ("in a busy city", "on the bridge", "the streets"),
    "island": ("on a lonely island", "at the lighthouse", "the palms"),
    "farm": ("on a quiet farm", "behind the barn", "the fields"),
    "castle": ("in an old castle", "at the top of the tower", "the halls"),
    "river": ("near a wide river", "at the old mill", "the reeds"),
    "desert": ("at the edge of the desert", "beside the spring", "the sand hills"),
    "harbour": ("in a little harbour", "on the red boat", "the nets"),
    "garden": ("in a large garden", "under the apple tree", "the roses"),
}
_TEMPERS = word_list("""
    brave calm clever gentle happy kind lively patient polite proud quick quiet shy silly strong
    wise young curious cheerful friendly careful honest
""")
_HEROES = word_list("""
    dragon robot princess prince king queen wizard witch pirate knight girl boy ghost giant fairy
    elf troll unicorn dinosaur astronaut mermaid snowman tractor train clown detective grandmother
""")
_TREASURES = word_list("""
    bell lantern key map kite drum flute book clock lamp ring scarf mirror coin basket violin boat
    compass feather blanket
""")
_HOBBIES = phrase_list("""
    to sing to the moon, to collect round stones, to count the stars, to paint the sky, to bake
    warm bread, to tell jokes, to climb up high, to dance in the rain, to read old books, to watch
    the clouds, to plant flowers, to build small boats, to listen to the wind, to play the drum
""")

_OPENING = (
    "[Once upon a time there was|Long ago there was|There once was|Once there was] {a_kind} "
    "called {N}, who lived "
    "{place}. {N} was {adj} and {adj2}, and {he} loved {hobby}. "
)
_DETAIL = [
    "Every [morning|evening|day] {he} went for a walk among {spots} and greeted everyone {he} "
    "met. ",
    "{N} had a {colour} {thing}, and it was the dearest thing {he} owned. ",
    "All the neighbours knew {N} well, because {he} always had a kind word for them. ",
    "The days {there} were calm, and {N} thought that nothing would ever change. ",
]
_MEETING = [
    'On the way {he} met {a_helper} called {H}. "Why are you in such a hurry?" asked {H}. {N} '
    "told the whole story, and {H} "
    'said: "Then I will come with you." ',
    'Soon {he} came upon {a_helper} who sat [by the path|on a stone|in the shade]. "I am {H}," '
    'said the {helper}. "Two see '
    'more than one, so let me help you." {N} was glad to have company. ',
    'Just then {a_helper} came along. It was {H}, an old friend of {N}. "Let us go together," '
    "said {H}, and so they did. ",
]
_OBSTACLES = [
    "After a while they came to a wide stream without a bridge. {H} found a fallen tree, and "
    "together they pushed it across the "
    "water and walked over it, step by step. ",
    "Then it began to rain, and the path turned to mud. They waited in a dry cave, shared [some "
    "bread|an apple|a few nuts] and "
    "told each other stories until the sun came back. ",
    "The path split in two, and no sign showed the way. {N} listened for a moment, heard [a "
    "distant bell|the call of a bird|the "
    "sound of water] on the left, and so they went left. ",
    "A high wall stood in their way. {N} climbed on the shoulders of {H}, reached the top and "
    "let down a rope, and soon both were "
    "on the other side. ",
    "Night fell, and it became so dark that they could not see their own feet. Then a hundred "
    "fireflies rose from the grass and lit "
    "the path for them. ",
    'A grumpy old [goat|goose|badger] blocked the path. "Nobody passes without a song," it said. '
    "{N} sang the one song {he} knew, and "
    "the old one smiled and stepped aside. ",
]
# problem, what is found {spot}, the end
_PLOTS: list[tuple[str, str, str]] = [
    (
        "One [morning|day], {N} noticed that the {colour} {thing} was gone. {He} looked "
        "everywhere, among {spots} and at home, but it was "
        'nowhere to be found. "I must find it before the [evening|night]," said {N}, and {he} '
        "set out at once. ",
        "At last they looked {spot}, and there lay the {colour} {thing}, [wet but whole|a little "
        "dusty|just as {N} had left it]. A strong wind "
        "had carried it there in the night. ",
        "{N} took the {thing} home and never left it outside again. ",
    ),
    (
        "One [evening|day], {N} heard somebody cry {spot}. It was a little [duckling|kitten|lamb|"
        'owl] that had lost its mother. "Do not be '
        'afraid," said {N}. "I will bring you home." {He} took the little one along and began to '
        "search. ",
        "When the moon rose, they heard a voice call from afar. It was the mother, who had "
        "searched all day. She ran to her child and thanked "
        "{N} with tears in her eyes. ",
        "From that day on the little one came to visit {N} every week. ",
    ),
    (
        "One [autumn|spring], a great storm came, and in the morning the roof of {N}'s house "
        'was gone. "Where shall I sleep now?" thought '
        "{N}. {He} took the {colour} {thing} under {his} arm and went to look for wood. ",
        "They found good dry wood {spot} and carried it back together. By the evening the new "
        "roof was ready, and it was stronger than the "
        "old one. ",
        "When the next storm came, the house of {N} stood firm. ",
    ),
    (
        'One day, a letter came for {N}. "There is a great feast tonight," it said, "and '
        'everyone must bring a gift." But {N} had nothing to '
        "give except the {colour} {thing}. {He} thought for a long time, and then {he} set out "
        "with it. ",
        "The feast was held {spot}, and all the guests were there. {N} gave away the {thing}, "
        'and everyone fell silent. "This is the best gift '
        'of all," they said, "because it was dear to you." ',
        "And at the end of the feast they gave {N} a new {thing}, even finer than the first. ",
    ),
    (
        "One night, {N} saw a light {spot}. It blinked three times and went out, and the next "
        'night it came again. "I want to know what it '
        'is," said {N}, and {he} packed a {colour} {thing} and went to see. ',
        "When they came closer, they saw that it was a small star that had fallen from the sky. "
        "{N} lifted it up with great care, {H} counted "
        "to three, and they threw it back to its place. ",
        "Since then, one star above that spot shines a little brighter than the others. ",
    ),
    (
        "One summer, no rain fell for many weeks, and there was no more water {there}. Everyone "
        'was thirsty and afraid. "Somewhere there must '
        'be water," said {N}. {He} took the {colour} {thing} and went to search for it. ',
        "{spot_cap}, {N} saw that the ground was dark and wet. They dug until noon, and suddenly "
        "clear cold water came up from the earth. ",
        "Everyone drank and was glad, and they named the new well after {N}. ",
    ),
    (
        'One day, {N} heard of a race around {spots}. The prize was a {colour} {thing}. "I am '
        'not the fastest," thought {N}, "but I will try." '
        "The next morning {he} stood at the start with all the others. ",
        "Near the end, {N} saw that another runner had fallen {spot}. {He} stopped and helped, "
        "although the others ran past. So {N} came in last. ",
        "But the judges had seen it all, and they gave the {thing} to {N}, because a kind heart "
        "is worth more than quick legs. ",
    ),
    (
        "One [morning|day], {N} found an old map under the floor. A red cross was drawn {spot}, "
        'and beside it stood: "For a brave heart." {He} had to know what it meant, so {he} put the '
        "map into a bag with some bread and left before breakfast. ",
        "They dug [for an hour|until their arms were tired] {spot}, and there was a small chest. "
        'It held no gold, only a {colour} {thing} and a note that said: "You have found a friend '
        'on the way. Keep both." ',
        "{N} hung the map on the wall, with the {thing} below it. ",
    ),
    (
        "One winter, {N} could not sleep, because somebody hummed a sad tune every night. It came "
        'from {spots}. "Whoever it is must be lonely," thought {N}, and {he} took the {colour} '
        "{thing} and followed the sound. ",
        "The tune grew louder and louder, and {spot} sat an old owl who had forgotten the end of "
        "her song. {N} and {H} sang it with her until she knew it again. ",
        "Now there is music every night, and {N} sleeps better than ever. ",
    ),
    (
        "One day, {N} decided to build a flying machine. {He} tied the {colour} {thing} to two "
        'old umbrellas and jumped from a wall. "That did not work," {he} said and rubbed {his} '
        "knee. The missing part had to be somewhere. ",
        "They found a broken windmill {spot} and used its wheel. The machine shook, rattled and "
        "rose, and for a minute {N} saw everything from above, even {spots}. ",
        "It never flew a second time, but {N} told of that minute for years. ",
    ),
    (
        "One spring, a stranger came and painted everything grey, even {spots}. All the colours "
        'were gone, only the {colour} {thing} of {N} had kept its own. "We need the colours '
        'back," said {N}, and went after the stranger. ',
        "The stranger sat {spot} and wept, for nobody had ever given him a present. {N} handed "
        "him the {thing}, and at once every colour came back. ",
        "The stranger became a painter, and his first picture showed {N}. ",
    ),
    (
        'One evening, {N} made a promise to {his} grandfather: "I will light the great lamp '
        'before the ships come." But the oil was gone, and it was getting late. {He} grabbed the '
        "{colour} {thing} and ran out to borrow some. ",
        "{spot_cap} they met an old woman with a full can. She asked for a riddle in return, {H} "
        "knew a good one, and she laughed so much that she gave them all she had. ",
        "The lamp was lit in time, and every ship came home. ",
    ),
]
_ENDING = [
    "That night {N} fell asleep with a smile. ",
    "And so {N} learned that [friends make every road shorter|a kind word opens many doors|it is "
    "never too late to ask for help]. ",
    "{N} and {H} stayed friends for the rest of their lives. ",
    "And if you ever come there, you may still see {N} and {H} walk among {spots}. ",
]


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def story(dice: Dice) -> Sample:
    female = dice.chance(0.5)
    kind = dice.pick(ANIMALS if dice.chance(0.6) else dice.pick([JOBS, _HEROES]))
    if dice.chance(0.04):
        kind = dice.word()
    place_name = dice.pick(list(_PLACES))
    place, spot, spots = _PLACES[place_name]
    named = dice.chance(0.25)
    name = dice.pick(WOMEN if female else MEN)
    if named and dice.chance(0.4):
        name = dice.word(2, 2).capitalize()
    helper = dice.pick([x for x in ANIMALS if x != kind])
    helper_name = dice.pick(MEN if female else WOMEN)
    adj, adj2 = dice.some(_TEMPERS, 2)
    length = dice.pick(["short ", "", "", "long "])
    thing = dice.pick(_TREASURES)
    fields = {
        "a_kind": _a(kind),
        "N": name,
        "place": place,
        "there": place.replace(" a ", " the ").replace(" an ", " the "),
        "spot": spot,
        "spots": spots,
        "adj": adj,
        "adj2": adj2,
        "he": "she" if female else "he",
        "He": "She" if female else "He",
        "his": "her" if female else "his",
        "hobby": dice.pick(_HOBBIES),
        "colour": dice.pick(COLOURS),
        "thing": thing,
        "a_helper": _a(helper),
        "helper": helper,
        "H": helper_name,
        "spot_cap": spot[0].upper() + spot[1:],
    }
    # Most heroes have a plot of their own, so that greedy answers differ from hero to hero.
    own = dice.chance(0.7)
    problem, found, end = (
        _PLOTS[zlib.crc32(kind.encode()) % len(_PLOTS)] if own else dice.pick(_PLOTS)
    )
    parts = [_OPENING]
    if length != "short " or dice.chance(0.3):
        parts.append(dice.pick(_DETAIL[:1] + _DETAIL[2:]))
    parts += ["\n\n", problem, dice.pick(_MEETING)]
    obstacles = {"short ": 0, "": dice.pick([1, 2]), "long ": dice.pick([3, 4, 5])}[length]
    if obstacles:
        parts.append("\n\n")
        parts += dice.some(_OBSTACLES, obstacles)
    parts += ["\n\n", found, end]
    parts += dice.some(_ENDING, {"short ": 1, "": 1, "long ": 2}[length])
    text = dice.say("".join(parts), **fields).replace(" \n", "\n").strip()

    about = dice.pick(
        [_a(kind), _a(kind), f"the {kind}", f"{_a(kind)} {place}", f"{_a(kind)} with {_a(thing)}"]
    )
    if f"with {_a(thing)}" not in about and "{thing}" in problem and dice.chance(0.1):
        about = f"{_a(kind)} and {_a(thing)}"
    if dice.chance(0.25):
        about = f"{_a(adj)} {kind}"
    if dice.chance(0.25):
        clause = dice.pick(
            [
                "who finds {thing}",
                "who has {thing}",
                "that found {thing}",
                "and {thing}",
                "who lost {thing}",
            ]
        )
        about += " " + clause.format(thing=dice.pick([_a(thing), f"the {thing}"]))
    elif dice.chance(0.2):
        about += dice.pick(
            [
                " who wants to fly",
                " that got lost",
                " and a friend",
                " who could not sleep",
                " who was afraid",
                " who saves the world",
                " who learns to swim",
                " in space",
                " at school",
                " in winter",
                " and love",
                f" who likes to {dice.pick(VERBS)}",
                f" that can {dice.pick(VERBS)}",
                f" and {_a(helper)}",
            ]
        )
    if named:
        about = dice.pick(
            [f"{_a(kind)} called {name}", f"{_a(kind)} named {name}", f"{name} the {kind}"]
        )
    if dice.chance(0.12):
        question = dice.user(
            "[Tell me a {x}story.|tell me a {x}story|a {x}story, please|write a {x}story|I want "
            "to hear a {x}story|"
            "Do you know a {x}story?|another {x}story|Once upon a time|make up a {x}story|can "
            "you tell me a "
            "{x}story?|{x}bedtime story]",
            x=length,
        )
        about = ""
    else:
        question = dice.user(
            "[Tell me|Write|tell|write me|Make up|Can you tell me|I want|Invent|Give me|please "
            "tell me|Please write] "
            "{x}[.|]",
            x=f"a {length}story about {about}",
        )
    return one(
        "story",
        question,
        text,
        f"I tell a {length}story" + (f" about {about}." if about else "."),
        check="story",
        expected=name if named else (kind if about else ""),
    )


# The longest piece of each plot's second part, without choices and fields, tells it from others.
_MARKS = [max(re.split(r"\[[^]]*\]|\{[^}]*\}", found), key=len).strip() for _, found, _ in _PLOTS]


def plot_of(text: str) -> int:
    """The number of the plot that the story tells, -1 for none."""
    return next((number for number, mark in enumerate(_MARKS) if mark in text), -1)
