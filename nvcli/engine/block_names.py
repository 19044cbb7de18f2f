"""Names of full blocks: the digest of a block's tokens and of its predecessor's name.

Hot path: yes (`BlockNames.of`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvcli.engine.sequence import Sequence

DIGEST_SIZE = 16  # bytes: two different prefixes never meet


class BlockNames:
    """Names blocks in order, each once a sequence.

    Sequences that come one after another often begin alike: a system prompt, a document, the n
    outputs of one prompt. To compare their tokens is quicker than to hash them, so the run of
    blocks that was named last is kept, and whoever begins like it takes its names.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._width = block_size * array("i").itemsize  # bytes of a block's tokens
        self._root = b""  # the run kept: what its first name was made with, its tokens, its names
        self._tokens = b""
        self._names: list[bytes] = []

    def of(self, seq: Sequence, count: int) -> list[bytes]:
        """Names of the sequence's first `count` full blocks at least; they are kept with it."""
        names, size, width = seq.block_hashes, self._size, self._width
        first = len(names)
        if first >= count:
            return names
        tokens = seq.known_tokens(first * size, count * size).tobytes()
        assert len(tokens) == (count - first) * width, "only a full block of known tokens has one"
        parent = names[-1] if names else _salt(seq.cache_salt)
        follows = self._follow(parent, first)
        num_alike = self._num_alike(tokens, first) if follows else 0
        alike = first + num_alike
        names += self._names[first:alike]
        if alike == count:
            return names
        parent = names[-1] if names else parent
        for at in range(num_alike * width, len(tokens), width):
            parent = blake2b(parent + tokens[at : at + width], digest_size=DIGEST_SIZE).digest()
            names.append(parent)
        if follows:
            self._tokens = self._tokens[: alike * width] + tokens[num_alike * width :]
            self._names[alike:] = names[alike:]
        return names

    def _follow(self, parent: bytes, first: int) -> bool:
        """Whether the run kept is that of a sequence whose block `first` comes after `parent`. A
        sequence named from its beginning starts a run of its own.
        """
        if first == 0:
            if self._root != parent:
                self._root, self._tokens, self._names = parent, b"", []
            return True
        return first <= len(self._names) and self._names[first - 1] == parent

    def _num_alike(self, tokens: bytes, first: int) -> int:
        """Blocks with which `tokens` goes on as the run does from its block `first` on."""
        width = self._width
        run = self._tokens[first * width : first * width + len(tokens)]
        if run == tokens:
            return len(tokens) // width
        most = len(run) // width
        return bisect_left(
            range(1, most + 1), True, key=lambda n: run[: n * width] != tokens[: n * width]
        )


def _salt(text: str | None) -> bytes:
    """What the name of a first block begins with."""
    if text is None:
        return b""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_SIZE).digest()
