"""Ids, duplicates and seeds."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from nvcli.batch.identity import DigestTable, IdRegistry, digest, record_seed
from nvcli.batch.options import OnDuplicate


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2**40 - 1))))
def test_digest_table_is_a_dictionary(pairs: list[tuple[int, int]]) -> None:
    table, model = DigestTable(capacity=4), {}
    for name, number in pairs:
        key = digest(b"t", b"%d" % name)
        table.set(key, number)
        model[key] = number
    assert len(table) == len(model)
    assert all(table.get(key) == number for key, number in model.items())
    assert table.get(digest(b"t", b"absent")) is None


def test_digest_table_takes_few_bytes() -> None:
    table = DigestTable()
    for number in range(100_000):
        table.set(digest(b"t", b"%d" % number))
    assert table.num_bytes <= 100_000 * 16 * 2


def assign(registry: IdRegistry, *ids: str | None) -> list[tuple[str, int | None]]:
    found = []
    for index, given_id in enumerate(ids):
        assigned = registry.assign(given_id, b"same", line=index + 1, index=index)
        found.append((assigned.id, assigned.first_line))
    return found


def test_duplicates_name_the_first_line() -> None:
    assert assign(IdRegistry(OnDuplicate.ERROR), "a", "b", "a") == [
        ("a", None),
        ("b", None),
        ("a", 1),
    ]


def test_suffixes_pass_over_ids_that_are_taken() -> None:
    found = assign(IdRegistry(OnDuplicate.SUFFIX), "a", "a#2", "a", "a", "a#3")
    assert [name for name, _ in found] == ["a", "a#2", "a#3", "a#4", "a#3#2"]


def test_equal_records_without_ids_stay_apart_and_are_found_again() -> None:
    first = assign(IdRegistry(OnDuplicate.ERROR), None, None, None)
    assert len({name for name, _ in first}) == 3
    assert assign(IdRegistry(OnDuplicate.ERROR), None, None, None) == first


def test_kept_duplicates_have_keys_of_their_own() -> None:
    registry = IdRegistry(OnDuplicate.KEEP)
    keys = {registry.assign("a", b"", line=i, index=i).key for i in range(3)}
    assert len(keys) == 3


def test_seeds_are_of_63_bits_and_do_not_repeat() -> None:
    rng = random.Random(1)
    seeds = {record_seed(run, index, p) for run in (0, 1) for index in range(500) for p in (0, 1)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)
    index = rng.randrange(10**9)
    assert record_seed(5, index) == record_seed(5, index)
