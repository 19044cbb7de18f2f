"""Exact allocator tests: block ids, queue order, counts."""

from __future__ import annotations

import random

import pytest

from nvcli.engine import block_names
from nvcli.engine.block_manager import BlockManager, FreeBlockQueue
from tests.builders import allocate, compute, holders, make_block_manager, make_sequence


def queue_of(manager: BlockManager) -> list[int]:
    return list(manager._queue)


# --- the queue -----------------------------------------------------------------------------------


def test_queue_starts_in_order_of_ids() -> None:
    queue = FreeBlockQueue(4)
    assert list(queue) == [0, 1, 2, 3]
    assert queue.pop_front() == 0
    assert len(queue) == 3


def test_queue_gives_up_a_block_from_the_middle_and_takes_it_at_either_end() -> None:
    queue = FreeBlockQueue(4)
    queue.remove(2)
    assert list(queue) == [0, 1, 3]
    queue.push_front(2)
    assert list(queue) == [2, 0, 1, 3]
    queue.remove(0)
    queue.push_back(0)
    assert list(queue) == [2, 1, 3, 0]


def test_queue_equals_a_list() -> None:
    draw = random.Random(7)
    queue, model = FreeBlockQueue(9), list(range(9))
    out: list[int] = []
    for _ in range(2000):
        action = draw.choice(["pop", "remove", "front", "back"])
        if action == "pop" and model:
            out.append(model.pop(0))
            assert queue.pop_front() == out[-1]
        elif action == "remove" and model:
            block = draw.choice(model)
            model.remove(block)
            queue.remove(block)
            out.append(block)
        elif action in ("front", "back") and out:
            block = out.pop(draw.randrange(len(out)))
            model.insert(0 if action == "front" else len(model), block)
            (queue.push_front if action == "front" else queue.push_back)(block)
        assert list(queue) == model
        assert len(queue) == len(model)


# --- sharing -------------------------------------------------------------------------------------


def test_second_sequence_reuses_full_blocks_only() -> None:
    manager = make_block_manager(num_blocks=10, block_size=4)
    compute(manager, tokens=range(10))  # blocks 0 1 2; only 0 and 1 are full
    second = allocate(manager, tokens=range(10))
    assert second.block_table == [0, 1, 3]
    assert manager.ref_counts[:5] == [2, 2, 1, 1, 0]


def test_the_last_block_is_found_too_when_it_is_full() -> None:
    manager = make_block_manager(num_blocks=10, block_size=4)
    first = compute(manager, tokens=range(8))
    assert manager.match_prefix(make_sequence(range(8))) == first.block_table == [0, 1]
    assert manager.match_prefix(make_sequence(range(9))) == [0, 1]
    assert manager.match_prefix(make_sequence(range(7))) == [0]


def test_equal_tokens_after_different_prefixes_are_different() -> None:
    manager = make_block_manager()
    compute(manager, [1, 1, 1, 1, 5, 5, 5, 5])
    assert manager.match_prefix(make_sequence([2, 2, 2, 2, 5, 5, 5, 5])) == []
    assert manager.match_prefix(make_sequence([5, 5, 5, 5])) == []


def test_cache_salt_isolates() -> None:
    manager = make_block_manager()
    plain = compute(manager, range(8))
    assert manager.match_prefix(make_sequence(range(8), cache_salt="a")) == []
    salted = compute(manager, range(8), cache_salt="a")
    assert salted.block_table == [2, 3]
    assert manager.match_prefix(make_sequence(range(8), cache_salt="a")) == [2, 3]
    assert manager.match_prefix(make_sequence(range(8), cache_salt="")) == []
    assert manager.match_prefix(make_sequence(range(8))) == plain.block_table


def test_a_match_holds_nothing() -> None:
    """sglang#16067, #20182, #21404: a request that matched and is not admitted leaves no trace."""
    manager = make_block_manager()
    manager.free(compute(manager, range(8)))
    before = (manager.ref_counts.copy(), queue_of(manager), manager.num_named)
    assert manager.match_prefix(make_sequence(range(8))) == [0, 1]
    assert (manager.ref_counts, queue_of(manager), manager.num_named) == before


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = make_block_manager(enable_prefix_caching=False)
    seq = compute(manager, range(8))
    assert seq.block_hashes == []
    assert manager.match_prefix(make_sequence(range(8))) == []


def test_output_tokens_are_part_of_the_prefix() -> None:
    manager = make_block_manager()
    seq = allocate(manager, range(3))
    seq.output_token_ids += [3, 4, 5, 6, 7]
    manager.grow(seq, 8)
    manager.publish(seq, 8)
    assert manager.match_prefix(make_sequence(range(8))) == [0, 1]


# --- freeing, reuse, eviction --------------------------------------------------------------------


def test_unnamed_blocks_are_reused_first_then_the_least_recently_freed() -> None:
    manager = make_block_manager(num_blocks=6, block_size=4)
    first = compute(manager, range(10))  # 0 1 named, 2 not
    second = compute(manager, range(50, 58))  # 3 4 named
    manager.free(first)
    assert queue_of(manager) == [2, 5, 1, 0]  # the end of a prefix goes before its beginning
    manager.free(second)
    assert queue_of(manager) == [2, 5, 1, 0, 4, 3]


def test_a_hit_revives_free_blocks_and_moves_them_out_of_the_queue() -> None:
    manager = make_block_manager(num_blocks=4, block_size=4)
    manager.free(compute(manager, range(8)))
    assert queue_of(manager) == [2, 3, 1, 0]
    seq = allocate(manager, range(8))
    assert seq.block_table == [0, 1]
    assert queue_of(manager) == [2, 3]


