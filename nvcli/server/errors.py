"""Errors of HTTP, and the one shape in which every error leaves: an object under 8 KiB."""

from __future__ import annotations

import re
from typing import Any

from nvcli.errors import NvcliError, RequestError

MAX_MESSAGE = 2000  # characters; in JSON at most six bytes each, less what `fit` cuts
MAX_PARAM = 200


class BadRequestError(RequestError):
    """The request cannot be read."""

    code = "invalid_request"


class AuthenticationError(RequestError):
    http_status = 401
    code = "invalid_api_key"


class OriginError(RequestError):
    """A web page asks that the operator did not allow to."""

    http_status = 403
    code = "origin_not_allowed"


class HostError(RequestError):
    """The name that the client asked for is not this server's: a bent DNS entry, perhaps."""

    http_status = 403  # 421 fits too, but browsers and proxies repeat the request after it
    code = "host_not_allowed"


class UnknownModelError(RequestError):
    http_status = 404
    code = "model_not_found"


class NotFoundError(RequestError):
    http_status = 404
    code = "not_found"


class PreviousResponseError(RequestError):
    """A request goes on from a response that is not there: its own fault, as OpenAI sees it."""

    code = "previous_response_not_found"


class MethodNotAllowedError(RequestError):
    http_status = 405
    code = "method_not_allowed"


class BodyTooLargeError(RequestError):
    http_status = 413
    code = "request_too_large"


class MediaTypeError(RequestError):
    http_status = 415
    code = "unsupported_media_type"


class InUseError(RequestError):
    http_status = 409
    code = "in_use"


class QueueFullError(RequestError):
    http_status = 429
    code = "queue_full"


class NotReadyError(RequestError):
    """The model is still loading, or the server is about to end."""

    http_status = 503
    code = "not_ready"


class TimeoutExceededError(RequestError):
    """The request ran longer than `--request-timeout`."""

    http_status = 504
    code = "request_timeout"

    def __init__(self, seconds: float | None) -> None:
        super().__init__(f"the request took longer than {seconds or 0:g} s")


class GenerationError(RequestError):
    """The engine ended a request that its client still waits for."""

    http_status = 500
    code = "engine_error"

    def __init__(self, message: str, code: str | None = None, http_status: int = 500) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code  # type: ignore[misc]
        self.http_status = http_status  # type: ignore[misc]


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def fit(text: str, size: int) -> str:
    """`text` on one line, at most `size` characters, as valid Unicode."""
    text = _CONTROL.sub(" ", text[: size + 1])
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) > size:
        text = text[: size - 3] + "..."
    while len(text.encode("utf-8")) > size * 3:
        text = text[: len(text) // 2] + "..."
    return text


def as_error(exc: BaseException) -> NvcliError:
    """Any exception as an error that may be shown; an unexpected one tells only its class."""
    if isinstance(exc, NvcliError):
        return exc
    return GenerationError(f"unexpected error: {type(exc).__name__}", code="internal_error")


def error_body(error: NvcliError) -> dict[str, Any]:
    """OpenAI's error object."""
    status = error.http_status
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {
        "error": {
            "message": fit(str(error), MAX_MESSAGE),
            "type": kind,
            "param": None if error.param is None else fit(error.param, MAX_PARAM),
            "code": error.code,
        }
    }


def anthropic_error_body(error: NvcliError, request_id: str) -> dict[str, Any]:
    """Anthropic's error object."""
    status = error.http_status
    default = "invalid_request_error" if status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(status, default)
    message = fit(str(error), MAX_MESSAGE)
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_headers(error: NvcliError) -> list[tuple[bytes, bytes]]:
    headers = []
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.http_status in (429, 503):
        headers.append((b"retry-after", b"1"))
    return headers
