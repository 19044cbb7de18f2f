"""A toolbox: the tools of several sources under one roof, none of which can break the conversation.

`call` never raises. A tool that fails gives its error as the result, one that hangs is ended at the
time limit, and of one that floods only the beginning is kept: the model reads what happened.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from nvcli.errors import UsageError
from nvcli.text.unicode import repair_surrogates

if TYPE_CHECKING:
    from collections.abc import Sequence

TIMEOUT_S = 60.0
MAX_CHARACTERS = 20_000


class ToolError(Exception):
    """A call failed; the text is for the model and the user."""


@dataclass(frozen=True)
class ToolSpec:
    """What the model is told of a tool; `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any]
    source: str  # where it comes from, for people

    def definition(self) -> dict[str, Any]:
        """As OpenAI's API and the chat template take it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolResult:
    """What goes back to the model."""

    text: str
    is_error: bool
    seconds: float


class ToolSource(Protocol):
    """Where tools come from: a Python file, an MCP server."""

    @property
    def specs(self) -> Sequence[ToolSpec]: ...

    def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
        """Raises `ToolError`, also when `timeout_s` is over."""
        ...

    def close(self) -> None: ...


def cut_result(text: str, limit: int = MAX_CHARACTERS) -> str:
    """The beginning of what a tool gave, and how much more there was."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[{len(text) - limit:,} more characters were left out]"


class Toolbox:
    """Raises `UsageError` where two tools have one name."""

    def __init__(
        self,
        sources: Sequence[ToolSource],
        *,
        timeout_s: float = TIMEOUT_S,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        self._sources = sources
        self._timeout_s = timeout_s
        self._max_characters = max_characters
        self._tools: dict[str, tuple[ToolSource, ToolSpec]] = {}
        for source in sources:
            for spec in source.specs:
                if spec.name in self._tools:
                    other = self._tools[spec.name][1].source
                    raise UsageError(f"both {other} and {spec.source} have a tool {spec.name!r}")
                self._tools[spec.name] = (source, spec)

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    @property
    def specs(self) -> list[ToolSpec]:
        return [spec for _, spec in self._tools.values()]

    def definitions(self) -> list[dict[str, Any]]:
        return [spec.definition() for spec in self.specs]

    def call(self, name: str, arguments: str) -> ToolResult:
        """Call by name with arguments as JSON text, as the model wrote them."""
        start = time.monotonic()
        try:
            text, is_error = self._call(name, arguments), False
        except ToolError as exc:
            text, is_error = f"error: {exc}", True
        text = repair_surrogates(cut_result(text, self._max_characters))
        return ToolResult(text, is_error, time.monotonic() - start)

    def _call(self, name: str, arguments: str) -> str:
        found = self._tools.get(name)
        if found is None:
            raise ToolError(f"there is no tool {name!r}; there are {', '.join(self._tools)}")
        try:
            values = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ToolError("the arguments are no JSON") from None
        if not isinstance(values, dict):
            raise ToolError("the arguments must be a JSON object")
        return found[0].call(name, values, self._timeout_s)

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