def test_a_reused_block_is_not_found_any_more() -> None:
    """nano-vllm #163, #110: cached for X, freed, reused for Y; X again."""
    manager = make_block_manager(num_blocks=2, block_size=4)
    manager.free(compute(manager, range(8)))
    other = compute(manager, range(50, 58))
    assert other.block_table == [1, 0]
    assert manager.num_evictions == 2
    manager.free(other)
    assert manager.match_prefix(make_sequence(range(8))) == []
    assert manager.match_prefix(make_sequence(range(50, 58))) == [1, 0]


def test_evicting_the_end_of_a_prefix_keeps_its_beginning() -> None:
    manager = make_block_manager(num_blocks=3, block_size=4)
    manager.free(compute(manager, range(12)))
    allocate(manager, [50, 51])
    assert manager.match_prefix(make_sequence(range(12))) == [0, 1]


def test_growing_is_all_or_nothing() -> None:
    manager = make_block_manager(num_blocks=3, block_size=4)
    seq = allocate(manager, range(4))
    assert not manager.grow(seq, 16)
    assert seq.block_table == [0]
    assert manager.num_free == 2
    assert manager.grow(seq, 12)
    assert seq.block_table == [0, 1, 2]


def test_a_shared_block_is_free_when_its_last_holder_frees_it() -> None:
    manager = make_block_manager(num_blocks=4, block_size=4)
    first = compute(manager, range(4))
    second = allocate(manager, range(4))
    manager.free(first)
    assert manager.num_free == 3
    manager.free(second)
    assert manager.num_free == 4


def test_freeing_a_block_twice_is_noticed() -> None:
    manager = make_block_manager()
    seq = allocate(manager, range(4))
    table = seq.block_table.copy()
    manager.free(seq)
    seq.block_table += table
    with pytest.raises(AssertionError, match="freed twice"):
        manager.free(seq)
    seq.block_table.clear()


def test_how_much_an_admission_takes() -> None:
    manager = make_block_manager(num_blocks=10, block_size=4)
    held = compute(manager, range(4))
    manager.free(compute(manager, range(100, 104)))
    free = manager.match_prefix(make_sequence(range(100, 104)))
    assert manager.num_taken_by(held.block_table, 9) == 2  # the held one costs nothing
    assert manager.num_taken_by(free, 9) == 3  # a free one leaves the queue


# --- names ---------------------------------------------------------------------------------------


def test_a_second_block_with_the_same_tokens_stays_unnamed() -> None:
    """nano-vllm #219: duplicates computed in one step."""
    manager = make_block_manager(num_blocks=4, block_size=4)
    first, second = allocate(manager, range(4)), allocate(manager, range(4))
    assert [block for block, _ in manager.publish(first, 4)] == [0]
    assert manager.publish(second, 4) == []
    assert manager.match_prefix(make_sequence(range(4))) == [0]
    manager.free(second)
    assert queue_of(manager)[0] == 1  # worthless, so reused first
    manager.free(first)
    assert manager.match_prefix(make_sequence(range(4))) == [0]


def test_retracted_names_are_gone_and_their_blocks_are_not() -> None:
    manager = make_block_manager()
    seq = allocate(manager, range(8))
    named = manager.publish(seq, 8)
    manager.retract(named)
    assert manager.num_named == 0
    assert manager.match_prefix(make_sequence(range(8))) == []
    manager.retract(named)  # again, after an eviction for example: nothing
    manager.free(seq)
    assert manager.num_free == manager.num_blocks


def test_retracting_leaves_a_block_that_was_renamed_meanwhile() -> None:
    manager = make_block_manager(num_blocks=1, block_size=4)
    first = allocate(manager, range(4))
    named = manager.publish(first, 4)
    manager.free(first)
    compute(manager, range(50, 54))
    manager.retract(named)
    assert manager.match_prefix(make_sequence(range(50, 54))) == [0]


def test_each_block_is_hashed_once_per_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching, publishing and matching again after preemption share the digests."""
    count = 0
    blake2b = block_names.blake2b

    def counting(*args: bytes, **options: int) -> object:
        nonlocal count
        count += 1
        return blake2b(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(block_names, "blake2b", counting)
    manager = make_block_manager(num_blocks=40, block_size=4)
    seq = make_sequence(range(40))
    holders[-1][1].append(seq)
    for _ in range(3):
        manager.share(seq, manager.match_prefix(seq))
        manager.grow(seq, 40)
        for end in range(1, 41):
            manager.publish(seq, end)
        manager.free(seq)
    assert count == 10


def test_a_miss_hashes_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_block_manager()
    seq = make_sequence(range(4000))
    assert manager.match_prefix(seq) == []
    assert len(seq.block_hashes) == 1


def test_free_blocks_are_counted_with_those_that_are_cached() -> None:
    manager = make_block_manager(num_blocks=4, block_size=4)
    assert manager.num_free == 4
    seq = compute(manager, range(9))
    assert manager.num_free == 1
    manager.free(seq)
    assert manager.num_free == 4


# --- the check itself ----------------------------------------------------------------------------


def test_check_notices_a_leak_a_stray_queue_entry_and_a_lost_name() -> None:
    manager = make_block_manager(num_blocks=4, block_size=4)
    seq = compute(manager, range(8))
    manager.check([seq])
    with pytest.raises(AssertionError, match="ref counts"):
        manager.check([])
    manager._queue.push_back(seq.block_table[0])
    with pytest.raises(AssertionError, match="queue"):
        manager.check([seq])
    manager._queue.remove(seq.block_table[0])
    digest = manager._digests[0]
    manager._digests[0] = None
    with pytest.raises(AssertionError, match="names"):
        manager.check([seq])
    manager._digests[0] = digest
