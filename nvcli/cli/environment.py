"""Options from the environment: `NVCLI_<COMMAND>_<FLAG>` for every flag, as it is written.

Typer reads a variable after a parameter's name, so it misses the second half of a switch
(`NVCLI_CHAT_NO_THINK`, `NVCLI_CHAT_PLAIN`), names that Python reserves (`NVCLI_CHAT_CONTINUE`), and
a command's own (`NVCLI_CHAT_MODEL`) where there is one for all (`NVCLI_MODEL`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from nvcli.errors import UsageError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on", "t", "y"), True),
    **dict.fromkeys(("0", "false", "no", "off", "f", "n"), False),
}


def more_flags(
    command: Any, ctx: Any, given: Mapping[str, Any]
) -> dict[str, tuple[list[str], str]]:
    """What Typer misses: name -> (arguments, variable). A flag that was `given` wins.

    The values were looked at by `check_variables`.
    """
    found = {}
    for param, flag, variable in _variables(command, ctx):
        text = os.environ.get(variable, "").strip()
        if not text or param.name in given or variable == variable_of(param, ctx):
            continue
        if not param.is_flag:
            found[param.name] = ([flag, text], variable)
        elif _WORDS[text.lower()]:
            found[param.name] = ([flag], variable)
    return found


def check_variables(command: Any, ctx: Any, given: Mapping[str, Any]) -> None:
    """Raises `UsageError` naming a variable that sets a switch to neither yes nor no, in the same
    words whether Typer reads it or `more_flags` does, or two that say different things of one
    option. A flag that was `given` wins."""
    _check_switches(command, ctx, given)
    said: dict[str, tuple[str, Any]] = {}
    for param, flag, variable in _variables(command, ctx):
        text = os.environ.get(variable, "").strip()
        if not text or param.name in given:
            continue
        value: Any = text
        if param.is_flag:
            value = _WORDS[text.lower()]
            if flag in param.secondary_opts:
                if not value:  # `NO_THINK=0` asks for nothing
                    continue
                value = False
        other, its_value = said.setdefault(param.name, (variable, value))
        if value != its_value:
            raise UsageError(
                f"{other} and {variable} contradict each other",
                hint="Unset one of them.",
                param=param.name,
            )


def _check_switches(command: Any, ctx: Any, given: Mapping[str, Any]) -> None:
    for param, _, variable in _variables(command, ctx):
        if not param.is_flag and not param.count:
            continue
        for name in (param.envvar, variable):
            text = os.environ.get(name, "").strip() if isinstance(name, str) else ""
            if not text or param.name in given:
                continue
            if param.count and not text.isdecimal():
                raise UsageError(f"{name} must be a whole number, got {text!r}", param=param.name)
            if not param.count and text.lower() not in _WORDS:
                raise UsageError(f"{name} must be true or false, got {text!r}", param=param.name)


def unknown_variables(command: Any, ctx: Any) -> Iterator[str]:
    """Sentences about variables that look like this command's and are no flag's."""
    start = f"{ctx.auto_envvar_prefix}_"
    known = [variable for _, _, variable in _variables(command, ctx)]
    known += [_automatic(param, ctx) for param in command.get_params(ctx)]
    known = [variable.removeprefix(start) for variable in known]
    for name in sorted(os.environ):
        word = name.removeprefix(start)
        if name.startswith(start) and word not in known:
            near = nearest(word, known)
            hint = "" if near is None else f"; did you mean {start}{near}?"
            yield f"the variable {name} is no option of {ctx.command_path}{hint}"


def variable_of(param: Any, ctx: Any) -> str:
    """Where Typer took the value from."""
    named = param.envvar if isinstance(param.envvar, str) else None
    if named is not None and os.environ.get(named):
        return named
    return _automatic(param, ctx)


def _automatic(param: Any, ctx: Any) -> str:
    return f"{ctx.auto_envvar_prefix}_{param.name.upper()}"


def _variables(command: Any, ctx: Any) -> Iterator[tuple[Any, str, str]]:
    for param in command.get_params(ctx):
        if param.param_type_name == "option" and param.name not in ("help", "version"):
            for flag in (*param.opts, *param.secondary_opts):
                if flag.startswith("--"):
                    name = flag[2:].replace("-", "_").upper()
                    yield param, flag, f"{ctx.auto_envvar_prefix}_{name}"
