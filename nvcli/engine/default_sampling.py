"""Sampling parameters where a caller names none: what the model's makers recommend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvcli.errors import InvalidParameterError, meant
from nvcli.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

# What Qwen recommends for Qwen3 (model cards): with thinking, and without.
THINKING_SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}
PLAIN_SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0}


def recommended_sampling(
    checkpoint: Mapping[str, Any], *, can_think: bool, enable_thinking: bool
) -> dict[str, Any]:
    """The checkpoint's generation_config over Qwen3's values. One that holds the values for
    thinking gets those for plain answers when thinking is off.
    """
    values = {**THINKING_SAMPLING, **checkpoint}
    is_recommended = all(values[k] == v for k, v in THINKING_SAMPLING.items())
    if can_think and is_recommended and not enable_thinking:
        values.update(PLAIN_SAMPLING)
    return values


def make_sampling(recommended: Mapping[str, Any], overrides: Mapping[str, Any]) -> SamplingParams:
    """The overrides that are not None, over what is recommended.

    Raises `InvalidParameterError` for an unknown name or a value out of range.
    """
    known = SamplingParams.__dataclass_fields__
    for name in overrides:
        if name not in known:
            raise InvalidParameterError(
                f"there is no sampling parameter {name!r}", hint=meant(name, known), param=name
            )
    return SamplingParams(
        **{**recommended, **{k: v for k, v in overrides.items() if v is not None}}
    )


def check_params(params: object) -> None:
    """Raises `InvalidParameterError` for what is neither `SamplingParams` nor None."""
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidParameterError(
            f"params must be SamplingParams, got {type(params).__name__}",
            hint="Make them with llm.sampling(temperature=0).",
            param="params",
        )
