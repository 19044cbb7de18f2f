"""Sequences whose restrictions forbid every token: each ends alone, with an error."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nvcli.config import EngineConfig
from nvcli.engine.core import EngineCore
from nvcli.engine.model_runner import ModelRunner
from nvcli.engine.sequence import Sequence
from nvcli.errors import EngineError, RequestError
from nvcli.models.config import ModelConfig
from nvcli.types import FinishReason, SamplingParams
from tests.builders import Log, run
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.torch

VOCAB, EOS = 290, 2
PROMPT = [7, 250, 3, 99, 120, 5, 61, 65]
# Parameters, and how many tokens come before nothing is left.
STUCK: dict[str, tuple[dict[str, Any], int]] = {
    "allowed are bad": ({"allowed_token_ids": (9, 65), "bad_token_ids": (65, 9, 4)}, 0),
    "only EOS, too early": ({"allowed_token_ids": (EOS,), "min_tokens": 3}, 0),
    "all but EOS are bad, too early": (
        {"bad_token_ids": tuple(i for i in range(VOCAB) if i != EOS), "min_tokens": 1},
        0,
    ),
    "only a stop id": ({"allowed_token_ids": (9,), "stop_token_ids": (9,), "min_tokens": 1}, 0),
    "a bad word of the last token": ({"allowed_token_ids": (65,), "bad_words": ((65, 65),)}, 0),
    "a bad word of a sample": ({"allowed_token_ids": (66,), "bad_words": ((66, 66),)}, 1),
    "a bad word of two samples": ({"allowed_token_ids": (66,), "bad_words": ((66,) * 3,)}, 2),
}
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_p": 0.5, "prompt_logprobs": 1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(path)
    return path


def make_core(folder: Path, depth: int) -> tuple[EngineCore, Log]:
    config = EngineConfig(device="cpu", block_size=4, num_blocks=64, max_num_seqs=4)
    runner = ModelRunner(folder, ModelConfig.from_hf(folder), config, vocab_size=VOCAB)
    log = Log()
    core = EngineCore(runner, log, max_num_batched_tokens=64, depth=depth, vocab_size=VOCAB)
    return core, log


def make(seq_id: int, **params: Any) -> Sequence:
    eos = frozenset({EOS})
    return Sequence(
        seq_id, array("i", PROMPT), SamplingParams(**params), 8, seq_id, eos_token_ids=eos
    )


def check_stuck(log: Log, seq: Sequence, num_tokens: int) -> None:
    last = log.of(seq)[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert not last.token_ids
    assert not last.logprobs
    assert isinstance(last.error, RequestError)
    assert f"nothing may be sampled after {num_tokens} output tokens" in str(last.error)
    assert len(log.tokens(seq)) == num_tokens
    assert set(log.tokens(seq)) <= set(seq.params.allowed_token_ids or ())


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_it_ends_alone(folder: Path, depth: int, way: dict[str, Any]) -> None:
    core, log = make_core(folder, depth)
    alone = make(0, **way, ignore_eos=True)
    core.add(alone)
    run(core)
    expected = log.tokens(alone)

    core, log = make_core(folder, depth)
    good = make(0, **way, ignore_eos=True)
    stuck = [make(1 + i, **way, **params) for i, (params, _) in enumerate(STUCK.values())]
    for seq in (good, *stuck):
        core.add(seq)
    run(core)
    assert log.tokens(good) == expected
    assert log.of(good)[-1].error is None
    for seq, (_, num_tokens) in zip(stuck, STUCK.values(), strict=True):
        check_stuck(log, seq, num_tokens)
    core.scheduler.check()
    core.scheduler.check_idle()

    again = make(0, **way, ignore_eos=True)  # in a slot and blocks of one that ended
    core.add(again)
    run(core)
    assert log.tokens(again) == expected


@pytest.mark.parametrize("depth", [0, 1])
def test_logits_that_are_no_numbers_are_not_the_requests_fault(folder: Path, depth: int) -> None:
    core, log = make_core(folder, depth)
    compute = core._device.model.compute_logits  # type: ignore[attr-defined]
    broken: list[int] = []

    def compute_logits(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = compute(hidden)
        broken.append(len(broken))
        return logits if len(broken) != 3 else torch.full_like(logits, torch.nan)

    core._device.model.compute_logits = compute_logits  # type: ignore[attr-defined]
    ways = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.5}, {"presence_penalty": 1.0}]
    seqs = [make(i, **way, ignore_eos=True) for i, way in enumerate(ways)]
    for seq in seqs:
        core.add(seq)
    run(core)
    for seq in seqs:
        last = log.of(seq)[-1]
        assert last.finish_reason is FinishReason.ERROR
        assert isinstance(last.error, EngineError)
        assert str(last.error).startswith("the model's logits after 2 output tokens are no numbers")
        assert len(log.tokens(seq)) == 2
    core.scheduler.check_idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_nor_are_they_where_its_restrictions_leave_a_token(folder: Path, depth: int) -> None:
    core, log = make_core(folder, depth)
    compute = core._device.model.compute_logits  # type: ignore[attr-defined]
    core._device.model.compute_logits = lambda hidden, out=None: torch.full_like(  # type: ignore[attr-defined]
        compute(hidden), torch.nan
    )
    last_id = np.zeros(-(-VOCAB // 32), np.int32)
    last_id[31 // 32] = np.int32(-(2**31))  # the sign is id 31
    restrictions: list[tuple[dict[str, Any], Any]] = [
        ({"min_tokens": 3}, None),
        ({"bad_token_ids": (5,)}, None),
        ({"bad_words": ((5,), (6, 7))}, None),
        ({"allowed_token_ids": (64, 65), "bad_token_ids": (64,)}, None),
        ({}, last_id),
        ({"allowed_token_ids": (30, 31)}, last_id),
    ]
    seqs = []
    for i, (params, mask) in enumerate(restrictions):
        seq = make(i, **params)
        if mask is not None:
            seq.has_grammar, seq.gate, seq.mask = True, 0, mask
        seqs.append(seq)
        core.add(seq)
    stuck = make(len(seqs), allowed_token_ids=(30, 32))
    stuck.has_grammar, stuck.gate, stuck.mask = True, 0, last_id
    core.add(stuck)
    run(core)
    for seq in seqs:
        error = log.of(seq)[-1].error
        assert isinstance(error, EngineError), (seq.seq_id, error)
        assert "no numbers" in str(error)
    check_stuck(log, stuck, 0)
    core.scheduler.check_idle()


@pytest.mark.parametrize("pools", [(), (5, 6)])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_pooled_is_numbers_or_an_error(
    folder: Path, pools: tuple[int, ...], wrong: float
) -> None:
    core, log = make_core(folder, 1)
    good = make(0)
    good.pools, good.max_output_tokens = pools, 0
    core.add(good)
    run(core)
    assert log.of(good)[-1].error is None
    assert log.of(good)[-1].pooled

    forward = core._device.model.forward  # type: ignore[attr-defined]
    core._device.model.forward = lambda *args, **kwargs: torch.full_like(  # type: ignore[attr-defined]
        forward(*args, **kwargs), wrong
    )
    bad = make(1)
    bad.pools, bad.max_output_tokens = pools, 0
    core.add(bad)
    run(core)
    last = log.of(bad)[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, EngineError)
    assert last.pooled is None
    core.scheduler.check_idle()


def spoil(core: EngineCore, token_id: int | slice, value: float) -> None:
    """These logits of every position are this."""
    model = core._device.model  # type: ignore[attr-defined]
    compute = model.compute_logits

    def spoiled(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden).clone()
        logits[:, token_id] = value
        return logits

    model.compute_logits = spoiled


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("token_id", [slice(None), 5])
@pytest.mark.parametrize(
    ("asked", "limit"), [("prompt_logprobs", 0), ("prompt_logprobs", 8), ("logprobs", 8)]
)
def test_logprobs_are_numbers_or_an_error(
    folder: Path, asked: str, token_id: int | slice, limit: int, depth: int
) -> None:
    core, log = make_core(folder, depth)
    spoil(core, token_id, torch.nan)
    seq = make(0, **{asked: 2})
    seq.max_output_tokens = limit
    core.add(seq)
    run(core)
    (last,) = log.of(seq)
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, EngineError)
    assert "are no numbers" in str(last.error)
    assert not [*last.logprobs, *last.prompt_logprobs, *last.token_ids]
    core.scheduler.check_idle()


def test_a_probability_of_zero_is_a_number(folder: Path) -> None:
    core, log = make_core(folder, 1)
    spoil(core, PROMPT[2], -torch.inf)
    seq = make(0, prompt_logprobs=1, logprobs=1)
    core.add(seq)
    run(core)
    assert log.of(seq)[-1].error is None
    assert log.of(seq)[0].prompt_logprobs[1].logprob == -np.inf


@pytest.mark.parametrize("depth", [0, 1])
def test_a_grammar_that_allows_nothing(folder: Path, depth: int) -> None:
    core, log = make_core(folder, depth)
    seq = make(0, logprobs=0)
    seq.has_grammar, seq.gate, seq.mask = True, 0, np.zeros(-(-VOCAB // 32), np.int32)
    core.add(seq)
    run(core)
    check_stuck(log, seq, 0)
    core.scheduler.check_idle()


def test_the_sampling_kernel_leaves_grammars_to_others(folder: Path) -> None:
    """What it takes itself, it tests itself: see `tests/kernels/test_sampling_kernels.py`."""
    from nvcli.engine.step import SlotInit, StepPlan

    core, _ = make_core(folder, 0)
    state = core._device.state  # type: ignore[attr-defined]
    for kind, has_grammar in (({}, True), ({"bad_words": ((1, 2),)}, False)):
        init = SlotInit(
            0, array("i", PROMPT), [], SamplingParams(**kind), 0, frozenset({EOS}), has_grammar
        )
        state.apply_deltas(StepPlan(0, slot_inits=[init]))
        assert not state.slots[0].features.fits_kernel
        assert state.params_i[0, 4:6].tolist() == [0, 0]
