"""SamplingParams refuses by name what is out of range or of another kind, and nothing else."""

from __future__ import annotations

import math

import pytest

from nvcli.errors import InvalidParameterError
from nvcli.types import MAX_INT, RequestOutput, SamplingParams, ToolCall, fold_outputs

WRONG: list[tuple[str, object]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 10**400),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", None),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 10**20),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("repetition_penalty", 2.5),
    ("repetition_penalty", 1e-300),  # 0 in float32
    ("repetition_penalty", -1e-300),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {1: -math.inf}),
    ("logit_bias", {1: 101}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", [1]),
    ("allowed_token_ids", ()),
    ("allowed_token_ids", (-1,)),
    ("allowed_token_ids", 5),
    ("bad_token_ids", (1.0,)),
    ("bad_token_ids", (-1,)),
    ("bad_words", ((),)),
    ("bad_words", (5,)),
    ("bad_words", ((1, -1),)),
    ("bad_words", ((1,),) * 2049),
    ("bad_words", ((1,) * 65,)),
    ("stop_token_ids", 3),
    ("stop_token_ids", (-1,)),
    ("stop", None),
    ("stop", 5),
    ("stop", ("",)),
    ("stop", (1,)),
    ("max_tokens", -1),
    ("max_tokens", 1.0),
    ("min_tokens", -1),
    ("min_tokens", 2**63),
    ("min_tokens", None),
    ("seed", 2**63),
    ("seed", "x"),
    ("n", 0),
    ("n", 129),
    ("n", None),
    ("best_of", 0),
    ("logprobs", 21),
    ("prompt_logprobs", -1),
    ("thinking_budget", -1),
    ("ignore_eos", "no"),
    ("skip_special_tokens", 1),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name
    assert name in caught.value.message
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", 2),
        ("top_k", -1),
        ("top_k", MAX_INT),
        ("top_p", 1),
        ("repetition_penalty", 2),
        ("repetition_penalty", 1e-20),
        ("max_tokens", 0),
        ("max_tokens", 2**40),
        ("seed", -(2**63 - 1)),
        ("logprobs", 0),
        ("logprobs", 20),
        ("thinking_budget", 0),
    ],
)
def test_the_ends_of_a_range_are_in_it(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value  # type: ignore[arg-type]


def test_values_that_contradict_each_other() -> None:
    with pytest.raises(InvalidParameterError, match="min_tokens must be at most max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(InvalidParameterError, match="best_of must be at least n"):
        SamplingParams(n=3, best_of=2)


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "thinking_budget", "top_k", "n"])
def test_a_number_that_is_too_large_is_told_the_bound(name: str) -> None:
    """To say "at least 0" of it would not tell what is wrong."""
    with pytest.raises(
        InvalidParameterError, match=f"^{name} must be a whole number from [01] to "
    ):
        SamplingParams(**{name: 10**20})
    if name != "n":
        low = 1 if name == "max_tokens" else 0
        rule = f"^{name} must be a whole number of at least {low}, got -2$"
        with pytest.raises(InvalidParameterError, match=rule):
            SamplingParams(**{name: -2})


def test_collections_are_kept_as_tuples() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[1, 2], bad_words=[[1, 2]])  # type: ignore[arg-type]
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
    assert params.bad_words == ((1, 2),)


def test_deltas_fold_to_the_whole() -> None:
    call = ToolCall(0, "call_1", "f", "")
    deltas = [
        RequestOutput(request_id="a", text="x", reasoning="r", token_ids=(1,)),
        RequestOutput(request_id="a", text="y", tool_calls=(call,), token_ids=(2,)),
        RequestOutput(request_id="a", tool_calls=(ToolCall(0, "", "", "{}"),), token_ids=(3,)),
    ]
    whole = fold_outputs(deltas)
    assert (whole.text, whole.reasoning, whole.token_ids) == ("xy", "r", (1, 2, 3))
    assert whole.tool_calls == (ToolCall(0, "call_1", "f", "{}"),)
    with pytest.raises(ValueError, match="at least one"):
        fold_outputs([])
