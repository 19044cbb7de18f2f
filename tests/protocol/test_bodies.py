"""Prepared prompts, and response bodies: OpenAI's required keys, counts and log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from nvcli.errors import ContextLengthError, InvalidParameterError
from nvcli.protocol import (
    AnswerHead,
    chat_body,
    completion_body,
    engine_request,
    parse_chat,
    parse_completion,
    prepare_chat,
    prepare_completion,
)
from nvcli.types import FinishReason, RequestOutput, SamplingParams, TokenLogprob, ToolCall, Usage
from tests.batch.fake_llm import ByteTokenizer

TOKENIZER: Any = ByteTokenizer()
USER = [{"role": "user", "content": "hi"}]


def output(text: str = "abc", **fields: Any) -> RequestOutput:
    values: dict[str, Any] = {
        "request_id": "r",
        "text": text,
        "token_ids": tuple(text.encode()),
        "finish_reason": FinishReason.STOP,
        "usage": Usage(5, len(text), 2, 1),
        **fields,
    }
    return RequestOutput(**values)


def body(request: Any, outputs: list[RequestOutput], **fields: Any) -> dict[str, Any]:
    return chat_body(request, outputs, AnswerHead("chatcmpl-1", 1, "m"), TOKENIZER, **fields)


def test_chat_has_all_required_keys() -> None:
    found = body(parse_chat({"messages": USER}), [output(reasoning="why")])
    assert set(found) >= {"id", "object", "created", "model", "choices", "usage"}
    choice = found["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": "abc",
        "refusal": None,
        "annotations": [],
        "reasoning": "why",
        "reasoning_content": "why",
    }
    assert (choice["logprobs"], choice["finish_reason"]) == (None, "stop")
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 3, 8)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 1


def test_a_prompt_counts_once_for_n_answers() -> None:
    found = body(parse_chat({"messages": USER, "n": 2}), [output(), output("ab", index=1)])
    assert found["usage"]["prompt_tokens"] == 5
    assert found["usage"]["completion_tokens"] == 5
    assert [choice["index"] for choice in found["choices"]] == [0, 1]


def test_hidden_reasoning_leaves_no_key() -> None:
    request = parse_chat({"messages": USER, "include_reasoning": False})
    assert "reasoning" not in body(request, [output(reasoning="x")])["choices"][0]["message"]


def test_tool_calls_and_null_content() -> None:
    calls = (ToolCall(0, "call_1", "f", '{"a":1}'),)
    found = output("", tool_calls=calls, finish_reason=FinishReason.TOOL_CALLS)
    message = body(parse_chat({"messages": USER}), [found])["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}


def test_chat_logprobs_have_raw_bytes() -> None:
    request = parse_chat({"messages": USER, "logprobs": True, "top_logprobs": 1})
    lp = TokenLogprob(0xE2, -1.0, 1, ((0xE2, -1.0),))
    content = body(request, [output("\ufffd", logprobs=(lp,))])["choices"][0]["logprobs"]["content"]
    assert content[0]["bytes"] == [0xE2]
    assert content[0]["top_logprobs"][0] == {"token": "\ufffd", "logprob": -1.0, "bytes": [0xE2]}


def test_truncation_is_never_silent() -> None:
    request = parse_chat({"messages": USER, "truncate_prompt_tokens": 4})
    prompt = prepare_chat(request, TOKENIZER)
    assert bytes(prompt.token_ids) == b">hi\n"
    assert prompt.num_truncated_tokens == 5
    assert body(request, [output()], num_truncated_tokens=5)["truncated_prompt_tokens"] == 5


def completion(request: Any, groups: list[list[RequestOutput]]) -> dict[str, Any]:
    return completion_body(
        request,
        groups,
        AnswerHead("cmpl-1", 1, "m"),
        TOKENIZER,
        prompt_token_ids=[p.token_ids for p in prepare_completion(request, TOKENIZER)],
    )


def test_completions_run_over_prompts_then_outputs() -> None:
    request = parse_completion({"prompt": ["a", "b"], "n": 2})
    groups = [[output("1"), output("2", index=1)], [output("3"), output("4", index=1)]]
    found = completion(request, groups)
    assert [(c["index"], c["text"]) for c in found["choices"]] == [
        (0, "1"),
        (1, "2"),
        (2, "3"),
        (3, "4"),
    ]
    assert found["usage"]["prompt_tokens"] == 10


def test_echo_with_logprobs() -> None:
    """L5 of api.md: prompt and completion arrays, null first, exact offsets."""
    request = parse_completion({"prompt": "hé", "echo": True, "logprobs": 1})
    prompt = (None, TokenLogprob(0xC3, -2.0, 1), TokenLogprob(0xA9, -3.0, 1))
    answer = (TokenLogprob(ord("x"), -0.5, 1, ((ord("x"), -0.5),)),)
    found = completion(request, [[output("x", prompt_logprobs=prompt, logprobs=answer)]])
    choice = found["choices"][0]
    assert choice["text"] == "héx"
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -3.0, -0.5]
    assert choice["logprobs"]["tokens"][0] == "h"
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][3] == {"x": -0.5}


def test_echoed_token_ids_are_decoded() -> None:
    request = parse_completion({"prompt": [104, 105], "echo": True})
    assert completion(request, [[output("x")]])["choices"][0]["text"] == "hix"


# --- preparing -----------------------------------------------------------------------------------


class Source:
    def sampling(self, *, enable_thinking: bool = True, **overrides: Any) -> SamplingParams:
        return SamplingParams(**{"temperature": 0.6 if enable_thinking else 0.7, **overrides})


def test_the_requests_thinking_wins_over_the_default() -> None:
    request = parse_chat({"messages": USER, "enable_thinking": False})
    prompt = prepare_chat(request, TOKENIZER, enable_thinking=True)
    assert not prompt.enable_thinking
    made = engine_request(Source(), prompt, request, request_id="x", is_streaming=True)
    assert made.params.temperature == 0.7
    assert made.is_chat


def test_bad_words_become_token_sequences() -> None:
    request = parse_completion({"prompt": "a", "bad_words": ["no"]})
    prompt = prepare_completion(request, TOKENIZER)[0]
    made = engine_request(Source(), prompt, request, request_id="x", is_streaming=False)
    assert made.params.bad_words == (tuple(b"no"), tuple(b" no"))


def test_endless_text_is_not_tokenized() -> None:
    request = parse_completion({"prompt": "x" * 50_000})
    with pytest.raises(ContextLengthError, match="50,000 characters"):
        prepare_completion(request, TOKENIZER, max_model_len=10)


def test_without_a_tokenizer_only_ids() -> None:
    assert prepare_completion(parse_completion({"prompt": [1, 2]}), None)[0].token_ids == [1, 2]
    with pytest.raises(InvalidParameterError, match="no tokenizer"):
        prepare_completion(parse_completion({"prompt": "x"}), None)
