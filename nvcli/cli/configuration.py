"""Configuration files under the flags: where a value may be set, and which one counts.

    flag > environment > ./nvcli.toml > $XDG_CONFIG_HOME/nvcli/config.toml > default

A key is a long flag without its dashes. It stands at the top for every command, or in a table
named after one; `[profile.NAME]` and `[profile.NAME.chat]` win over both when the profile is
chosen. `--config FILE` is read in place of the two files.

A folder that was cloned must not run code, write or remove files, open ports or read what is not
its own, so ./nvcli.toml may not set the keys in `REFUSED`, and those in `READING` only to files in
it.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nvcli.cli.declare import check_file_name
from nvcli.cli.environment import variable_of
from nvcli.errors import UsageError, meant
from nvcli.paths import expand_user, home_folder, xdg_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PROJECT_FILE = "nvcli.toml"
PROFILE = "profile"
REFUSED = frozenset(
    {
        *("tools", "mcp", "mcp_allow", "allow_tool"),
        *("api_key_file", "attach", "uds", "host", "cors_origin", "allowed_host"),
        *("ray_address", "metrics", "allow_request_template", "log_requests"),
        *("log_file", "stats_json", "ready_file", "output", "out", "storage", "force", "yes"),
    }
)
READING = frozenset({"file", "system", "schema", "data", "trace"})
_MAX_BYTES = 1 << 20  # of a configuration file
_NO_SUCH = "docs/cli.md lists what there is."
_NOT_KEYS = frozenset({"help", "version", "config", "profile", "show_config", "continue_"})


@dataclass(frozen=True)
class Entry:
    """A value from a file, and the file and table it stands in."""

    value: Any
    origin: str


@dataclass
class Configuration:
    """What the files say to one command."""

    entries: dict[str, Entry] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def values(self) -> dict[str, Any]:
        return {name: entry.value for name, entry in self.entries.items()}


def user_file() -> Path:
    """`$XDG_CONFIG_HOME/nvcli/config.toml`."""
    return xdg_folder("XDG_CONFIG_HOME", ".config") / "nvcli" / "config.toml"


def load_configuration(
    command: Any, ctx: Any, *, config: Path | None, profile: str | None
) -> Configuration:
    """Read the files for the command of `ctx`.

    Raises `UsageError` naming the file: for one that cannot be read, a key that no command has, a
    value that does not fit, a profile that is nowhere.
    """
    found = Configuration()
    tables: list[tuple[Mapping[str, Any], str, bool]] = []  # the first that has a key wins
    profiles: list[str] = []
    known = _known_keys(ctx.find_root().command)
    section = section_of(ctx)
    for path, name, is_foreign in _files(config):
        content = _read(path, name, is_required=config is not None)
        if content is None:
            continue
        found.files.append(name)
        for table, place in _walk(content, name):
            _check_keys(table, place, name, known, is_foreign=is_foreign)
        own = content.get(PROFILE, {})
        profiles += own
        if profile is not None and profile in own:
            chosen = own[profile]
            if section in chosen:
                place = f"{name} [profile.{profile}.{section}]"
                tables.append((chosen[section], place, is_foreign))
            tables.append((chosen, f"{name} [profile.{profile}]", is_foreign))
        if section in content:
            tables.append((content[section], f"{name} [{section}]", is_foreign))
        tables.append((content, name, is_foreign))
    if profile is not None and profile not in profiles:
        hint = meant(profile, profiles) or "A table [profile.NAME] makes one."
        raise UsageError(f"there is no profile {profile!r}", hint=hint)
    for param in command.get_params(ctx):
        if not _is_key(param):
            continue
        for table, origin, is_foreign in tables:
            value = next((v for k, v in table.items() if _name(k) == param.name), None)
            if value is not None and not isinstance(value, dict):
                if is_foreign and param.name in READING:
                    _check_is_inside(param.name, value, origin)
                found.entries[param.name] = Entry(_fit(param, value, ctx, origin), origin)
                break
    return found


def section_of(ctx: Any) -> str:
    """`chat`; for `nvcli models list` it is `models`."""
    while ctx.parent is not None and ctx.parent.parent is not None:
        ctx = ctx.parent
    return str(ctx.info_name)


def configuration_paths() -> list[Path]:
    """The files that are read where none is named; they need not be there."""
    return [path for path, _, _ in _files(None)]


def _files(config: Path | None) -> list[tuple[Path, str, bool]]:
    """(path, name in messages, whether somebody else may have written it)"""
    if config is not None:
        return [(config, str(config), False)]
    path = user_file()
    home = str(home_folder())
    name = f"~{str(path)[len(home) :]}" if str(path).startswith(home + "/") else str(path)
    return [(Path(PROJECT_FILE), f"./{PROJECT_FILE}", True), (path, name, False)]


def _read(path: Path, name: str, *, is_required: bool) -> dict[str, Any] | None:
    try:
        if not is_required and path.exists() and not path.is_dir() and not path.is_file():
            raise UsageError(f"cannot read {name}: it is no regular file", param="config")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise UsageError(f"{name} is too large for a configuration", param="config")
        return tomllib.loads(data.decode("utf-8-sig"))  # some editors write a mark before it
    except (FileNotFoundError, NotADirectoryError) as exc:
        if is_required:
            raise UsageError(f"cannot read {name}: there is no such file", param="config") from exc
        return None
    except OSError as exc:
        raise UsageError(f"cannot read {name}: {exc.strerror or exc}", param="config") from exc
    except (ValueError, RecursionError) as exc:
        reason = " ".join(str(exc).split())
        raise UsageError(f"{name} is no TOML file: {reason}", param="config") from exc


def _walk(content: Mapping[str, Any], file: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The top and every profile, each with the place that messages name."""
    yield {k: v for k, v in content.items() if k != PROFILE}, ""
    profiles = content.get(PROFILE, {})
    if not isinstance(profiles, dict):
        raise UsageError(f"{file}: {PROFILE} is a table", hint="Write [profile.NAME].")
    for name, table in profiles.items():
        if not isinstance(table, dict):
            where = f"{PROFILE}.{name}"
            raise UsageError(f"{file}: {where} is a table", hint=f"Write [{where}].")
        yield table, f"{PROFILE}.{name}"


