"""Which sizes of steps are captured as CUDA graphs, and to which of them a step is padded.

The captured steps (`cuda_graph`) and the physical model of `nvcli bench` ask the same functions: a
step costs what its bucket costs, not what its tokens would.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKEN_BUCKETS = (
    *(16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792),
    *(2048, 2560, 3072, 3584, 4096),
)
MIN_TOKENS = 512  # buckets up to it are captured for every model
LAUNCH_S = 15e-3  # the host's time to launch an eager step; a step that computes longer hides it
FLOPS = 600e12  # what a Hopper GPU reaches in such steps


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, rising; the last is `max_num_seqs`."""
    sizes = [1, 2, 4, 8, *range(16, 257, 8), *range(272, max_num_seqs + 1, 16), max_num_seqs]
    return sorted({size for size in sizes if size <= max_num_seqs})


def token_buckets(max_num_batched_tokens: int, num_params: int) -> list[int]:
    """Token counts to capture for steps that are not all decode, rising.

    The largest is where computing (2 operations a parameter and token) takes as long as launching.
    Beyond it capturing gains nothing, and padding up to the bucket costs time.
    """
    limit = max(MIN_TOKENS, LAUNCH_S * FLOPS / (2 * num_params))
    return [size for size in TOKEN_BUCKETS if size <= min(limit, max_num_batched_tokens)]


def smallest(sizes: Sequence[int], least: float) -> int | None:
    """The smallest of the rising sizes that holds `least`; None where none does."""
    at = bisect_left(sizes, least)
    return sizes[at] if at < len(sizes) else None


@dataclass(frozen=True, slots=True)
class Buckets:
    """The captured sizes of an engine. Steps whose rows share keys have fewer, and are not told."""

    decode: tuple[int, ...]  # rows of one token; the last is `max_num_seqs`
    tokens: tuple[int, ...]  # of steps that hold prompts

    @classmethod
    def of(cls, max_num_seqs: int, max_num_batched_tokens: int, num_params: int) -> Buckets:
        """num_params: of one rank"""
        return cls(
            tuple(decode_buckets(max_num_seqs)),
            tuple(token_buckets(max_num_batched_tokens, num_params)),
        )

    @classmethod
    def from_json(cls, value: dict[str, list[int]] | None) -> Buckets | None:
        """Of `dataclasses.asdict`, None of None."""
        return None if value is None else cls(tuple(value["decode"]), tuple(value["tokens"]))

    def rows_of(self, num_tokens: int) -> int:
        """Rows that a captured step of so many tokens computes logits for."""
        return min(num_tokens, self.decode[-1])

    def padded(self, num_rows: float, num_prompt_tokens: float) -> tuple[float, float] | None:
        """(tokens, rows with logits) that a step computes which decodes so many rows and holds so
        many tokens of prompts; None where it runs eagerly, unpadded.

        The numbers may be means.
        """
        if not num_prompt_tokens:
            size = smallest(self.decode, num_rows)
            return None if size is None else (size, size)
        size = smallest(self.tokens, num_rows + num_prompt_tokens)
        return None if size is None else (size, self.rows_of(size))
