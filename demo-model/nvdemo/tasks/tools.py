"""Tool calls: one or several, known tools and made-up ones, and answers from their results."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from nvdemo.chat import Message, Sample
from nvdemo.dice import Dice
from nvdemo.lexicon.people import PEOPLE, TOWNS
from nvdemo.lexicon.words import ADJECTIVES, ALL_WORDS, COLOURS, DAYS, FOODS, OBJECTS, PLACES, VERBS, VOCABULARY_WORDS


_CHOICES: dict[str, list[str]] = {
    "colour": COLOURS, "day": DAYS, "food": FOODS, "money": ["USD", "EUR", "GBP", "JPY", "CHF", "SEK"],
    "language": ["French", "German", "Spanish", "Italian", "Greek"], "state": ["ok", "done", "sent", "failed"],
    "sky": ["sunny", "cloudy", "rainy", "clear", "snowy", "windy"],
}


@dataclass
class Tool:
    """A function signature, and how a user asks for it in words (``{p}`` for each parameter)."""

    name: str
    description: str
    params: dict[str, str]  # name: kind of value
    asks: list[str] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)  # result key: kind of value

    def schema(self, dice: Dice) -> dict[str, Any]:
        types = {"integer": "integer", "number": "number", "flag": "boolean"}
        properties = {}
        for name, kind in self.params.items():
            entry: dict[str, Any] = {"type": types.get(kind, "string")}
            if dice.chance(0.35):
                entry["description"] = f"The {name.replace('_', ' ')}"
            if kind in _CHOICES and dice.chance(0.3):
                entry["enum"] = _CHOICES[kind]
            properties[name] = entry
        if dice.chance(0.12):  # one that the question does not give, and that may stay away
            properties.setdefault(dice.pick(["unit", "limit", "verbose", "format", "timeout"]), {"type": "string"})
        function = {"name": self.name, "description": self.description,
                    "parameters": {"type": "object", "properties": properties,
                                   "required": list(self.params)}}
        return {"type": "function", "function": function}


KNOWN = [
    Tool("get_weather", "Get the weather of a city", {"city": "town"},
         ["[What is the weather in|How is the weather in|weather in|What's the weather like in|Is it raining in|"
          "How warm is it in] {city}[?|]"], {"temperature": "integer", "sky": "sky"}),
    Tool("get_time", "Get the time in a city", {"city": "town"},
         ["[What time is it in|time in|Tell me the time in|What is the time in] {city}[?|]"], {"time": "clock"}),
    Tool("calculator", "Evaluate an arithmetic expression", {"expression": "sum"},
         ["[Calculate|compute|use the calculator for|Evaluate|What is] {expression}[?|.|]"], {"result": "integer"}),
    Tool("search", "Search the web", {"query": "topic"},
         ["[Search for|search the web for|Look up|find|google] {query}[.|]"], {"result": "phrase"}),
    Tool("send_email", "Send an email", {"to": "person", "subject": "phrase"},
         ["[Send an email to|email|Write a mail to] {to} [about|with the subject] {subject}[.|]"], {"status": "state"}),
    Tool("set_timer", "Set a timer", {"minutes": "integer"},
         ["[Set a timer for|timer for|start a timer of|wake me in] {minutes} minutes[.|]"], {"status": "state"}),
    Tool("play_song", "Play a song", {"title": "phrase"},
         ["[Play|play the song|I want to hear|put on] {title}[.|]"], {"status": "state"}),
    Tool("read_file", "Read a file", {"path": "path"},
         ["[Read the file|read|open the file|show me|What is in|cat] {path}[?|]"], {"content": "phrase"}),
    Tool("list_files", "List the files of a folder", {"folder": "path"},
         ["[List the files in|list|ls|Which files are in|show the folder] {folder}[?|]"], {"count": "integer"}),
    Tool("get_stock_price", "Get the price of a stock", {"symbol": "symbol"},
         ["[What is the price of|stock price of|How much is|price of] {symbol}[?|]"], {"price": "number"}),
    Tool("translate", "Translate a text", {"text": "phrase", "language": "language"},
         ["[Translate|please translate] {text} [to|into] {language}[.|]"], {"translation": "word"}),
    Tool("convert_currency", "Convert money", {"amount": "integer", "source": "money", "target": "money"},
         ["[Convert|change|How much is|exchange] {amount} {source} [to|in|into] {target}[?|]"], {"result": "number"}),
    Tool("create_event", "Create a calendar event", {"title": "phrase", "day": "day"},
         ["[Create an event called|Plan|add the event|Put into my calendar:] {title} on {day}[.|]"],
         {"status": "state"}),
    Tool("book_table", "Book a table in a restaurant", {"place": "name", "people": "integer"},
         ["[Book a table at|reserve a table at|I want to eat at] {place} for {people} people[.|]"],
         {"status": "state"}),
    Tool("get_user", "Get a user by id", {"user_id": "integer"},
         ["[Who is user|Get user|show user|look up the user with id] {user_id}[?|]"], {"name": "person", "age": "integer"}),
    Tool("roll_dice", "Roll dice", {"sides": "integer"},
         ["[Roll a die with|roll dice with|throw a die of] {sides} sides[.|]"], {"result": "integer"}),
    Tool("get_distance", "Get the distance between two cities", {"start": "town", "end": "town"},
         ["[How far is it from|distance from|What is the distance from] {start} to {end}[?|]"],
         {"kilometres": "integer"}),
    Tool("set_light", "Switch a light", {"room": "name", "on": "flag"},
         ["[Switch the light of|set the light in|change the light of] {room}, on: {on}[.|]"], {"status": "state"}),
]
_KNOWN_TEXTS = {tool.description for tool in KNOWN}
_PARAM_POOL = {"city": "town", "name": "person", "count": "integer", "amount": "integer", "color": "colour",
               "title": "phrase", "id": "integer", "date": "day", "message": "phrase", "size": "integer",
               "price": "number", "path": "path", "enabled": "flag", "mode": "word", "user": "person", "level":
               "integer", "key": "code", "topic": "topic", "food": "food", "item": "phrase", "language": "language"}


_OTHER_NAMES = {
    "get_weather": ["get_current_weather", "weather", "weather_lookup", "fetch_weather", "getWeather", "forecast"],
    "get_time": ["current_time", "get_current_time", "clock", "time_in"], "search": ["web_search", "search_web", "lookup"],
    "calculator": ["calculate", "calc", "evaluate", "math"], "send_email": ["email", "send_mail", "sendEmail"],
    "read_file": ["open_file", "cat", "file_read", "readFile"], "list_files": ["ls", "list_dir", "list_directory"],
    "set_timer": ["timer", "start_timer"], "play_song": ["play_music", "play"], "get_user": ["user_info", "find_user"],
    "get_stock_price": ["stock_price", "quote"], "roll_dice": ["roll", "dice"], "set_light": ["light", "switch_light"],
}
_OTHER_PARAMS = {
    "city": ["location", "place", "town", "name"], "query": ["q", "text", "term", "question"], "path": ["file", "filename"],
    "expression": ["formula", "expr", "input"], "folder": ["directory", "path", "dir"], "symbol": ["ticker", "stock"],
    "minutes": ["duration", "time", "n"], "title": ["name", "song"], "user_id": ["id", "uid"], "sides": ["n", "faces"],
}


def renamed(dice: Dice, tool: Tool) -> Tool:
    """A known tool under another name, with other names of its parameters."""
    names = {param: dice.pick(_OTHER_PARAMS.get(param, [param])) for param in tool.params}
    if len(set(names.values())) < len(names):
        return tool
    asks = tool.asks
    for old, new in names.items():
        asks = [ask.replace(f"{{{old}}}", f"{{{new}}}") for ask in asks]
    return Tool(dice.pick(_OTHER_NAMES.get(tool.name, [tool.name])), tool.description,
                {names[param]: kind for param, kind in tool.params.items()}, asks, tool.answers)


def make_value(dice: Dice, kind: str) -> Any:
    if kind == "integer":
        return dice.number(1, dice.pick([9, 60, 999, 9999]))
    if kind == "number":
        return round(dice.number(1, 9999) / 10, 1)
    if kind == "flag":
        return dice.chance(0.5)
    if kind == "town":
        return dice.pick([dice.own(TOWNS), dice.own(TOWNS), dice.word().capitalize(),
                          dice.pick(VOCABULARY_WORDS).capitalize()])
    if kind in ("person", "name"):
        return dice.pick([dice.own(PEOPLE), dice.own(PEOPLE), dice.word().capitalize(),
                          dice.pick(VOCABULARY_WORDS).capitalize()])
    if kind == "sum":
        return f"{dice.number(1, 999)} {dice.pick('+-*/')} {dice.number(1, 999)}"
    if kind == "phrase":
        return dice.pick([f"{dice.pick(ADJECTIVES)} {dice.pick(OBJECTS)}", dice.word(),
                          f"{dice.pick(VERBS)} the {dice.pick(OBJECTS)}", f"{dice.word()} {dice.word()}"])
    if kind == "topic":
        return dice.pick([f"{dice.pick(ADJECTIVES)} {dice.pick(FOODS)}", f"{dice.word()} in {dice.own(TOWNS)}",
                          f"the {dice.pick(PLACES)} of {dice.own(TOWNS)}", dice.word()])
    if kind == "path":
        return dice.pick(["/tmp/{}.txt", "{}.md", "src/{}.py", "/home/{}", "data/{}.csv", "./{}"]).format(
            dice.word())
    if kind == "symbol":
        return dice.string(3, 4, "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    if kind == "code":
        return dice.string(4, 8, "ABCDEFGHJKLMNPQRSTUVWXYZ23456789abcdefghkmnpqrstuvwxyz")
    if kind == "clock":
        return f"{dice.number(0, 23):02d}:{dice.number(0, 59):02d}"
    return dice.pick(_CHOICES[kind]) if kind in _CHOICES else dice.word()


def made_up(dice: Dice) -> Tool:
    """A tool that nobody has seen: a verb and a noun, often invented, with drawn parameters."""
    plain = 0.0 if dice.unseen else 0.6
    verb = dice.pick(VERBS) if dice.chance(plain) else dice.word(1, 2)
    noun = dice.pick([*OBJECTS, *PLACES, *FOODS]) if dice.chance(plain) else dice.word()
    name = {0: f"{verb}_{noun}", 1: f"{verb}{noun.capitalize()}", 2: f"{noun}.{verb}", 3: f"{verb}-{noun}"}[
        dice.pick([0, 0, 0, 0, 1, 2, 3])]
    params: dict[str, str] = {}
    for _ in range(dice.pick([1, 1, 2, 2, 3])):
        if dice.chance(0.6):
            param = dice.pick(list(_PARAM_POOL))
            params[param] = _PARAM_POOL[param]
        else:
            param = dice.word(1, 2) if dice.chance(0.6) else dice.pick(ALL_WORDS)
            params[param] = dice.pick(["integer", "phrase", "word", "person", "town", "flag", "number", "code"])
    tool = Tool(name, f"{verb.capitalize()} {dice.pick(['the', 'a', 'one'])} {noun}", params)
    words = [f"{p} {{{p}}}" for p in params] if dice.chance(0.5) else [f"{p} = {{{p}}}" for p in params]
    listed = words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
    tool.asks = [f"[Please |Can you |I want to |]{verb} [the|a] {noun} [with|for|using] {listed}[.|]",
                 f"[Use|Call|Run|Please use|call the tool|invoke] {name} with {listed}[.|]"]
    tool.answers = {dice.pick(["result", "status", "value", "answer", dice.word(1, 2), dice.pick(ALL_WORDS)]):
                    dice.pick(["integer", "word", "phrase", "state", "code"])}
    return tool


def _typed(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _result(dice: Dice, tool: Tool) -> dict[str, Any]:
    return {key: make_value(dice, kind) for key, kind in tool.answers.items()}


def _state(result: dict[str, Any]) -> str:
    """"The sky is sunny and the temperature is 21": an answer from a result's own keys."""
    parts = [f"the {key.replace('_', ' ')} is {_typed(value)}" for key, value in result.items()]
    text = " and ".join(parts) + "."
    return text[0].upper() + text[1:]


