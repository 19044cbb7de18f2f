"""What a request must keep to, so that the engine can serve it.

A request is checked where it is made, in the caller's thread or in another process than the
engine's, so that a bad one raises there and nothing of it reaches the engine.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvcli.errors import ContextLengthError, InvalidParameterError, RequestError

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import UnionType

    from nvcli.engine.engine import Request
    from nvcli.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestChecks:
    """The limits of one engine. May be used by many threads."""

    max_model_len: int
    num_pool_tokens: int  # what the KV cache holds in all
    vocab_size: int  # token ids a request may use, 0 .. vocab_size - 1
    has_tokenizer: bool

    def validate(self, request: Request) -> None:
        """Check a request, and note its prompt as int32 in `request.packed`.

        Raises:
            ContextLengthError: the prompt is too long for the context, or for the KV cache.
            InvalidParameterError: a token id lies outside the tokenizer's vocabulary, a value is
                of the wrong kind, or no token may be sampled.
            RequestError: the prompt is empty.
        """
        params, prompt = request.params, request.prompt_token_ids
        _check_kind("priority", request.priority, int, "a whole number")
        _check_kind("cache_salt", request.cache_salt, str | None, "text or None")
        if not prompt:
            raise RequestError("the prompt is empty", hint="Give at least one token.")
        needs_room = params.max_tokens != 0
        too_long = ContextLengthError.of_prompt(
            len(prompt), self.max_model_len, needs_room=needs_room
        )
        if too_long is not None:
            raise too_long
        if len(prompt) + int(needs_room) > self.num_pool_tokens:
            raise ContextLengthError(
                f"the prompt has {len(prompt):,} tokens, the KV cache holds "
                f"{self.num_pool_tokens:,}",
                hint="Shorten the prompt or give the KV cache more memory.",
                param="prompt",
            )
        request.packed = self._check_ids("prompt", prompt)
        self._check_ids("pools", request.pools or ())
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("bad_token_ids", params.bad_token_ids)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        for word in params.bad_words:
            self._check_ids("bad_words", word)
        self._check_choice(params)
        if (params.stop or request.is_chat) and not self.has_tokenizer:
            raise InvalidParameterError("stop strings need a tokenizer", param="stop")

    def _check_choice(self, params: SamplingParams) -> None:
        """Refuse a request whose allowed and bad tokens leave nothing to sample from the start.
        min_tokens, longer bad words and grammars may come to that too; it ends the sequence then.
        """
        bad = {*params.bad_token_ids, *(word[0] for word in params.bad_words if len(word) == 1)}
        allowed = params.allowed_token_ids
        if allowed is not None and bad.issuperset(allowed):
            raise InvalidParameterError(
                f"allowed_token_ids leaves no token: all {len(allowed)} of them are in "
                "bad_token_ids or bad_words",
                param="allowed_token_ids",
            )
        if len(bad) >= self.vocab_size:
            raise InvalidParameterError(
                f"bad_token_ids and bad_words forbid all {self.vocab_size} tokens",
                param="bad_token_ids",
            )

    def _check_ids(self, param: str, token_ids: Collection[int]) -> array[int]:
        """Raise for an id outside the vocabulary. -> the ids as int32, which makes it possible to
        check thousands at once.
        """
        import numpy as np  # here, since a dry run of a batch imports the engine but does without

        try:
            packed = array("i", token_ids)
            if not packed or np.frombuffer(packed, np.uint32).max() < self.vocab_size:
                return packed
        except (TypeError, OverflowError):
            pass
        wrong = next(
            token_id
            for token_id in token_ids
            if not isinstance(token_id, int) or not 0 <= token_id < self.vocab_size
        )
        raise InvalidParameterError(
            f"{param} holds token id {wrong}; the vocabulary ends at {self.vocab_size - 1}",
            param=param,
        )


def _check_kind(param: str, value: object, kind: type | UnionType, rule: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidParameterError(f"{param} must be {rule}, got {value!r}", param=param)
