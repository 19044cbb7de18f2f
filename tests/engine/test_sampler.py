"""The sampler: each filter and penalty on four tokens by hand, then distributions and batches."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np
import pytest
import torch

from nvcli.engine.device_state import DeviceState, StepInputs
from nvcli.engine.kv_cache import KVCache, KVCacheSpec
from nvcli.engine.sampler import (
    Sampler,
    draw,
    draw_from_left,
    filter_sorted,
    group_key,
    scale,
    top_candidates,
)
from nvcli.engine.sequence import Sequence
from nvcli.engine.step import BlockWrite, Row, SlotInit, StepPlan, TokenWrite
from nvcli.kernels.noise import GROUPS, gumbel_noise, noise_keys
from nvcli.types import SamplingParams

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
SPEC = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype=torch.float32)
EOS = 3


class Bench:
    """A state and a sampler; rows sample from logits that the test writes."""

    def __init__(self, vocab: int = 4, padded: int | None = None, max_num_seqs: int = 8) -> None:
        self.state = DeviceState(
            max_num_seqs=max_num_seqs,
            max_model_len=64,
            padded_vocab_size=padded or vocab,
            kv_cache=KVCache(SPEC, 100, CPU),
            device=CPU,
        )
        self.sampler = Sampler(self.state, vocab)
        self.lengths: dict[int, int] = {}

    def start(
        self,
        slot: int,
        params: SamplingParams,
        prompt: list[int],
        output: list[int] | None = None,
        seed: int = 0,
    ) -> None:
        init = SlotInit(slot, array("i", prompt), output or [], params, seed, frozenset({EOS}))
        writes = [BlockWrite(slot, 0, list(range(slot * 16, slot * 16 + 16)))]
        self.state.prepare(
            StepPlan(0, slot_inits=[init], block_writes=writes if slot < 6 else []),
            None,  # type: ignore[arg-type]
        )
        self.lengths[slot] = len(prompt) + len(output or [])

    def force(self, slot: int, token_ids: list[int]) -> None:
        write = TokenWrite(slot, self.lengths[slot], token_ids)
        self.state.prepare(StepPlan(0, token_writes=[write]), None)  # type: ignore[arg-type]
        self.lengths[slot] += len(token_ids)

    def step(self, logits: torch.Tensor, slots: list[int] | None = None) -> list[int]:
        """logits: [R, V], row by row for `slots`."""
        slots = list(range(logits.shape[0])) if slots is None else slots
        before = logits.clone()
        rows = []
        for slot in slots:
            seq = Sequence(slot, array("i", [0]), SamplingParams(), 1, 0)
            rows.append(Row(seq, 0, slot, self.lengths[slot] - 1, 1, samples=True))
        plan = StepPlan(0, rows=rows)
        inputs = self.state.prepare(plan, None)  # type: ignore[arg-type]
        assert isinstance(inputs, StepInputs)
        sampled = self.sampler.sample(logits, slots, inputs)
        self.state.store_samples(plan, inputs, sampled)
        assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "logits are read only"
        for slot in slots:
            self.lengths[slot] += 1
        return sampled.tolist()

    def changed(self, logits: torch.Tensor) -> list[float]:
        """What row 0 samples from after penalties and masks, before temperature."""
        slots = torch.tensor([0])
        (group,) = self.sampler._make_groups([0], slots)
        position = torch.tensor([self.lengths[0]])
        changed = self.sampler._change_logits(group, logits, position)
        return [round(value, 4) for value in changed[0].tolist()]


def bench(prompt: list[int], output: list[int] | None = None, **params: Any) -> Bench:
    made = Bench()
    made.start(0, SamplingParams(**params), prompt, output)
    return made


LOGITS = torch.tensor([[1.0, 2.0, -1.0, 0.5]])
INF = math.inf


# --- penalties and masks, by hand ----------------------------------------------------------------


def test_repetition_penalty_covers_prompt_and_output() -> None:
    made = bench([0, 2], [1], repetition_penalty=2.0)
    assert made.changed(LOGITS) == [0.5, 1.0, -2.0, 0.5]


def test_presence_penalty_covers_output_once() -> None:
    assert bench([0], [1, 1, 3], presence_penalty=0.5).changed(LOGITS) == [1.0, 1.5, -1.0, 0.0]


def test_frequency_penalty_counts_output() -> None:
    assert bench([0], [1, 1, 3], frequency_penalty=0.5).changed(LOGITS) == [1.0, 1.0, -1.0, 0.0]


def test_penalties_combine_repetition_first() -> None:
    made = bench([2], [1], repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.25)
    assert made.changed(LOGITS) == [1.0, -0.25, -2.0, 0.5]


def test_counts_follow_sampled_and_forced_tokens() -> None:
    made = bench([0], temperature=0, frequency_penalty=1.0)
    assert made.step(LOGITS) == [1]
    assert made.changed(LOGITS) == [1.0, 1.0, -1.0, 0.5]
    made.force(0, [2, 2])
    assert made.changed(LOGITS) == [1.0, 1.0, -3.0, 0.5]


def test_a_forced_token_replaces_a_sampled_one_in_the_counts() -> None:
    made = bench([0], temperature=0, frequency_penalty=1.0)
    assert made.step(LOGITS) == [1]
    made.lengths[0] -= 1  # the host throws the sample away
    made.force(0, [3])
    assert made.changed(LOGITS) == [1.0, 2.0, -1.0, -0.5]
    made.lengths[0] -= 1
    assert made.step(LOGITS) == [1]  # and now it samples the position again
    assert made.changed(LOGITS) == [1.0, 1.0, -1.0, 0.5]


def test_logit_bias_is_added() -> None:
    assert bench([0], logit_bias={2: 5.0, 0: -1.5}).changed(LOGITS) == [-0.5, 2.0, 4.0, 0.5]


def test_allowed_and_bad_tokens() -> None:
    made = bench([0], allowed_token_ids=(0, 1, 2), bad_token_ids=(1,), logit_bias={0: 1.0})
    assert made.changed(LOGITS) == [2.0, -INF, -1.0, -INF]


def test_bad_word_of_one_token() -> None:
    assert bench([0], bad_words=((1,),)).changed(LOGITS) == [1.0, -INF, -1.0, 0.5]


def test_bad_words_are_not_completed() -> None:
    words = ((2, 1, 3), (1, 0), (0, 1, 1))
    assert bench([2], [1], bad_words=words).changed(LOGITS) == [-INF, 2.0, -1.0, -INF]
    assert bench([1], [2], bad_words=words).changed(LOGITS) == [1.0, 2.0, -1.0, 0.5]
    # at the very beginning there are fewer tokens than the longest word has
    assert bench([1], bad_words=words).changed(LOGITS) == [-INF, 2.0, -1.0, 0.5]


def test_bad_word_with_equal_last_tokens_masks_when_one_fits() -> None:
    assert bench([1], bad_words=((1, 0), (2, 0))).changed(LOGITS) == [-INF, 2.0, -1.0, 0.5]
    assert bench([1], bad_words=((2, 0), (1, 0))).changed(LOGITS) == [-INF, 2.0, -1.0, 0.5]


def test_min_tokens_masks_eos_and_stop_ids_until_then() -> None:
    made = bench([0, 1], temperature=0, min_tokens=2, stop_token_ids=(1,))
    assert made.changed(LOGITS) == [1.0, -INF, -1.0, -INF]
    assert made.step(LOGITS) == [0]
    assert made.step(LOGITS) == [0]
    assert made.changed(LOGITS) == [1.0, 2.0, -1.0, 0.5]
    assert made.step(LOGITS) == [1]


def test_min_tokens_counts_output_after_a_resume() -> None:
    made = bench([0, 1], [2], temperature=0, min_tokens=2, stop_token_ids=(1,))
    assert made.step(LOGITS) == [0]
    assert made.step(LOGITS) == [1]


def test_nothing_of_the_previous_owner_is_left_in_a_slot() -> None:
    params = SamplingParams(
        temperature=0,
        repetition_penalty=1.5,
        frequency_penalty=1.0,
        logit_bias={0: 50.0},
        bad_token_ids=(1,),
        bad_words=((0, 2),),
        min_tokens=5,
    )
    made = Bench()
    made.start(0, params, [0, 1, 2, 3], [1, 1])
    assert made.step(LOGITS) == [0]
    made.start(0, SamplingParams(temperature=0), [0])
    assert made.step(LOGITS) == [1]
    made.start(0, SamplingParams(frequency_penalty=1.0, logit_bias={3: 1.0}), [2])
    assert made.changed(LOGITS) == [1.0, 2.0, -1.0, 1.5]


# --- filters, by hand ----------------------------------------------------------------------------


def kept(
    probs: list[float], *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[int]:
    """Ids that remain of these probabilities."""
    logits = torch.tensor([probs], dtype=torch.float64).log().to(torch.float32)
    values, ids = logits.sort(dim=1, descending=True, stable=True)
    y = filter_sorted(
        scale(values, torch.ones(1)),
        torch.tensor([top_k]),
        torch.tensor([top_p], dtype=torch.float64),
        torch.tensor([min_p]),
    )
    return sorted(ids[0][y[0] > -INF].tolist())


def test_top_p_keeps_the_token_that_crosses() -> None:
    assert kept([0.1, 0.2, 0.3, 0.4], top_p=0.6) == [2, 3]


def test_top_p_is_the_smallest_set_that_reaches_the_mass() -> None:
    assert kept([0.25, 0.25, 0.25, 0.25], top_p=0.5) == [0, 1]  # ties: lower ids first
    assert kept([0.125, 0.5, 0.125, 0.25], top_p=0.75) == [1, 3]
    assert kept([0.125, 0.5, 0.125, 0.25], top_p=0.76) == [0, 1, 3]
    assert kept([0.1, 0.2, 0.3, 0.4], top_p=1e-9) == [3]
    assert kept([0.1, 0.2, 0.3, 0.4], top_p=1.0) == [0, 1, 2, 3]


def test_top_k_keeps_exactly_k_with_lower_ids_first() -> None:
    assert kept([0.1, 0.2, 0.3, 0.4], top_k=2) == [2, 3]
    assert kept([0.3, 0.2, 0.2, 0.3], top_k=3) == [0, 1, 3]
    assert kept([0.25, 0.25, 0.25, 0.25], top_k=1) == [0]


def test_top_p_counts_within_what_top_k_left() -> None:
    # .4 of (.4 + .3) is 0.571, so it is enough for 0.55 of the rest
    assert kept([0.1, 0.2, 0.3, 0.4], top_k=2, top_p=0.55) == [3]
    assert kept([0.1, 0.2, 0.3, 0.4], top_p=0.55) == [2, 3]


def test_min_p_is_relative_to_the_best() -> None:
    assert kept([0.1, 0.2, 0.3, 0.4], min_p=0.4) == [1, 2, 3]
    assert kept([0.1, 0.2, 0.3, 0.4], min_p=1.0) == [3]
    assert kept([0.5, 0.125, 0.25, 0.125], min_p=0.5) == [0, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("v", "k"), [(300, 1), (1000, 5), (5003, 16), (5000, 64), (70, 70)])
def test_top_candidates_equals_a_stable_sort(dtype: torch.dtype, v: int, k: int) -> None:
    generator = torch.Generator().manual_seed(v * k)
    logits = torch.randn((3, v), generator=generator).to(dtype)
    logits[1] = (logits[1] * 2).round()  # many ties, zeros of both signs among them
    logits[2] = 0.0
    values, ids = top_candidates(logits, k)
    expected = logits.float().sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :k])
    assert torch.equal(ids, expected.indices[:, :k])


def test_top_candidates_of_a_view_and_of_masked_rows() -> None:
    wide = torch.randn((2, 1003))
    wide[1, :990] = -INF
    logits = wide[:, :1000]
    _, ids = top_candidates(logits, 12)
    assert ids[1, 10:].tolist() == [0, 1]  # ten are finite, then the lowest ids
    assert torch.equal(ids[0], logits[0].sort(descending=True).indices[:12])


# --- draws ---------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    made = Bench()
    made.start(0, SamplingParams(temperature=0, top_p=0.1, top_k=1), [0])
    assert made.step(torch.tensor([[1.0, 3.0, 3.0, 0.0]])) == [1]


def test_padded_ids_are_never_sampled() -> None:
    made = Bench(vocab=4, padded=10)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {},
        {"top_k": 2},
        {"top_p": 0.5},
        {"frequency_penalty": 1.0},
        {"logit_bias": {1: 1.0}},
    ]
    logits = torch.zeros((len(kinds), 10))
    logits[:, 4:] = 1000.0
    for slot, kind in enumerate(kinds):
        made.start(slot, SamplingParams(**kind), [0])
    for _ in range(30):
        assert max(made.step(logits)) < 4


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.1, 0.2, 0.3, 0.4]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ({"top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_k": 3}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"top_p": 0.6}, [0, 0, 3 / 7, 4 / 7]),
        ({"min_p": 0.4}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"top_k": 3, "top_p": 0.7, "min_p": 0.1}, [0, 0, 3 / 7, 4 / 7]),
        ({"temperature": 1e-9}, [0, 0, 0, 1]),
        ({"logit_bias": {0: math.log(4)}, "bad_token_ids": (2,)}, [0.4, 0.2, 0, 0.4]),
    ],
)
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_distribution(params: dict[str, Any], expected: list[float], vary: str) -> None:
    """chi-square over 4,000 draws that differ by position, or by seed."""
    num_rows, rounds = 80, 50
    made = Bench(max_num_seqs=num_rows)
    sampling = SamplingParams(**params)
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(num_rows, 4)
    counts = [0, 0, 0, 0]
    for turn in range(rounds):
        for slot in range(num_rows):
            if vary == "seed":
                made.start(slot, sampling, [0], seed=turn * num_rows + slot)
            elif turn == 0:
                made.start(slot, sampling, [0], seed=slot << 40)
        for token_id in made.step(logits):
            counts[token_id] += 1
    draws = num_rows * rounds
    chi2 = 0.0
    for count, share in zip(counts, expected, strict=True):
        if share == 0:
            assert count == 0
        else:
            chi2 += (count - draws * share) ** 2 / (draws * share)
    assert chi2 < 18.5  # 3 degrees of freedom, p < 0.0004


def chi2_per_degree(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """In standard deviations; tokens of few expected draws count as one."""
    expected = counts.sum() * probs
    is_rare = expected < 10
    observed = torch.cat((counts[~is_rare], counts[is_rare].sum()[None]))
    expected = torch.cat((expected[~is_rare], expected[is_rare].sum()[None]))
    is_used = expected > 0
    assert observed[~is_used].sum() == 0
    chi2 = ((observed - expected)[is_used] ** 2 / expected[is_used]).sum().item()
    degrees = int(is_used.sum()) - 1
    return (chi2 - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("spread", [0.0, 1.5, 6.0])
def test_draws_over_several_groups_are_the_softmax(spread: float) -> None:
    """200,000 draws from 333 tokens: five groups and a part of one."""
    y = spread * torch.randn(333, generator=torch.Generator().manual_seed(1))
    y -= y.max()
    counts = torch.zeros(333, dtype=torch.float64)
    for seed in range(5):
        keys = noise_keys(torch.full((40_000,), seed), torch.arange(40_000))
        counts += torch.bincount(draw(y.expand(40_000, -1), keys), minlength=333)
    assert abs(chi2_per_degree(counts, y.double().softmax(0))) < 5


def test_a_draw_is_the_documented_formula() -> None:
    y = -torch.rand((4, 150), generator=torch.Generator().manual_seed(2))
    keys = noise_keys(torch.arange(4), torch.arange(4))
    for row, key in zip(y, keys.split(1), strict=True):
        scores = []
        for group, part in enumerate(row.split(64)):
            noise = gumbel_noise(key, torch.tensor([GROUPS + group])).item()
            scores.append(math.log(part.double().exp().sum().item()) + noise)
        first = 64 * scores.index(max(scores))
        ids = torch.arange(first, min(first + 64, 150))
        best = (row[ids] + gumbel_noise(key, ids)[0]).argmax()
        assert draw(row[None], key).tolist() == [first + int(best)]


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.6},
        {"top_p": 0.15},
        {"min_p": 0.2},
        {"top_k": 40},
        {"top_k": 90, "top_p": 0.8},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.1},
    ],
)
def test_second_draws_are_the_softmax_of_what_is_left(params: dict[str, Any]) -> None:
    """80,000 draws from 200 tokens, of which the filters drop up to nine in ten."""
    num_rows, rounds, vocab = 400, 200, 200
    made = Bench(vocab=vocab, max_num_seqs=num_rows)
    logits = 1.2 * torch.randn((1, vocab), generator=torch.Generator().manual_seed(4))
    for slot in range(num_rows):
        made.start(slot, SamplingParams(**params), [0], seed=slot)
    (group, *_) = made.sampler._make_groups(list(range(num_rows)), torch.arange(num_rows))
    size = len(group.host_rows)
    counts = torch.zeros(vocab, dtype=torch.float64)
    for turn in range(rounds):
        positions = torch.full((size,), turn)
        tokens = made.sampler._sample_group(group, logits.expand(size, -1), positions)
        counts += torch.bincount(tokens, minlength=vocab)
    values, order = logits.sort(dim=1, descending=True, stable=True)
    left = filter_sorted(
        scale(values, torch.ones(1)),
        torch.tensor([params.get("top_k", 0)]),
        torch.tensor([params.get("top_p", 1.0)], dtype=torch.float64),
        torch.tensor([params.get("min_p", 0.0)]),
    )
    probs = torch.zeros(vocab, dtype=torch.float64)
    probs[order[0]] = left[0].double().softmax(0)
    assert 1 < (probs > 0).sum() < 150
    assert abs(chi2_per_degree(counts, probs)) < 5


def test_a_second_draw_knows_nothing_of_the_first() -> None:
    """Two equal tokens are left, one of them in the group of what was dropped. With the numbers of
    the first draw the other would come in 56 of 100.
    """
    y = torch.full((1, 128), -INF)
    y[0, [0, 64]] = math.log(0.2)
    y[0, 1:61] = math.log(0.01)
    keys = noise_keys(torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64))
    drawn = draw(y.expand(20_000, -1), keys)
    left, ids = torch.zeros(1, 2), torch.tensor([[0, 64]]).expand(20_000, 2)
    tokens = draw_from_left(drawn, left, ids, keys)
    assert set(tokens.tolist()) == {0, 64}
    assert abs((tokens == 64).sum().item() - 10_000) < 5 * math.sqrt(20_000 / 4)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40, "min_p": 0.05},
    {"top_p": 0.7},
    {"top_k": 900, "top_p": 0.99},
    {"frequency_penalty": 1.0, "repetition_penalty": 1.2},
    {"temperature": 0, "logit_bias": {7: 3.0}, "min_tokens": 3},
]


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    """T10: alone, in a batch of eight kinds, and in another order, the same tokens."""
    steps, vocab = 12, 1000
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn((steps, len(KINDS), vocab), generator=generator)
    alone = []
    for kind, params in enumerate(KINDS):
        made = Bench(vocab=vocab)
        made.start(0, SamplingParams(**params), [1, 2, 3], seed=100 + kind)
        alone.append([made.step(logits[t, kind : kind + 1])[0] for t in range(steps)])
    for order in ([0, 1, 2, 3, 4, 5, 6, 7], [6, 2, 7, 0, 1, 5, 3, 4]):
        made = Bench(vocab=vocab)
        for slot, kind in enumerate(order):
            made.start(slot, SamplingParams(**KINDS[kind]), [1, 2, 3], seed=100 + kind)
        together = [made.step(logits[t, order]) for t in range(steps)]
        for row, kind in enumerate(order):
            assert [tokens[row] for tokens in together] == alone[kind], KINDS[kind]


def test_noise_of_a_token_does_not_depend_on_the_path() -> None:
    """Filters that drop nothing likely give the same draw as no filter."""
    logits = torch.full((1, 1000), -60.0)
    logits[0, [3, 500, 999]] = torch.tensor([1.0, 1.2, 0.8])
    drawn = []
    for params in (
        {},
        {"top_k": 30},
        {"top_p": 0.999999},
        {"min_p": 1e-6},
        {"logit_bias": {1: 0.1}},
    ):
        made = Bench(vocab=1000)
        made.start(0, SamplingParams(**params), [1], seed=9)
        drawn.append([made.step(logits)[0] for _ in range(20)])
    assert len(set(drawn[0])) == 3
    assert all(tokens == drawn[0] for tokens in drawn)


def test_a_row_of_nan_stays_alone() -> None:
    """Padding and broken rows: no reduction crosses rows, and what is no number is no id."""
    logits = 3 * torch.randn((4, 1000), generator=torch.Generator().manual_seed(2))
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"top_k": 5}, {}, {"top_p": 0.5}]
    for kind in kinds:
        results = []
        for poison in (False, True):
            made = Bench(vocab=1000)
            for slot in range(4):
                made.start(slot, SamplingParams(**kind), [1], seed=slot)
            rows = logits.clone()
            if poison:
                rows[1] = torch.nan
            results.append(made.step(rows))
        clean, poisoned = results
        assert poisoned[1] == -1
        assert [clean[i] for i in (0, 2, 3)] == [poisoned[i] for i in (0, 2, 3)]


FORBIDDING: list[dict[str, Any]] = [
    {"bad_token_ids": (0, 1, 2, 3)},
    {"bad_token_ids": (0, 1), "allowed_token_ids": (0, 1)},
    {"allowed_token_ids": (EOS,), "min_tokens": 2},
    {"allowed_token_ids": (2,), "stop_token_ids": (2,), "min_tokens": 1},
    {"allowed_token_ids": (1,), "bad_words": ((0, 1),)},
    {"allowed_token_ids": (1,), "bad_words": ((1,),)},
]


@pytest.mark.parametrize("kind", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}])
@pytest.mark.parametrize("forbids", FORBIDDING)
def test_when_everything_is_forbidden_nothing_comes_out(
    forbids: dict[str, Any], kind: dict[str, Any]
) -> None:
    made = Bench()
    made.start(0, SamplingParams(**kind, **forbids, presence_penalty=1), [0])
    made.start(1, SamplingParams(temperature=0, presence_penalty=1), [0])
    stuck, other = made.step(LOGITS.expand(2, 4))
    assert stuck == -1
    assert other == LOGITS.argmax().item()
    assert made.state.tokens[0, 1] == 0  # what a step in flight reads
    assert made.state.by_token.counts is not None
    assert made.state.by_token.counts[:2].sum(1).tolist() == [0, 1]


def test_a_grammar_that_allows_nothing_leaves_nothing() -> None:
    made = Bench()
    for slot in range(2):
        init = SlotInit(
            slot, array("i", [0]), [], SamplingParams(), 0, frozenset(), has_grammar=True
        )
        made.state.prepare(StepPlan(0, slot_inits=[init]), None)  # type: ignore[arg-type]
    masks: list[Any] = [np.zeros(1, np.int32), np.full(1, 1 << 2, np.int32)]
    slots = torch.arange(2)
    inputs = StepInputs(None, [0, 1], slots, torch.ones(2, dtype=torch.int64), masks)
    assert made.sampler.sample(LOGITS.expand(2, 4), [0, 1], inputs).tolist() == [-1, 2]


def test_plain_rows_bring_no_tables() -> None:
    made = Bench()
    for slot, kind in enumerate(({"temperature": 0}, {}, {"top_k": 2}, {"min_p": 0.1})):
        made.start(slot, SamplingParams(**kind), [0])
    made.step(LOGITS.expand(4, 4))
    tables = made.state.by_token
    assert tables.counts is tables.prompt_seen is tables.logit_bias is None


def test_groups_are_kept_while_the_same_slots_sample() -> None:
    made = Bench()
    for slot in range(3):
        made.start(slot, SamplingParams(temperature=0), [0])
    made.step(LOGITS.expand(3, 4))
    first = made.sampler._groups
    made.step(LOGITS.expand(3, 4))
    assert made.sampler._groups is first
    made.step(LOGITS.expand(2, 4), slots=[0, 2])
    assert made.sampler._groups is not first


@pytest.mark.parametrize(("spread", "width"), [(0.0, 20_000), (2.0, 4096), (8.0, 256)])
def test_a_nucleus_is_the_same_from_candidates_and_from_a_sort(spread: float, width: int) -> None:
    made = Bench(vocab=20_000)
    logits = spread * torch.randn((1, 20_000), generator=torch.Generator().manual_seed(3))
    y = scale(logits, torch.ones(1))
    top_p, none = torch.tensor([0.8], dtype=torch.float64), torch.tensor([0])
    found, ids = made.sampler._filter_nucleus(y, none, top_p, torch.zeros(1))
    order = y.sort(dim=1, descending=True, stable=True)
    mass = order.values.double().exp().cumsum(1)
    count = int((mass < 0.8 * mass[:, -1:]).sum()) + 1
    assert ids[0, : int((found > -INF).sum())].tolist() == order.indices[0, :count].tolist()
    assert ids.shape[1] == width


def test_widths_depend_on_the_row_alone() -> None:
    made = Bench(vocab=50_000)
    widths = {}
    for top_k in (1, 16, 17, 50, 1024, 1025, 50_000, -1):
        made.start(0, SamplingParams(top_k=top_k), [0])
        info = made.state.slots[0]
        assert info is not None
        widths[top_k] = group_key(info, 50_000).width
    assert widths == {
        1: 16, 16: 16, 17: 32, 50: 64, 1024: 1024, 1025: -2, 50_000: 0, -1: 0,
    }  # fmt: skip
