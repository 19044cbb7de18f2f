"""From a checked request to what the engine takes: token ids and whether they are a chat.

Only the tokenizer is needed, so `nvcli batch --dry-run` and token counting run this without an
engine; `nvcli.protocol.engine_request` joins it with sampling parameters.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nvcli.engine.engine import Request
from nvcli.errors import ContextLengthError, InvalidParameterError
from nvcli.protocol.structured import grammar_spec
from nvcli.protocol.tools import Tools
from nvcli.types import SamplingParams

if TYPE_CHECKING:
    from nvcli.engine.grammar import Grammar, GrammarSpec
    from nvcli.protocol.chat import ChatRequest
    from nvcli.protocol.completions import CompletionRequest, TokenIds
    from nvcli.protocol.shared import TextRequest
    from nvcli.text import Tokenizer

PROBE_CHARACTERS = 16  # a token; four are usual
MAX_BAD_WORDS = 1024  # each is spelled with and without a blank before it


class SamplingSource(Protocol):
    """What is needed of an `LLM` for sampling parameters."""

    def sampling(self, *, enable_thinking: bool = True, **overrides: Any) -> SamplingParams: ...

    def compile_grammar(self, spec: GrammarSpec) -> Grammar: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """One prompt of a request as token ids."""

    token_ids: list[int]
    is_chat: bool = False
    parse_tools: bool = False
    enable_thinking: bool = True
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarSpec | None = None
    num_truncated_tokens: int = 0  # cut off because the request asked for it


def prepare_chat(
    request: ChatRequest,
    tokenizer: Tokenizer,
    *,
    enable_thinking: bool = True,
    max_model_len: int | None = None,
) -> PreparedPrompt:
    """Render and tokenize a conversation; the request's thinking switch wins over the default.

    Raises `TemplateError` for messages the template cannot take, `ContextLengthError` for text so
    long that it need not be tokenized.
    """
    if request.thinking.enabled is not None:
        enable_thinking = request.thinking.enabled
    text = tokenizer.render(
        request.messages,
        tools=request.tools.definitions if request.tools.is_active else None,
        enable_thinking=enable_thinking,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template,
        **request.template_variables,
    )
    is_cut = request.truncate_prompt_tokens is not None
    token_ids = _encode(tokenizer, text, None if is_cut else max_model_len)
    kept = _truncate(token_ids, request.truncate_prompt_tokens, request.truncation_side)
    return PreparedPrompt(
        token_ids=kept,
        is_chat=True,
        parse_tools=request.tools.is_active,
        enable_thinking=enable_thinking,
        bad_words=_bad_words(request.bad_words, tokenizer),
        grammar=grammar_spec(request.structure, request.tools, tokenizer),
        num_truncated_tokens=len(token_ids) - len(kept),
    )


def prepare_completion(
    request: CompletionRequest, tokenizer: Tokenizer | None, *, max_model_len: int | None = None
) -> list[PreparedPrompt]:
    """Tokenize the prompts; token ids need no tokenizer. Raises `InvalidParameterError` for text
    where there is none."""
    words = _bad_words(request.bad_words, tokenizer)
    grammar = grammar_spec(request.structure, Tools(), tokenizer)
    prepared = []
    is_cut = request.truncate_prompt_tokens is not None
    for prompt in request.prompts:
        token_ids = _prompt_ids(prompt, tokenizer, None if is_cut else max_model_len)
        kept = _truncate(token_ids, request.truncate_prompt_tokens, request.truncation_side)
        cut = len(token_ids) - len(kept)
        prepared.append(
            PreparedPrompt(
                token_ids=kept, bad_words=words, grammar=grammar, num_truncated_tokens=cut
            )
        )
    return prepared


def engine_request(
    llm: SamplingSource,
    prompt: PreparedPrompt,
    asked: TextRequest,
    *,
    request_id: str,
    is_streaming: bool,
    sampling: dict[str, Any] | None = None,
) -> Request:
    """The engine's request. `sampling`, by default what was asked for, lies over the checkpoint's
    defaults.

    Raises `InvalidParameterError` for a value out of range, `GrammarError` for a grammar that
    cannot be used.
    """
    params = llm.sampling(
        enable_thinking=prompt.enable_thinking, **(asked.sampling if sampling is None else sampling)
    )
    if prompt.bad_words:
        params = params.replace(bad_words=(*params.bad_words, *prompt.bad_words))
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        params=params,
        is_chat=prompt.is_chat,
        parse_tools=prompt.parse_tools,
        is_streaming=is_streaming,
        priority=asked.priority,
        cache_salt=asked.cache_salt,
        grammar=None if prompt.grammar is None else llm.compile_grammar(prompt.grammar),
    )


def pooling_request(
    request_id: str, prompt_token_ids: list[int], pools: tuple[int, ...] = ()
) -> Request:
    """One that reads numbers from a prompt and generates nothing: see `Sequence.pools`."""
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        params=SamplingParams(max_tokens=0),
        is_streaming=False,
        pools=pools,
    )


def _prompt_ids(
    prompt: str | TokenIds, tokenizer: Tokenizer | None, max_model_len: int | None
) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    if tokenizer is None:
        raise InvalidParameterError(
            "the model has no tokenizer", hint="Give the prompt as token ids.", param="prompt"
        )
    return _encode(tokenizer, prompt, max_model_len)


def _encode(tokenizer: Tokenizer, text: str, max_model_len: int | None) -> list[int]:
    """Raises `ContextLengthError` for a text that is much too long, after its beginning alone."""
    if max_model_len is None:
        return tokenizer.encode(text)
    probe = max_model_len * PROBE_CHARACTERS
    while probe < len(text) // 2:
        count = len(tokenizer.encode(text[:probe]))
        if count > 2 * max_model_len:  # where the text is cut a token or two may come out otherwise
            raise ContextLengthError(
                f"the first {probe:,} of {len(text):,} characters of the prompt have {count:,} "
                f"tokens, the context holds {max_model_len:,}",
                hint="Shorten the prompt.",
                param="prompt",
            )
        probe *= 4
    return tokenizer.encode(text)


def _truncate(token_ids: list[int], limit: int | None, side: str) -> list[int]:
    if limit is None or len(token_ids) <= limit:
        return token_ids
    return token_ids[-limit:] if side == "left" else token_ids[:limit]


def _bad_words(words: tuple[str, ...], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The token sequences of each word, at the start of a text and after a blank."""
    if not words:
        return ()
    if tokenizer is None:
        raise InvalidParameterError("bad_words need a tokenizer", param="bad_words")
    if len(words) > MAX_BAD_WORDS:
        raise InvalidParameterError(
            f"bad_words takes at most {MAX_BAD_WORDS:,} words, got {len(words):,}",
            param="bad_words",
        )
    if not all(words):
        raise InvalidParameterError("bad_words must hold no empty string", param="bad_words")
    spellings = itertools.chain.from_iterable((word, f" {word.lstrip()}") for word in words)
    sequences = [tuple(tokenizer.encode(word, parse_special=False)) for word in spellings]
    return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))