def _choose(dice: Dice, made: float) -> Tool:
    if dice.chance(made):
        return made_up(dice)
    tool = dice.pick(KNOWN)
    return renamed(dice, tool) if dice.chance(0.4) else tool


def _question(dice: Dice, tool: Tool, arguments: dict[str, Any]) -> str:
    shown = {name: _typed(value) for name, value in arguments.items()}
    quoted = dice.chance(0.15)
    if quoted:
        shown = {name: f"'{text}'" if isinstance(arguments[name], str) else text for name, text in shown.items()}
    return dice.user(dice.pick(tool.asks), **shown)


def _others(dice: Dice, tools: list[Tool], made: float) -> list[Tool]:
    """The tools of a request: the ones needed and up to four more, no name twice."""
    offered = list(tools)
    names, texts = {tool.name for tool in offered}, {tool.description for tool in offered}
    for _ in range(dice.number(0, 4)):
        other = _choose(dice, made)
        if other.name not in names and other.description not in texts:
            texts.add(other.description)
            names.add(other.name)
            offered.append(other)
    dice.shuffle(offered)
    return offered


def tool_call(dice: Dice, made: float = 0.6) -> Sample:
    """One call for a question."""
    tool = _choose(dice, made)
    arguments = {name: make_value(dice, kind) for name, kind in tool.params.items()}
    question = _question(dice, tool, arguments)
    offered = _others(dice, [tool], made)
    kind = "tool_known" if tool.description in _KNOWN_TEXTS else "tool_unseen"
    return Sample(kind, [{"role": "user", "content": question}], "", f"I call {tool.name}.",
                  calls=[{"name": tool.name, "arguments": arguments}],
                  tools=[entry.schema(dice) for entry in offered], check="calls")


