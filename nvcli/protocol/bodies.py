"""Response bodies of chat and completions, not streamed: OpenAI's shapes from engine outputs.

Every required key is always there, null where it has no value. `index` runs over prompts, then
over the n outputs of each.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvcli.protocol.logprobs import (
    LegacyLogprobs,
    TextLogprobs,
    chat_logprob,
    prompt_logprobs_body,
    token_text,
)
from nvcli.text import call_json
from nvcli.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvcli.protocol.chat import ChatRequest
    from nvcli.protocol.completions import CompletionRequest
    from nvcli.text import Tokenizer
    from nvcli.types import RequestOutput

SYSTEM_FINGERPRINT = "nvcli"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every object of one answer has."""

    id: str
    created: int  # seconds since 1970
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> AnswerHead:
        return cls(f"{prefix}{uuid.uuid4().hex}", int(time.time()), model)

    def json(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def chat_body(
    request: ChatRequest,
    outputs: Sequence[RequestOutput],
    head: AnswerHead,
    tokenizer: Tokenizer | None,
    *,
    num_truncated_tokens: int = 0,
) -> dict[str, Any]:
    """A `chat.completion` of one prompt's outputs, in order of their index."""
    body: dict[str, Any] = {
        **head.json("chat.completion"),
        "choices": [_chat_choice(request, output, tokenizer) for output in outputs],
        "usage": usage_body([outputs]),
        "service_tier": "default",
        "system_fingerprint": SYSTEM_FINGERPRINT,
    }
    if request.sampling.get("prompt_logprobs") is not None and outputs[0].prompt_logprobs:
        body["prompt_logprobs"] = prompt_logprobs_body(outputs[0].prompt_logprobs, tokenizer)
    if num_truncated_tokens:
        body["truncated_prompt_tokens"] = num_truncated_tokens
    return body


def _chat_choice(
    request: ChatRequest, output: RequestOutput, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    text: str | None = output.text
    if request.echo and isinstance(request.messages[-1].content, str):
        text = request.messages[-1].content + output.text
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    message["annotations"] = []
    if request.thinking.is_shown:
        message["reasoning"] = message["reasoning_content"] = output.reasoning
    if output.tool_calls:
        message["content"] = text or None
        message["tool_calls"] = [call_json(call) for call in output.tool_calls]
    logprobs = None
    if request.has_logprobs and output.logprobs is not None:
        as_ids = request.return_tokens_as_token_ids
        shown = TextLogprobs(tokenizer).feed(output)
        content = [chat_logprob(lp, tokenizer, as_ids=as_ids) for lp in shown]
        logprobs = {"content": content, "refusal": None}
    choice = {
        "index": output.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason(output),
        "stop_reason": output.stop_reason,
    }
    if request.return_token_ids:
        choice["token_ids"] = list(output.token_ids)
    return choice


def completion_body(
    request: CompletionRequest,
    outputs: Sequence[Sequence[RequestOutput]],
    head: AnswerHead,
    tokenizer: Tokenizer | None,
    *,
    prompt_token_ids: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """A `text_completion` of the outputs of each prompt. `echo` needs the prompts' token ids."""
    choices: list[dict[str, Any]] = []
    for number, group in enumerate(outputs):
        prompt_ids = prompt_token_ids[number]
        echo = prompt_text(request.prompts[number], prompt_ids, tokenizer) if request.echo else ""
        for output in group:
            choice: dict[str, Any] = {
                "index": len(choices),
                "text": echo + output.text,
                "logprobs": None,
                "finish_reason": finish_reason(output),
                "stop_reason": output.stop_reason,
            }
            if request.logprobs is not None:
                choice["logprobs"] = completion_logprobs(request, output, prompt_ids, tokenizer)
            if request.has_prompt_logprobs:
                entries = output.prompt_logprobs or ()
                choice["prompt_logprobs"] = prompt_logprobs_body(entries, tokenizer)
            if request.return_token_ids:
                choice["token_ids"] = list(output.token_ids)
            choices.append(choice)
    return {
        **head.json("text_completion"),
        "choices": choices,
        "usage": usage_body(outputs),
        "system_fingerprint": SYSTEM_FINGERPRINT,
    }


def completion_logprobs(
    request: CompletionRequest,
    output: RequestOutput,
    prompt_ids: Sequence[int],
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Of an echoed prompt, which starts with null, and of the text."""
    legacy = LegacyLogprobs(tokenizer, as_ids=request.return_tokens_as_token_ids)
    if request.echo:
        legacy.add(prompt_ids, output.prompt_logprobs or [None] * len(prompt_ids))
    shown = TextLogprobs(tokenizer).feed(output)
    legacy.add([entry.token_id for entry in shown], shown)
    return legacy.take()


def prompt_text(
    prompt: str | Sequence[int], token_ids: Sequence[int], tokenizer: Tokenizer | None
) -> str:
    """A prompt as `echo` repeats it."""
    if isinstance(prompt, str):
        return prompt
    return "".join(token_text(token_id, tokenizer) for token_id in token_ids)


# --- parts ---------------------------------------------------------------------------------------


def finish_reason(output: RequestOutput) -> str:
    """OpenAI's word; a reason of the engine's own never gets here."""
    reason = output.finish_reason or FinishReason.STOP
    assert reason not in (FinishReason.ERROR, FinishReason.ABORT), reason
    return str(reason)


def usage_body(groups: Sequence[Sequence[RequestOutput]]) -> dict[str, Any]:
    """OpenAI's usage: a prompt counts once however many outputs it has."""
    prompt = sum(group[0].usage.prompt_tokens for group in groups if group)
    cached = sum(group[0].usage.cached_tokens for group in groups if group)
    completion = sum(output.usage.completion_tokens for group in groups for output in group)
    reasoning = sum(output.usage.reasoning_tokens for group in groups for output in group)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
