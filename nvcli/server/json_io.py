"""JSON in and out: bounded when read, always valid UTF-8 when written."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response

from nvcli.protocol.fields import kind_of
from nvcli.server.errors import BadRequestError, MediaTypeError
from nvcli.text import repair_surrogates

if TYPE_CHECKING:
    from starlette.requests import Request

    from nvcli.server.state import ServerState

MAX_DEPTH = 128
MAX_CONTAINERS = 500_000  # objects and lists: a second's work, in which no other thread runs
LARGE_BODY = 64 * 1024  # bytes; from here on reading it is work for a thread


def dumps(value: Any) -> bytes:
    """Compact JSON. Lone surrogates become U+FFFD; a number that is none becomes null."""
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError):
        return orjson.dumps(_clean(value))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return repair_surrogates(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and not isinstance(value, bool):
        if -(2**63) <= value < 2**64:
            return value
        return float(value) if abs(value) < 2**1000 else None
    if isinstance(value, dict):
        return {_clean(k) if isinstance(k, str) else k: _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


class JSONBody(Response):
    """A response of one JSON value."""

    media_type = "application/json"

    def __init__(self, value: Any) -> None:
        super().__init__(dumps(value))


def loads(data: bytes) -> Any:
    """Decode a request body. Raises `BadRequestError` for what is no JSON or nested too deep."""
    if not data.strip():
        raise BadRequestError("the request body is empty; send a JSON object")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        deepest, count = _shape(data)
        if deepest > MAX_DEPTH:
            raise BadRequestError(f"the JSON body is nested deeper than {MAX_DEPTH} levels")
        if count > MAX_CONTAINERS:
            raise BadRequestError(f"the JSON body has over {MAX_CONTAINERS:,} objects and lists")
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        where = f" (line {error.lineno}, column {error.colno})"
        raise BadRequestError(f"the request body is not valid JSON: {error.msg}{where}") from None


def _shape(data: bytes) -> tuple[int, int]:
    """Deepest nesting, and how many objects and lists; brackets inside strings left out. It stops
    where one of them is too much."""
    import re

    depth = deepest = count = 0
    for match in re.finditer(rb'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', data, re.DOTALL):
        first = match[0][0]
        if first in b"[{":
            depth += 1
            count += 1
            deepest = max(deepest, depth)
            if deepest > MAX_DEPTH or count > MAX_CONTAINERS:
                break
        elif first in b"]}":
            depth -= 1
    return deepest, count


async def read_object(request: Request) -> dict[str, Any]:
    """The decoded body, which must be an object. Raises `MediaTypeError`, `BadRequestError`,
    `BodyTooLargeError`.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise MediaTypeError(
            f"the content type must be application/json, got {kind[:80] or 'none'}",
            hint="Send the header 'Content-Type: application/json'.",
        )
    data = await request.body()
    if len(data) > LARGE_BODY:
        state: ServerState = request.app.state
        body = await state.in_thread(loads, data, num_bytes=len(data))
    else:
        body = loads(data)
    if not isinstance(body, dict):
        raise BadRequestError(f"the request body must be a JSON object, got {kind_of(body)}")
    return body