def tool_calls(dice: Dice) -> Sample:
    """Two or three calls at once: one tool for several values, or two tools."""
    if dice.chance(0.6):
        tool = dice.pick([t for t in KNOWN if len(t.params) == 1])
        (param, kind), = tool.params.items()
        values: list[Any] = []
        while len(values) < dice.pick([2, 2, 3]):
            fresh = make_value(dice, kind)
            if fresh not in values:
                values.append(fresh)
        listed = ", ".join(map(_typed, values[:-1])) + " and " + _typed(values[-1])
        question = dice.user(dice.pick(tool.asks), **{param: listed})
        calls = [{"name": tool.name, "arguments": {param: v}} for v in values]
        used = [tool]
    else:
        used = dice.some(KNOWN, 2)
        if dice.chance(0.5):
            used[0] = made_up(dice)
        drawn = [{name: make_value(dice, kind) for name, kind in tool.params.items()} for tool in used]
        parts = [_question(dice, tool, arguments).rstrip(".?") for tool, arguments in zip(used, drawn, strict=True)]
        question = dice.pick([" and ", ", then ", ". "]).join(parts)
        calls = [{"name": tool.name, "arguments": arguments} for tool, arguments in zip(used, drawn, strict=True)]
    offered = _others(dice, used, 0.4)
    names = ", ".join(call["name"] for call in calls)
    return Sample("tool_several", [{"role": "user", "content": question}], "", f"I call {names}.",
                  calls=calls, tools=[entry.schema(dice) for entry in offered], check="calls")


