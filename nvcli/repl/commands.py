"""The slash commands, as a table, and how a typed line is told from a message.

A name must match exactly; a near miss gets a suggestion and is not sent. A path is no command, and
a leading space or a second slash sends a text that looks like one.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nvcli.errors import UsageError
from nvcli.repl.render import ThinkingView
from nvcli.repl.screen import Screen, visible
from nvcli.repl.session import (
    SETTINGS,
    Session,
    context_meter,
    parse_setting,
    spaced,
    startup_lines,
    statistics_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nvcli.types import RequestOutput

_COMMAND = re.compile(r"/([A-Za-z]+)(?:\s+(.*))?", re.DOTALL)
_ESCAPED = re.compile(r"//[A-Za-z]+(?:\s.*)?", re.DOTALL)


@dataclass
class Shell:
    """What a command can act on: the conversation, how it is shown, and a way to ask."""

    session: Session
    screen: Screen
    thinking: ThinkingView = ThinkingView.FULL
    show_stats: bool = True
    markdown: bool = True
    is_streaming: bool = True
    is_over: bool = False
    pending: list[Iterator[RequestOutput]] = field(default_factory=list)
    """A turn that a command wants to run; the loop shows it like any other."""

    def say(self, text: str) -> None:
        self.screen.write(visible(text) + "\n")


@dataclass(frozen=True)
class Command:
    """One row of the table."""

    name: str
    arguments: str
    help: str
    run: Callable[[Shell, str], None]
    aliases: tuple[str, ...] = ()
    words: Sequence[str] = ()  # what Tab offers after the name


def interpret(text: str) -> tuple[str, str] | str:
    """A typed line as (command name, arguments), or as the message to send."""
    match = _COMMAND.fullmatch(text)
    if match is not None:
        return match[1], (match[2] or "").strip()
    return text[1:] if _ESCAPED.fullmatch(text) else text


def run_command(shell: Shell, name: str, arguments: str) -> None:
    """Raises `UsageError` for an unknown command or arguments it does not take."""
    find_command(name).run(shell, arguments)


def find_command(name: str) -> Command:
    """Raises `UsageError` with a suggestion."""
    for command in COMMANDS:
        if name in (command.name, *command.aliases):
            return command
    names = [n for c in COMMANDS for n in (c.name, *c.aliases)]
    longer = [n for n in names if n.startswith(name)]
    near = longer if len(longer) == 1 else difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean /{near[0]}?" if near else "/help lists them."
    raise UsageError(f"unknown command /{name}", hint=f"{hint} A leading space sends it as text.")


def completions(line: str) -> list[str]:
    """What the last word of `line` can become."""
    head, _, last = line.rpartition(" ")
    if not head:
        names = [f"/{c.name}{' ' if c.words else ''}" for c in COMMANDS]
        return [name for name in names if name.startswith(last)]
    try:
        command = find_command(head.split()[0].removeprefix("/"))
    except UsageError:
        return []
    return [word for word in command.words if word.startswith(last)] if head.count(" ") < 1 else []


def _choose(arguments: str, choices: Sequence[str], name: str) -> str:
    if arguments not in choices:
        raise UsageError(f"/{name} takes {', '.join(choices)}, got {arguments!r}")
    return arguments


def _no_arguments(arguments: str, name: str) -> None:
    if arguments:
        raise UsageError(f"/{name} takes no arguments, got {arguments!r}")


# --- the handlers --------------------------------------------------------------------------------


def _help(shell: Shell, arguments: str) -> None:
    if arguments:
        command = find_command(arguments.removeprefix("/"))
        shell.say(f"/{command.name} {command.arguments}".rstrip() + f"\n  {command.help}")
        if command.aliases:
            shell.say("  also: " + ", ".join(f"/{a}" for a in command.aliases))
        return
    rows = [(f"/{c.name} {c.arguments}".rstrip(), c.help) for c in COMMANDS]
    width = max(len(left) for left, _ in rows)
    shell.say("\n".join(f"{left:<{width}}  {right}" for left, right in rows))
    shell.say(
        '\nEnter sends; Alt+Enter or Ctrl+J starts a new line; """ opens and closes a block.\n'
        "Ctrl+C stops the answer, Ctrl+D leaves. A leading space sends a text that starts with /."
    )


def _exit(shell: Shell, arguments: str) -> None:
    _no_arguments(arguments, "exit")
    shell.is_over = True


def _clear(shell: Shell, arguments: str) -> None:
    _no_arguments(arguments, "clear")
    shell.session.clear()
    shell.say("The conversation is empty.")


def _undo(shell: Shell, arguments: str) -> None:
    if arguments and not arguments.isdecimal():
        raise UsageError(f"/undo takes a number of turns, got {arguments!r}")
    for turn in reversed(shell.session.undo(int(arguments or 1))):
        shell.say(f"Took back: {_first_line(turn.user)}")


def _retry(shell: Shell, arguments: str) -> None:
    overrides = {}
    for pair in arguments.split():
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"/retry takes settings like temperature=0.2, got {pair!r}")
        name, parsed = parse_setting(key, value)
        overrides[name] = parsed
    if not shell.session.turns:
        raise UsageError("there is nothing to retry")
    shell.pending.append(shell.session.retry(**overrides))


def _system(shell: Shell, arguments: str) -> None:
    if arguments == "none":
        shell.session.system = None
    elif arguments.startswith("@"):
        path = Path(arguments[1:]).expanduser()
        try:
            shell.session.system = path.read_text("utf-8", "replace").strip("\n") or None
        except OSError as exc:
            raise UsageError(f"cannot read {path}: {exc.strerror or exc}") from exc
    elif arguments:
        shell.session.system = arguments
    shell.say(shell.session.system or "There is no system prompt.")


