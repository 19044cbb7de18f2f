"""Slash commands about conversations on disk: save, load, fork, list, export."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING

from nvcli.errors import NvcliError, UsageError
from nvcli.paths import expand_user
from nvcli.repl.shell import first_line, no_arguments, not_saved
from nvcli.repl.store import SessionFile, new_name, record_line, session_names, session_path
from nvcli.text import message_json
from nvcli.text.words import counted
from nvcli.types import Message

if TYPE_CHECKING:
    from nvcli.repl.session import Session
    from nvcli.repl.shell import Shell


def save(shell: Shell, arguments: str) -> None:
    session = shell.session
    if not session.messages():
        raise UsageError("nothing was said yet")
    if not arguments and session.file is None:
        arguments = new_name()
    old = session.file
    if arguments and (old is None or arguments != old.name):
        _save_as(shell, arguments)
        if old is not None:
            old.path.unlink(missing_ok=True)  # the conversation has another name now
    else:
        _save(shell)
    assert session.file is not None, "it was set above"
    shell.say(f"Saved as {session.file.name}.")


def _save_as(shell: Shell, name: str) -> None:
    """The old file stays the conversation's where the new one cannot be written."""
    old = shell.session.file
    shell.session.file = _new_file(name)
    try:
        _save(shell)
    except NvcliError:
        shell.session.file = old
        raise


def _save(shell: Shell) -> None:
    """On the user's word: a failure is told every time. Raises `NvcliError`."""
    try:
        shell.session.save()
    except OSError as exc:
        raise NvcliError(not_saved(shell.session, exc)) from exc


def _new_file(name: str) -> SessionFile:
    if session_path(name).exists():
        raise UsageError(f"there is a session {name!r} already", hint="/load opens it.")
    return SessionFile(name)


def fork(shell: Shell, arguments: str) -> None:
    if not arguments:
        raise UsageError("/fork takes a name for the copy")
    _new_file(arguments)  # the name is free
    shell.save()
    _save_as(shell, arguments)
    shell.say(f"This is {arguments} now; the other one stays as it was.")


def load(shell: Shell, arguments: str) -> None:
    if not arguments:
        raise UsageError("/load takes a name", hint="/sessions lists them.")
    shell.save()
    shell.session.load(arguments)
    shell.has_warned = False
    turns = shell.session.turns
    shell.say(f"{arguments}: {counted(len(turns), 'turn')}.")
    if turns:
        shell.say(f"Last: {first_line(turns[-1].user)}")


def sessions(shell: Shell, arguments: str) -> None:
    no_arguments(arguments, "sessions")
    rows = []
    for name in session_names():
        path = session_path(name)
        try:
            lines = path.read_text("utf-8", "replace").splitlines()
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
        except OSError:
            continue
        count = counted(len(lines), "turn")
        rows.append((name, f"{when}  {count}  {_first_question(lines)}".rstrip()))
    if rows:
        shell.table(rows)
    else:
        shell.say("No conversation is saved.")


def _first_question(lines: list[str]) -> str:
    try:
        messages = json.loads(lines[0])["messages"]
        return first_line(next(m["content"] for m in messages if m["role"] == "user"))
    except (IndexError, KeyError, TypeError, ValueError, StopIteration, AttributeError):
        return ""


# --- export --------------------------------------------------------------------------------------


def export(shell: Shell, arguments: str) -> None:
    path = expand_user(arguments)
    writers = {".md": _markdown, ".txt": _text, ".json": _json, ".jsonl": _jsonl}
    writer = writers.get(path.suffix)
    if not arguments or writer is None:
        raise UsageError(f"/export takes a file that ends in {', '.join(writers)}")
    if not shell.session.turns:
        raise UsageError("nothing was said yet")
    try:
        with path.open("x", encoding="utf-8", errors="replace") as out:
            out.write(writer(shell.session))
    except FileExistsError as exc:
        raise UsageError(f"{path} is there already", hint="Choose another name.") from exc
    except OSError as exc:
        with contextlib.suppress(OSError):
            if path.is_file() and path.stat().st_size == 0:
                path.unlink()
        raise UsageError(f"cannot write {path}: {exc.strerror or exc}") from exc
    shell.say(f"Wrote {path}.")


def _transcript(session: Session) -> list[Message]:
    """Everything that was said, the turns without an answer too."""
    messages = [Message("system", session.system)] if session.system else []
    for turn in session.turns:
        messages += turn.messages()
    return messages


def _markdown(session: Session) -> str:
    parts = [f"# {first_line(session.turns[0].user)}"]
    for message in _transcript(session):
        parts.append(f"## {message.role.capitalize()}")
        if message.reasoning:
            body = message.reasoning.strip("\n").replace("\n", "\n> ")
            parts.append(f"> {body}")
        if message.content:
            parts.append(str(message.content).strip("\n"))
        for call in message.tool_calls:
            parts.append(f"```json\n{json.dumps({call.name: call.arguments})}\n```")
    return "\n\n".join(parts) + "\n"


def _text(session: Session) -> str:
    parts = []
    for message in _transcript(session):
        calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
        body = "\n".join(filter(None, [str(message.content or "").strip("\n"), *calls]))
        parts.append(f"{message.role}:\n{body}")
    return "\n\n".join(parts) + "\n"


def _json(session: Session) -> str:
    record = {
        "model": session.llm.model_name,
        "messages": [message_json(message) for message in _transcript(session)],
    }
    return json.dumps(record, ensure_ascii=False, indent=2) + "\n"


def _jsonl(session: Session) -> str:
    return record_line(_transcript(session))
