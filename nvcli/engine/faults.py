"""Why a sequence ends with an error: its restrictions, the model's numbers, or a failed step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nvcli.errors import EngineError, NvcliError, RequestError, first_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nvcli.engine.sequence import Sequence
    from nvcli.types import TokenLogprob


def why_nothing(seq: Sequence, vocab_size: int) -> NvcliError:
    """The error of a sequence for which nothing could be sampled: the request's fault where its
    restrictions leave no token, else the model's, whose logits are no numbers then.
    """
    count = len(seq.output_token_ids)
    if _leave_nothing(seq, vocab_size):
        return RequestError(
            f"nothing may be sampled after {count} output tokens: the request's restrictions "
            "together forbid every token",
            hint="Loosen allowed_token_ids, bad_token_ids, bad_words, min_tokens or "
            "response_format.",
        )
    return no_numbers(f"logits after {count} output tokens")


def no_numbers(what: str) -> EngineError:
    """The error where the model computed NaN or infinity. what: the values, in words."""
    return EngineError(
        f"the model's {what} are no numbers",
        hint="Where it was trained in bfloat16, float16 is too narrow: use another --dtype. Else "
        "the checkpoint may be damaged: `nvcli models verify`.",
    )


def are_numbers(pooled: bytes) -> bool:
    """Whether all of these float32 are finite."""
    import numpy as np

    return bool(np.isfinite(np.frombuffer(pooled, np.float32)).all())


def have_numbers(logprobs: Iterable[TokenLogprob]) -> bool:
    """Whether each of these came from logits that are numbers; minus infinity is one."""
    return not any(math.isnan(logprob.logprob) for logprob in logprobs)


def _leave_nothing(seq: Sequence, vocab_size: int) -> bool:
    """Whether a sequence's restrictions may have left no token; certain but for bad words of
    several tokens, which count as if all but their last had come before."""
    params = seq.params
    bad = {*params.bad_token_ids, *(word[-1] for word in params.bad_words)}
    if len(seq.output_token_ids) < params.min_tokens:
        bad |= seq.end_ids
    allowed = params.allowed_token_ids
    if seq.mask is not None:
        words = seq.mask.tolist()  # int32, a bit for each id
        ids = range(min(vocab_size, 32 * len(words))) if allowed is None else allowed
        allowed = tuple([i for i in ids if words[i // 32] >> i % 32 & 1])
    return len(bad) >= vocab_size if allowed is None else bad.issuperset(allowed)


def as_engine_error(error: Exception) -> NvcliError:
    """The error a user sees for a failed step: our own as it is, any other by its first line."""
    if isinstance(error, NvcliError):
        return error
    wrapped = EngineError(f"the step failed: {first_line(error)}")
    wrapped.__cause__ = error
    return wrapped
