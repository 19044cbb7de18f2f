"""`benchmarks.attention_accuracy`: what counts as near enough."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import attention_accuracy
from benchmarks.attention_accuracy import distances, is_close
from benchmarks.kv_accuracy import Side


def side(logprobs: list[float], answers: list[tuple[int, ...]], of: list[list[float]]) -> Side:
    return Side("bfloat16", "bfloat16", "torch", logprobs, [0] * len(logprobs), answers, of)


EXACT = side([-1.0, -2.0], [(1, 2, 3), (4, 5, 6)], [[-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0]])


def test_an_answer_counts_up_to_where_it_leaves_the_exact_one() -> None:
    answers = [(1, 9, 3), (4, 5, 6)]
    found = distances(side([-1.5, -2.0], answers, [[-1.2, -8, -9], [-2, -2, -2.2]]), EXACT)
    assert found == {
        "prompts": pytest.approx(0.25),
        "answers": pytest.approx(0.1),
        "answer_tokens": 4,
    }


@pytest.mark.parametrize(
    ("prompts", "answers", "tokens", "expected"),
    [
        (0.1, 0.2, 40, True),
        (0.199, 0.399, 40, True),
        (0.21, 0.2, 40, False),
        (0.1, 0.41, 40, False),
        (0.0, 0.0, 0, False),  # every answer differs at once: nothing was compared
    ],
)
def test_twice_as_far_is_the_most(
    prompts: float, answers: float, tokens: int, expected: bool
) -> None:
    plain = {"prompts": 0.1, "answers": 0.2, "answer_tokens": 40}
    found = {"prompts": prompts, "answers": answers, "answer_tokens": tokens}
    assert is_close(found, plain) is expected


def test_fa2_is_measured_with_blocks_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        attention_accuracy,
        "run_side",
        lambda args, cache, **more: asked.append((args.attention_backend, args.dtype, more)),
    )
    for backend in ("fa3", "fa2"):
        attention_accuracy.side_of(argparse.Namespace(dtype="float32"), backend, "bfloat16")
    assert asked == [("fa3", "bfloat16", {}), ("fa2", "bfloat16", {"block_size": 256})]
