"""Which rows share keys, and the work made of it: by hand, and any forest of prefixes at random."""

from __future__ import annotations

import random

import pytest

from tests.kernels.triton_testing import needs_triton

pytestmark = [needs_triton, pytest.mark.torch]

P = 16
SMS = 132


def make(num_heads: int = 16, num_kv_heads: int = 8, block_size: int = P):  # type: ignore[no-untyped-def]
    from nvcli.kernels.shared_prefix import SharedPrefixes

    return SharedPrefixes(
        num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size, num_sms=SMS
    )


class Blocks:
    """Hands out ids: `chain(n)` for n new blocks."""

    def __init__(self) -> None:
        self._next = 0

    def chain(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def test_rows_of_one_prefix_are_a_group_whatever_their_order() -> None:
    blocks = Blocks()
    prefix = blocks.chain(128)
    tables = [prefix + blocks.chain(5) for _ in range(9)]
    tables.insert(3, blocks.chain(140))
    tables.insert(0, [])  # a prompt
    (group,) = make().find(tables, [0] + [133 * P - 3] * 10)
    assert group == ([1, 2, 3, 5, 6, 7, 8, 9, 10], 2048)


def test_what_is_shared_is_whole_tiles_that_every_row_sees() -> None:
    blocks = Blocks()
    prefix = blocks.chain(300)
    tables = [prefix] * 20
    (group,) = make().find(tables, [300 * P] * 19 + [299 * P + 5])
    assert group == (list(range(20)), 299 * P // 64 * 64)
    (group,) = make().find(tables, [300 * P] * 20)
    assert group.num_keys == 4800  # all of it: a prompt found in the cache, its last token again


def test_too_few_rows_too_few_keys_and_too_little_of_both() -> None:
    blocks = Blocks()
    long, short, middle = blocks.chain(4000), blocks.chain(7), blocks.chain(70)

    def find(prefix: list[int], count: int) -> int:
        tables = [prefix + blocks.chain(2) for _ in range(count)]
        return len(make().find(tables, [len(prefix) * P + 20] * count))

    assert find(long, 3) == 0
    assert find(long, 4) == 1
    assert find(short, 200) == 0
    assert find(middle, 15) == 0  # 14 x 1,088 keys are not worth it
    assert find(middle, 17) == 1


def test_prefixes_within_a_prefix() -> None:
    """Rows that agree in more are apart where that spares more."""
    blocks = Blocks()
    system = blocks.chain(64)
    documents = [system + blocks.chain(200) for _ in range(3)]
    tables = [documents[i % 3] + blocks.chain(1) for i in range(30)]
    tables += [system + blocks.chain(3) for _ in range(40)]
    tables += [documents[0][:70] + blocks.chain(2)]
    num_keys = [len(table) * P for table in tables]
    groups = sorted(make().find(tables, num_keys))
    assert groups == [
        (list(range(0, 30, 3)), 264 * P),
        (list(range(1, 30, 3)), 264 * P),
        (list(range(2, 30, 3)), 264 * P),
        (list(range(30, 71)), 64 * P),
    ]
    # Pairs of rows with a little more in common stay: their own tiles would read the rest again.
    pairs = [system + blocks.chain(8) for _ in range(16)]
    tables = [pairs[i // 4] + blocks.chain(1) for i in range(64)]
    (group,) = make().find(tables, [73 * P] * 64)
    assert group == (list(range(64)), 64 * P)


def random_step(rng: random.Random, block_size: int) -> tuple[list[list[int]], list[int]]:
    """Rows over a forest of prefixes."""
    blocks = Blocks()
    nodes: list[list[int]] = [[]]
    for _ in range(rng.randrange(1, 8)):
        nodes.append(rng.choice(nodes) + blocks.chain(rng.randrange(1, 1 + 2000 // block_size)))
    tables, num_keys = [], []
    for _ in range(rng.randrange(1, 260)):
        table = rng.choice(nodes) + blocks.chain(rng.randrange(1, 20))
        tables.append(table if rng.random() < 0.9 else [])
        full = len(table) * block_size
        num_keys.append(rng.randint(full - block_size + 1, full) if rng.random() < 0.9 else 1)
    return tables, num_keys


@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (40, 8), (64, 8), (16, 1), (8, 8)], ids=str)
def test_any_forest(heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Members agree in what they share and see it, each row is in one group, and the items cover
    every member's shared keys once, in as many parts as are merged.
    """
    import torch

    from nvcli.kernels import shared_prefix

    monkeypatch.setattr(shared_prefix, "MIN_SPARED", 1)
    rng = random.Random(sum(heads))
    num_shared = 0
    for _ in range(60):
        block_size = rng.choice([4, 16, 64, 256])
        prefixes = make(*heads, block_size)
        tables, num_keys = random_step(rng, block_size)
        groups = prefixes.find(tables, num_keys)
        if not groups:
            continue
        members = [row for group in groups for row in group.rows]
        assert len(set(members)) == len(members)
        for group in groups:
            num_shared += 1
            assert len(group.rows) >= shared_prefix.MIN_ROWS
            assert group.num_keys > 0
            assert group.num_keys % 64 == 0
            count = -(-group.num_keys // block_size)
            assert len({tuple(tables[row][:count]) for row in group.rows}) == 1
            assert all(num_keys[row] >= group.num_keys for row in group.rows)

        query_lens = [1 if table else rng.randrange(1, 50) for table in tables]
        capacity = len(tables) + rng.randrange(5)
        work = prefixes.allocate(capacity, torch.device("cpu"))
        num_items = work.send(prefixes.fill(work, groups, query_lens))
        assert num_items <= prefixes.max_items(len(tables)) <= work.num_items
        assert int(work.count[0]) == num_items
        seen: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(len(tables))}
        for record in work.items.view(-1, 8)[:num_items].tolist():
            leader, first, end, part, start, count = record[:6]
            assert first < end
            assert first % 64 == end % 64 == 0
            for row, token in work.members.view(-1, 2)[start : start + count].tolist():
                assert tables[row][: end // block_size] == tables[leader][: end // block_size]
                assert token == sum(query_lens[:row])
                seen[row].append((part, first, end))
        rows = work.rows.view(-1, 2).tolist()
        shared = {row: group.num_keys for group in groups for row in group.rows}
        for row, pieces in seen.items():
            pieces.sort()
            assert [part for part, _, _ in pieces] == list(range(len(pieces)))
            bounds = [0, *(end for _, _, end in pieces)]
            assert [first for _, first, _ in pieces] == bounds[:-1]
            assert rows[row] == [bounds[-1], len(pieces)]
            assert bounds[-1] == shared.get(row, 0)
            assert len(pieces) <= shared_prefix.MAX_PARTS
        assert not any(any(pair) for pair in rows[len(tables) :])
    assert num_shared > 40


def test_it_is_off_where_rows_must_not_depend_on_others_and_by_the_switch() -> None:
    import torch

    from nvcli.kernels import shared_prefix
    from nvcli.kernels.triton_attention import TritonAttention

    args = (16, 8, 16, torch.device("cpu"))
    assert TritonAttention().shared_prefixes(*args) is not None
    assert TritonAttention(is_uniform=True).shared_prefixes(*args) is None
    shared_prefix.set_sharing(False)
    try:
        assert TritonAttention().shared_prefixes(*args) is None
    finally:
        shared_prefix.set_sharing(True)
