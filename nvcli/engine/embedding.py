"""Embeddings: what a text ends with when its last hidden state is wanted, and the vector of it."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvcli.text import Tokenizer

END_OF_TEXT = "<|endoftext|>"


def ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """`ids` with `<|endoftext|>` at the end, as Qwen3-Embedding and Qwen3-Reranker want it; as they
    are where it is there already, or where the tokenizer has no such token.
    """
    end = tokenizer.id_of(END_OF_TEXT)
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def unit_vector(data: bytes) -> tuple[float, ...]:
    """A hidden state, little-endian float32, as a vector of length 1; zeros stay zeros."""
    values = [value for (value,) in struct.iter_unpack("<f", data)]
    length = math.hypot(*values) or 1.0
    return tuple(value / length for value in values)
