"""Seeded noise: known answers, and the distributions it must have."""

from __future__ import annotations

import math

import pytest
import torch

from nvcli.kernels.noise import (
    AGAIN,
    GOLDEN,
    GROUP,
    GROUPS,
    as_int64,
    gumbel_noise,
    hash_ids,
    noise_keys,
    splitmix64,
    uniforms,
)

pytestmark = pytest.mark.torch

MASK = (1 << 64) - 1


def splitmix64_in_python(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def hash_in_python(key: int, token_id: int) -> int:
    x = (token_id + key) & 0xFFFFFFFF
    x = (x ^ x >> 17) * 0xED5AD4BB & 0xFFFFFFFF
    x = (x ^ x >> 11 ^ key >> 32) * 0xAC4C1B51 & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x31848BAB & 0xFFFFFFFF
    return x ^ x >> 14


def test_known_answers_of_the_published_generator() -> None:
    # The first outputs of splitmix64.c for seed 1234567.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = 1234567 + torch.arange(5) * GOLDEN
    assert [value & MASK for value in splitmix64(states).tolist()] == expected


def test_wraps_like_unsigned_arithmetic() -> None:
    values = [0, 1, MASK, 1 << 63, (1 << 63) - 1, 0x9E3779B97F4A7C15]
    got = splitmix64(torch.tensor([as_int64(value) for value in values])).tolist()
    assert [value & MASK for value in got] == [splitmix64_in_python(value) for value in values]


def test_uniforms_are_the_documented_formula() -> None:
    seed, position, token_id = -3, 41, 151_000
    key = splitmix64_in_python(
        (splitmix64_in_python(seed & MASK) + position * 0x9E3779B97F4A7C15) & MASK
    )
    bits = hash_in_python(key, token_id)
    expected = torch.tensor(bits).to(torch.float32).add(0.5).mul(2.0**-32).item()
    keys = noise_keys(torch.tensor([seed]), torch.tensor([position]))
    assert keys.tolist() == [as_int64(key)]
    assert uniforms(keys, torch.tensor([token_id])).item() == expected


def test_hash_is_the_documented_formula() -> None:
    keys = [0, 1, MASK, 0x9E3779B97F4A7C15, 1 << 63, (1 << 32) - 1]
    ids = [0, 1, 2, 151_935, (1 << 31) - 1]
    got = hash_ids(torch.tensor([as_int64(key) for key in keys]), torch.tensor(ids))
    want = [[hash_in_python(key, token_id) for token_id in ids] for key in keys]
    assert [[value & 0xFFFFFFFF for value in row] for row in got.tolist()] == want


def chi2_of_pairs(a: torch.Tensor, b: torch.Tensor, bins: int = 16) -> float:
    """In standard deviations from what pairs of independent uniforms give."""
    cells = (a * bins).long() * bins + (b * bins).long()
    observed = torch.bincount(cells.flatten(), minlength=bins * bins).double()
    expected = observed.sum() / bins**2
    chi2 = ((observed - expected) ** 2 / expected).sum().item()
    return (chi2 - (bins**2 - 1)) / math.sqrt(2 * (bins**2 - 1))


@pytest.mark.parametrize("lag", [1, 2, 8, 64, 256, 1024])
def test_ids_of_a_row_are_independent(lag: int) -> None:
    """A million pairs of ids at a distance; weaker hashes fail at powers of two."""
    keys = noise_keys(torch.arange(1000), torch.full((1000,), 3))
    values = uniforms(keys, torch.arange(2048))
    assert abs(chi2_of_pairs(values[:, :-lag], values[:, lag:])) < 5


@pytest.mark.parametrize("first", [GROUPS, AGAIN])
@pytest.mark.parametrize("place", [0, 1, 63])
def test_groups_and_second_draws_have_numbers_of_their_own(first: int, place: int) -> None:
    """A million pairs: beside the number of an id in the group, and beside the id's own."""
    keys = noise_keys(torch.arange(1000), torch.full((1000,), 3))
    numbers = torch.arange(1000)
    values = uniforms(keys, first + numbers)
    for ids in (numbers, numbers * GROUP + place):
        assert abs(chi2_of_pairs(values, uniforms(keys, ids))) < 5
    other = GROUPS + AGAIN - first
    assert abs(chi2_of_pairs(values, uniforms(keys, other + numbers * GROUP + place))) < 5


@pytest.mark.parametrize("shift", [0, 1, 1000])
def test_rows_whose_counters_overlap_are_independent(shift: int) -> None:
    """Where the lower halves of two keys are near each other, the rows run over the same counters,
    and only the upper halves part them.
    """
    ids = torch.arange(1 << 20)
    generator = torch.Generator().manual_seed(shift)
    for _ in range(5):
        low, one, two = torch.randint(0, 1 << 31, (3,), generator=generator).tolist()
        keys = torch.tensor([low + (one << 32), low + shift + (two << 32)])
        a, b = uniforms(keys, ids)
        assert abs(chi2_of_pairs(a[shift:], b[: len(b) - shift])) < 5


def test_uniforms_are_uniform_and_stay_inside() -> None:
    keys = noise_keys(torch.arange(20), torch.full((20,), 7))
    values = uniforms(keys, torch.arange(10_000)).flatten()
    assert 0 < values.min() < 1e-4
    assert 1 - 1e-4 < values.max() < 1
    observed = torch.histc(values, bins=64, min=0, max=1)
    chi2 = ((observed - 3125) ** 2 / 3125).sum().item()
    assert chi2 < 63 + 5 * math.sqrt(2 * 63)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    seeds, positions = torch.tensor([5, 6, 7]), torch.tensor([1, 2, 3])
    together = gumbel_noise(noise_keys(seeds, positions), torch.arange(1003))
    alone = gumbel_noise(noise_keys(seeds[1:2], positions[1:2]), torch.arange(1003))
    assert torch.equal(together[1], alone[0])
    chosen = torch.tensor([[999, 3, 500]])
    some = gumbel_noise(noise_keys(seeds[1:2], positions[1:2]), chosen)
    assert torch.equal(some[0], alone[0][chosen[0]])


@pytest.mark.parametrize("neighbours", ["seeds", "positions", "tokens"])
def test_neighbours_are_independent(neighbours: str) -> None:
    base = torch.arange(2000)
    ids = torch.arange(4)
    if neighbours == "seeds":
        values = uniforms(noise_keys(base, torch.zeros_like(base)), ids)
    elif neighbours == "positions":
        values = uniforms(noise_keys(torch.full_like(base, 42), base), ids)
    else:
        keys = noise_keys(torch.arange(4), torch.zeros(4, dtype=torch.int64))
        values = uniforms(keys, base).T
    for lag in (1, 2, 16):
        pair = torch.stack((values[:-lag].flatten(), values[lag:].flatten()))
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 5 / math.sqrt(pair.shape[1])


def test_gumbel_has_the_right_moments_and_tail() -> None:
    keys = noise_keys(torch.arange(100), torch.arange(100))
    noise = gumbel_noise(keys, torch.arange(10_000)).flatten().double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    # P(G > 10) = 1 - exp(-exp(-10)): 45 of a million
    assert 20 < (noise > 10).sum().item() < 80
