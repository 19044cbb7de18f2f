"""The command line as data: what completions and the reference page are generated from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import typer

from nvcli.cli.app import command_line
from nvcli.config import AttentionBackendName

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHOICES = re.compile(r"[a-z0-9-]+(?:\|[A-Za-z0-9-]+)+")
_DTYPES = ("auto", "float32", "float16", "bfloat16")
_WORDS = {
    "dtype": _DTYPES,
    "kv_cache_dtype": (*_DTYPES, "fp8"),
    "attention_backend": get_args(AttentionBackendName),
    "show_thinking": ("auto", "full", "fold", "hide"),
}
_DYNAMIC = {"model": "models", "session": "sessions", "profile": "profiles"}
_FILE_METAVARS = ("FILE", "PATH", "OUT", "INPUT", "FILE|JSON")


@dataclass(frozen=True)
class Value:
    """What a value can be. `kind`: words, files, models, sessions, profiles, or free."""

    name: str
    kind: str = "free"
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    flags: tuple[str, ...]
    help: str
    value: Value | None  # None: a switch
    may_repeat: bool = False

    @property
    def name(self) -> str:
        return next((f for f in self.flags if f.startswith("--")), self.flags[0])


@dataclass(frozen=True)
class CommandRow:
    """One command; `path` is () for `nvcli` itself."""

    path: tuple[str, ...]
    help: str
    options: tuple[Option, ...]
    arguments: tuple[Value, ...]
    subcommands: tuple[tuple[str, str], ...]  # name, help

    @property
    def name(self) -> str:
        return " ".join(self.path)


def command_rows() -> list[CommandRow]:
    """The root first, then every command that is not hidden."""
    root = command_line()
    return list(_rows(root, typer.Context(root, info_name="nvcli", **root.context_settings), ()))


def _rows(command: Any, ctx: Any, path: tuple[str, ...]) -> Iterator[CommandRow]:
    children = [(n, c) for n, c in getattr(command, "commands", {}).items() if not c.hidden]
    params = [p for p in command.get_params(ctx) if not getattr(p, "hidden", False)]
    yield CommandRow(
        path=path,
        help=first_sentence(command.help or ""),
        options=tuple(_option(p) for p in params if p.param_type_name == "option"),
        arguments=tuple(_value(p) for p in params if p.param_type_name == "argument"),
        subcommands=tuple((name, first_sentence(child.help or "")) for name, child in children),
    )
    for name, child in children:
        yield from _rows(child, typer.Context(child, info_name=name, parent=ctx), (*path, name))


def first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def _option(param: Any) -> Option:
    flags = tuple(sorted((*param.opts, *param.secondary_opts), key=lambda f: f.startswith("--")))
    is_switch = param.is_flag or param.count
    may_repeat = param.multiple or param.count
    return Option(flags, param.help or "", None if is_switch else _value(param), may_repeat)


def _value(param: Any) -> Value:
    metavar = param.metavar or param.name.upper()
    if param.name in _WORDS:
        return Value(metavar, "words", _WORDS[param.name])
    if param.name in _DYNAMIC:
        return Value(metavar, _DYNAMIC[param.name])
    if metavar == "MODEL":
        return Value(metavar, "models")
    if metavar in _FILE_METAVARS:
        return Value(metavar, "files")
    if _CHOICES.fullmatch(metavar):
        return Value(metavar, "words", tuple(w for w in metavar.split("|") if w.islower()))
    return Value(metavar)