def tool_result(dice: Dice) -> Sample:
    """The answer after one call or two, from what the tools returned."""
    count = dice.pick([1, 1, 1, 2])
    tool = _choose(dice, 0.5)
    if count == 2:
        tool = dice.pick([t for t in KNOWN if len(t.params) == 1])
    calls, results, shown = [], [], []
    for _ in range(count):
        arguments = {name: make_value(dice, kind) for name, kind in tool.params.items()}
        calls.append({"name": tool.name, "arguments": arguments})
        results.append(_result(dice, tool))
        shown.append(arguments)
    question = _question(dice, tool, shown[0])
    if count == 2:
        (param,) = tool.params
        both = f"{_typed(shown[0][param])} and {_typed(shown[1][param])}"
        question = dice.user(dice.pick(tool.asks), **{param: both})
    called: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    if dice.chance(0.4):
        called["reasoning_content"] = f"I call {', '.join([tool.name] * count)}."
    messages: list[Message] = [{"role": "user", "content": question}, called]
    plain = count == 1 and dice.chance(0.2)
    for result in results:
        text = _typed(next(iter(result.values()))) if plain else json.dumps(result, ensure_ascii=False)
        messages.append({"role": "tool", "content": text})
    if plain:
        text = messages[-1]["content"]
        answer = f"The result is {text}."
    elif count == 1:
        answer = _state(results[0])
    else:
        (param,) = tool.params
        answer = " ".join(f"{_typed(a[param])}: {_state(r)}" for a, r in zip(shown, results, strict=True))
    offered = _others(dice, [tool], 0.4)
    return Sample("tool_result", messages, answer, "I read the result.",
                  tools=[entry.schema(dice) for entry in offered])


def next_call(dice: Dice) -> Sample:
    """One call has its result; the question's second part still needs another tool."""
    used = dice.some(KNOWN, 2)
    drawn = [{name: make_value(dice, kind) for name, kind in tool.params.items()} for tool in used]
    parts = [_question(dice, tool, arguments).rstrip(".?") for tool, arguments in zip(used, drawn, strict=True)]
    messages: list[Message] = [
        {"role": "user", "content": dice.pick([" and then ", ", then ", ". Then "]).join(parts)},
        {"role": "assistant", "content": "", "tool_calls": [{"name": used[0].name, "arguments": drawn[0]}]},
        {"role": "tool", "content": json.dumps(_result(dice, used[0]), ensure_ascii=False)},
    ]
    if dice.chance(0.4):
        messages[1]["reasoning_content"] = f"I call {used[0].name}."
    return Sample("tool_next", messages, "", f"I call {used[1].name}.",
                  calls=[{"name": used[1].name, "arguments": drawn[1]}],
                  tools=[entry.schema(dice) for entry in _others(dice, used, 0.4)], check="calls")


def no_tool(dice: Dice, plain: Sample) -> Sample:
    """Tools on offer, but the question needs none."""
    plain.tools = [_choose(dice, 0.4).schema(dice) for _ in range(dice.number(1, 3))]
    return plain
