"""The settings of a conversation by name, as `/set`, `/unset` and `/retry` take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvcli.errors import InvalidParameterError, UsageError
from nvcli.types import SamplingParams, check_answer_limit

if TYPE_CHECKING:
    from collections.abc import Mapping

SETTINGS: Mapping[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "presence_penalty": float,
    "repetition_penalty": float,
    "max_tokens": int,
    "stop": str,
    "seed": int,
    "think_budget": int,
}
_PARAMETER = {"think_budget": "thinking_budget"}


def parse_setting(key: str, value: str) -> tuple[str, Any]:
    """A setting as typed, as a sampling parameter's name and value; `default` gives None.

    Raises `UsageError` for an unknown key and `InvalidParameterError` for a bad value.
    """
    name = key.replace("-", "_")
    if name not in SETTINGS:
        raise UsageError(f"there is no setting {key!r}", hint=f"Known: {', '.join(SETTINGS)}.")
    if value == "default":
        return _PARAMETER.get(name, name), None
    kind = SETTINGS[name]
    try:
        parsed: Any = (value,) if kind is str else kind(value)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise InvalidParameterError(f"{key} must be {what}, got {value!r}", param=key) from None
    name = _PARAMETER.get(name, name)
    SamplingParams(**{name: parsed})
    if name == "max_tokens":
        check_answer_limit(parsed)
    return name, parsed
