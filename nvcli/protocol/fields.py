"""Reading a JSON request field by field: every fault names the field, nothing known is dropped.

`Fields` hands out the values of one object with their types checked and remembers which were asked
for; what is left at the end is unknown to us. `null` counts as absent, as in OpenAI's API.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from nvcli.errors import InvalidParameterError, UnsupportedParameterError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

T = TypeVar("T")


class UnsupportedFieldError(UnsupportedParameterError):
    """A known request field, or a value of it, that this version refuses by name."""

    code = "unsupported_field"


class UnsupportedEndpointError(UsageError):
    """A known endpoint that this version does not have."""

    http_status = 404
    code = "unsupported_endpoint"


class Fields:
    """The fields of one JSON object. Raises `InvalidParameterError` naming `place.field`."""

    def __init__(self, body: object, place: str = "") -> None:
        if not isinstance(body, dict):
            what = place or "the request body"
            raise InvalidParameterError(
                f"{what} must be a JSON object, got {kind_of(body)}", param=place or None
            )
        self._body: Mapping[str, Any] = body
        self._place = place
        self._known: set[str] = set()
        self._inner: dict[str, Fields] = {}

    def name(self, field: str) -> str:
        return f"{self._place}.{field}" if self._place else field

    def fail(self, field: str, rule: str) -> NoReturn:
        name = self.name(field)
        raise InvalidParameterError(f"{name} {rule}", param=name)

    def refuse(self, field: str, missing: str) -> NoReturn:
        """Refuse a field by name: `missing` says what is not there."""
        name = self.name(field)
        raise UnsupportedFieldError(f"{name}: {missing}", param=name)

    def refuse_given(self, reasons: Mapping[str, str]) -> None:
        """Refuse by name each of these fields that is given."""
        for field, missing in reasons.items():
            if self.get(field) is not None:
                self.refuse(field, missing)

    # --- values -----------------------------------------------------------------------------------

    def get(self, field: str) -> Any:
        """The raw value, None where it is absent or null."""
        self._known.add(field)
        return self._body.get(field)

    def has(self, field: str) -> bool:
        return self._body.get(field) is not None

    def alone(self, field: str, *others: str) -> None:
        """Refuse the others where `field` is given: only one of them would be answered."""
        for other in others:
            if self.has(field) and self.has(other):
                self.fail(other, f"cannot be given beside {self.name(field)}")

    def ignore(self, fields: Iterable[str]) -> None:
        """Fields that are accepted and change nothing."""
        self._known.update(fields)

    def _typed(self, field: str, is_right: bool, value: object, kind: str) -> None:
        if not is_right:
            self.fail(field, f"must be {kind}, got {kind_of(value)}")

    def _of(self, field: str, kind: type[T], name: str) -> T | None:
        value = self.get(field)
        self._typed(field, value is None or isinstance(value, kind), value, name)
        return cast("T | None", value)

    def text(self, field: str) -> str | None:
        return self._of(field, str, "text")

    def flag(self, field: str) -> bool | None:
        return self._of(field, bool, "true or false")

    def integer(self, field: str, low: int | None = None, high: int | None = None) -> int | None:
        value = self.get(field)
        if value is None:
            return None
        number = self._whole(field, value)
        if (low is not None and number < low) or (high is not None and number > high):
            self.fail(field, f"must be {_range(low, high)}, got {_short(number)}")
        return number

    def _whole(self, field: str, value: object) -> int:
        """JSON has one kind of number: 5.0 is 5. A number beyond all floats, 1e400, arrives as
        infinity."""
        if isinstance(value, float):
            if not math.isfinite(value):
                self.fail(field, "must be a finite number")
            if not value.is_integer():
                self.fail(field, f"must be a whole number, got {value}")
            return int(value)
        self._typed(field, is_integer(value), value, "a whole number")
        return cast("int", value)

    def number(
        self, field: str, low: float | None = None, high: float | None = None
    ) -> float | None:
        value = self.get(field)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        self._typed(field, is_number, value, "a number")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            self.fail(field, "must be a finite number")
        if (low is not None and value < low) or (high is not None and value > high):
            self.fail(field, f"must be {_range(low, high)}, got {value:g}")
        return value

    def choice(self, field: str, choices: tuple[str, ...]) -> str | None:
        value = self.text(field)
        if value is not None and value not in choices:
            self.fail(field, f"must be one of {', '.join(choices)}, got {_short(value)}")
        return value

    def array(self, field: str) -> list[Any] | None:
        return self._of(field, list, "a list")

    def object(self, field: str) -> Fields | None:
        """The fields of an object inside, the same ones each time: `unknown` looks at them too."""
        value = self.get(field)
        if value is None:
            return None
        if field not in self._inner:
            self._inner[field] = Fields(value, self.name(field))
        return self._inner[field]

    def inner(self, field: str) -> Fields:
        """As `object`; where there is none, of an empty one."""
        return self.object(field) or Fields({}, self.name(field))

    def integers(self, field: str) -> tuple[int, ...] | None:
        return self._items(field, self._whole)

    def texts(self, field: str) -> tuple[str, ...] | None:
        def text(place: str, value: Any) -> str:
            self._typed(place, isinstance(value, str), value, "text")
            return cast("str", value)

        return self._items(field, text)

    def _items(self, field: str, read: Callable[[str, Any], T]) -> tuple[T, ...] | None:
        values = self.array(field)
        if values is None:
            return None
        return tuple(read(f"{field}[{i}]", value) for i, value in enumerate(values))

    # --- the whole --------------------------------------------------------------------------------

    @property
    def raw(self) -> Mapping[str, Any]:
        """All of it, for one who takes whatever there is: nothing in it is unknown."""
        self._known.update(self._body)
        return self._body

    def unknown(self, *, is_strict: bool = False) -> tuple[str, ...]:
        """Fields that nobody asked for, those of objects inside as `reasoning.effort`. Raises
        `InvalidParameterError` when `is_strict`."""
        left = tuple(name for name in self._body if name not in self._known)
        for field, inner in self._inner.items():
            left += tuple(f"{field}.{name}" for name in inner.unknown())
        if left and is_strict:
            raise InvalidParameterError(
                f"unknown field {self.name(_short(left[0]))}", param=left[0]
            )
        return left


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def are_integers(values: Iterable[object]) -> bool:
    """`is_integer` of every item of a JSON list, at the speed of C: a prompt has thousands."""
    return set(map(type, values)) <= {int}


def kind_of(value: object) -> str:
    """What JSON calls a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
    return "an object"


def _short(value: object) -> str:
    is_huge = isinstance(value, int) and abs(value) > 10**40  # str() of thousands of digits raises
    text = "a huge number" if is_huge else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"from {low} to {high}"
    return f"at least {low}" if low is not None else f"at most {high}"
