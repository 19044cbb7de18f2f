"""The process that a file of tools runs in: `python -m nvcli.tools.worker FILE.py`.

One JSON object a line on standard input and output: first the tools, then a result for each call.
What a tool prints goes to standard error and what it reads is empty, so that it cannot disturb the
lines. When the lines end while a tool runs, the process ends with all that the tool has started.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import queue
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

MODULE = "nvcli_tools_file"


def load_module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec.loader.exec_module(module)
    return module


def find_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """`__all__` where there is one, or else the public functions that the file itself defines."""
    names = getattr(module, "__all__", None)
    if names is not None:
        return {name: getattr(module, name) for name in names}
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == MODULE and not name.startswith("_")
    }


def describe(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Name, docstring and the JSON schema of the parameters, from their type hints."""
    from pydantic import TypeAdapter

    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{parameter} cannot be given by name")
    adapter: TypeAdapter[Any] = TypeAdapter(cast("Any", function))
    schema = adapter.json_schema()
    properties = schema.get("properties", {})
    for value in properties.values():
        value.pop("title", None)
    parameters = {"type": "object", "properties": properties}
    for key in ("required", "$defs"):
        if key in schema:
            parameters[key] = schema[key]
    text = inspect.getdoc(function) or ""
    return {"name": name, "description": text, "parameters": parameters}


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """Arguments are checked against the type hints; what comes back becomes text."""
    from pydantic import TypeAdapter, validate_call

    value = validate_call(function)(**arguments)
    if inspect.iscoroutine(value):
        import asyncio

        value = asyncio.run(value)
    if isinstance(value, str):
        return value
    return TypeAdapter(Any).dump_json(value).decode() if value is not None else "done"


def reason(exc: BaseException) -> str:
    text = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def describe_all(functions: dict[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    found = []
    for name, function in functions.items():
        try:
            found.append(describe(name, function))
        except Exception as exc:
            raise TypeError(f"{name} cannot be a tool: {reason(exc)}") from exc
    return found


class Requests:
    """The lines of standard input, read in a thread: their end is seen also while a tool runs."""

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(0), encoding="utf-8")
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self._waiting: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._is_busy = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._lines:
            self._waiting.put(json.loads(line))
        if self._is_busy:
            if os.getpgrp() == os.getpid():
                os.killpg(0, signal.SIGKILL)
            os._exit(1)
        self._waiting.put(None)

    def next(self) -> dict[str, Any] | None:
        self._is_busy = False
        request = self._waiting.get()
        self._is_busy = request is not None
        return request


def main(path: str) -> int:
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints, in Python or below it, prints to standard error
    requests = Requests()

    def send(value: dict[str, Any]) -> None:
        lines.write(json.dumps(value) + "\n")
        lines.flush()

    try:
        functions = find_functions(load_module(path))
        send({"tools": describe_all(functions)})
    except BaseException as exc:  # noqa: BLE001 - also SystemExit of the file
        send({"error": reason(exc)})
        return 1
    while (request := requests.next()) is not None:
        try:
            send({"result": call(functions[request["name"]], request["arguments"])})
        except BaseException as exc:  # noqa: BLE001 - a tool may raise what it wants
            send({"error": reason(exc)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
