"""How an option is declared: the groups of the help pages, and values that do not parse.

Typer's own words for a bad value change with its version and its choice of Rich; ours do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from nvcli.config import parse_length
from nvcli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from enum import StrEnum

MODEL = "Model"
SAMPLING = "Sampling"
INPUT = "Input"
TOOLS = "Tools"
SESSION = "Conversation"
OUTPUT = "Output"
GLOBAL = "General"
CLUSTER = "Cluster"
ARGUMENTS = "Arguments"
OF_FILES = frozenset({"FILE", "PATH", "OUT", "FOLDER", "INPUT"})  # metavars


def option(
    group: str, spelling: str, help: str, parser: Callable[[str], Any] | None = None, **more: Any
) -> Any:
    """`spelling` is how the help page shows it: `-t, --temperature X`. `more`: what Typer takes."""
    words = spelling.split(" ")
    return typer.Option(
        *(word.removesuffix(",") for word in words if word.startswith("-")),
        help=help,
        metavar=None if words[-1].startswith("-") else words[-1],
        parser=parser,
        rich_help_panel=group,
        show_default=False,
        show_envvar=False,
        **more,
    )


def check_file_name(param: Any, value: Any, flag: str) -> None:
    """Raises `UsageError` where an option that names a file is given an empty name, most often a
    variable of the shell that is not set; `Path` would make the folder one is in of it."""
    if param.metavar in OF_FILES and "" in (value if isinstance(value, list) else [value]):
        raise UsageError(f"{flag}: the name is empty", hint="Give a file, or leave it out.")


def argument(metavar: str, help: str) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def parser(parse: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    """Our own words for a value that does not parse, whatever Typer's version says."""

    def parse_value(text: str) -> Any:
        try:
            return parse(text)
        except UsageError as exc:
            raise typer.BadParameter(str(exc)) from exc
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not {what}") from None

    parse_value.__name__ = what
    return parse_value


def choice(choices: type[StrEnum]) -> Callable[[str], Any]:
    return parser(choices, f"one of {', '.join(choices)}")


INT = parser(int, "a whole number")
FLOAT = parser(float, "a number")
LENGTH = parser(parse_length, "a token count")
