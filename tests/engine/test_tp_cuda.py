"""Tensor parallelism on two GPUs: the text of one, and an end when a rank dies in a collective."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from nvcli import LLM, SamplingParams
from nvcli.types import FinishReason
from tests.engine.test_tp_processes import is_alive, worker_pids
from tests.waiting import until

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PROMPTS = ["What is 3+4?", "Say hello.", "Name a colour.", "What is 12-5?"]


@pytest.mark.parametrize("is_eager", [False, True])
def test_text_equals_that_of_one_gpu(is_eager: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    found = []
    for size in (1, 2):
        with LLM(
            device="cuda", dtype="float32", tensor_parallel_size=size, enforce_eager=is_eager
        ) as llm:
            alone = [llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS]
            together = [output.token_ids for output in llm.generate(PROMPTS, params)]
            found.append((alone, together))
    assert found[1] == found[0]


def test_sampling_with_every_restriction_keeps_the_ranks_together() -> None:
    """Ranks that disagreed about a token would read other keys from then on, and drift apart."""
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=64, presence_penalty=0.5 * i)
        for i in range(4)
    ]
    found = []
    for size in (1, 2):
        with LLM(device="cuda", dtype="float32", tensor_parallel_size=size) as llm:
            found.append([output.token_ids for output in llm.generate(PROMPTS, params)])
    assert found[1] == found[0]


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
    until(lambda: not any(map(is_alive, pids)))