def _check_keys(
    table: Mapping[str, Any],
    place: str,
    file: str,
    known: Mapping[str, frozenset[str]],
    *,
    is_foreign: bool,
) -> None:
    everywhere = frozenset[str]().union(*known.values())
    for key, value in table.items():
        if isinstance(value, dict):
            where = ".".join(filter(None, (place, key)))
            if key not in known:
                hint = meant(key, known) or _NO_SUCH
                raise UsageError(f"{file}: there is no command for [{where}]", hint=hint)
            for inner, held in value.items():
                if isinstance(held, dict):
                    raise UsageError(
                        f"{file}: there is no table [{where}.{inner}]",
                        hint=f"What [{where}] may hold are the options of nvcli {key}.",
                    )
                _check_key(inner, known[key], f"{file}, [{where}]", is_foreign=is_foreign)
        elif key in known:  # no option is called like a command
            where = ".".join(filter(None, (place, key)))
            raise UsageError(f"{file}: {where} is a table", hint=f"Write [{where}].")
        else:
            where = f"{file}, [{place}]" if place else file
            _check_key(key, everywhere, where, is_foreign=is_foreign)


def _check_key(key: str, known: frozenset[str], where: str, *, is_foreign: bool) -> None:
    name = _name(key)
    if is_foreign and name in REFUSED:
        raise UsageError(
            f"{where}: {key!r} is not allowed in a folder's file",
            hint=f"Set it in {user_file()}, or by its flag.",
        )
    if name not in known and name.rstrip("_") in {n.rstrip("_") for n in _NOT_KEYS}:
        raise UsageError(f"{where}: {key!r} can only be given as a flag")
    if name not in known:
        hint = meant(key.replace("_", "-"), (n.replace("_", "-") for n in known)) or _NO_SUCH
        raise UsageError(f"{where}: there is no key {key!r}", hint=hint)


def _check_is_inside(name: str, value: Any, origin: str) -> None:
    """The values of a folder's file that name a file: only one of that folder."""
    for text in map(str, value if isinstance(value, list) else [value]):
        path = {
            "system": text[1:] if text.startswith("@") else "",
            "schema": "" if text.lstrip().startswith(("{", "[")) else text,
            "data": text.partition(":")[2],
        }.get(name, text)
        is_inside = not path.startswith("~") and Path(os.path.realpath(path)).is_relative_to(
            os.path.realpath(".")
        )
        if path and not is_inside:
            raise UsageError(
                f"{origin}: {name} may name only files in this folder, got {text!r}",
                hint=f"Set it in {user_file()}, or by its flag.",
            )


def _name(key: str) -> str:
    return key.replace("-", "_")


