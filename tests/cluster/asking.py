"""Prompts for a `ReplicatedEngine` of scripted replicas, and their answers."""

from __future__ import annotations

import queue

import pytest

from nvcli.cluster.replicated_engine import ReplicatedEngine
from nvcli.engine.engine import Request
from nvcli.types import RequestOutput, SamplingParams
from tests.waiting import PATIENCE_S


def ask(engine: ReplicatedEngine, prompts: list[list[int]]) -> list[RequestOutput]:
    """The answers in the order of the prompts; each comes once."""
    answers: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=8)
        request = Request(
            request_id=f"r-{i}", prompt_token_ids=prompt, params=params, is_streaming=False
        )
        engine.submit(request, answers.put)
    found: dict[str, RequestOutput] = {}
    while len(found) < len(prompts):
        for output in answers.get(timeout=PATIENCE_S):
            assert output.request_id not in found, "an answer came twice"
            found[output.request_id] = output
    with pytest.raises(queue.Empty):
        answers.get(timeout=0.05)
    return [found[f"r-{i}"] for i in range(len(prompts))]


def prompts_of(count: int) -> list[list[int]]:
    return [[100 + i % 150, 20 + i // 150, 5, 6, 100 + i % 7] for i in range(count)]


def check(outputs: list[RequestOutput], prompts: list[list[int]]) -> None:
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.error is None
        assert list(output.token_ids)[:4] == prompt[-4:]
