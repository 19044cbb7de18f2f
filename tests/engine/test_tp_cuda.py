"""Tensor parallelism on two GPUs: the text of one, and an end when a rank dies in a collective."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

from nvcli import LLM, SamplingParams
from nvcli.types import FinishReason
from tests.engine.test_tp_processes import worker_pids
from tests.waiting import is_running, until

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PROMPTS = ["What is 3+4?", "Say hello.", "Name a colour.", "What is 12-5?"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
SAMPLED = [
    SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=64, presence_penalty=0.5 * i)
    for i in range(4)
]


def texts(size: int, *, sums: str = "", **options: Any) -> list[Any]:
    """Ids, alone, together and sampled: ranks that disagreed about a token would read other keys
    from then on, and drift apart.  sums: how the report about them begins
    """
    with LLM(device="cuda", tensor_parallel_size=size, **options) as llm:
        assert llm.startup.all_reduce.startswith(sums)
        assert (llm.startup.num_graphs > 0) == (
            llm.startup.attention_backend == "triton" and not options.get("enforce_eager")
        )
        alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]
        together = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
        sampled = [output.token_ids for output in llm.generate(PROMPTS, SAMPLED)]
        return [alone, together, sampled]


def test_text_equals_that_of_one_gpu() -> None:
    assert texts(2, dtype="float32", sums="ours") == texts(1, dtype="float32")


def test_captured_text_equals_text_that_is_not() -> None:
    """But for near ties: a captured step is padded, so a library may round in another way."""
    captured = texts(2, dtype="bfloat16", sums="ours")
    eager = texts(2, dtype="bfloat16", sums="ours", enforce_eager=True)
    same = [
        a == b
        for these, those in zip(captured, eager, strict=True)
        for a, b in zip(these, those, strict=True)
    ]
    assert sum(same) >= 0.8 * len(same)


def test_text_does_not_depend_on_who_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, where the norm is a kernel of its own: in the deterministic mode."""
    ours = texts(2, dtype="bfloat16", deterministic=True, sums="ours")
    monkeypatch.setenv("NVCLI_ALL_REDUCE", "nccl")
    assert ours == texts(2, dtype="bfloat16", deterministic=True, sums="NCCL")


def test_a_killed_rank_is_one_error() -> None:
    llm = LLM(device="cuda", tensor_parallel_size=2)
    pids = worker_pids(llm)
    params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True)
    stream = llm.stream([5, 6, 7], params)
    next(stream)
    start = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    last = list(stream)[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "the engine stopped: the process of rank 1 of 2 was ended by SIGKILL"
    assert time.monotonic() - start < 15
    llm.close()
    until(lambda: not any(map(is_running, pids)))
    assert torch.ones(3, device="cuda").sum().item() == 3  # this process can go on with the GPU
