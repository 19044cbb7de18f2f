"""How a model writes a tool call, as a table: start tag, end tag, parser. A new format is a row.

A parser receives the text between the tags in pieces of any size and gives the name once it is
complete, then the characters of the arguments as the model wrote them. Parsing JSON that is still
growing and writing it out again would change what was already sent, so nothing is re-serialised.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

from nvcli.text.unicode import repair_surrogates

if TYPE_CHECKING:
    from collections.abc import Callable

_SPACE = " \t\n\r"
_MAX_DEPTH = 200  # of nesting inside the arguments; deeper counts as malformed


class CallStatus(Enum):
    OPEN = auto()
    COMPLETE = auto()  # name and arguments are there, and the arguments are a JSON object
    MALFORMED = auto()


@dataclass(frozen=True, slots=True)
class CallPiece:
    """News of one call: its name, at most once, and further characters of its arguments."""

    name: str | None = None
    arguments: str = ""


class ToolCallParser(Protocol):
    @property
    def status(self) -> CallStatus: ...

    @property
    def in_string(self) -> bool:
        """Inside a string value, where a tag is only text."""
        ...

    def feed(self, text: str) -> CallPiece: ...

    def close(self) -> CallPiece:
        """The end tag came: decide between complete and malformed."""
        ...


class _Expect(Enum):
    OBJECT = auto()
    KEY = auto()
    KEY_STRING = auto()
    COLON = auto()
    VALUE = auto()
    VALUE_REST = auto()
    COMMA = auto()
    NOTHING = auto()  # the object is closed; what follows is ignored


class HermesParser:
    """`{"name": ..., "arguments": {...}}`, keys in any order.

    Arguments may also be a string that holds a JSON object (its contents are the arguments), null
    or absent (`{}`). A control character inside a string, which JSON forbids and models write, is
    escaped. A missing last brace is forgiven.
    """

    def __init__(self) -> None:
        self.status = CallStatus.OPEN
        self.in_string = False
        self._expect = _Expect.OBJECT
        self._key = ""
        self._raw: list[str] = []  # characters of the key or value being read
        self._depth = 0
        self._escaped = False
        self._name: str | None = None
        self._arguments: str | None = None  # complete and valid
        self._out: list[str] = []  # arguments not yet handed out, because the name is not known
        self._new_name: str | None = None

    def feed(self, text: str) -> CallPiece:
        for character in text:
            if self.status is CallStatus.MALFORMED or self._expect is _Expect.NOTHING:
                break
            self._step(character)
        return self._take()

    def close(self) -> CallPiece:
        if self.status is CallStatus.OPEN:
            self._settle()
        return self._take()

    def _take(self) -> CallPiece:
        if self._name is None:
            return CallPiece()
        name, self._new_name = self._new_name, None
        arguments = "".join(self._out)
        self._out.clear()
        return CallPiece(name, arguments)

    def _step(self, c: str) -> None:
        if self._expect in (_Expect.KEY_STRING, _Expect.VALUE_REST):
            self._step_inside(c)
        elif c in _SPACE:
            pass
        elif self._expect is _Expect.OBJECT and c == "{":
            self._expect = _Expect.KEY
        elif self._expect is _Expect.KEY and c == '"':
            self._begin(c, _Expect.KEY_STRING)
        elif self._expect is _Expect.COLON and c == ":":
            self._expect = _Expect.VALUE
        elif self._expect is _Expect.VALUE and c not in ",:}]":
            self._begin(c, _Expect.VALUE_REST)
        elif self._expect is _Expect.COMMA and c == ",":
            self._expect = _Expect.KEY
        elif self._expect in (_Expect.COMMA, _Expect.KEY) and c == "}":
            self._expect = _Expect.NOTHING
            self._settle()
        else:
            self.status = CallStatus.MALFORMED

    def _begin(self, c: str, expect: _Expect) -> None:
        self._expect = expect
        self._raw.clear()
        self._depth = 0
        self._append(c)
        if c == '"':
            self.in_string = True
        elif c in "{[":
            self._depth = 1

    @property
    def _streams(self) -> bool:
        """Whether the value being read is the arguments object, which is handed out as it comes."""
        return (
            self._expect is _Expect.VALUE_REST
            and self._key == "arguments"
            and self._arguments is None
            and self._raw[0] == "{"
        )

    def _append(self, c: str) -> None:
        self._raw.append(c)
        if self._streams:
            self._out.append(c)

    def _step_inside(self, c: str) -> None:
        if self.in_string:
            self._append(json.dumps(c)[1:-1] if c < " " else c)
            if self._escaped:
                self._escaped = False
            elif c == "\\":
                self._escaped = True
            elif c == '"':
                self.in_string = False
                if self._depth == 0:
                    self._end_text()
        elif self._depth == 0 and c in ",}" + _SPACE:  # a number, true, false or null has ended
            self._end_text()
            if self.status is CallStatus.OPEN:
                self._step(c)
        else:
            self._append(c)
            if c == '"':
                self.in_string = True
            elif c in "{[":
                self._depth += 1
                if self._depth > _MAX_DEPTH:
                    self.status = CallStatus.MALFORMED
            elif c in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._end_text()

    def _end_text(self) -> None:
        raw = "".join(self._raw)
        value, is_json = _loads(raw)
        if not is_json:
            self.status = CallStatus.MALFORMED
        elif self._expect is _Expect.KEY_STRING:
            self._key = value
            self._expect = _Expect.COLON
        else:
            self._end_value(raw, value)
            self._expect = _Expect.COMMA

    def _end_value(self, raw: str, value: object) -> None:
        if self._key == "name" and self._name is None:
            if isinstance(value, str) and value:
                self._name = self._new_name = repair_surrogates(value)
            else:
                self.status = CallStatus.MALFORMED
        elif self._key == "arguments" and self._arguments is None:
            if isinstance(value, dict):
                self._arguments = raw  # its characters are in `_out` or were handed out
            elif value is None or (isinstance(value, str) and not value.strip()):
                self._set_arguments("{}")
            elif isinstance(value, str) and isinstance(_loads(value)[0], dict):
                self._set_arguments(repair_surrogates(value))
            else:
                self.status = CallStatus.MALFORMED

    def _set_arguments(self, text: str) -> None:
        self._arguments = text
        self._out.append(text)

    def _settle(self) -> None:
        """The call ends here: complete with a name and at the end of a value or of the object."""
        if self._name is None or self._expect not in (_Expect.COMMA, _Expect.NOTHING):
            self.status = CallStatus.MALFORMED
            return
        if self._arguments is None:
            self._set_arguments("{}")
        self.status = CallStatus.COMPLETE


def _loads(text: str) -> tuple[Any, bool]:
    """The value of `text`, and whether it is JSON at all (NaN and its like are not)."""

    def refuse(constant: str) -> object:
        raise ValueError(f"{constant} is not JSON")

    try:
        # Python limits how long an integer may be, and its value is not needed.
        return json.loads(text, parse_int=lambda _: 0, parse_constant=refuse), True
    except (ValueError, RecursionError):
        return None, False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Both tags are single tokens of the vocabulary; without them there is no tool parsing."""

    start_tag: str
    end_tag: str
    parser: Callable[[], ToolCallParser]


TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", HermesParser),
}
