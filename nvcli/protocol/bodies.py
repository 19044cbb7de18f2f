"""Response bodies of chat and completions, not streamed: OpenAI's shapes from engine outputs.

Every required key is always there, null where it has no value. `index` runs over prompts, then
over the n outputs of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvcli.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvcli.protocol.chat import ChatRequest
    from nvcli.protocol.completions import CompletionRequest
    from nvcli.text import Tokenizer
    from nvcli.types import RequestOutput, TokenLogprob, ToolCall

SYSTEM_FINGERPRINT = "nvcli"


def chat_body(
    request: ChatRequest,
    outputs: Sequence[RequestOutput],
    *,
    response_id: str,
    created: int,
    model: str,
    tokenizer: Tokenizer | None,
    num_truncated_tokens: int = 0,
) -> dict[str, Any]:
    """A `chat.completion` of one prompt's outputs, in order of their index."""
    body: dict[str, Any] = {
        "id": response_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [_chat_choice(request, output, tokenizer) for output in outputs],
        "usage": usage_body([outputs]),
        "service_tier": "default",
        "system_fingerprint": SYSTEM_FINGERPRINT,
    }
    if request.return_token_ids:
        body["choices"] = [
            {**choice, "token_ids": list(output.token_ids)}
            for choice, output in zip(body["choices"], outputs, strict=True)
        ]
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
        message["tool_calls"] = [tool_call_body(call) for call in output.tool_calls]
    logprobs = None
    if request.has_logprobs and output.logprobs is not None:
        as_ids = request.return_tokens_as_token_ids
        content = [_chat_logprob(lp, tokenizer, as_ids=as_ids) for lp in output.logprobs]
        logprobs = {"content": content, "refusal": None}
    return {
        "index": output.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason(output),
        "stop_reason": output.stop_reason,
    }


def completion_body(
    request: CompletionRequest,
    outputs: Sequence[Sequence[RequestOutput]],
    *,
    response_id: str,
    created: int,
    model: str,
    tokenizer: Tokenizer | None,
    prompt_token_ids: Sequence[Sequence[int]] = (),
) -> dict[str, Any]:
    """A `text_completion` of the outputs of each prompt. `echo` needs the prompts' token ids."""
    choices: list[dict[str, Any]] = []
    for number, group in enumerate(outputs):
        prompt = request.prompts[number]
        prompt_ids = list(prompt_token_ids[number]) if request.echo else []
        if request.echo and isinstance(prompt, str):
            prompt_text = prompt
        else:
            prompt_text = "".join(_token_text(i, tokenizer) for i in prompt_ids)
        for output in group:
            choice: dict[str, Any] = {
                "index": len(choices),
                "text": (prompt_text if request.echo else "") + output.text,
                "logprobs": None,
                "finish_reason": finish_reason(output),
                "stop_reason": output.stop_reason,
            }
            if request.logprobs is not None:
                choice["logprobs"] = _legacy_logprobs(request, output, prompt_ids, tokenizer)
            if request.return_token_ids:
                choice["token_ids"] = list(output.token_ids)
            choices.append(choice)
    return {
        "id": response_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage_body(outputs),
        "system_fingerprint": SYSTEM_FINGERPRINT,
    }


# --- parts ---------------------------------------------------------------------------------------


def finish_reason(output: RequestOutput) -> str:
    """OpenAI's word; a reason of the engine's own never gets here."""
    reason = output.finish_reason or FinishReason.STOP
    assert reason not in (FinishReason.ERROR, FinishReason.ABORT), reason
    return str(reason)


def tool_call_body(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


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


def _token_bytes(token_id: int, tokenizer: Tokenizer | None) -> bytes:
    return tokenizer.token_bytes(token_id) if tokenizer is not None else b""


def _token_text(token_id: int, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> str:
    if as_ids or tokenizer is None:
        return f"token_id:{token_id}"
    return _token_bytes(token_id, tokenizer).decode("utf-8", "replace")


def _chat_logprob(
    logprob: TokenLogprob, tokenizer: Tokenizer | None, *, as_ids: bool
) -> dict[str, Any]:
    def entry(token_id: int, value: float) -> dict[str, Any]:
        return {
            "token": _token_text(token_id, tokenizer, as_ids=as_ids),
            "logprob": value,
            "bytes": list(_token_bytes(token_id, tokenizer)),
        }

    top = [entry(token_id, value) for token_id, value in logprob.top]
    return {**entry(logprob.token_id, logprob.logprob), "top_logprobs": top}


def _legacy_logprobs(
    request: CompletionRequest,
    output: RequestOutput,
    prompt_ids: Sequence[int],
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """tokens, token_logprobs, top_logprobs and text_offset; an echoed prompt starts with null."""
    as_ids = request.return_tokens_as_token_ids
    entries: list[TokenLogprob | None] = []
    if request.echo:
        entries += output.prompt_logprobs or [None] * len(prompt_ids)
    entries += output.logprobs or ()
    echoed = len(entries) - len(output.logprobs or ())
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    offset = 0
    for position, entry in enumerate(entries):
        if entry is not None:
            token_id = entry.token_id
        elif position < echoed:
            token_id = prompt_ids[position]
        else:
            continue
        tokens.append(_token_text(token_id, tokenizer, as_ids=as_ids))
        values.append(None if entry is None else entry.logprob)
        top = None
        if entry is not None:
            top = {_token_text(i, tokenizer, as_ids=as_ids): value for i, value in entry.top}
        tops.append(top)
        offsets.append(offset)
        offset += len(_token_text(token_id, tokenizer))
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    }
