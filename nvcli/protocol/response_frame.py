"""What all events of a response share: numbers, and items that are opened, filled and closed."""

from __future__ import annotations

import secrets
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from nvcli.protocol.response_items import new_item_id

if TYPE_CHECKING:
    from collections.abc import Iterator

Event = dict[str, Any]

_OBFUSCATED = 16


class EventFrame:
    """Every method that yields gives events in order. A subclass closes the kinds of items."""

    def __init__(self, response: dict[str, Any], *, include_obfuscation: bool) -> None:
        self.response = response
        self._include_obfuscation = include_obfuscation
        self._sequence = 0
        self._item: dict[str, Any] | None = None  # the open one

    def _event(self, kind: str, **values: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence, **values}
        self._sequence += 1
        return event

    def _snapshot(self) -> dict[str, Any]:
        return deepcopy(self.response)

    def _place(self, item: dict[str, Any]) -> int:
        output = self.response["output"]
        return next(i for i in range(len(output) - 1, -1, -1) if output[i] is item)

    def _of_item(self, kind: str, item: dict[str, Any], **values: Any) -> Event:
        return self._event(kind, item_id=item["id"], output_index=self._place(item), **values)

    def _in_item(self, kind: str, **values: Any) -> Event:
        assert self._item is not None, "an item is open"
        event = self._of_item(kind, self._item, **values)
        if kind.endswith(".delta") and self._include_obfuscation:
            size = _OBFUSCATED - len(values["delta"]) % _OBFUSCATED
            event["obfuscation"] = secrets.token_urlsafe(_OBFUSCATED)[:size]
        return event

    def _is_open(self, kind: str) -> bool:
        return self._item is not None and self._item["type"] == kind

    def _open(self, kind: str, **values: Any) -> Iterator[Event]:
        """Begin an item after the open one has ended."""
        if self._item is not None:
            yield from self._close("completed")
        self._item = {"id": new_item_id(kind), "type": kind, "status": "in_progress", **values}
        yield self._add(self._item)

    def _add(self, item: dict[str, Any]) -> Event:
        output = self.response["output"]
        output.append(item)
        index = len(output) - 1
        return self._event("response.output_item.added", output_index=index, item=deepcopy(item))

    def _close(self, status: str) -> Iterator[Event]:
        """End the open item."""
        raise NotImplementedError

    def _done(self, item: dict[str, Any]) -> Event:
        index = self._place(item)
        return self._event("response.output_item.done", output_index=index, item=deepcopy(item))
