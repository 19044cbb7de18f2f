"""What a slash command can act on: the conversation, how it is shown, and ways to ask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from nvcli.errors import UsageError
from nvcli.repl.render import ThinkingView
from nvcli.repl.screen import Screen, visible
from nvcli.repl.wrap import table, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nvcli.repl.model import ChatModel
    from nvcli.repl.session import Session
    from nvcli.types import RequestOutput


class History(Protocol):
    """The typed lines that are remembered."""

    is_on: bool

    def recent(self, count: int) -> list[str]: ...
    def clear(self) -> None: ...


@dataclass
class Shell:
    """Commands change it; the loop in `terminal` reads it."""

    session: Session
    screen: Screen
    thinking: ThinkingView = ThinkingView.FULL
    show_stats: bool = True
    markdown: bool = True
    is_streaming: bool = True
    is_over: bool = False
    is_multiline: bool = False  # Enter starts a line; Alt+Enter sends
    attachments: list[str] = field(default_factory=list)  # go before the next message
    pending: list[Iterator[RequestOutput]] = field(default_factory=list)
    """A turn that a command wants to run; the loop shows it like any other."""
    allowed_tools: set[str] = field(default_factory=set)  # `*`: all of them
    history: History | None = None
    ask: Callable[[str], str] | None = None  # a question that wants a short answer
    edit: Callable[[str], str] | None = None  # a text through $EDITOR
    open_model: Callable[[str], ChatModel] | None = None  # closes the old one
    has_save_failed: bool = False
    has_warned: bool = False  # of a context that is nearly full

    def say(self, text: str, indent: int = 0) -> None:
        """What nvcli says; on a terminal it is broken between words."""
        text = visible(text)
        self.screen.write((wrap(text, self.width, indent) if self.width else text) + "\n")

    def quote(self, text: str) -> None:
        """What somebody else said, or wants to copy: never broken."""
        self.screen.write(visible(text) + "\n")

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        rows = [(visible(name), visible(text)) for name, text in rows]
        self.screen.write(table(rows, self.width or 1000) + "\n")

    @property
    def width(self) -> int:
        """Columns of the terminal; 0 where there is none."""
        return self.screen.size()[0] if self.screen.out_is_terminal else 0

    def save(self) -> None:
        """After each turn; a disk that is full is told once and stops nothing."""
        try:
            self.session.save()
            self.has_save_failed = False
        except OSError as exc:
            if not self.has_save_failed:
                self.screen.error(not_saved(self.session, exc))
            self.has_save_failed = True


def not_saved(session: Session, exc: OSError) -> str:
    where = f" in {session.file.path.parent}" if session.file is not None else ""
    return f"the conversation is not saved{where}: {exc.strerror or exc}"


def choose(arguments: str, choices: Sequence[str], name: str) -> str:
    if arguments not in choices:
        raise UsageError(f"/{name} takes {', '.join(choices)}, got {arguments!r}")
    return arguments


def no_arguments(arguments: str, name: str) -> None:
    if arguments:
        raise UsageError(f"/{name} takes no arguments, got {arguments!r}")


def is_number(word: str) -> bool:
    return word.isdecimal() and len(word) < 10


def number(arguments: str, name: str, what: str, default: int = 1) -> int:
    if arguments and not is_number(arguments):
        raise UsageError(f"/{name} takes {what}, got {arguments!r}")
    return int(arguments or default)


def first_line(text: str) -> str:
    line = text.strip().split("\n")[0]
    return line if line == text.strip() and len(line) <= 60 else f"{line[:60]}…"
