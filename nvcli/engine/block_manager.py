"""KV-cache blocks: who holds which block, and which hold a reusable prefix.

A sequence's tokens fill fixed-size blocks in order. A full block is named by a digest of its tokens
and its predecessor's digest, so equal prefixes have equal names and share blocks. A freed block
keeps its contents, and its name, until it is reused; the least recently freed goes first.

             share / grow                      free
    [free queue] ------> [held, ref_count > 0] ------> [free queue]
         | a hit revives it in O(1)              with a name: back of the queue
         | reuse evicts its name                 without: front, nothing is lost by reusing it

A block is named (`publish`) before or after its tokens are computed, but only once a launched step
writes them and the host knows them. A step that fails takes its names back (`retract`).

Invariants (checked by `BlockManager.check`):
  * a block is either free (ref_count 0, in the queue once) or held (ref_count > 0, not in it)
  * a name belongs to one block and a block has at most one name
  * a block's ref_count is the number of block tables that contain it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvcli.engine.block_names import BlockNames

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nvcli.engine.sequence import Sequence
    from nvcli.engine.step import HashedBlock


class FreeBlockQueue:
    """A doubly linked list threaded through two arrays; entry `num_blocks` is its head and tail.

    Every operation is O(1), including `remove` from the middle, which a prefix hit needs.
    """

    def __init__(self, num_blocks: int) -> None:
        self._end = num_blocks
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]
        self._num_free = num_blocks

    def __len__(self) -> int:
        return self._num_free

    def __iter__(self) -> Iterator[int]:
        """From the next to be reused to the last."""
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def push_front(self, block: int) -> None:
        self._link(self._end, block, self._next[self._end])

    def push_back(self, block: int) -> None:
        self._link(self._prev[self._end], block, self._end)

    def pop_front(self) -> int:
        block = self._next[self._end]
        assert block != self._end, "no free block"
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self._num_free -= 1

    def _link(self, before: int, block: int, after: int) -> None:
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self._num_free += 1


class BlockManager:
    """Hands out blocks to sequences and finds prefixes that are already computed.

    It keeps numbers only: block i is where the device stores `block_size` tokens' keys and values.
    To admit a sequence: `match_prefix`, then `share` what was found and `grow` by the rest. While
    it runs: `grow` again, and `publish` its blocks as they fill up. At its end: `free`.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self._queue = FreeBlockQueue(num_blocks)
        self._digests: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._names = BlockNames(block_size)
        self.num_queried_tokens = 0  # known tokens of admitted sequences
        self.num_hit_tokens = 0  # of those, not computed again
        self.num_evictions = 0  # named blocks reused for something else

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, those with a reusable prefix included."""
        return len(self._queue)

    @property
    def num_named(self) -> int:
        """Blocks that a prefix match can find."""
        return len(self._block_of)

    def is_named(self, block: int) -> bool:
        return self._digests[block] is not None

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- holding and freeing ---------------------------------------------------------------------

    def match_prefix(self, seq: Sequence) -> list[int]:
        """The longest run of leading full blocks that are already computed.

        A mere look-up: it holds nothing, so a sequence that is not admitted has nothing to undo.
        """
        found: list[int] = []
        if self.enable_prefix_caching:
            num_full = seq.num_tokens // self.block_size
            while len(found) < num_full:
                first, count = len(found), min(num_full, 2 * len(found) + 1)  # a miss names few
                for digest in self._names.of(seq, count)[first:count]:
                    block = self._block_of.get(digest)
                    if block is None:
                        return found
                    found.append(block)
        return found

    def num_taken_by(self, matched: list[int], num_tokens: int) -> int:
        """How far `num_free` falls when a sequence shares `matched` and grows to `num_tokens`."""
        held = sum(self.ref_counts[block] > 0 for block in matched)
        return self.num_blocks_for(num_tokens) - held

    def share(self, seq: Sequence, matched: list[int]) -> None:
        """Start the sequence's block table with blocks that `match_prefix` found."""
        assert not seq.block_table, f"sequence {seq.seq_id} already holds blocks"
        for block in matched:
            if self.ref_counts[block] == 0:
                self._queue.remove(block)
            self.ref_counts[block] += 1
        seq.block_table.extend(matched)
        seq.num_hashed_blocks = len(matched)

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Append blocks until `num_tokens` fit: all of them, or none and False."""
        num_missing = self.num_blocks_for(num_tokens) - len(seq.block_table)
        if num_missing > len(self._queue):
            return False
        for _ in range(num_missing):
            block = self._queue.pop_front()
            digest = self._digests[block]
            if digest is not None:
                self._forget(block, digest)
                self.num_evictions += 1
            self.ref_counts[block] = 1
            seq.block_table.append(block)
        return True

    def free(self, seq: Sequence) -> None:
        """Give back all blocks of the sequence, last first: a prefix outlives what follows it."""
        for block in reversed(seq.block_table):
            assert self.ref_counts[block] > 0, f"block {block} freed twice"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if self._digests[block] is None:
                    self._queue.push_front(block)
                else:
                    self._queue.push_back(block)
        seq.block_table.clear()
        seq.num_hashed_blocks = 0

    # --- names -----------------------------------------------------------------------------------

    def publish(self, seq: Sequence, num_tokens: int) -> list[HashedBlock]:
        """Name the sequence's full blocks within its first `num_tokens` tokens.

        These tokens must be known, and written by launched steps. Returns what was named. A prefix
        that has a block keeps it: a second block with the same tokens stays without a name.
        """
        if not self.enable_prefix_caching:
            return []
        named: list[HashedBlock] = []
        num_full = num_tokens // self.block_size
        if num_full <= seq.num_hashed_blocks:
            return named  # nearly always
        names = self._names.of(seq, num_full)
        for index in range(seq.num_hashed_blocks, num_full):
            block, digest = seq.block_table[index], names[index]
            if digest not in self._block_of:
                self._block_of[digest] = block
                self._digests[block] = digest
                named.append((block, digest))
        seq.num_hashed_blocks = num_full
        return named

    def retract(self, named: list[HashedBlock]) -> None:
        """Take back names whose tokens were not computed after all."""
        for block, digest in named:
            if self._block_of.get(digest) == block:
                self._forget(block, digest)

    def _forget(self, block: int, digest: bytes) -> None:
        del self._block_of[digest]
        self._digests[block] = None

    # --- integrity -------------------------------------------------------------------------------

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert every invariant; `holders` are all sequences that may hold blocks. O(pool)."""
        expected = [0] * self.num_blocks
        for seq in holders:
            assert len(set(seq.block_table)) == len(seq.block_table), f"{seq.seq_id}: block twice"
            for block in seq.block_table:
                expected[block] += 1
        assert self.ref_counts == expected, "ref counts differ from the block tables"
        queued = list(self._queue)
        assert len(queued) == len(self._queue), "the queue's length is wrong"
        free = [block for block, count in enumerate(self.ref_counts) if count == 0]
        assert sorted(queued) == free, "the queue is not the set of free blocks"
        named = {digest: block for block, digest in enumerate(self._digests) if digest is not None}
        assert named == self._block_of, "names and blocks disagree"
