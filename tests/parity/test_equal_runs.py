"""The same request gives the same tokens and logprobs, however the engine came to them: prefix
cache, chunks, preemption, run-ahead, batch mates. Float32 on the CPU, so equal means equal ids and
logprobs to 1e-5 (T1 to T4, T10, T13).
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from nvcli.llm import LLM
from nvcli.types import FinishReason, RequestOutput, SamplingParams
from tests.parity.conftest import both_models

pytestmark = [pytest.mark.torch, both_models]

MakeLLM = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def assert_equal(left: list[RequestOutput], right: list[RequestOutput]) -> None:
    assert [o.token_ids for o in left] == [o.token_ids for o in right]
    assert [o.finish_reason for o in left] == [o.finish_reason for o in right]
    for a, b in zip(left, right, strict=True):
        assert (a.logprobs is None) == (b.logprobs is None)
        for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert x.logprob == pytest.approx(y.logprob, abs=1e-5)
            assert x.rank == y.rank
            assert [i for i, _ in x.top] == [i for i, _ in y.top]


@pytest.mark.parametrize("run_ahead", [False, True])
def test_t1_full_prefix_hit(make_llm: MakeLLM, run_ahead: bool) -> None:
    llm = make_llm(run_ahead=run_ahead)
    plain = make_llm(enable_prefix_caching=False)
    ids = prompt(1, 8)
    for tokens, cached in ((ids, 0), (ids, 7), ([*ids, 9], 8), (ids[:7], 4)):
        output = llm.generate(tokens, GREEDY)
        assert_equal(output, plain.generate(tokens, GREEDY))
        assert output[0].usage.cached_tokens == cached


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("budget", [5, 8, 64])
def test_t2_chunk_equals_whole(make_llm: MakeLLM, budget: int, run_ahead: bool) -> None:
    whole = make_llm(max_num_batched_tokens=256)
    chunked = make_llm(max_num_batched_tokens=budget, run_ahead=run_ahead)
    ids = prompt(2, 40)
    params = GREEDY.replace(prompt_logprobs=2)
    left, right = chunked.generate(ids, params), whole.generate(ids, params)
    assert_equal(left, right)
    assert left[0].prompt_logprobs is not None
    assert right[0].prompt_logprobs is not None
    assert len(left[0].prompt_logprobs) == 40
    for a, b in zip(left[0].prompt_logprobs[1:], right[0].prompt_logprobs[1:], strict=True):
        assert a is not None
        assert b is not None
        assert a.token_id == b.token_id
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5)


SAMPLED = SamplingParams(
    temperature=0.9,
    top_k=50,
    top_p=0.95,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    max_tokens=14,
    logprobs=2,
    seed=42,
    n=2,
)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_t3_preempted_equals_undisturbed(
    make_llm: MakeLLM, params: SamplingParams, run_ahead: bool
) -> None:
    tight = make_llm(num_blocks=10, run_ahead=run_ahead)
    ample = make_llm(num_blocks=1000)
    prompts = [prompt(i, 6) for i in range(6)]
    left = tight.generate(prompts, params)
    assert_equal(left, ample.generate(prompts, params))
    assert tight.stats().num_preemptions > 0
    assert ample.stats().num_preemptions == 0


@pytest.mark.parametrize("run_ahead", [False, True])
def test_t4_impossible_requests_fail_alone(make_llm: MakeLLM, run_ahead: bool) -> None:
    llm = make_llm(num_blocks=8, run_ahead=run_ahead)
    outputs = llm.generate(
        [prompt(1, 40), prompt(2, 8), prompt(3, 8)],
        [GREEDY, GREEDY.replace(max_tokens=40), GREEDY.replace(max_tokens=4)],
    )
    assert outputs[0].finish_reason is FinishReason.ERROR
    assert outputs[0].error is not None
    assert "40 tokens" in outputs[0].error
    assert outputs[1].finish_reason is FinishReason.LENGTH
    assert 4 < len(outputs[1].token_ids) <= 32 - 8 + 1
    assert outputs[2].finish_reason is FinishReason.LENGTH
    assert len(outputs[2].token_ids) == 4


@pytest.mark.parametrize("run_ahead", [False, True])
def test_t10_a_seed_decides_whatever_shares_the_batch(make_llm: MakeLLM, run_ahead: bool) -> None:
    seeded = SamplingParams(temperature=1.0, max_tokens=16, seed=42)
    other = SamplingParams(temperature=1.3, max_tokens=20)
    ids = prompt(5, 11)
    alone = make_llm().generate(ids, seeded)[0].token_ids
    llm = make_llm(run_ahead=run_ahead)
    for place in (0, 3, 7):
        prompts = [prompt(100 + i, 3 + 2 * i) for i in range(7)]
        params = [other] * 7
        prompts.insert(place, ids)
        params.insert(place, seeded)
        assert llm.generate(prompts, params)[place].token_ids == alone
    tight = make_llm(num_blocks=12, run_ahead=run_ahead)
    outputs = tight.generate([prompt(6, 9), prompt(7, 9), ids], [other, other, seeded])
    assert tight.stats().num_preemptions > 0
    assert outputs[2].token_ids == alone


def test_two_outputs_of_one_seed_differ_and_repeat(make_llm: MakeLLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, seed=7, n=3)
    first = make_llm().generate(prompt(1, 5), params)
    again = make_llm(max_num_batched_tokens=3).generate(prompt(1, 5), params)
    assert len({o.token_ids for o in first}) == 3
    assert [o.token_ids for o in first] == [o.token_ids for o in again]


@pytest.mark.parametrize("max_num_seqs", [3, 12, 20, 100])
def test_t13_every_batch_size(make_llm: MakeLLM, max_num_seqs: int) -> None:
    llm = make_llm(max_num_seqs=max_num_seqs, max_model_len=32)
    params = SamplingParams(temperature=0, max_tokens=3)
    prompts = [prompt(i, 2 + i % 5) for i in range(max_num_seqs + 2)]
    alone = [make_llm(max_model_len=32).generate(p, params)[0].token_ids for p in prompts[:6]]
    sizes = range(1, max_num_seqs + 3) if max_num_seqs <= 20 else (1, 64, 97, 98, 99, 100, 102)
    for size in sizes:
        outputs = llm.generate(prompts[:size], params)
        assert [o.token_ids for o in outputs][:6] == alone[:size]


def test_max_tokens_zero_is_empty_and_finishes(make_llm: MakeLLM) -> None:
    output = make_llm().generate(prompt(1, 6), SamplingParams(max_tokens=0))[0]
    assert output.token_ids == ()
    assert output.finish_reason is FinishReason.LENGTH


def test_prompt_of_the_whole_context_with_no_output_is_served(make_llm: MakeLLM) -> None:
    llm = make_llm(max_model_len=16)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    output = llm.generate(prompt(1, 16), params)[0]
    assert output.finish_reason is FinishReason.LENGTH
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 16
    refused = llm.generate(prompt(1, 16), SamplingParams())[0]
    assert refused.finish_reason is FinishReason.ERROR


def test_output_stops_at_the_context(make_llm: MakeLLM) -> None:
    output = make_llm(max_model_len=16).generate(prompt(1, 10), SamplingParams(temperature=0))[0]
    assert len(output.token_ids) == 6
    assert output.finish_reason is FinishReason.LENGTH


def test_two_engines_in_one_process_do_not_meet(make_llm: MakeLLM) -> None:
    left, right = make_llm(), make_llm(block_size=8)
    ids = prompt(3, 20)
    assert_equal(left.generate(ids, GREEDY), right.generate(ids, GREEDY))
