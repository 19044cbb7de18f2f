"""What follows a tool's result: the answer, the call that is still missing, the next question."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from nvdemo.chat import Message, Sample
from nvdemo.tasks.toolkit import KNOWN, Tool
from nvdemo.tasks.tools import ask, choose, could_answer, make_result, offer, statement, typed
from nvdemo.tasks.values import make_value

if TYPE_CHECKING:
    from nvdemo.dice import Dice

_ONE_PARAM = [tool for tool in KNOWN if len(tool.params) == 1]


def _returned(dice: Dice, tool: Tool, plain: bool) -> tuple[str, str]:
    """What a tool returns, as JSON or in plain words, and what the answer says of it."""
    result = make_result(dice, tool)
    if not plain:
        return json.dumps(result, ensure_ascii=False), statement(result)
    text = dice.pick([" ", ", "]).join([typed(value) for value in result.values()])
    if dice.chance(0.3):
        text = make_value(dice, dice.pick(["phrase", "integer", "sky", "clock", "word", "state"]))
        text = typed(text)
    return text, f"The result is {text}."


def _arguments(dice: Dice, tool: Tool) -> dict[str, Any]:
    return {name: make_value(dice, kind) for name, kind in tool.params.items()}


def _called(calls: list[tuple[Tool, dict[str, Any]]]) -> Message:
    made = [{"name": tool.name, "arguments": arguments} for tool, arguments in calls]
    return {"role": "assistant", "content": "", "tool_calls": made}


def tool_result(dice: Dice, counts: tuple[int, ...] = (1, 1, 1, 2, 2, 3)) -> Sample:
    """The answer after one to three calls, from what the tools returned; several calls are of
    one tool and answered by their argument."""
    count = dice.pick(counts)
    tool = choose(dice, 0.5) if count == 1 else dice.pick(_ONE_PARAM)
    drawn: list[dict[str, Any]] = []
    while len(drawn) < count:
        fresh = _arguments(dice, tool)
        if fresh not in drawn:
            drawn.append(fresh)
    question = ask(dice, tool, drawn[0])
    plain = dice.chance(0.3 if count == 1 else 0.5)
    returned = [_returned(dice, tool, plain) for _ in drawn]
    answer = returned[0][1]
    if count > 1:
        (param,) = tool.params
        shown = [typed(arguments[param]) for arguments in drawn]
        listed = ", ".join(shown[:-1]) + " and " + shown[-1]
        question = dice.user(dice.pick(tool.asks), **{param: listed})
        said = [text for _, text in returned]
        answer = " ".join(f"{a}: {text}" for a, text in zip(shown, said, strict=True))
    called = _called([(tool, arguments) for arguments in drawn])
    if dice.chance(0.4):
        called["reasoning_content"] = f"I call {', '.join([tool.name] * count)}."
    messages: list[Message] = [{"role": "user", "content": question}, called]
    messages += [{"role": "tool", "content": text} for text, _ in returned]
    return Sample(
        "tool_result_plain" if plain else "tool_result",
        messages,
        answer,
        "I read the result." if count == 1 else "I read the results.",
        tools=[entry.schema(dice) for entry in offer(dice, [tool], 0.4)],
    )


def _exchange(dice: Dice, tool: Tool) -> list[Message]:
    """A question, its call, the result and the answer, as turns of the past."""
    arguments = _arguments(dice, tool)
    text, answer = _returned(dice, tool, dice.chance(0.4))
    return [
        {"role": "user", "content": ask(dice, tool, arguments)},
        _called([(tool, arguments)]),
        {"role": "tool", "content": text},
        {"role": "assistant", "content": answer},
    ]


def after_result(dice: Dice, plain: Sample, needs_tool: bool | None = None) -> Sample:
    """The next question after one or two that a tool answered: it needs the same tool again,
    another one, or, being ``plain``, none."""
    if needs_tool is None:
        needs_tool = dice.chance(0.75)
    before = [choose(dice, 0.4) for _ in range(dice.pick([1, 1, 2]))]
    tool = dice.pick(before) if dice.chance(0.35) else choose(dice, 0.4)
    used: list[Tool] = []
    for each in [*before, tool]:
        same = [u for u in used if u.name == each.name or u.description == each.description]
        if not same:
            used.append(each)
        elif each is not same[0]:  # two tools that cannot be told apart: draw again
            return after_result(dice, plain, needs_tool)
    offered = offer(dice, used, 0.4)
    if not needs_tool and any(could_answer(each, plain) for each in offered):
        return after_result(dice, plain, needs_tool)
    messages = [message for each in before for message in _exchange(dice, each)]
    tools = [entry.schema(dice) for entry in offered]
    if not needs_tool:
        plain.kind, plain.tools = "tool_after_plain", tools
        plain.messages[:0] = messages
        return plain
    arguments = _arguments(dice, tool)
    messages.append({"role": "user", "content": ask(dice, tool, arguments)})
    return Sample(
        "tool_after",
        messages,
        "",
        f"I call {tool.name}.",
        calls=[{"name": tool.name, "arguments": arguments}],
        tools=tools,
        check="calls",
    )


def next_call(dice: Dice) -> Sample:
    """One call has its result; the question's second part still needs another tool."""
    used = dice.some(KNOWN, 2)
    drawn = [{name: make_value(dice, kind) for name, kind in tool.params.items()} for tool in used]
    parts = [
        ask(dice, tool, arguments).rstrip(".?") for tool, arguments in zip(used, drawn, strict=True)
    ]
    messages: list[Message] = [
        {"role": "user", "content": dice.pick([" and then ", ", then ", ". Then "]).join(parts)},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"name": used[0].name, "arguments": drawn[0]}],
        },
        {"role": "tool", "content": json.dumps(make_result(dice, used[0]), ensure_ascii=False)},
    ]
    if dice.chance(0.4):
        messages[1]["reasoning_content"] = f"I call {used[0].name}."
    return Sample(
        "tool_next",
        messages,
        "",
        f"I call {used[1].name}.",
        calls=[{"name": used[1].name, "arguments": drawn[1]}],
        tools=[entry.schema(dice) for entry in offer(dice, used, 0.4)],
        check="calls",
    )
