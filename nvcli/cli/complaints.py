"""What is said of a command line that is wrong: one line that names the flag, the file or the
variable a value came from, and what to do.
"""

from __future__ import annotations

import re
from typing import Any

from nvcli.cli.environment import variable_of
from nvcli.errors import UsageError, nearest

FILES = "nvcli.configuration"
VARIABLES = "nvcli.variables"


def name_flag(exc: UsageError, ctx: Any) -> None:
    """An error about a field names the flag that set it, or where else its value came from."""
    params = ctx.command.get_params(ctx)
    param = next((p for p in params if exc.param == _FIELDS.get(p.name, p.name)), None)
    if param is None:
        return
    if param.param_type_name == "option" and exc.message.startswith(f"{exc.param} "):
        exc.message = max(param.opts, key=len) + exc.message[len(exc.param or "") :]
    origin = _origin(ctx, param.name)
    if origin is not None:
        exc.message = f"{exc.message} (from {origin})"


_FIELDS = {  # options whose field is called otherwise
    "gpu_memory_utilization": "memory_utilization",
    "think_budget": "thinking_budget",
}


def _origin(ctx: Any, name: str) -> str | None:
    """The file or the variable that gave a value; None for a flag, or the default."""
    source = ctx.get_parameter_source(name)
    if name in ctx.meta.get(VARIABLES, ()):
        return str(ctx.meta[VARIABLES][name])
    if source is None or source.name not in ("DEFAULT_MAP", "ENVIRONMENT"):
        return None
    if source.name == "ENVIRONMENT":
        return variable_of(next(p for p in ctx.command.get_params(ctx) if p.name == name), ctx)
    entry = ctx.meta[FILES].entries.get(name) if FILES in ctx.meta else None
    return entry.origin if entry is not None else None


def usage_error(exc: Any, root: Any) -> UsageError:
    """Typer's complaint in our words: one line, with a suggestion and where to read more."""
    path = exc.ctx.command_path if exc.ctx is not None else "nvcli"
    hint = f"Try '{path} --help'."
    if hasattr(exc, "possibilities"):
        return _no_option(exc, root, hint)
    message = exc.format_message().replace("\n", " ").replace("Value error, ", "").rstrip(".")
    param = getattr(exc, "param", None)
    origin = _origin(exc.ctx, param.name) if exc.ctx is not None and param is not None else None
    if origin is not None:
        message = f"{message} (from {origin})"
    extra = re.fullmatch(r"Got unexpected extra arguments? ?(?:\(s\))? ?\((.*)\)", message)
    if extra is not None:
        message = f"unexpected argument {extra[1]!r}"
        if path.endswith(" chat"):
            hint = f"Quote a prompt of several words. {hint}"
    return UsageError(message[:1].lower() + message[1:], hint=hint)


def _no_option(exc: Any, root: Any, hint: str) -> UsageError:
    name = exc.option_name
    options = _options(exc.ctx.command, exc.ctx) if exc.ctx is not None else exc.possibilities or ()
    known = {option.lstrip("-"): option for option in options}
    near = nearest(name.lstrip("-"), known)
    owner = None if exc.ctx is None or exc.ctx.command is not root else _owner(root, exc.ctx, name)
    if owner is not None:
        hint = f"It goes after the command's name: nvcli {owner} {name}."
    elif near is not None:
        hint = f"Did you mean {known[near]}?"
    return UsageError(f"there is no option {name}", hint=hint)


def _options(command: Any, ctx: Any) -> list[str]:
    names = (name for p in command.get_params(ctx) for name in (*p.opts, *p.secondary_opts))
    return [name for name in names if name.startswith("-")]


def _owner(root: Any, ctx: Any, name: str) -> str | None:
    """The first command that has the option, which was given to the root."""
    for command_name in root.list_commands(ctx):
        if name in _options(root.get_command(ctx, command_name), ctx):
            return str(command_name)
    return None
