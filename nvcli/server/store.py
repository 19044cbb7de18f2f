"""Bounded memory of answers that may be asked for again: by count, by bytes and by age."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvcli.errors import InvalidParameterError
from nvcli.server.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request as HTTPRequest

MAX_BYTES = 256 * 1024 * 1024
MAX_AGE_S = 30 * 24 * 3600.0  # what OpenAI keeps


@dataclass(slots=True)
class Entry:
    id: str
    created: float
    size: int
    body: dict[str, Any]  # the object as it was answered
    extra: dict[str, Any] = field(default_factory=dict)  # what belongs to it: messages, items


class Store:
    """The newest `limit` entries within `max_bytes`; older ones go as new ones come."""

    def __init__(
        self,
        limit: int,
        *,
        max_bytes: int = MAX_BYTES,
        max_age_s: float = MAX_AGE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry_id: str, body: dict[str, Any], size: int, **extra: Any) -> None:
        """Keep an entry; one of the same id is replaced in its place."""
        old = self._entries.get(entry_id)
        created = self._clock() if old is None else old.created
        if old is not None:
            self.num_bytes -= old.size
        self._entries[entry_id] = Entry(entry_id, created, size, body, extra)
        self.num_bytes += size
        self._evict()

    def get(self, entry_id: str) -> Entry | None:
        self._evict()
        return self._entries.get(entry_id)

    def delete(self, entry_id: str) -> bool:
        entry = self._entries.pop(entry_id, None)
        if entry is not None:
            self.num_bytes -= entry.size
        return entry is not None

    def entries(self) -> list[Entry]:
        """All, the oldest first."""
        self._evict()
        return list(self._entries.values())

    def _evict(self) -> None:
        oldest = self._clock() - self._max_age_s
        while self._entries:
            entry = next(iter(self._entries.values()))
            is_over = len(self._entries) > self._limit or self.num_bytes > self._max_bytes
            if not is_over and entry.created >= oldest:
                return
            self.delete(entry.id)


def page_of(
    items: list[dict[str, Any]],
    http: HTTPRequest,
    *,
    default_order: str,
    default_limit: int = 20,
    max_limit: int = 100,
) -> dict[str, Any]:
    """The `page` of a list that a request's `limit`, `order`, `after` and `before` ask for. Raises
    `InvalidParameterError`, and what `page` raises."""
    query = http.query_params
    raw = query.get("limit", str(default_limit))
    limit = int(raw) if raw.isascii() and raw.isdigit() and len(raw) < 6 else 0
    if not 1 <= limit <= max_limit:
        message = f"limit must be from 1 to {max_limit}, got {raw[:40]!r}"
        raise InvalidParameterError(message, param="limit")
    order = query.get("order", default_order)
    if order not in ("asc", "desc"):
        message = f"order must be asc or desc, got {order[:40]!r}"
        raise InvalidParameterError(message, param="order")
    after, before = query.get("after") or None, query.get("before") or None
    return page(items, limit=limit, order=order, after=after, before=before)


def page(
    items: list[dict[str, Any]],
    *,
    limit: int,
    order: str,
    after: str | None,
    before: str | None = None,
) -> dict[str, Any]:
    """OpenAI's list object: `items` stand oldest first and each has an `id`. `after` asks for the
    page that follows that item, `before` for the one that ends at it, both for what is between.
    Raises `NotFoundError` for one that the list does not have."""
    ordered = list(items) if order == "asc" else items[::-1]
    places = {item["id"]: place for place, item in enumerate(ordered)}
    first = 0 if after is None else _place(places, after, "after") + 1
    end = len(ordered) if before is None else _place(places, before, "before")
    between = ordered[first:end]
    is_backwards = before is not None and after is None
    shown = between[-limit:] if is_backwards else between[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else "",  # text, says OpenAI's description
        "last_id": shown[-1]["id"] if shown else "",
        "has_more": len(between) > limit,
    }


def _place(places: dict[str, int], item_id: str, param: str) -> int:
    if item_id not in places:
        raise NotFoundError(
            f"{param}: this list has no {item_id[:100]!r}",
            hint="It may have been deleted since; begin without it.",
            param=param,
        )
    return places[item_id]
