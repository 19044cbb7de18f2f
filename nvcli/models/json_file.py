"""One JSON object on disk, read with types checked: what is wrong in it is named with its file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from nvcli.errors import ModelError, UnsupportedModelError
from nvcli.paths import read_whole

if TYPE_CHECKING:
    from pathlib import Path


class JsonFile:
    """Raises `ModelError` for a file that holds no such object, and from its methods
    `UnsupportedModelError` for a value of another kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = json.loads(read_whole(path).decode("utf-8"))
        except (ValueError, RecursionError) as err:  # bad JSON and bad UTF-8 alike
            raise ModelError(f"{path} is not valid JSON: {err}") from err
        except OSError as err:
            raise ModelError(f"{path} cannot be read: {err.strerror}") from err
        if not isinstance(data, dict):
            raise ModelError(f"{path} is not a JSON object")
        self.data: dict[str, Any] = data

    def error(self, message: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.path}: {message}")

    def count(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{key} must be a positive whole number, got {value!r}")
        return value

    def flag(self, key: str) -> bool:
        value = self.data.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return self.number_in(self.data, key, key, default)

    def number_in(self, data: dict[str, Any], key: str, name: str, default: float | None) -> float:
        value = data.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.error(f"{name} must be a positive number, got {value!r}")
        return float(value)

    def token_ids(self, key: str) -> list[int]:
        value = self.data.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for item in values:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self.error(f"{key} must be a token id or a list of them, got {value!r}")
        return values
