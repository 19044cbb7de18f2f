"""What chat and completion requests have in common, and the fields that every API for text has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvcli.protocol.fields import Fields
    from nvcli.protocol.structured import Structure


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """What a request for text asks for. `sampling` holds only what the client set."""

    model: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    structure: Structure | None = None
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"
    priority: int = 0
    cache_salt: str | None = None
    ignored_fields: tuple[str, ...] = ()


def read_shared(fields: Fields) -> dict[str, Any]:
    """Fields of a `TextRequest` that every API has."""
    return {
        "model": fields.text("model"),
        "bad_words": fields.texts("bad_words") or (),
        "stream": fields.flag("stream") or False,
        "priority": fields.integer("priority", -(2**31), 2**31) or 0,
        "cache_salt": fields.text("cache_salt"),
    }


def read_options(fields: Fields) -> dict[str, Any]:
    """Those, and what chat and completions have beside them."""
    return {
        **read_shared(fields),
        "include_usage": fields.inner("stream_options").flag("include_usage") or False,
        "echo": fields.flag("echo") or False,
        "return_token_ids": fields.flag("return_token_ids") or False,
        "return_tokens_as_token_ids": fields.flag("return_tokens_as_token_ids") or False,
        "truncate_prompt_tokens": fields.integer("truncate_prompt_tokens", 1),
        "truncation_side": fields.choice("truncation_side", ("left", "right")) or "left",
    }