def _is_key(param: Any) -> bool:
    return param.param_type_name == "option" and param.name not in _NOT_KEYS


def _known_keys(root: Any) -> dict[str, frozenset[str]]:
    """Command -> the keys that its table may hold."""
    shared = {p.name for p in root.params if _is_key(p)}

    def keys(command: Any) -> set[str]:
        own = {p.name for p in command.params if _is_key(p)}
        return own.union(*(keys(c) for c in getattr(command, "commands", {}).values()))

    return {name: frozenset(keys(command) | shared) for name, command in root.commands.items()}


def _fit(param: Any, value: Any, ctx: Any, origin: str) -> Any:
    """The value as the flag would have taken it; checked here, where the file is known."""
    key = param.name.replace("_", "-")
    is_switch = bool(param.is_flag) and not param.count
    if isinstance(value, bool) != is_switch:
        what = "must be true or false" if is_switch else "cannot be true or false"
        raise UsageError(f"{origin}: {key} {what}, got {value!r}", param=param.name)
    if is_switch:
        return value
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not param.multiple:
        raise UsageError(f"{origin}: {key} takes one value", param=param.name)
    if any(isinstance(v, bool | list | dict) for v in values):
        raise UsageError(f"{origin}: {key} takes texts or numbers", param=param.name)
    check_file_name(param, values, f"{origin}: {key}")
    texts = [str(expand_user(v)) if str(v).startswith("~/") else str(v) for v in values]
    given: Any = texts if param.multiple else int(texts[0]) if param.count else texts[0]
    try:
        param.process_value(ctx, given)
    except typer.BadParameter as exc:
        raise UsageError(f"{origin}: {key}: {exc.message}", param=param.name) from exc
    except ValueError as exc:
        raise UsageError(f"{origin}: {key}: {exc}", param=param.name) from exc
    return given


# --- telling where values come from --------------------------------------------------------------


def describe(
    ctx: Any, configuration: Configuration, variables: Mapping[str, str]
) -> list[tuple[str, Any, str]]:
    """(key, value, origin) of every option of the command that `ctx` parsed. `variables`: of the
    names that were set by one that Typer does not read.
    """
    rows = []
    for param in ctx.command.get_params(ctx):
        if not _is_key(param):
            continue
        value, source = ctx.params.get(param.name), ctx.get_parameter_source(param.name)
        kind = source.name if source is not None else "DEFAULT"
        key = param.name.replace("_", "-")
        if param.name in variables:
            origin = f"environment, {variables[param.name]}"
        elif kind == "COMMANDLINE":
            origin = "flag"
        elif kind == "ENVIRONMENT":
            origin = f"environment, {variable_of(param, ctx)}"
        elif kind == "DEFAULT_MAP":
            origin = configuration.entries[param.name].origin
        else:
            origin = "default"
        rows.append((key, value, origin))
    return rows


def configuration_lines(
    ctx: Any,
    configuration: Configuration,
    given: Mapping[str, tuple[Any, str]],
    variables: Mapping[str, str],
) -> list[str]:
    """The page of --show-config. `given`: the global options that were set before the command, with
    their origin; `variables`: see `describe`.
    """
    rows = []
    for key, value, origin in describe(ctx, configuration, variables):
        name = _name(key)
        if name in given and origin == "default":
            value, origin = given[name]
        is_empty = value in (None, (), []) or (origin == "default" and value in (False, 0))
        rows.append((key, "-" if is_empty else _shown(value), origin))
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    lines = [f"{k:<{widths[0]}}  {v:<{min(widths[1], 32)}}  {origin}" for k, v, origin in rows]
    files = ", ".join(configuration.files)
    return [*lines, "", f"read: {files}" if files else f"no file; yours would be {user_file()}"]


def _shown(value: Any) -> str:
    """As it may be written on a command line."""
    if isinstance(value, dict):
        return ",".join(f"{name}={_shown(part)}" for name, part in value.items())
    if isinstance(value, list) and any(isinstance(part, int | float) for part in value):
        return ",".join(map(_shown, value))  # one text held them; several texts are strings
    if isinstance(value, list):
        return shlex.join(map(str, value))
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def profile_names() -> list[str]:
    """The profiles of the files, for completion: a file that cannot be read has none."""
    names: set[str] = set()
    for path, name, _ in _files(None):
        try:
            content = _read(path, name, is_required=False) or {}
        except UsageError:
            continue
        profiles = content.get(PROFILE, {})
        names.update(profiles if isinstance(profiles, dict) else ())
    return sorted(names)
