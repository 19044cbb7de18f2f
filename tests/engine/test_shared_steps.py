"""Whole runs of the engine in which rows share keys: the same text as without, on our kernels in
the interpreter with a stand-in for CUDA graphs (see `test_captured_steps`).
"""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from nvcli.engine.sequence import Sequence
from nvcli.engine.shared_steps import SharedSteps
from nvcli.engine.step import Row, StepPlan
from nvcli.types import SamplingParams
from tests.engine.test_captured_steps import (
    TOKENIZER_SIZE,
    captured_buckets,
    make_runner,
    used_buckets,
)
from tests.kernels.triton_testing import needs_triton, run_in_interpreter

MAX_NUM_SEQS = 6
PREFIX_LEN = 67  # tokens: one tile of keys, in 16 blocks of 4


def generate(
    runner: Any, depth: int, waves: int = 3
) -> tuple[list[tuple[list[int], list[Any]]], Any]:
    """Waves of requests, the first and the third with the same prefix, the second with another that
    takes its blocks. In each, members end one after the other, and a request shares nothing.

    -> token ids and log-probabilities of every sequence, and the scheduler.
    """
    from nvcli.engine.core import EngineCore

    rng = random.Random(7)
    found: dict[int, tuple[list[int], list[Any]]] = {}

    def consume(updates: list[Any]) -> None:
        for update in updates:
            assert update.error is None
            ids, logprobs = found.setdefault(update.seq.seq_id, ([], []))
            ids += update.token_ids
            logprobs += update.logprobs

    core = EngineCore(runner, consume, max_num_batched_tokens=24, depth=depth, watermark=0)
    first, second = (rng.choices(range(TOKENIZER_SIZE), k=PREFIX_LEN) for _ in range(2))
    for wave, prefix in enumerate((first, second, first)[:waves]):
        for i in range(7):
            own = rng.choices(range(TOKENIZER_SIZE), k=rng.randrange(1, 7))
            prompt = own if i == 2 else prefix + own
            if i == 5:
                prompt = prefix[:64]  # found in the cache to its last token
            params = SamplingParams(temperature=0.8 * (i % 2), logprobs=1)
            core.add(Sequence(10 * wave + i, array("i", prompt), params, 4 + i, seed=i))
        while core.has_unfinished:
            core.step()
    return [found[i] for i in sorted(found)], core.scheduler


def check_same_text_with_and_without() -> None:
    import tempfile

    from nvcli.engine import cuda_graph
    from nvcli.kernels import sampling, shared_prefix
    from tests.tiny import write_tiny_checkpoint

    folder = Path(tempfile.mkdtemp())
    write_tiny_checkpoint(folder, layers=1)
    options: dict[str, Any] = {"max_num_seqs": MAX_NUM_SEQS, "num_blocks": 30}
    plain, scheduler = generate(make_runner(folder, captured=False, **options), 0)
    assert scheduler.num_preemptions > 0
    assert scheduler.blocks.num_evictions > 3 * 16
    assert scheduler.blocks.num_hit_tokens > 10 * 64

    def assert_equal(runner: Any, depth: int, waves: int) -> Any:
        result, scheduler = generate(runner, depth, waves)
        for got, want in zip(result, plain, strict=waves == 3):
            assert got[0] == want[0]
            for ours, theirs in zip(got[1], want[1], strict=True):
                assert ours.token_id == theirs.token_id
                assert abs(ours.logprob - theirs.logprob) < 1e-4
        return scheduler

    # Attention, inputs and sampling on our kernels, in the interpreter; the rest is not at stake.
    sampling.CHUNK = 512
    shared_prefix.MIN_KEYS, shared_prefix.MIN_SPARED = 64, 1
    cuda_graph.MIN_SHARED_TOKENS = 16
    sizes: list[list[int]] = []  # of the groups, by step in which they were looked for
    usual = shared_prefix.SharedPrefixes.find

    def find(*args: Any) -> Any:
        groups = usual(*args)
        sizes.append([len(group.rows) for group in groups])
        return groups

    shared_prefix.SharedPrefixes.find = find  # type: ignore[method-assign]
    runner = make_runner(folder, captured=True, shares=True, **options)
    scheduler = assert_equal(runner, 1, waves=3)
    assert scheduler.num_preemptions > 0
    used = used_buckets(runner, shares=True)
    assert (MAX_NUM_SEQS, MAX_NUM_SEQS) in used, used
    assert len(used) > 1, "no mixed step shared keys"
    assert used_buckets(runner), "every step shared keys"
    assert {(4,), (5,), ()} <= set(map(tuple, sizes)), "no group that shrinks"
    assert len(sizes) < sum(b.graph.num_replays for b in captured_buckets(runner)) - 10

    sizes.clear()
    runner.graphs = None  # the same kernels, launched one by one
    assert_equal(runner, 0, waves=1)
    assert {(4,), (5,), ()} <= set(map(tuple, sizes))

    sizes.clear()
    shared_prefix.set_sharing(False)
    runner = make_runner(folder, captured=True, shares=True, **options)
    assert runner.graphs.shared is None
    assert_equal(runner, 1, waves=1)
    assert not sizes


