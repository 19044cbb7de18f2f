"""`POST /v1/completions`: the request, checked without a model. Prompts are continued."""

from __future__ import annotations

from dataclasses import dataclass

from nvcli.protocol.fields import Fields, are_integers
from nvcli.protocol.sampling import check_sampling, read_sampling, read_token_limit
from nvcli.protocol.shared import TextRequest, read_options
from nvcli.protocol.structured import read_structure
from nvcli.types import MAX_LOGPROBS, MAX_N

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 2048

_ACCEPTED = ("user", "request_id", "rid", "session_id", "add_special_tokens")

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(TextRequest):
    """What a completion request asks for, one prompt or several."""

    prompts: tuple[str | TokenIds, ...]
    logprobs: int | None = None
    has_prompt_logprobs: bool = False  # asked for by that name


def parse_completion(body: object, *, is_strict: bool = False) -> CompletionRequest:
    """Read a request body. Raises `InvalidParameterError` and `UnsupportedFieldError`."""
    fields = Fields(body)
    fields.alone("prompt", "messages", "input")
    prompts = read_prompts(fields, "prompt", "prompts")
    sampling = read_sampling(fields)
    echo = fields.flag("echo") or False
    limit = read_token_limit(fields, may_be_zero=echo or "prompt_logprobs" in sampling)
    if limit is not None:
        sampling["max_tokens"] = limit
    best_of = fields.integer("best_of", 1, MAX_N)
    if best_of is not None:
        if best_of < sampling.get("n", 1):
            fields.fail("best_of", f"must be at least n ({sampling['n']})")
        if fields.flag("stream") and best_of > sampling.get("n", 1):
            fields.fail("best_of", "cannot be streamed")
        sampling["best_of"] = best_of
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    if logprobs is not None:
        sampling["logprobs"] = logprobs
        if echo:
            sampling.setdefault("prompt_logprobs", logprobs)
    check_sampling(sampling)
    if fields.text("suffix"):
        fields.refuse("suffix", "is not supported; this model fills in no middle")
    fields.ignore(_ACCEPTED)
    return CompletionRequest(
        prompts=prompts,
        sampling=sampling,
        structure=read_structure(fields),
        logprobs=logprobs,
        has_prompt_logprobs=fields.has("prompt_logprobs"),
        **read_options(fields),
        ignored_fields=fields.unknown(is_strict=is_strict),
    )


def read_prompts(
    fields: Fields, name: str, noun: str, *, no_object: str | None = None
) -> tuple[str | TokenIds, ...]:
    """Text, texts, token ids, or lists of token ids. `noun`: what an error calls several;
    `no_object`: why a JSON object among them is refused, where it might be meant."""
    value = fields.get(name)
    if value is None:
        fields.fail(name, "is missing")
    if isinstance(value, str) or (isinstance(value, list) and value and are_integers(value)):
        value = [value]
    elif not isinstance(value, list):
        fields.fail(name, "must be text, a list of texts, token ids or lists of token ids")
    if not 1 <= len(value) <= MAX_PROMPTS:
        fields.fail(name, f"must hold from 1 to {MAX_PROMPTS} {noun}, got {len(value)}")
    prompts: list[str | TokenIds] = []
    for i, item in enumerate(value):
        place = name if len(value) == 1 else f"{name}[{i}]"
        if isinstance(item, dict) and no_object is not None:
            fields.refuse(place, no_object)
        if isinstance(item, list) and are_integers(item):
            item = tuple(item)
        elif not isinstance(item, str):
            fields.fail(place, "must be text or token ids")
        if not item:
            fields.fail(place, "is empty")
        prompts.append(item)
    return tuple(prompts)