def _set(shell: Shell, arguments: str) -> None:
    key, _, value = arguments.partition(" ")
    if not value.strip():
        raise UsageError("/set takes a setting and its value", hint="/show lists them.")
    shell.session.set(key, value.strip())
    _show_settings(shell)


def _show(shell: Shell, arguments: str) -> None:
    what = _choose(arguments or "settings", tuple(_VIEWS), "show")
    _VIEWS[what](shell)


def _show_settings(shell: Shell) -> None:
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
    rows.append(("system", _first_line(session.system or "none")))
    width = max(len(key) for key, _ in rows)
    shell.say("\n".join(f"{key:<{width}}  {value}" for key, value in rows))


def _show_prompt(shell: Shell) -> None:
    shell.say(shell.session.prompt_text() if shell.session.messages() else "Nothing was said yet.")


def _show_model(shell: Shell) -> None:
    llm = shell.session.llm
    lines = [f"{llm.model_name}: up to {spaced(llm.max_model_len)} tokens"]
    shell.say("\n".join([*lines, *startup_lines(llm.startup)]))


def _show_messages(shell: Shell) -> None:
    session = shell.session
    parts = [f"[system]\n{session.system}"] if session.system else []
    for turn in session.turns:
        parts.append(f"[user]\n{turn.user}")
        mark = ", interrupted" if turn.is_interrupted else ""
        mark += "" if turn.is_answered else ", not sent again"
        parts.append(f"[assistant{mark}]\n{turn.output.text if turn.output else ''}".rstrip())
    shell.say("\n\n".join(parts) or "Nothing was said yet.")


_VIEWS: dict[str, Callable[[Shell], None]] = {
    "settings": _show_settings,
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


def _think(shell: Shell, arguments: str) -> None:
    word, _, number = arguments.partition(" ")
    if word == "budget":
        shell.session.set("think_budget", number.strip() or "default")
    elif arguments:
        shell.session.think = _choose(arguments, ("on", "off", "budget N"), "think") == "on"
    shell.say(f"think: {_thinking_state(shell)}")


def _thinking(shell: Shell, arguments: str) -> None:
    views = {"show": ThinkingView.FULL, "fold": ThinkingView.FOLD, "hide": ThinkingView.HIDE}
    if arguments == "last":
        turns = shell.session.turns
        output = turns[-1].output if turns else None
        shell.say((output and output.reasoning) or "There was no thinking.")
        return
    if arguments:
        shell.thinking = views[_choose(arguments, (*views, "last"), "thinking")]
    shell.say("thinking: " + next(n for n, view in views.items() if view is shell.thinking))


def _stats(shell: Shell, arguments: str) -> None:
    word = _choose(arguments or "last", ("on", "off", "last"), "stats")
    if word == "last":
        turn = shell.session.turns[-1] if shell.session.turns else None
        if turn is None or turn.output is None:
            raise UsageError("there is no answer yet")
        limit = shell.session.llm.max_model_len
        shell.say(statistics_line(turn.output, limit, is_interrupted=turn.is_interrupted))
        return
    shell.show_stats = word == "on"
    shell.say(f"stats: {word}")


def _context(shell: Shell, arguments: str) -> None:
    _no_arguments(arguments, "context")
    use = shell.session.context()
    filled = round(30 * min(use.used / max(use.limit, 1), 1))
    shell.say(
        f"[{'#' * filled}{'.' * (30 - filled)}] {context_meter(use.used, use.limit)}\n"
        f"used          {spaced(use.used)} of {spaced(use.limit)} tokens\n"
        f"KV cache      {spaced(use.cached_blocks)} of {spaced(use.num_blocks)} blocks hold"
        f" reusable text ({use.block_size} tokens each)\n"
        f"last prompt   {spaced(use.cached_tokens)} tokens came from the cache"
    )


def _first_line(text: str) -> str:
    line = text.strip().split("\n")[0]
    return line if line == text.strip() and len(line) <= 60 else f"{line[:60]}…"


COMMANDS: tuple[Command, ...] = (
    Command("help", "[COMMAND]", "this list, or one command", _help),
    Command("exit", "", "leave", _exit, aliases=("quit", "bye")),
    Command("clear", "", "forget the conversation", _clear, aliases=("new",)),
    Command("undo", "[N]", "take back the last turn, or the last N", _undo),
    Command("retry", "[KEY=VALUE…]", "ask the last question again", _retry,
            words=tuple(f"{key}=" for key in SETTINGS)),
    Command("system", "[TEXT|@FILE|none]", "show or change the system prompt", _system),
    Command("set", "KEY VALUE", "change a setting; the value default resets it", _set,
            words=tuple(SETTINGS)),
    Command("show", "[settings|prompt|model|messages]", "show it; prompt is the exact text", _show,
            words=tuple(_VIEWS)),
    Command("think", "[on|off|budget N]", "let the model think before it answers", _think,
            words=("on", "off", "budget")),
    Command("thinking", "[show|fold|hide|last]", "how thinking is shown; last: the last one",
            _thinking, words=("show", "fold", "hide", "last")),
    Command("stats", "[on|off|last]", "the line after each answer", _stats,
            words=("on", "off", "last")),
    Command("context", "", "how full the context and the KV cache are", _context),
)  # fmt: skip