@needs_triton
@pytest.mark.interpret
def test_the_same_text_with_and_without() -> None:
    run_in_interpreter("tests.engine.test_shared_steps", "check_same_text_with_and_without")


# --- when groups are looked for ------------------------------------------------------------------


class Prefixes:
    """Finds what it is told to; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[list[int]], list[int]]] = []
        self.groups: list[str] = ["a group"]
        self.filled: list[list[int]] = []

    def allocate(self, num_rows: int, device: object) -> Prefixes:
        return self

    def find(self, tables: list[list[int]], num_keys: list[int]) -> list[str]:
        self.asked.append((tables, num_keys))
        return self.groups

    def fill(self, work: object, groups: list[str], query_lens: list[int]) -> str:
        self.filled.append(query_lens)
        return "array"

    def send(self, array: str) -> None:
        assert array == "array"


def make_plan(*rows: tuple[int, int, int]) -> StepPlan:
    """rows: slot, start, tokens."""
    plan = StepPlan(0)
    for slot, start, n in rows:
        seq = Sequence(
            slot, array("i", [0] * 9), SamplingParams(), 9, 0, block_table=[7, 8, 10 + slot]
        )
        plan.rows.append(Row(seq, 0, slot, start, n, True))
    return plan


@needs_triton
@pytest.mark.torch
def test_groups_are_looked_for_when_rows_come_or_go_and_else_stay() -> None:
    prefixes: Any = Prefixes()
    steps = SharedSteps(prefixes, 8, torch.device("cpu"))
    decode = [(slot, 9, 1) for slot in range(5)]
    assert steps.update(make_plan(*decode), version=1)
    assert prefixes.asked == [([[7, 8, 10 + slot] for slot in range(5)], [10] * 5)]
    for step in range(3):
        assert steps.update(make_plan(*((slot, 10 + step, 1) for slot in range(5))), version=1)
    assert len(prefixes.asked) == len(prefixes.filled) == 1
    assert steps.update(make_plan(*decode), version=2)  # a slot has another owner
    assert len(prefixes.asked) == 2
    assert steps.update(make_plan(*decode[1:]), version=2)  # a member ended
    assert steps.update(make_plan(*decode[:0:-1]), version=2)  # the others in another order
    assert len(prefixes.asked) == len(prefixes.filled) == 4
    assert steps.update(make_plan(*decode, (5, 0, 6)), version=2)
    assert prefixes.asked[-1][0][5] == [], "a prompt shares nothing here"
    assert prefixes.filled[-1] == [1, 1, 1, 1, 1, 6]
    assert steps.update(make_plan((5, 6, 2), *decode), version=2)
    assert steps.update(make_plan((5, 8, 1), *decode), version=2)
    assert prefixes.filled[-2:] == [[2, 1, 1, 1, 1, 1], [1] * 6]
    assert len(prefixes.asked) == len(prefixes.filled) == 7
    assert not steps.update(make_plan(*decode[:3]), version=2)  # never enough for a group
    assert len(prefixes.asked) == 7
    prefixes.groups = []
    assert not steps.update(make_plan(*decode), version=3)
    assert not steps.update(make_plan(*decode), version=3)
    assert len(prefixes.asked) == 8
    assert len(prefixes.filled) == 7


# --- on a GPU ------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_text_on_cuda(monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str) -> None:
    """The built-in model in bfloat16, 48 questions behind one long text: *equal* to the text
    without sharing, with graphs and without, and when blocks are short.
    """
    from nvcli import LLM, Message
    from nvcli.kernels import shared_prefix
    from tests.engine.test_captured_steps_cuda import gap_at

    monkeypatch.setattr(shared_prefix, "MIN_SPARED", 1)
    sums = " ".join(f"{a} plus {b} is {a + b}." for a in range(3, 12) for b in range(5, 11))
    questions = [f"What is {a} plus {b}?" for a in range(20, 26) for b in range(30, 38)]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    prompts: list[list[int]] = []
    texts: dict[str, list[list[int]]] = {}
    for name, way in {
        "off": {},
        "on": {},
        "eager": {"enforce_eager": True},
        "preempted": {"num_blocks": 140},
    }.items():
        monkeypatch.setattr(shared_prefix, "_use_sharing", name != "off")
        options: dict[str, Any] = {"num_blocks": 2000, "kv_cache_dtype": kv_cache_dtype, **way}
        with LLM("demo", device="cuda", max_num_seqs=48, **options) as llm:
            if not prompts:
                prompts += [
                    llm.tokenizer.encode_chat([Message("system", sums), Message("user", question)])
                    for question in questions
                ]
                assert len(prompts[0]) > 400
            texts[name] = [list(output.token_ids) for output in llm.generate(prompts, params)]
            if name == "preempted":
                assert llm.stats().num_preemptions > 0
    for name, found in texts.items():
        parted = 0
        for prompt, ours, theirs in zip(prompts, found, texts["off"], strict=True):
            pairs = enumerate(zip(ours, theirs, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), None)
            if at is not None:
                parted += 1
                limit = 0.1 if kv_cache_dtype == "auto" else 0.5  # an fp8 key may land a step away
                assert gap_at(prompt, ours[: at + 1], theirs[at]) < limit, name
        assert parted <= len(prompts) // 4, name
