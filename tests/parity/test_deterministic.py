"""`--deterministic`: the same ids and the same bits, however the engine came to them.

On the CPU in float32 by default; `NVCLI_TEST_DEVICE=cuda` runs the same on a GPU, where a test of
its own does so on the built-in model in bfloat16.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from nvcli.errors import DeviceError, UsageError
from nvcli.llm import LLM
from nvcli.types import RequestOutput, SamplingParams
from tests.parity.conftest import DEVICE, both_models

pytestmark = pytest.mark.torch

MakeLLM = Callable[..., LLM]
KINDS = [
    SamplingParams(temperature=0, max_tokens=10, logprobs=2),
    SamplingParams(temperature=0.9, max_tokens=10, seed=5, logprobs=2),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, max_tokens=10, seed=6, logprobs=1),
    SamplingParams(
        temperature=1.1, top_p=0.8, presence_penalty=0.6, max_tokens=10, seed=7, logprobs=0
    ),
]
WAYS: dict[str, dict[str, Any]] = {
    "budget 5": {"max_num_batched_tokens": 5},
    "budget 17, run-ahead": {"max_num_batched_tokens": 17, "run_ahead": True},
    "one at a time": {"max_num_seqs": 1},
    "no prefix cache": {"enable_prefix_caching": False},
    "preempted": {"num_blocks": 24, "max_num_seqs": 8},
}


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = rng.choices(range(256), k=13)
    found = [rng.choices(range(256), k=rng.randrange(1, 30)) for _ in range(4)]
    return [shared + p if i % 2 else p for i, p in enumerate(found)]


def bits(outputs: list[RequestOutput]) -> list[Any]:
    """Ids; on the CPU log-probabilities too, which on a GPU come from PyTorch."""
    if DEVICE != "cpu":
        return [o.token_ids for o in outputs]
    return [(o.token_ids, [(x.logprob, x.top) for x in o.logprobs or ()]) for o in outputs]


@both_models
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_the_same_bits_in_every_way(make_llm: MakeLLM, kv_cache_dtype: str) -> None:
    dtype = "float32" if DEVICE == "cpu" else "bfloat16"
    options = {"deterministic": True, "kv_cache_dtype": kv_cache_dtype, "dtype": dtype}
    whole = make_llm(**options)
    assert whole.startup.deterministic
    want = bits(whole.generate(prompts(), KINDS))
    assert bits(whole.generate(prompts(), KINDS)) == want, "from the prefix cache"
    assert bits(whole.generate(prompts()[::-1], KINDS[::-1])) == want[::-1], "in another order"
    for name, way in WAYS.items():
        llm = make_llm(**options, **way)
        assert bits(llm.generate(prompts(), KINDS)) == want, name
        assert (llm.stats().num_preemptions > 0) == (name == "preempted")


@both_models
def test_it_is_the_same_model(make_llm: MakeLLM) -> None:
    """On the CPU in float32, to the token; a GPU takes 16 bits here: up to rounding."""
    dtype, tolerance = ("float32", 1e-4) if DEVICE == "cpu" else ("bfloat16", 0.1)
    params = KINDS[0].replace(prompt_logprobs=1)
    exact, plain = (
        make_llm(deterministic=on, dtype=dtype).generate(prompts(), params) for on in (True, False)
    )
    for a, b in zip(exact, plain, strict=True):
        assert a.token_ids == b.token_ids or DEVICE == "cuda"
        for x, y in zip(a.prompt_logprobs or (), b.prompt_logprobs or (), strict=True):
            assert x is None or y is None or x.logprob == pytest.approx(y.logprob, abs=tolerance)


def test_backends_that_are_not_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from nvcli.kernels.attention import select_backend

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda, options = torch.device("cuda"), {"head_dim": 128, "block_size": 16}
    for name in ("torch", "fa2", "fa3"):
        with pytest.raises(DeviceError, match=f"backend {name} is not deterministic"):
            select_backend(name, device=cuda, dtype=torch.bfloat16, deterministic=True, **options)
    with pytest.raises(DeviceError, match="it needs float16, bfloat16 or fp8, not float32"):
        select_backend("auto", device=cuda, dtype=torch.float32, deterministic=True, **options)


def test_the_option_is_checked() -> None:
    with pytest.raises(UsageError, match="deterministic must be True or False"):
        LLM(deterministic=1)


@pytest.mark.gpu
def test_exact_ids_on_cuda() -> None:
    """The built-in model in bfloat16: alone, in batches, in chunks, cached, preempted, captured and
    not. Every text is the same, to the id.
    """
    rng = random.Random(0)
    shared = [rng.randrange(300, 2000) for _ in range(70)]
    requests = [
        (shared if i % 3 == 0 else [])
        + [rng.randrange(300, 2000) for _ in range(rng.randrange(1, 200))]
        for i in range(60)
    ]
    params = [
        SamplingParams(
            temperature=(0, 0.8, 1.0)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            seed=i,
            max_tokens=48,
            ignore_eos=True,
        )
        for i in range(60)
    ]
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "eager": {"enforce_eager": True},
        "run-ahead off": {"run_ahead": False},
        "4 at once": {"max_num_seqs": 4},
        "budget 64": {"max_num_batched_tokens": 64},
        "budget 300": {"max_num_batched_tokens": 300},
        "no cache": {"enable_prefix_caching": False},
        "preempted": {"num_blocks": 120},
    }
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, way in ways.items():
        options = {"max_model_len": 512, **way}
        with LLM("demo", device="cuda", dtype="bfloat16", deterministic=True, **options) as llm:
            found[name] = [tuple(o.token_ids) for o in llm.generate(requests, params)]
            if name == "plain":
                found["cached"] = [tuple(o.token_ids) for o in llm.generate(requests, params)]
                found["alone"] = [
                    tuple(llm.generate(r, p)[0].token_ids)
                    for r, p in zip(requests[:12], params, strict=False)
                ] + found["plain"][12:]
            if name == "preempted":
                assert llm.stats().num_preemptions > 0
    for name, texts in found.items():
        assert texts == found["plain"], name
