"""The slash commands, as a table, and how a typed line is told from a message.

A name must match exactly; a near miss gets a suggestion and is not sent. A path is no command, and
a leading space or a second slash sends a text that looks like one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvcli.errors import UsageError, nearest
from nvcli.repl import command_files as files
from nvcli.repl import command_turns as turns
from nvcli.repl import command_view as view
from nvcli.repl.files import path_completions
from nvcli.repl.settings import SETTINGS
from nvcli.repl.shell import Shell, no_arguments
from nvcli.repl.store import session_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_COMMAND = re.compile(r"/([A-Za-z]+)(?:\s+(.*))?", re.DOTALL)
_ESCAPED = re.compile(r"//[A-Za-z]+(?:\s.*)?", re.DOTALL)
KEYS_HELP = """
Enter sends; Alt+Enter or Ctrl+J starts a new line; \"\"\" opens and closes a block.
Ctrl+C stops the answer, Ctrl+T lets it answer without more thinking, Ctrl+O folds the thinking.
Ctrl+G opens the editor, Ctrl+R searches the history, Ctrl+L clears the screen, Ctrl+D leaves.
@path puts a file before the message. A leading space sends a text that starts with /."""


@dataclass(frozen=True)
class Command:
    """One row of the table."""

    name: str
    arguments: str
    help: str
    run: Callable[[Shell, str], None]
    aliases: tuple[str, ...] = ()
    words: Sequence[str] = ()  # what Tab offers after the name
    values: Callable[[str], Sequence[str]] | None = None  # the same, looked up


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
    near = nearest(name, names)
    hint = "/help lists them." if near is None else f"Did you mean /{near}?"
    raise UsageError(f"unknown command /{name}", hint=f"{hint} A leading space sends it as text.")


def completions(line: str) -> list[str]:
    """What the last word of `line` can become."""
    head, _, last = line.rpartition(" ")
    if last.startswith("@") and not line.startswith("/"):
        return [f"@{path}" for path in path_completions(last[1:])]
    if not line.startswith("/"):
        return []
    if not head:
        names = [f"/{c.name}{' ' if c.words or c.values else ''}" for c in COMMANDS]
        return [name for name in names if name.startswith(last)]
    try:
        command = find_command(head.split()[0].removeprefix("/"))
    except UsageError:
        return []
    if command.values is not None and (head.count(" ") < 1 or command.name == "file"):
        return [value for value in command.values(last) if value.startswith(last)]
    return [word for word in command.words if word.startswith(last)] if head.count(" ") < 1 else []


def _help(shell: Shell, arguments: str) -> None:
    if arguments:
        command = find_command(arguments.removeprefix("/"))
        shell.say(f"/{command.name} {command.arguments}".rstrip() + f"\n  {command.help}", 2)
        if command.aliases:
            shell.say("  also: " + ", ".join(f"/{a}" for a in command.aliases))
        return
    rows = []
    for c in COMMANDS:
        also = f" (also {', '.join(f'/{a}' for a in c.aliases)})" if c.aliases else ""
        rows.append((f"/{c.name} {c.arguments}".rstrip(), f"{c.help}{also}"))
    shell.table(rows)
    shell.say(KEYS_HELP)


def _exit(shell: Shell, arguments: str) -> None:
    no_arguments(arguments, "exit")
    shell.is_over = True


def _names(start: str) -> list[str]:
    return session_names()


def _models(start: str) -> list[str]:
    from nvcli.models.store import stored_models

    return [model.name for model in stored_models()] + path_completions(start)


COMMANDS: tuple[Command, ...] = (
    Command("help", "[COMMAND]", "this list, or one command", _help),
    Command("exit", "", "leave", _exit, aliases=("quit", "bye")),
    Command("clear", "", "forget the conversation", turns.clear, aliases=("new",)),
    Command("undo", "[N]", "take back the last turn, or the last N", turns.undo),
    Command("retry", "[KEY=VALUE…]", "ask the last question again", turns.retry,
            words=tuple(f"{key}=" for key in SETTINGS)),
    Command("edit", "[N]", "change the last message, or the N-th last, in $EDITOR", turns.edit),
    Command("continue", "", "go on with an answer that was cut", turns.go_on),
    Command("system", "[TEXT|@FILE|none]", "show or change the system prompt", turns.system),
    Command("set", "KEY VALUE", "change a setting", view.set_value, words=tuple(SETTINGS)),
    Command("unset", "KEY…", "back to the default", view.unset, words=tuple(SETTINGS)),
    Command("show", "[settings|prompt|model|messages]", "show it; prompt is the exact text",
            view.show, words=tuple(view.VIEWS)),
    Command("think", "[on|off|budget N]", "let the model think before it answers", view.think,
            words=("on", "off", "budget")),
    Command("thinking", "[show|fold|hide|last]", "how thinking is shown; last: the last one",
            view.thinking, words=("show", "fold", "hide", "last")),
    Command("file", "PATH…", "put files before the next message", turns.attach_file,
            values=path_completions),
    Command("save", "[NAME]", "name this conversation; it is saved after each turn", files.save,
            values=_names),
    Command("load", "NAME", "open a saved conversation", files.load, values=_names),
    Command("sessions", "", "the saved conversations", files.sessions),
    Command("fork", "NAME", "go on in a copy, the prefix is not computed again", files.fork),
    Command("export", "FILE", "write it as .md, .txt, .json or .jsonl", files.export,
            values=path_completions),
    Command("copy", "[code N]", "the last answer, or one of its code blocks, to the clipboard",
            turns.copy, words=("code",)),
    Command("last", "", "the last answer again, unrendered", turns.last),
    Command("probs", "[N]", "how likely each token of the answer was, and what else", turns.probs),
    Command("branch", "N [K]", "go on from token N with its K-th alternative", turns.branch),
    Command("json", "[on|off]", "answers are JSON objects", view.json_mode, words=view.ON_OFF),
    Command("schema", "[FILE|JSON|off]", "answers are JSON of this schema", view.schema,
            values=path_completions),
    Command("tools", "[allow|ask NAME]", "the tools, and which run unasked", view.tools,
            words=("allow", "ask")),
    Command("model", "[NAME]", "another model, the conversation stays", view.model, values=_models),
    Command("markdown", "[on|off]", "render Markdown", view.markdown, words=view.ON_OFF),
    Command("multiline", "[on|off]", "Enter starts a line, Alt+Enter sends", view.multiline,
            words=view.ON_OFF),
    Command("history", "[clear|on|off]", "the lines you typed", view.history,
            words=("clear", "on", "off")),
    Command("stats", "[on|off|last]", "the line after each answer", view.stats,
            words=("on", "off", "last")),
    Command("context", "", "how full the context and the KV cache are", view.context),
)  # fmt: skip
