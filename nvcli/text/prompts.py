"""What may be given as a prompt: a text, token ids, or messages; one, or many."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from nvcli.errors import InvalidParameterError
from nvcli.types import Message

if TYPE_CHECKING:
    from collections.abc import Iterable

Prompt = str | Sequence[int] | Sequence[Message] | Sequence[Mapping[str, Any]]


def are_messages(prompt: object) -> bool:
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and isinstance(prompt[0], Message | Mapping)
    )


def as_token_ids(prompt: object) -> list[int]:
    """Raises `InvalidParameterError` for what are no numbers."""
    try:
        return list(map(operator.index, cast("Iterable[int]", prompt)))
    except TypeError as error:
        raise InvalidParameterError(
            f"the prompt must be text, messages or token ids, got {type(prompt).__name__}",
            param="prompt",
        ) from error


def as_batch(prompts: object) -> list[str | Sequence[int]]:
    """One prompt or many, as a list of them. Raises `InvalidParameterError`."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        batch = list(cast("Iterable[Any]", prompts))
    except TypeError as error:
        raise InvalidParameterError(
            f"prompts must be texts or token ids, got {type(prompts).__name__}", param="prompts"
        ) from error
    is_one = bool(batch) and not isinstance(batch[0], str) and hasattr(batch[0], "__index__")
    return [batch] if is_one else batch
