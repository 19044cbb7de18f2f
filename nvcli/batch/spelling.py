"""Keys of records that seem to be misspelt: a `temprature` would be data of the record, and the
answers would come at another temperature than was asked for, without a word.

Other keys beside a prompt or messages are the user's own, whatever they are called; so a key counts
as misspelt only where it is close to a field, or what another tool calls it, and its value would do
for that field. Keys that `--echo` names are data. In the body of an OpenAI line there is no place
for data: every key that nobody reads is told.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvcli.batch.rows import as_value
from nvcli.errors import NvcliError
from nvcli.protocol import GENERATION_FIELDS, parse_chat

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping

_FIELDS = (*GENERATION_FIELDS, "system")
_WITH_MESSAGES = frozenset(GENERATION_FIELDS) | {"messages", "id", "custom_id"}
_WITH_PROMPT = _WITH_MESSAGES | {"prompt", "system", "raw"}
MAX_TOLD = 20
_CLOSE = 0.88  # of difflib: temprature, frequency_penality; neither num_tokens nor reason
_SHORT = 5  # letters of a field up to which only its own letters count: speed is not seed
_LONG = 64  # letters; no field has so many
_ELSEWHERE = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "system_prompt": "system",
}
_USER = [{"role": "user", "content": "x"}]


@dataclass(frozen=True, slots=True)
class Doubt:
    """A key of a record that may be meant otherwise than it is taken."""

    key: str
    text: str


class Teller:
    """Tells each key once, with the first line that has it, and the first few only."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._told: set[str] = set()

    def add(self, line: int, doubts: Iterable[Doubt]) -> None:
        for doubt in doubts:
            if doubt.key not in self._told and len(self._told) < MAX_TOLD:
                self._told.add(doubt.key)
                self._tell(f"line {line}: {doubt.text}")


def unread(fields: Iterable[str]) -> tuple[Doubt, ...]:
    """fields: those of an OpenAI line's body that nobody has read."""
    return tuple(
        Doubt(name, f"{name[:_LONG]!r} in body is no known field and changes nothing{_hint(name)}")
        for name in fields
    )


def _hint(name: str) -> str:
    found = meant(name[:_LONG])
    return "" if found is None else f"; the field is called {found}"


def misspelt(
    value: Mapping[str, Any], *, has_messages: bool, data: Container[str]
) -> tuple[Doubt, ...]:
    """Of a record with a prompt or messages. data: keys that are nothing else."""
    doubts = []
    known = _WITH_MESSAGES if has_messages else _WITH_PROMPT
    for key in value:
        if key in known or key in data or len(key) > _LONG:
            continue
        name = meant(key)
        if name is None or (name != key and name in value) or not _would_do(name, value[key]):
            continue
        text = f"{key!r} is taken as data of the record; the field is called {name}"
        if name == "system" and has_messages:
            text = f"{key!r} counts beside a prompt only; put it into the messages"
        doubts.append(Doubt(key, text))
    return tuple(doubts)


def _would_do(name: str, value: object) -> bool:
    if name == "system":
        return isinstance(value, str) and value != ""
    value = as_value(value) if isinstance(value, str) else value
    if value is None:
        return False
    try:
        parse_chat({"messages": _USER, name: value})
    except (NvcliError, RecursionError):
        return False
    return True


@functools.lru_cache(4096)
def meant(key: str) -> str | None:
    """The field that `key` seems to stand for."""
    found = _BY_LETTERS.get(_letters(key))
    if found is None:
        longer = [name for name in _FIELDS if len(name) > _SHORT]
        near = difflib.get_close_matches(key.lower(), longer, n=1, cutoff=_CLOSE)
        found = near[0] if near else None
    return found


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


_BY_LETTERS = {_letters(other): name for other, name in _ELSEWHERE.items()}
_BY_LETTERS.update({_letters(name): name for name in _FIELDS})
