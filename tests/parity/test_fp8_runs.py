"""With an fp8 KV cache too, a request gives the same tokens however the engine came to them: every
token attends through the cache, the step's own included, and scales never change.

Steps of other shapes differ in the last bit of float32, and rarely that takes a key to the next of
256 values; so log-probabilities agree to `TOLERANCE` here, not to 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nvcli.errors import DeviceError
from nvcli.llm import LLM
from nvcli.types import RequestOutput, SamplingParams
from tests.parity.conftest import DEVICE
from tests.parity.test_equal_runs import GREEDY, SAMPLED, prompt

pytestmark = pytest.mark.torch

MakeLLM = Callable[..., LLM]
TOLERANCE = 2e-3


def assert_equal(left: list[RequestOutput], right: list[RequestOutput]) -> None:
    assert [o.token_ids for o in left] == [o.token_ids for o in right]
    for a, b in zip(left, right, strict=True):
        for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert x.logprob == pytest.approx(y.logprob, abs=TOLERANCE)


@pytest.mark.parametrize("budget", [5, 8, 64])
def test_chunk_equals_whole(make_llm: MakeLLM, budget: int) -> None:
    whole = make_llm(max_num_batched_tokens=256, kv_cache_dtype="fp8")
    chunked = make_llm(max_num_batched_tokens=budget, kv_cache_dtype="fp8", run_ahead=True)
    ids = prompt(2, 40)
    params = GREEDY.replace(prompt_logprobs=2)
    left, right = chunked.generate(ids, params), whole.generate(ids, params)
    assert_equal(left, right)
    for a, b in zip(left[0].prompt_logprobs or (), right[0].prompt_logprobs or (), strict=True):
        assert a is None or b is None or a.logprob == pytest.approx(b.logprob, abs=TOLERANCE)


def test_prefix_hit_equals_fresh(make_llm: MakeLLM) -> None:
    llm = make_llm(kv_cache_dtype="fp8")
    plain = make_llm(kv_cache_dtype="fp8", enable_prefix_caching=False)
    ids = prompt(1, 8)
    for tokens, cached in ((ids, 0), (ids, 7), ([*ids, 9], 8), (ids[:7], 4)):
        output = llm.generate(tokens, GREEDY)
        assert_equal(output, plain.generate(tokens, GREEDY))
        assert output[0].usage.cached_tokens == cached


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_preempted_equals_undisturbed(make_llm: MakeLLM, params: SamplingParams) -> None:
    tight = make_llm(num_blocks=10, kv_cache_dtype="fp8", run_ahead=True)
    ample = make_llm(num_blocks=1000, kv_cache_dtype="fp8")
    prompts = [prompt(i, 6) for i in range(6)]
    assert_equal(tight.generate(prompts, params), ample.generate(prompts, params))
    assert tight.stats().num_preemptions > 0


def test_it_is_a_quarter_of_float32_near_it_and_named(make_llm: MakeLLM) -> None:
    llm, exact = make_llm(kv_cache_dtype="fp8"), make_llm()
    assert llm.startup.kv_cache_dtype == "float8_e4m3fn"
    assert 4 * llm.startup.pool_bytes == exact.startup.pool_bytes
    params = GREEDY.replace(max_tokens=1, prompt_logprobs=0)

    def logprobs(one: LLM) -> torch.Tensor:
        found = one.generate(prompt(3, 60), params)[0].prompt_logprobs
        return torch.tensor([entry.logprob for entry in found or () if entry is not None])

    left, right = logprobs(llm), logprobs(exact)
    assert not torch.equal(left, right)
    assert (left - right).abs().mean() < 0.05


@pytest.mark.parametrize("name", ["fa2", "fa3", "triton"])
def test_a_backend_that_cannot_is_refused_by_name(make_llm: MakeLLM, name: str) -> None:
    if name == "triton" and DEVICE == "cuda":
        pytest.skip("it can, there")
    with pytest.raises(DeviceError, match=f"attention backend {name} cannot run"):
        make_llm(kv_cache_dtype="fp8", attention_backend=name)
