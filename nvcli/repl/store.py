"""Conversations on disk: one JSON line a turn, each the whole conversation up to it.

    {"messages": [system?, user, assistant]}
    {"messages": [system?, user, assistant, user, assistant]}

So the last line is the longest, each line is a record that `nvcli batch` accepts, and a crash costs
at most the turn that was being written. Files are private (0600) and written in place of the old
one, never into it, except for the next turn, which is appended.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from typing import TYPE_CHECKING, Any

from nvcli.errors import UsageError, meant
from nvcli.paths import state_folder, write_whole
from nvcli.text import message_json, repair_surrogates
from nvcli.types import Message, ToolCall

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SUFFIX = ".jsonl"
_NAME = re.compile(r"[\w][\w .+-]{0,99}")


def sessions_folder() -> Path:
    return state_folder() / "sessions"


def session_names() -> list[str]:
    """Saved conversations, the newest first."""
    return [path.stem for path in _files()]


def latest_name() -> str | None:
    files = _files()
    return files[0].stem if files else None


def new_name() -> str:
    """A name of this moment that is not taken."""
    base = name = time.strftime("%Y-%m-%d-%H%M%S")
    number = 2
    while session_path(name).exists():
        name = f"{base}-{number}"
        number += 1
    return name


def session_path(name: str) -> Path:
    """Raises `UsageError` for a name that is none, such as one with a slash."""
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"{name!r} is no name for a session", hint="Use letters, digits, spaces, . - + and _."
        )
    return sessions_folder() / f"{name}{SUFFIX}"


def _files() -> list[Path]:
    with contextlib.suppress(OSError):
        found = [p for p in sessions_folder().iterdir() if p.suffix == SUFFIX and p.is_file()]
        return sorted(found, key=lambda p: (p.stat().st_mtime, p.stem), reverse=True)
    return []


class SessionFile:
    """One conversation's file. Writing raises `OSError`; the caller tells it once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = session_path(name)
        self._lines: list[str] = []  # what the file holds

    def save(self, prefixes: Sequence[Sequence[Message]]) -> None:
        """`prefixes`: the conversation up to each turn. Appends where only turns were added."""
        lines = [record_line(messages) for messages in prefixes]
        if lines == self._lines:
            return
        is_longer = bool(self._lines) and lines[: len(self._lines)] == self._lines
        known, self._lines = self._lines, []  # should writing fail, the next time it is all new
        if is_longer and self.path.exists():
            _append(self.path, lines[len(known) :])
        elif lines:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(self.path, "".join(lines).encode(), mode=0o600)
        else:
            self.path.unlink(missing_ok=True)
        self._lines = lines

    @classmethod
    def load(cls, name: str) -> tuple[SessionFile, list[Message]]:
        """Raises `UsageError` where there is none, or it cannot be read."""
        file = cls(name)
        try:
            text = file.path.read_text("utf-8")
        except FileNotFoundError as exc:
            hint = meant(name, session_names()) or "/sessions lists them."
            raise UsageError(f"there is no session {name!r}", hint=hint) from exc
        except (OSError, ValueError) as exc:
            raise UsageError(f"cannot read the session {name!r}: {exc}") from exc
        lines = text.split("\n")[:-1]  # a torn last line is left out
        if not lines:
            raise UsageError(f"the session {name!r} is empty")
        messages = messages_of(lines[-1], name)
        if text.endswith("\n"):
            file._lines = [f"{line}\n" for line in lines]
        return file, messages


def _append(path: Path, lines: Sequence[str]) -> None:
    with path.open("a", encoding="utf-8") as out:
        out.write("".join(lines))


# --- messages as OpenAI writes them --------------------------------------------------------------


def record_line(messages: Sequence[Message]) -> str:
    record = {"messages": [message_json(message) for message in messages]}
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    for sign in "\u2028\u2029\x85":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return repair_surrogates(text) + "\n"


def messages_of(line: str, name: str) -> list[Message]:
    """The messages of a record. Raises `UsageError` where it is none."""
    try:
        return [_message(value) for value in json.loads(line)["messages"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise UsageError(f"the session {name!r} holds a line that is no conversation") from exc


def _message(value: dict[str, Any]) -> Message:
    role, content = value["role"], value.get("content")
    if role not in ("system", "user", "assistant", "tool") or not isinstance(content, str | None):
        raise ValueError("not a message of a conversation")
    calls = [
        ToolCall(i, call["id"], call["function"]["name"], call["function"]["arguments"])
        for i, call in enumerate(value.get("tool_calls") or ())
    ]
    return Message(
        role,
        content,
        reasoning=value.get("reasoning_content"),
        tool_calls=tuple(calls),
        tool_call_id=value.get("tool_call_id"),
    )
