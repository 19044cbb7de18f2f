"""The sampling fields that every endpoint shares, read from JSON into `SamplingParams` names.

Only what the client gave is returned: the caller lays it over flags, the checkpoint's
generation_config and Qwen3's values (`LLM.sampling`). Ranges are those of `SamplingParams`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvcli.errors import InvalidParameterError
from nvcli.types import MAX_N, SamplingParams, check_answer_limit

if TYPE_CHECKING:
    from nvcli.protocol.fields import Fields

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 4096
MAX_TOKENS = 2**31 - 1  # no context is longer: a limit above says the same

_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_INTEGERS = ("top_k", "min_tokens", "seed", "prompt_logprobs")
_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
_ID_LISTS = ("stop_token_ids", "allowed_token_ids")

SAMPLING_FIELDS = (
    *_NUMBERS,
    *_INTEGERS,
    *_FLAGS,
    *_ID_LISTS,
    "n",
    "stop",
    "logit_bias",
    "bad_words",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
)

_REFUSED = dict.fromkeys(
    ("logprob_token_ids", "stream_interval", "repetition_detection"), "is not supported"
)


def read_sampling(fields: Fields) -> dict[str, Any]:
    """The `SamplingParams` fields a request sets, without token limits and logprobs.

    Raises `InvalidParameterError` for a wrong type; ranges are checked by `check_sampling`.
    """
    values: dict[str, Any] = {}
    for name in _NUMBERS:
        values[name] = fields.number(name)
    for name in _INTEGERS:
        values[name] = fields.integer(name)
    for name in _FLAGS:
        values[name] = fields.flag(name)
    for name in _ID_LISTS:
        values[name] = fields.integers(name)
    values["n"] = fields.integer("n", 1, MAX_N)
    values["stop"] = _stops(fields)
    values["logit_bias"] = _logit_bias(fields)
    fields.refuse_given(_REFUSED)
    return {name: value for name, value in values.items() if value is not None}


def refuse_outputs(fields: Fields, values: dict[str, Any]) -> None:
    """Of APIs whose reply has one output and no place for the prompt's log-probabilities."""
    if values.pop("n", 1) != 1:
        fields.refuse("n", "there is one output here")
    if values.pop("prompt_logprobs", None) is not None:
        fields.refuse("prompt_logprobs", "cannot be given back here")


def read_token_limit(fields: Fields, *, may_be_zero: bool = False) -> int | None:
    """`max_completion_tokens`, or the older `max_tokens`; both and different is a contradiction.

    may_be_zero: the request is about the prompt, too, and may ask for nothing else.
    """
    new = read_limit(fields, "max_completion_tokens", may_be_zero=may_be_zero)
    old = read_limit(fields, "max_tokens", may_be_zero=may_be_zero)
    if new is not None and old is not None and new != old:
        fields.fail("max_completion_tokens", f"({new}) contradicts max_tokens ({old})")
    return old if new is None else new


def read_limit(fields: Fields, name: str, *, may_be_zero: bool = False) -> int | None:
    """One field that bounds the tokens of an answer, by whatever name its API has for it."""
    limit = fields.integer(name)
    if limit is None:
        return None
    if not (limit == 0 and may_be_zero):
        check_answer_limit(min(limit, MAX_TOKENS), fields.name(name))
    return min(limit, MAX_TOKENS)


def check_sampling(values: dict[str, Any]) -> None:
    """Raises `InvalidParameterError` for a value out of range or one that contradicts another."""
    if values:
        SamplingParams(**values)


def _stops(fields: Fields) -> tuple[str, ...] | None:
    value = fields.get("stop")
    if value is None:
        return None
    stops = (value,) if isinstance(value, str) else fields.texts("stop")
    assert stops is not None, "the field is there"
    if len(stops) > MAX_STOPS:
        fields.fail("stop", f"takes at most {MAX_STOPS} strings, got {len(stops)}")
    if any(stop == "" for stop in stops):
        fields.fail("stop", "must hold no empty string")
    if sum(map(len, stops)) > MAX_STOP_CHARACTERS:
        fields.fail("stop", f"takes at most {MAX_STOP_CHARACTERS:,} characters in all")
    return stops


def _logit_bias(fields: Fields) -> dict[int, float] | None:
    biases = fields.object("logit_bias")
    if biases is None:
        return None
    values: dict[int, float] = {}
    for key in biases.raw:
        if not (key.isascii() and key.isdecimal()) or len(key) > 10:
            raise InvalidParameterError(
                f"logit_bias keys must be token ids, got {key[:40]!r}", param="logit_bias"
            )
        bias = biases.number(key, -100, 100)
        if bias is not None:
            values[int(key)] = bias
    return values
