"""What a sequence's sampling needs beyond its numbers, and whether the sampling kernel knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from nvcli.engine.step import SlotInit

MAX_MASKED = 16  # EOS and stop ids that the kernel can mask in a row
FLAG_PENALTIES, FLAG_BIAS = 1, 2  # as `kernels.sampling_parts` has them


@dataclass(frozen=True, slots=True)
class Features:
    """Which optional parts of sampling a sequence uses, read from its parameters once."""

    has_penalties: bool
    bad_tokens: tuple[int, ...]  # bad words of one token among them
    has_bias: bool  # logit bias, allowed or bad tokens
    masked_ids: tuple[int, ...]  # EOS and stop ids, masked until min_tokens
    bad_words: tuple[tuple[int, ...], ...]  # of two tokens and more
    has_grammar: bool
    fits_kernel: bool  # False: the kernel's sample of the row is replaced by `Sampler`'s

    @classmethod
    def of(cls, init: SlotInit) -> Self:
        params = init.params
        masked = init.eos_token_ids.union(params.stop_token_ids) if params.min_tokens else ()
        single = (word[0] for word in params.bad_words if len(word) == 1)
        bad_tokens = (*params.bad_token_ids, *single)
        bad_words = tuple(word for word in params.bad_words if len(word) > 1)
        return cls(
            has_penalties=params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0,
            bad_tokens=bad_tokens,
            has_bias=bool(bad_tokens or params.logit_bias) or params.allowed_token_ids is not None,
            masked_ids=tuple(sorted(masked)),
            bad_words=bad_words,
            has_grammar=init.has_grammar,
            fits_kernel=not (init.has_grammar or bad_words) and len(masked) <= MAX_MASKED,
        )

    @property
    def kernel_flags(self) -> int:
        """0 also where the kernel's sample is thrown away."""
        if not self.fits_kernel:
            return 0
        return self.has_penalties * FLAG_PENALTIES | self.has_bias * FLAG_BIAS

    @property
    def kernel_masked_ids(self) -> tuple[int, ...]:
        return self.masked_ids if self.fits_kernel else ()
