"""Tool calls: one or several, known tools and made-up ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from nvdemo.chat import Sample
from nvdemo.lexicon.words import (
    ALL_WORDS,
    FOODS,
    OBJECTS,
    PLACES,
    VERBS,
)

if TYPE_CHECKING:
    from nvdemo.dice import Dice
from nvdemo.tasks.toolkit import KNOWN, KNOWN_TEXTS, PARAM_POOL, Tool, renamed
from nvdemo.tasks.values import make_value


def made_up(dice: Dice) -> Tool:
    """A tool that nobody has seen: a verb and a noun, often invented, with drawn parameters."""
    plain = 0.0 if dice.unseen else 0.6
    verb = dice.pick(VERBS) if dice.chance(plain) else dice.word(1, 2)
    noun = dice.pick([*OBJECTS, *PLACES, *FOODS]) if dice.chance(plain) else dice.word()
    name = {
        0: f"{verb}_{noun}",
        1: f"{verb}{noun.capitalize()}",
        2: f"{noun}.{verb}",
        3: f"{verb}-{noun}",
    }[dice.pick([0, 0, 0, 0, 1, 2, 3])]
    params: dict[str, str] = {}
    for _ in range(dice.pick([1, 1, 2, 2, 3])):
        if dice.chance(0.6):
            param = dice.pick(list(PARAM_POOL))
            params[param] = PARAM_POOL[param]
        else:
            param = dice.word(1, 2) if dice.chance(0.6) else dice.pick(ALL_WORDS)
            params[param] = dice.pick(
                ["integer", "phrase", "word", "person", "town", "flag", "number", "code"]
            )
    tool = Tool(name, f"{verb.capitalize()} {dice.pick(['the', 'a', 'one'])} {noun}", params)
    words = (
        [f"{p} {{{p}}}" for p in params] if dice.chance(0.5) else [f"{p} = {{{p}}}" for p in params]
    )
    listed = words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
    tool.asks = [
        f"[Please |Can you |I want to |]{verb} [the|a] {noun} [with|for|using] {listed}[.|]",
        f"[Use|Call|Run|Please use|call the tool|invoke] {name} with {listed}[.|]",
    ]
    tool.answers = {
        dice.pick(
            ["result", "status", "value", "answer", dice.word(1, 2), dice.pick(ALL_WORDS)]
        ): dice.pick(["integer", "word", "phrase", "state", "code"])
    }
    return tool


def typed(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def make_result(dice: Dice, tool: Tool) -> dict[str, Any]:
    return {key: make_value(dice, kind) for key, kind in tool.answers.items()}


def statement(result: dict[str, Any]) -> str:
    """ "The sky is sunny and the temperature is 21": an answer from a result's own keys."""
    parts = [f"the {key.replace('_', ' ')} is {typed(value)}" for key, value in result.items()]
    text = " and ".join(parts) + "."
    return text[0].upper() + text[1:]


def choose(dice: Dice, made: float) -> Tool:
    if dice.chance(made):
        return made_up(dice)
    tool = dice.pick(KNOWN)
    return renamed(dice, tool) if dice.chance(0.4) else tool


def ask(dice: Dice, tool: Tool, arguments: dict[str, Any]) -> str:
    shown = {name: typed(value) for name, value in arguments.items()}
    quoted = dice.chance(0.15)
    if quoted:
        shown = {
            name: f"'{text}'" if isinstance(arguments[name], str) else text
            for name, text in shown.items()
        }
    return dice.user(dice.pick(tool.asks), **shown)


def offer(dice: Dice, tools: list[Tool], made: float) -> list[Tool]:
    """The tools of a request: the ones needed and up to four more, no name twice."""
    offered = list(tools)
    names, texts = {tool.name for tool in offered}, {tool.description for tool in offered}
    for _ in range(dice.number(0, 4)):
        other = choose(dice, made)
        if other.name not in names and other.description not in texts:
            texts.add(other.description)
            names.add(other.name)
            offered.append(other)
    dice.shuffle(offered)
    return offered


def tool_call(dice: Dice, made: float = 0.6) -> Sample:
    """One call for a question."""
    tool = choose(dice, made)
    arguments = {name: make_value(dice, kind) for name, kind in tool.params.items()}
    question = ask(dice, tool, arguments)
    offered = offer(dice, [tool], made)
    kind = "tool_known" if tool.description in KNOWN_TEXTS else "tool_unseen"
    return Sample(
        kind,
        [{"role": "user", "content": question}],
        "",
        f"I call {tool.name}.",
        calls=[{"name": tool.name, "arguments": arguments}],
        tools=[entry.schema(dice) for entry in offered],
        check="calls",
    )


def mail_call(dice: Dice) -> Sample:
    """One call with an e-mail address among its arguments."""
    while True:
        sample = tool_call(dice, made=0.3)
        if any("@" in str(argument) for argument in sample.calls[0]["arguments"].values()):
            return sample


def tool_calls(dice: Dice) -> Sample:
    """Two or three calls at once: one tool for several values, or two tools."""
    if dice.chance(0.6):
        tool = dice.pick([t for t in KNOWN if len(t.params) == 1])
        ((param, kind),) = tool.params.items()
        values: list[Any] = []
        while len(values) < dice.pick([2, 2, 3]):
            fresh = make_value(dice, kind)
            if fresh not in values:
                values.append(fresh)
        listed = ", ".join(map(typed, values[:-1])) + " and " + typed(values[-1])
        question = dice.user(dice.pick(tool.asks), **{param: listed})
        calls = [{"name": tool.name, "arguments": {param: v}} for v in values]
        used = [tool]
    else:
        used = dice.some(KNOWN, 2)
        if dice.chance(0.5):
            used[0] = made_up(dice)
        drawn = [
            {name: make_value(dice, kind) for name, kind in tool.params.items()} for tool in used
        ]
        parts = [
            ask(dice, tool, arguments).rstrip(".?")
            for tool, arguments in zip(used, drawn, strict=True)
        ]
        question = dice.pick([" and ", ", then ", ". "]).join(parts)
        calls = [
            {"name": tool.name, "arguments": arguments}
            for tool, arguments in zip(used, drawn, strict=True)
        ]
    offered = offer(dice, used, 0.4)
    names = ", ".join(str(call["name"]) for call in calls)
    return Sample(
        "tool_several",
        [{"role": "user", "content": question}],
        "",
        f"I call {names}.",
        calls=calls,
        tools=[entry.schema(dice) for entry in offered],
        check="calls",
    )


def could_answer(tool: Tool, plain: Sample) -> bool:
    """Whether a tool is meant for a question that is to be answered without one."""
    is_sum = plain.kind.startswith(("sum", "product", "difference"))
    return is_sum and "expression" in tool.description


def no_tool(dice: Dice, plain: Sample) -> Sample:
    """Tools on offer, but the question needs none."""
    drawn = [choose(dice, 0.4) for _ in range(dice.number(1, 3))]
    drawn = [tool for tool in drawn if not could_answer(tool, plain)] or [made_up(dice)]
    plain.tools = [tool.schema(dice) for tool in drawn]
    return plain
