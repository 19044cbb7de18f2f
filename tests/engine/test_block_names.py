"""Names of blocks: those of a run that was named before are the same as if they were hashed."""

from __future__ import annotations

import random
from array import array
from hashlib import blake2b

import numpy as np
import pytest

from nvcli.engine import block_names
from nvcli.engine.block_names import BlockNames
from nvcli.engine.sequence import Sequence
from nvcli.types import SamplingParams

SIZE = 4


def make_sequence(prompt: list[int], salt: str | None = None) -> Sequence:
    return Sequence(0, array("i", prompt), SamplingParams(), 10, 0, cache_salt=salt)


def hashed(seq: Sequence, count: int) -> list[bytes]:
    """Each block by itself, from the definition."""
    tokens, names = seq.known_tokens(0, count * SIZE), []
    salt = seq.cache_salt
    parent = b"" if salt is None else blake2b(salt.encode(), digest_size=16).digest()
    for at in range(0, count * SIZE, SIZE):
        data = np.array(tokens[at : at + SIZE], np.int32).tobytes()
        parent = blake2b(parent + data, digest_size=16).digest()
        names.append(parent)
    return names


@pytest.fixture
def num_hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number: blocks hashed so far, of a sequence without a salt."""
    counted = [0]

    def counting(*args: bytes, **options: int) -> object:
        counted[0] += 1
        return blake2b(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(block_names, "blake2b", counting)
    return counted


@pytest.mark.parametrize("seed", range(20))
def test_whatever_was_named_before(seed: int) -> None:
    rng = random.Random(seed)
    names, live = BlockNames(SIZE), []
    for _ in range(200):
        if not live or rng.random() < 0.3:  # a stem of another, or none, and then its own
            stem = rng.choice(live).known_tokens(0, rng.randrange(30)) if live else []
            own = [rng.randrange(3) for _ in range(rng.randrange(SIZE, 30))]
            live.append(make_sequence([*stem, *own], rng.choice([None, None, "a", "b"])))
        seq = rng.choice(live)
        seq.output_token_ids += [rng.randrange(2) for _ in range(rng.randrange(6))]
        count = rng.randrange(seq.num_tokens // SIZE + 1)
        found = names.of(seq, count)
        assert len(found) >= count
        assert found == hashed(seq, len(found))


def test_an_equal_beginning_is_not_hashed_again(num_hashed: list[int]) -> None:
    names = BlockNames(SIZE)
    document = list(range(400))
    names.of(make_sequence([*document, 1, 2, 3, 4]), 101)
    assert num_hashed == [101]
    for own in range(50):
        seq = make_sequence([*document, *[own + 5] * 8])
        for count in (1, 3, 7, 101, 102):  # as a match asks
            assert names.of(seq, count)[:count] == hashed(seq, count)
    assert num_hashed == [101 + 50 * 2]


def test_equal_tokens_behind_another_salt_or_another_block_are_hashed(
    num_hashed: list[int],
) -> None:
    names = BlockNames(SIZE)
    plain, salted = make_sequence([7] * 12), make_sequence([7] * 12, "tenant")
    other = make_sequence([8] * 4 + [7] * 8)
    found = [names.of(seq, 3) for seq in (plain, salted, other)]
    assert len({name for each in found for name in each}) == 9
    assert num_hashed == [9 + 1]  # the salt


def test_an_output_goes_on_with_its_own_run(num_hashed: list[int]) -> None:
    names = BlockNames(SIZE)
    first, second = make_sequence([1] * 8), make_sequence([1] * 8)
    for seq in (first, second):
        names.of(seq, 2)
    for seq in (first, second):
        seq.output_token_ids += [2] * 4
        assert names.of(seq, 3) == hashed(seq, 3)
    assert num_hashed == [3]
