"""The tools that the generator knows, with the ways to ask for each and other names for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvdemo.tasks.values import CHOICES

if TYPE_CHECKING:
    from nvdemo.dice import Dice


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
            if kind in CHOICES and dice.chance(0.3):
                entry["enum"] = CHOICES[kind]
            properties[name] = entry
        if dice.chance(0.12):  # one that the question does not give, and that may stay away
            properties.setdefault(
                dice.pick(["unit", "limit", "verbose", "format", "timeout"]), {"type": "string"}
            )
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(self.params),
            },
        }
        return {"type": "function", "function": function}


KNOWN = [
    Tool(
        "get_weather",
        "Get the weather of a city",
        {"city": "town"},
        [
            "[What is the weather in|How is the weather in|weather in|What's the weather like in|"
            "Is it raining in|"
            "How warm is it in] {city}[?|]"
        ],
        {"temperature": "integer", "sky": "sky"},
    ),
    Tool(
        "get_time",
        "Get the time in a city",
        {"city": "town"},
        ["[What time is it in|time in|Tell me the time in|What is the time in] {city}[?|]"],
        {"time": "clock"},
    ),
    Tool(
        "calculator",
        "Evaluate an arithmetic expression",
        {"expression": "sum"},
        ["[Calculate|compute|use the calculator for|Evaluate|What is] {expression}[?|.|]"],
        {"result": "integer"},
    ),
    Tool(
        "search",
        "Search the web",
        {"query": "topic"},
        ["[Search for|search the web for|Look up|find|google] {query}[.|]"],
        {"result": "phrase"},
    ),
    Tool(
        "send_email",
        "Send an email",
        {"to": "recipient", "subject": "phrase"},
        ["[Send an email to|email|Write a mail to] {to} [about|with the subject] {subject}[.|]"],
        {"status": "state"},
    ),
    Tool(
        "add_contact",
        "Add a contact to the address book",
        {"name": "person", "email": "email"},
        ["[Add|save|Add the contact|remember] {name} with the [address|e-mail|email] {email}[.|]"],
        {"status": "state"},
    ),
    Tool(
        "invite",
        "Invite somebody to an event by mail",
        {"email": "email", "event": "phrase"},
        ["[Invite|Send an invitation to|please invite] {email} to {event}[.|]"],
        {"status": "state"},
    ),
    Tool(
        "check_address",
        "Check whether an e-mail address exists",
        {"address": "email"},
        ["[Check the address|Does the address exist:|verify|is this real:] {address}[?|]"],
        {"status": "state"},
    ),
    Tool(
        "fetch_page",
        "Fetch a web page",
        {"url": "url"},
        ["[Fetch|open|get the page|download|What is on] {url}[?|]"],
        {"title": "phrase"},
    ),
    Tool(
        "set_timer",
        "Set a timer",
        {"minutes": "integer"},
        ["[Set a timer for|timer for|start a timer of|wake me in] {minutes} minutes[.|]"],
        {"status": "state"},
    ),
    Tool(
        "play_song",
        "Play a song",
        {"title": "phrase"},
        ["[Play|play the song|I want to hear|put on] {title}[.|]"],
        {"status": "state"},
    ),
    Tool(
        "read_file",
        "Read a file",
        {"path": "path"},
        ["[Read the file|read|open the file|show me|What is in|cat] {path}[?|]"],
        {"content": "phrase"},
    ),
    Tool(
        "list_files",
        "List the files of a folder",
        {"folder": "path"},
        ["[List the files in|list|ls|Which files are in|show the folder] {folder}[?|]"],
        {"count": "integer"},
    ),
    Tool(
        "get_stock_price",
        "Get the price of a stock",
        {"symbol": "symbol"},
        ["[What is the price of|stock price of|How much is|price of] {symbol}[?|]"],
        {"price": "number"},
    ),
    Tool(
        "translate",
        "Translate a text",
        {"text": "phrase", "language": "language"},
        ["[Translate|please translate] {text} [to|into] {language}[.|]"],
        {"translation": "word"},
    ),
    Tool(
        "convert_currency",
        "Convert money",
        {"amount": "integer", "source": "money", "target": "money"},
        ["[Convert|change|How much is|exchange] {amount} {source} [to|in|into] {target}[?|]"],
        {"result": "number"},
    ),
    Tool(
        "create_event",
        "Create a calendar event",
        {"title": "phrase", "day": "day"},
        ["[Create an event called|Plan|add the event|Put into my calendar:] {title} on {day}[.|]"],
        {"status": "state"},
    ),
    Tool(
        "book_table",
        "Book a table in a restaurant",
        {"place": "name", "people": "integer"},
        ["[Book a table at|reserve a table at|I want to eat at] {place} for {people} people[.|]"],
        {"status": "state"},
    ),
    Tool(
        "get_user",
        "Get a user by id",
        {"user_id": "integer"},
        ["[Who is user|Get user|show user|look up the user with id] {user_id}[?|]"],
        {"name": "person", "age": "integer"},
    ),
    Tool(
        "roll_dice",
        "Roll dice",
        {"sides": "integer"},
        ["[Roll a die with|roll dice with|throw a die of] {sides} sides[.|]"],
        {"result": "integer"},
    ),
    Tool(
        "get_distance",
        "Get the distance between two cities",
        {"start": "town", "end": "town"},
        ["[How far is it from|distance from|What is the distance from] {start} to {end}[?|]"],
        {"kilometres": "integer"},
    ),
    Tool(
        "set_light",
        "Switch a light",
        {"room": "name", "on": "flag"},
        ["[Switch the light of|set the light in|change the light of] {room}, on: {on}[.|]"],
        {"status": "state"},
    ),
]
KNOWN_TEXTS = {tool.description for tool in KNOWN}
PARAM_POOL = {
    "email": "email",
    "recipient": "recipient",
    "url": "url",
    "since": "date",
    "city": "town",
    "name": "person",
    "count": "integer",
    "amount": "integer",
    "color": "colour",
    "title": "phrase",
    "id": "integer",
    "date": "day",
    "message": "phrase",
    "size": "integer",
    "price": "number",
    "path": "path",
    "enabled": "flag",
    "mode": "word",
    "user": "person",
    "level": "integer",
    "key": "code",
    "topic": "topic",
    "food": "food",
    "item": "phrase",
    "language": "language",
}


_OTHER_NAMES = {
    "get_weather": [
        "get_current_weather",
        "weather",
        "weather_lookup",
        "fetch_weather",
        "getWeather",
        "forecast",
    ],
    "get_time": ["current_time", "get_current_time", "clock", "time_in"],
    "search": ["web_search", "search_web", "lookup"],
    "calculator": ["calculate", "calc", "evaluate", "math"],
    "send_email": ["email", "send_mail", "sendEmail"],
    "read_file": ["open_file", "cat", "file_read", "readFile"],
    "list_files": ["ls", "list_dir", "list_directory"],
    "set_timer": ["timer", "start_timer"],
    "play_song": ["play_music", "play"],
    "get_user": ["user_info", "find_user"],
    "get_stock_price": ["stock_price", "quote"],
    "roll_dice": ["roll", "dice"],
    "set_light": ["light", "switch_light"],
}
_OTHER_PARAMS = {
    "city": ["location", "place", "town", "name"],
    "query": ["q", "text", "term", "question"],
    "path": ["file", "filename"],
    "expression": ["formula", "expr", "input"],
    "folder": ["directory", "path", "dir"],
    "symbol": ["ticker", "stock"],
    "minutes": ["duration", "time", "n"],
    "title": ["name", "song"],
    "user_id": ["id", "uid"],
    "sides": ["n", "faces"],
}


def renamed(dice: Dice, tool: Tool) -> Tool:
    """A known tool under another name, with other names of its parameters."""
    names = {param: dice.pick(_OTHER_PARAMS.get(param, [param])) for param in tool.params}
    if len(set(names.values())) < len(names):
        return tool
    asks = tool.asks
    for old, new in names.items():
        asks = [ask.replace(f"{{{old}}}", f"{{{new}}}") for ask in asks]
    return Tool(
        dice.pick(_OTHER_NAMES.get(tool.name, [tool.name])),
        tool.description,
        {names[param]: kind for param, kind in tool.params.items()},
        asks,
        tool.answers,
    )
