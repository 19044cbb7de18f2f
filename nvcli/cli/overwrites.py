"""No command writes over a file that it reads, or twice into one file: refused before anything is
opened, whatever the file is called (a link, `./`, a second hard link).

Every option that names a file stands in one of the tables below; a test looks that it does.
"""

from __future__ import annotations

import os
import stat
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nvcli.errors import UsageError
from nvcli.paths import expand_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _behind_at(text: str) -> list[Path]:
    return [Path(text[1:])] if text.startswith("@") else []


def _schema(text: str) -> list[Path]:
    return [] if text.lstrip().startswith(("{", "[")) else [expand_user(text)]


def _data(text: str) -> list[Path]:
    return [Path(text.partition(":")[2])] if ":" in text else []


def _run(text: str) -> list[Path]:
    from nvcli.bench.record import find_run

    try:
        return [find_run(text)]
    except UsageError:  # told in its own words by who reads it
        return []


def _checkpoint(text: str) -> list[Path]:
    """What is read of a model's folder. A Hugging Face id has none: its cache is not the user's."""
    from nvcli.models.resolve import FILE_PATTERNS

    folder = expand_user(text)
    try:
        names = os.listdir(folder)
    except NotADirectoryError:
        return [folder]  # `bench plan` takes a config.json
    except (OSError, ValueError):
        return []
    return [folder / n for n in names if any(fnmatch(n, pattern) for pattern in FILE_PATTERNS)]


def _path(text: str) -> list[Path]:
    return [Path(text)] if text != "-" else []  # standard input and output are always looked at


def _batch_output(text: str) -> list[Path]:
    """And what stands beside it: its lock, what the run was, what is to take its place."""
    if text in ("-", "/dev/stdout"):
        return []
    path = Path(os.path.realpath(text))
    return [Path(text), *(path.parent / f"{path.name}{end}" for end in _BESIDE)]


_BESIDE = (".meta.json", ".lock", ".tmp")
READS: dict[str, Callable[[str], list[Path]]] = {
    **dict.fromkeys(("input", "file", "tools", "mcp", "api_key_file", "trace", "config"), _path),
    **dict.fromkeys(("model", "model_argument", "name"), _checkpoint),
    **dict.fromkeys(("run", "a", "b"), _run),
    "system": _behind_at,
    "schema": _schema,
    "data": _data,
}
WRITES: dict[str, Callable[[str], list[Path]]] = {
    **dict.fromkeys(("log_file", "stats_json", "out", "ready_file"), _path),
    "output": _batch_output,
}
# A socket is put where nothing is, and a folder gets files with names of their own.
NEITHER = frozenset({"uds", "storage"})


class _File(NamedTuple):
    flag: str  # or what a stream is called
    given: str  # the name of an option's file, as it was given
    path: Path | int  # or a descriptor
    verb: str


def check_overwrites(
    command: Any, ctx: Any, *, log_file: Path | None = None, config: Path | None = None
) -> None:
    """Raises `UsageError` naming both options. What is no regular file (a terminal, a pipe,
    /dev/null) may be given more than once."""
    values = {**ctx.params, "log_file": log_file, "config": config}
    params = {param.name: param for param in command.get_params(ctx)}
    _check_streams(params, values)
    written = list(_files(WRITES, params, values, "writes"))
    streams = [_File("standard output", "", 1, "writes"), _File("standard error", "", 2, "writes")]
    prints_records = "output" in params and not any(f.flag == "--output" for f in written)
    if not written and not prints_records:
        return
    from nvcli.cli.configuration import configuration_paths

    found = configuration_paths() if config is None else []
    read = [
        *_files(READS, params, values, "reads"),
        *(_File("the configuration", "", path, "reads") for path in found),
        _File("standard input", "", 0, "reads"),
    ]
    taken = {key: file for file in reversed(read) if (key := _identity(file.path)) is not None}
    if prints_records:  # what is read must not grow by what is answered
        _claim(taken, streams[0])
    for file in streams:
        if (key := _identity(file.path)) is not None:
            taken.setdefault(key, file)
    for file in written:
        _claim(taken, file)


def _check_streams(params: dict[str, Any], values: dict[str, Any]) -> None:
    """`-` is standard output to `--output` only: the others would make a file of that name."""
    for name in WRITES:
        if name != "output" and str(values.get(name)) == "-" and name in params:
            flag = max(params[name].opts, key=len)
            raise UsageError(f"{flag} - names no file", hint="Give a file.", param=name)


def _claim(taken: dict[object, _File], file: _File) -> None:
    key = _identity(file.path)
    if key is None:
        return
    other = taken.get(key)
    appends_errors = file.flag == "--log-file" and other is not None and other.path == 2
    if other is None or appends_errors:
        taken[key] = file
        return
    is_stream = isinstance(other.path, int)
    whose = f"is {other.flag}" if is_stream else f"is what {other.flag} {other.verb}"
    name = f"{file.flag} {file.given}".rstrip()
    if isinstance(file.path, Path) and file.given != str(file.path):
        name = f"{name}: {file.path}, which it writes too,"
    raise UsageError(f"{name} {whose}", hint="Give another file.")


def _files(
    table: dict[str, Callable[[str], list[Path]]],
    params: dict[str, Any],
    values: dict[str, Any],
    verb: str,
) -> Iterator[_File]:
    for name, param in params.items():
        value = values.get(name)
        if name not in table or value is None:
            continue
        is_option = param.param_type_name == "option"
        flag = max(param.opts, key=len) if is_option else param.metavar
        for given in value if isinstance(value, list | tuple) else [value]:
            for path in table[name](str(given)):
                yield _File(flag, str(given), path, verb)


def _identity(path: Path | int) -> object:
    """What two names of one file have in common; None for what can take and give more than once."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None if isinstance(path, int) else os.path.realpath(path)
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None
