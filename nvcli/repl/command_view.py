"""Slash commands that show or set how the conversation runs and looks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from nvcli.errors import UsageError
from nvcli.paths import expand_user
from nvcli.repl.files import read_file
from nvcli.repl.numbers import SEPARATOR, context_meter, spaced, startup_lines, statistics_line
from nvcli.repl.render import ThinkingView
from nvcli.repl.session import ANY_OBJECT
from nvcli.repl.settings import SETTINGS, parse_setting
from nvcli.repl.shell import choose, first_line, no_arguments
from nvcli.repl.wrap import wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.repl.shell import Shell

ON_OFF = ("on", "off")


def set_value(shell: Shell, arguments: str) -> None:
    key, _, value = arguments.partition(" ")
    if not value.strip():
        raise UsageError("/set takes a setting and its value", hint="/show lists them.")
    shell.session.set(key, value.strip())
    show_settings(shell)


def unset(shell: Shell, arguments: str) -> None:
    if not arguments:
        raise UsageError("/unset takes a setting", hint="/show lists them.")
    for key in arguments.split():
        shell.session.set(key, "default")
    show_settings(shell)


def show(shell: Shell, arguments: str) -> None:
    VIEWS[choose(arguments or "settings", tuple(VIEWS), "show")](shell)


def show_settings(shell: Shell) -> None:
    session = shell.session
    params = session.sampling()
    rows = []
    for key in SETTINGS:
        name, _ = parse_setting(key, "default")
        value = getattr(params, name)
        text = " ".join(map(repr, value)) if isinstance(value, tuple) else value
        text = "default" if value in (None, ()) else text
        rows.append((key, f"{text}{' (set)' if name in session.overrides else ''}"))
    rows.append(("think", _thinking_state(shell)))
    rows.append(("thinking", "show" if shell.thinking is ThinkingView.FULL else shell.thinking))
    rows.append(("stats", "on" if shell.show_stats else "off"))
    rows.append(("markdown", "on" if shell.markdown else "off"))
    rows.append(("multiline", "on" if shell.is_multiline else "off"))
    rows.append(("json", _json_state(shell)))
    rows.append(("system", first_line(session.system or "none")))
    rows.append(("session", session.file.name if session.file is not None else "not saved"))
    shell.table(rows)


def _show_prompt(shell: Shell) -> None:
    if shell.session.messages():
        shell.quote(shell.session.prompt_text())
    else:
        shell.say("Nothing was said yet.")


def _show_model(shell: Shell) -> None:
    llm = shell.session.llm
    lines = [f"{llm.model_name}: up to {spaced(llm.max_model_len)} tokens"]
    if llm.startup is not None:
        lines += startup_lines(llm.startup)
    elif hasattr(llm, "where"):
        lines.append(f"runs at {llm.where}")
    shell.say("\n".join(lines))


def _show_messages(shell: Shell) -> None:
    session = shell.session
    parts = [f"[system]\n{session.system}"] if session.system else []
    for turn in session.turns:
        parts.append(f"[user]\n{turn.user}")
        for step in turn.steps:
            for call in step.tool_calls:
                parts.append(f"[call]\n{call.name}({call.arguments})")
            if step.role == "tool":
                parts.append(f"[tool]\n{step.content}")
        mark = ", interrupted" if turn.is_interrupted else ""
        mark += "" if turn.is_answered else ", not sent again"
        parts.append(f"[assistant{mark}]\n{turn.output.text if turn.output else ''}".rstrip())
    shell.quote("\n\n".join(parts) or "Nothing was said yet.")


VIEWS: dict[str, Callable[[Shell], None]] = {
    "settings": show_settings,
    "prompt": _show_prompt,
    "model": _show_model,
    "messages": _show_messages,
}


def _thinking_state(shell: Shell) -> str:
    if not shell.session.llm.supports_thinking:
        return "this model has no thinking mode"
    budget = shell.session.overrides.get("thinking_budget")
    state = "on" if shell.session.think else "off"
    return f"{state}, budget {budget} tokens" if budget is not None else state


def think(shell: Shell, arguments: str) -> None:
    word, _, count = arguments.partition(" ")
    if word == "budget":
        shell.session.set("think_budget", count.strip() or "default")
    elif arguments:
        shell.session.think = choose(arguments, ("on", "off", "budget N"), "think") == "on"
    shell.say(f"think: {_thinking_state(shell)}")


def thinking(shell: Shell, arguments: str) -> None:
    views = {"show": ThinkingView.FULL, "fold": ThinkingView.FOLD, "hide": ThinkingView.HIDE}
    if arguments == "last":
        turns = shell.session.turns
        output = turns[-1].output if turns else None
        shell.quote((output and output.reasoning) or "There was no thinking.")
        return
    if arguments:
        shell.thinking = views[choose(arguments, (*views, "last"), "thinking")]
    shell.say("thinking: " + next(n for n, view in views.items() if view is shell.thinking))


def stats(shell: Shell, arguments: str) -> None:
    word = choose(arguments or "last", ("on", "off", "last"), "stats")
    if word == "last":
        turn = shell.session.turns[-1] if shell.session.turns else None
        if turn is None or turn.output is None:
            raise UsageError("there is no answer yet")
        limit = shell.session.llm.max_model_len
        line = statistics_line(turn.output, limit, is_interrupted=turn.is_interrupted)
        shell.say(wrap(line, shell.width, separator=SEPARATOR) if shell.width else line)
        return
    shell.show_stats = word == "on"
    shell.say(f"stats: {word}")


def context(shell: Shell, arguments: str) -> None:
    no_arguments(arguments, "context")
    use = shell.session.context()
    rows = [("used", f"{spaced(use.used)} of {spaced(use.limit)} tokens")]
    if use.cached_blocks is not None:
        held = f"{spaced(use.cached_blocks)} of {spaced(use.num_blocks)} blocks hold reusable text"
        rows.append(("KV cache", f"{held} ({use.block_size} tokens each)"))
    rows.append(("last prompt", f"{spaced(use.cached_tokens)} tokens came from the cache"))
    meter = context_meter(use.used, use.limit)
    length = min(30, shell.width - len(meter) - 3) if shell.width else 30
    filled = round(length * min(use.used / max(use.limit, 1), 1))
    shell.say(f"[{'#' * filled}{'.' * (length - filled)}] {meter}" if length > 4 else meter)
    shell.table(rows)


def markdown(shell: Shell, arguments: str) -> None:
    if arguments:
        shell.markdown = choose(arguments, ON_OFF, "markdown") == "on"
    shell.say(f"markdown: {'on' if shell.markdown else 'off'}")


def multiline(shell: Shell, arguments: str) -> None:
    if arguments:
        shell.is_multiline = choose(arguments, ON_OFF, "multiline") == "on"
    sends = "Alt+Enter sends, Enter starts a line" if shell.is_multiline else "Enter sends"
    shell.say(f"multiline: {'on' if shell.is_multiline else 'off'}; {sends}")


def history(shell: Shell, arguments: str) -> None:
    if shell.history is None:
        raise UsageError("no history is kept")
    word = choose(arguments, ("", "clear", "off", "on"), "history")
    if word == "clear":
        shell.history.clear()
        shell.say("The history is empty.")
    elif word:
        shell.history.is_on = word == "on"
        shell.say(f"history: {word}")
    else:
        lines = "\n".join(map(first_line, shell.history.recent(20)))
        shell.quote(lines or "The history is empty.")


def _json_state(shell: Shell) -> str:
    schema = shell.session.schema
    if schema is None:
        return "off"
    return "on" if schema is ANY_OBJECT else "on, by a schema"


def json_mode(shell: Shell, arguments: str) -> None:
    if arguments:
        is_on = choose(arguments, ON_OFF, "json") == "on"
        shell.session.schema = ANY_OBJECT if is_on else None
    shell.say(f"json: {_json_state(shell)}")


def schema(shell: Shell, arguments: str) -> None:
    if arguments == "off":
        shell.session.schema = None
    elif arguments:
        shell.session.schema = read_schema(arguments, shell.screen.warn)
    found = shell.session.schema
    shell.quote(json.dumps(found, ensure_ascii=False, indent=2) if found else "There is no schema.")


def read_schema(text: str, warn: Callable[[str], None]) -> dict[str, object]:
    """A schema from a file, or written out. Raises `UsageError`."""
    if not text.strip():
        raise UsageError("the schema is empty", hint="Give a file or JSON.", param="schema")
    is_inline = text.lstrip().startswith(("{", "["))
    source = text if is_inline else read_file(expand_user(text), warn)
    try:
        found = json.loads(source)
    except (ValueError, RecursionError) as exc:
        where = "the schema" if is_inline else text
        raise UsageError(f"{where} is no JSON: {exc}", param="schema") from exc
    if not isinstance(found, dict):
        raise UsageError("a schema is a JSON object", param="schema")
    return found


def model(shell: Shell, arguments: str) -> None:
    session = shell.session
    if arguments and arguments != session.llm.model_name:
        if shell.open_model is None:
            raise UsageError("the model cannot be changed here")
        session.llm = shell.open_model(arguments)
        shell.has_warned = False
    shell.say(f"model: {session.llm.model_name}, {spaced(session.llm.max_model_len)} tokens")


def tools(shell: Shell, arguments: str) -> None:
    box = shell.session.tools
    if box is None or not box.names:
        raise UsageError("there are no tools", hint="Start with --tools FILE.py or --mcp FILE.")
    word, _, name = arguments.partition(" ")
    if arguments:
        choose(word, ("allow", "ask"), "tools")
        if name != "*" and name not in box.names:
            raise UsageError(f"there is no tool {name!r}", hint=f"Known: {', '.join(box.names)}.")
        change = shell.allowed_tools.add if word == "allow" else shell.allowed_tools.discard
        change(name)
    lines = []
    for spec in box.specs:
        state = "allowed" if shell.allowed_tools & {spec.name, "*"} else "asks"
        lines.append(f"{spec.name}  ({spec.source}, {state})\n  {first_line(spec.description)}")
    shell.say("\n".join(lines))
