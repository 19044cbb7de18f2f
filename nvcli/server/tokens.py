"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's shape and with llama.cpp's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvcli.errors import InvalidParameterError
from nvcli.protocol import parse_chat, prepare_chat
from nvcli.protocol.fields import Fields
from nvcli.server.front import ignore_fields
from nvcli.server.generate import prepare
from nvcli.server.json_io import JSONBody, read_object

if TYPE_CHECKING:
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response

    from nvcli.server.state import ServerState

_FLAGS = ("add_special_tokens", "add_special", "parse_special")
_OWN = (*_FLAGS, "return_token_strs", "with_pieces")  # of this endpoint, not of a chat


def _token_ids(state: ServerState, body: dict[str, Any], fields: Fields) -> list[int]:
    fields.alone("messages", "prompt", "content")
    fields.alone("prompt", "content")
    if fields.has("messages"):
        chat = {key: value for key, value in body.items() if key not in _OWN}
        request = parse_chat(
            chat, is_strict=state.config.is_strict, allow_template=state.config.allow_template
        )
        fields.ignore(set(chat) - set(request.ignored_fields))
        return prepare_chat(
            request, state.tokenizer, enable_thinking=state.config.enable_thinking
        ).token_ids
    text = fields.text("prompt")
    if text is None:
        text = fields.text("content")
    if text is None:
        fields.fail("prompt", "is missing; give prompt, content or messages")
    parses = fields.flag("parse_special")
    return state.tokenizer.encode(text, parse_special=parses is not False)


async def tokenize(state: ServerState, http: HTTPRequest) -> Response:
    body = await read_object(http)
    fields = Fields(body)
    state.check_model(fields.text("model"), is_optional=True)
    answer: Response = await prepare(http, lambda: JSONBody(_tokenized(state, body, fields)))
    ignore_fields(http.scope, fields.unknown(is_strict=state.config.is_strict))
    return answer


def _tokenized(state: ServerState, body: dict[str, Any], fields: Fields) -> dict[str, Any]:
    token_ids = _token_ids(state, body, fields)
    tokenizer = state.tokenizer
    fields.ignore(_FLAGS)
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": state.llm.max_model_len,
        "tokens": token_ids,
        "token_strs": None,
    }
    if fields.flag("return_token_strs"):
        answer["token_strs"] = [
            tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids
        ]
    if fields.flag("with_pieces"):
        answer["tokens"] = [
            {"id": token_id, "piece": _piece_or_bytes(tokenizer.token_bytes(token_id))}
            for token_id in token_ids
        ]
    return answer


def _piece_or_bytes(data: bytes) -> str | list[int]:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


async def detokenize(state: ServerState, http: HTTPRequest) -> Response:
    fields = Fields(await read_object(http))
    state.check_model(fields.text("model"), is_optional=True)
    answer: Response = await prepare(http, lambda: JSONBody(_detokenized(state, fields)))
    ignore_fields(http.scope, fields.unknown(is_strict=state.config.is_strict))
    return answer


def _detokenized(state: ServerState, fields: Fields) -> dict[str, Any]:
    token_ids = fields.integers("tokens")
    if token_ids is None:
        fields.fail("tokens", "is missing")
    size = state.llm.vocab_size
    for token_id in token_ids:
        if not 0 <= token_id < size:
            known = f"the vocabulary ends at {size - 1}"
            shown = token_id if abs(token_id) < 10**20 else "a huge number"
            raise InvalidParameterError(f"tokens holds {shown}; {known}", param="tokens")
    skips = fields.flag("skip_special_tokens") or False
    text = state.tokenizer.decode(token_ids, skip_special_tokens=skips)
    return {"prompt": text, "content": text}


async def tokenizer_info(state: ServerState, http: HTTPRequest) -> Response:
    tokenizer = state.tokenizer
    template = tokenizer.chat_template() if tokenizer.has_chat_template else None
    named = tokenizer.named_tokens
    return JSONBody(
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "bos_token": None,
            "eos_token": None,
            "pad_token": None,
            "unk_token": None,
            **named,
            "eos_token_ids": list(tokenizer.eos_token_ids),
            "add_bos_token": False,
            "vocab_size": tokenizer.size,
            "model_max_length": state.llm.max_model_len,
            "chat_template": template,
        }
    )
