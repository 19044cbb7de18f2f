"""Captured steps at the ends of what a request may ask, and through what may happen to it: the ids
are those of the eager loop without any of it. As in `test_captured_steps`, in the interpreter.
"""

from __future__ import annotations

import random
import tempfile
from array import array
from pathlib import Path
from typing import Any

import pytest

from tests.engine import test_captured_steps as captured
from tests.kernels.triton_testing import needs_triton, run_in_interpreter

VOCAB = captured.TOKENIZER_SIZE
LAST_SEED = 2**63 - 1
# As `SamplingParams` has them; GRAMMAR beside them masks every token of the output.
GRAMMAR = "grammar"
KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 5e-324, "top_p": 0.5},  # 0 in float32
    {"temperature": 2.0, "top_p": 5e-324, "logprobs": 0},
    {"temperature": 2.0, "min_p": 1.0},
    {"temperature": 1.0, "top_k": VOCAB - 1, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 2**31 - 1, "min_p": 1e-300},
    {"temperature": 2.0, "repetition_penalty": 2.0, "presence_penalty": -2.0},
    {"temperature": 1.0, "repetition_penalty": 1e-20, "frequency_penalty": 2.0, "top_k": 3},
    {"temperature": 0.7, "logit_bias": {0: 100.0, VOCAB - 1: -100.0, 7: 100.0}},
    {"temperature": 0.7, "allowed_token_ids": (0, VOCAB - 1), "logprobs": 20},
    {"temperature": 0.5, "min_tokens": 3, "stop_token_ids": tuple(range(100, 130))},  # over 16 ids
    {"temperature": 0.9, "bad_words": ((3,), tuple(range(64)))},
    {"temperature": 1.0, "prompt_logprobs": 5},
    {"temperature": 1.0, GRAMMAR: True, "logprobs": 2},
    {"temperature": 0.0, GRAMMAR: True, "repetition_penalty": 1.5},
]
SEEDS = (LAST_SEED, -LAST_SEED, 0, -1)


def make_sequences(block_size: int) -> list[Any]:
    """Prompts of whole blocks, some shared; every third request has two outputs."""
    from nvcli.engine.sequence import Sequence
    from nvcli.types import SamplingParams

    rng = random.Random(0)
    shared = rng.choices(range(VOCAB), k=2 * block_size)
    found = []
    for i, kind in enumerate(KINDS):
        own = rng.choices(range(VOCAB), k=(block_size, 1, block_size + 1)[i % 3])
        prompt = shared if i % 4 == 0 else shared[:block_size] + own if i % 4 == 1 else own
        params = SamplingParams(**{name: kind[name] for name in kind if name != GRAMMAR})
        for index in range(2 if i % 3 == 0 else 1):
            seed = SEEDS[(i + index) % len(SEEDS)]
            ids, most = array("i", prompt), 3 + i % 4
            seq = Sequence(10 * i + index, ids, params, most, seed, priority=i % 2)
            seq.has_grammar = GRAMMAR in kind
            seq.gate = 0 if seq.has_grammar else None
            found.append(seq)
    return found


def set_mask(seq: Any) -> None:
    """Seven ids that follow from the output so far."""
    import numpy as np

    if not seq.has_grammar:
        return
    rng = random.Random(sum(seq.output_token_ids) + len(seq.output_token_ids))
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for token_id in rng.choices(range(VOCAB), k=7):
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    seq.mask = words.view(np.int32)


def run(runner: Any, depth: int, *, aborts: bool) -> tuple[dict[int, list[Any]], Any]:
    """-> by sequence: ids, log-probabilities, the prompt's, and how it ended; and the scheduler."""
    from nvcli.engine.core import EngineCore

    rng = random.Random(1)
    found: dict[int, list[Any]] = {}

    def consume(updates: list[Any]) -> None:
        for update in updates:
            ids, logprobs, of_prompt, _ = entry = found.setdefault(
                update.seq.seq_id, [[], [], [], 0]
            )
            ids += update.token_ids
            logprobs += update.logprobs
            of_prompt += update.prompt_logprobs
            entry[3] = update.finish_reason
            assert update.error is None
            set_mask(update.seq)

    budget = 2 * runner.block_size + 1
    core = EngineCore(runner, consume, max_num_batched_tokens=budget, depth=depth)
    sequences = make_sequences(runner.block_size)
    for seq in sequences:
        set_mask(seq)
        core.add(seq)
        for _ in range(rng.randrange(2)):
            core.step()
    while core.has_unfinished:
        core.step()
        core.scheduler.check()
        running = [seq for seq in sequences if not seq.is_finished]
        if aborts and running and rng.random() < 0.1:
            core.abort(rng.choice(running))
    return found, core.scheduler


def check(max_num_seqs: int, block_size: int = 4, least_buckets: int = 2, **options: Any) -> None:
    from nvcli import kernels
    from nvcli.kernels import sampling
    from nvcli.types import FinishReason
    from tests.tiny import write_tiny_checkpoint

    captured.P = block_size
    folder = Path(tempfile.mkdtemp())
    write_tiny_checkpoint(folder, max_position_embeddings=1024)
    # A context that is no whole number of blocks.
    limits = {"max_num_seqs": max_num_seqs, "max_model_len": 9 * block_size + 1}
    eager = captured.make_runner(folder, captured=False, **limits)
    plain, scheduler = run(eager, 0, aborts=False)
    assert scheduler.num_preemptions == 0
    kernels._use_triton = lambda x: True
    sampling.CHUNK = 512
    runner = captured.make_runner(folder, captured=True, buckets=(16,), **limits, **options)
    got, scheduler = run(runner, 1, aborts=True)
    assert scheduler.num_preemptions > 0 or "num_blocks" not in options
    assert len(captured.used_buckets(runner)) >= least_buckets
    num_aborted = 0
    for seq_id, (ids, logprobs, of_prompt, reason) in got.items():
        whole = plain[seq_id]
        if reason is FinishReason.ABORT:
            num_aborted += 1
        else:
            assert len(ids) == len(whole[0]), (seq_id, ids, whole[0])
            assert len(of_prompt) == len(whole[2])
        assert ids == whole[0][: len(ids)], (seq_id, ids, whole[0])
        for ours, theirs in ((logprobs, whole[1]), (of_prompt, whole[2])):
            for one, other in zip(ours, theirs, strict=False):
                assert one.token_id == other.token_id
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert 0 < num_aborted < len(got) // 2


def check_few_blocks() -> None:
    check(5, least_buckets=4, num_blocks=8)


def check_one_at_a_time() -> None:
    check(1)


def check_large_blocks() -> None:
    check(7, block_size=64)


@needs_triton
@pytest.mark.interpret
def test_ids_are_those_of_the_eager_loop() -> None:
    run_in_interpreter("tests.engine.test_captured_extremes", "check_few_blocks")


@needs_triton
@pytest.mark.soak
@pytest.mark.parametrize("case", ["check_one_at_a_time", "check_large_blocks"])
def test_ids_with_other_batches_and_blocks(case: str) -> None:
    run_in_interpreter("tests.engine.test_captured_extremes", case)
