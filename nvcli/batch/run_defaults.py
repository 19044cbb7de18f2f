"""What the run's flags add to the body of a record that does not say it itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvcli.protocol.structured import STRUCTURED_FIELDS

if TYPE_CHECKING:
    from nvcli.batch.options import BatchOptions


def with_format(body: Any, options: BatchOptions) -> Any:
    """The run's shape of an answer for a record that asks for none."""
    if options.response_format is None or not isinstance(body, dict):
        return body
    if _has_shape(body):
        return body
    return {**body, "response_format": options.response_format}


def with_text_format(body: Any, options: BatchOptions) -> Any:
    """The same in a request for a response, where the shape stands one level higher."""
    shape = options.response_format
    if shape is None or not isinstance(body, dict) or _has_shape(body):
        return body
    text = body.get("text") or {}
    if not isinstance(text, dict) or text.get("format") is not None:
        return body
    flat = {"type": shape["type"], **shape.get("json_schema", {})}
    return {**body, "text": {**text, "format": flat}}


def _has_shape(body: dict[str, Any]) -> bool:
    return any(body.get(name) is not None for name in ("response_format", *STRUCTURED_FIELDS))


def with_system(body: Any, options: BatchOptions) -> Any:
    """The run's system prompt before a conversation that has none."""
    if options.system is None or not isinstance(body, dict):
        return body
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body
    for message in messages:
        if isinstance(message, dict) and message.get("role") in ("system", "developer"):
            return body
    return {**body, "messages": [{"role": "system", "content": options.system}, *messages]}


def with_instructions(body: Any, options: BatchOptions) -> Any:
    """The run's system prompt where a request for a response brings none."""
    if options.system is None or not isinstance(body, dict) or body.get("instructions") is not None:
        return body
    return {**body, "instructions": options.system}
