"""Records: rows with a meaning. Four kinds may be mixed in one input:

    {"prompt": ...}                                 a user message, or text to continue (raw)
    {"messages": [...]}                             a conversation
    {"custom_id", "method", "url", "body"}          OpenAI's batch line (`endpoints`)

`identify` looks only at kind and id, which is what a pre-scan of the input needs; `parse_record`
checks everything that can be checked without a model, through the server's own protocol layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from nvcli.batch.endpoints import (
    CHAT_URL,
    COMPLETIONS_URL,
    EMBEDDINGS_URL,
    RESPONSES_URL,
    endpoint_of,
    read_embedding,
    read_responses,
)
from nvcli.batch.options import OutputFormat
from nvcli.batch.rows import Problem
from nvcli.batch.run_defaults import with_format, with_instructions, with_system, with_text_format
from nvcli.batch.spelling import Doubt, misspelt, unread
from nvcli.errors import InvalidParameterError, NvcliError
from nvcli.protocol import (
    DEFAULT_MAX_TOKENS,
    GENERATION_FIELDS,
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from nvcli.protocol.fields import is_integer
from nvcli.protocol.sampling import check_sampling
from nvcli.text.unicode import repair_surrogates

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvcli.batch.options import BatchOptions
    from nvcli.batch.rows import Row
    from nvcli.protocol.pooling import EmbeddingRequest
    from nvcli.protocol.responses import ResponsesRequest

_SIMPLE_FIELDS = frozenset(GENERATION_FIELDS)


class Kind(StrEnum):
    PROMPT = "prompt"
    MESSAGES = "messages"
    OPENAI = "openai"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a row says of itself; `kind` is None where it says nothing that we know."""

    kind: Kind | None
    given_id: str | None
    problem: Problem | None


@dataclass(slots=True)
class Record:
    """A checked record; `request` has everything of it that decides the answer."""

    index: int  # in the whole input, bad rows counted
    line: int
    id: str
    kind: Kind
    request: ChatRequest | CompletionRequest | EmbeddingRequest
    sampling: dict[str, Any]  # the record's own over the run's flags
    enable_thinking: bool = True
    responses: ResponsesRequest | None = None  # `request` is its chat
    url: str = CHAT_URL  # whose body it is
    body: dict[str, Any] = field(default_factory=dict)  # what `request` was read from
    echo: dict[str, Any] = field(default_factory=dict)
    doubts: tuple[Doubt, ...] = ()  # keys that may be meant otherwise; `--strict` has none


@dataclass(slots=True)
class Failure:
    """A record that ends as an error; it has an output line like any other."""

    index: int
    line: int
    id: str
    kind: Kind | None
    code: str
    message: str
    status: int = 400
    param: str | None = None
    echo: dict[str, Any] = field(default_factory=dict)


def failure_of(record: Record, error: NvcliError) -> Failure:
    return failed(record, error.code, str(error), status=error.http_status, param=error.param)


def failed(record: Record | Failure, code: str, message: str, **more: Any) -> Failure:
    """`record` as a failure. `more`: its status, and the parameter that is wrong."""
    place = (record.index, record.line, record.id, record.kind)
    return Failure(*place, code, message, echo=record.echo, **more)


def identify(row: Row, prompt_field: str | None = None) -> Identity:
    """The kind and id of a row; a row with a problem keeps its id if it has a usable one."""
    if row.problem is not None:
        return Identity(None, None, row.problem)
    value = row.value
    if not isinstance(value, dict):
        what = "is a list; write one object a line" if isinstance(value, list) else "is no object"
        return Identity(None, None, Problem("invalid_record", f"the record {what}"))
    keys = {} if row.is_prompt else _keys_of(value, prompt_field)
    kind = Kind.PROMPT if row.is_prompt else next(iter(keys), None)
    name = "custom_id" if kind is Kind.OPENAI or "id" not in value else "id"
    given_id, problem = _given_id(value.get(name), name)
    if problem is None and kind is None:
        field_name = prompt_field or "prompt"
        message = f"the record has neither {field_name}, nor messages, nor url and body"
        problem = Problem("invalid_record", message)
    if problem is None and len(keys) > 1:
        one, other = tuple(keys.values())[:2]
        message = f"the record has both {one} and {other}; it can be one question only"
        problem = Problem("invalid_record", message)
    return Identity(kind, given_id, problem)


def _keys_of(value: Mapping[str, Any], prompt_field: str | None) -> dict[Kind, str]:
    """The kinds that a row asks to be taken for, with the key of each. Null asks for nothing beside
    another key; `url` and `body` are also names that people's data has."""
    prompt = prompt_field if prompt_field is not None and prompt_field in value else "prompt"
    keys = {Kind.MESSAGES: "messages"}
    if "url" in value and isinstance(value.get("body"), dict):
        keys = {Kind.OPENAI: "body", **keys}
    if prompt not in keys.values():  # --prompt-field may name the key of another kind
        keys[Kind.PROMPT] = prompt
    present = {kind: key for kind, key in keys.items() if key in value}
    given = {kind: key for kind, key in present.items() if value[key] is not None}
    if not present and ("url" in value or "body" in value):
        return {Kind.OPENAI: "body"}
    return given or dict(list(present.items())[:1])


def _given_id(value: Any, name: str) -> tuple[str | None, Problem | None]:
    if is_integer(value):
        if abs(value) < 10**40:
            return str(value), None
        return None, Problem("invalid_id", f"{name} has over 40 digits; write it as text")
    if value is None:
        return None, None
    if not isinstance(value, str):
        return None, Problem("invalid_id", f"{name} must be text or a whole number")
    if value == "":
        return None, Problem("invalid_id", f"{name} is empty")
    return repair_surrogates(value), None


def parse_record(
    row: Row, identity: Identity, options: BatchOptions, *, record_id: str, index: int
) -> Record | Failure:
    """Check a row whole. Never raises for the row's sake."""
    kind = identity.kind
    echo = read_echo(row, options)
    if identity.problem is not None or kind is None:
        problem = identity.problem or Problem("invalid_record", "the record has no known kind")
        return Failure(index, row.line, record_id, kind, problem.code, problem.message, echo=echo)
    try:
        record = _read(row, kind, options, record_id=record_id, index=index)
    except RecursionError:
        error: NvcliError = InvalidParameterError("the record is nested too deep")
    except NvcliError as exc:
        error = exc
    else:
        record.echo = echo
        record.doubts = find_doubts(row, kind, options, record.request.ignored_fields)
        if record.doubts and options.is_strict:
            return failed(record, "unknown_field", record.doubts[0].text)
        return record
    said = (error.code, str(error), error.http_status, error.param)
    return Failure(index, row.line, record_id, kind, *said, echo)


def find_doubts(
    row: Row, kind: Kind, options: BatchOptions, unread_fields: tuple[str, ...] = ()
) -> tuple[Doubt, ...]:
    if kind is Kind.OPENAI:
        return unread(unread_fields)
    data = (*options.echo, options.prompt_field or "prompt")
    return misspelt(row.value, has_messages=kind is Kind.MESSAGES, data=data)


def read_echo(row: Row, options: BatchOptions) -> dict[str, Any]:
    """The input fields that are copied to the output; null where a record lacks one."""
    if not options.echo or not isinstance(row.value, dict):
        return {}
    return {name: row.value.get(name) for name in options.echo}


def _read(row: Row, kind: Kind, options: BatchOptions, *, record_id: str, index: int) -> Record:
    """Raises `NvcliError`s of the record's own making, and `RecursionError`."""
    value = row.value
    make = partial(Record, index, row.line, record_id, kind)
    request: ChatRequest | CompletionRequest
    responses = None
    if kind is Kind.OPENAI:
        url = endpoint_of(value)
        body = value.get("body")
        if url == EMBEDDINGS_URL:
            if options.output_format is OutputFormat.TEXT:
                raise InvalidParameterError("embeddings cannot be written as text", param="url")
            return make(read_embedding(body), {}, url=url, body=body)
        if url == RESPONSES_URL:
            body = with_instructions(with_text_format(body, options), options)
            responses = read_responses(body)
        elif url == CHAT_URL:
            body = with_system(with_format(body, options), options)
        else:
            body = with_format(body, options)
    elif kind is Kind.MESSAGES:
        url = CHAT_URL
        body = with_format({k: v for k, v in value.items() if k in _SIMPLE_FIELDS}, options)
        body = with_system({**body, "messages": value["messages"]}, options)
    else:
        url, body = _prompt_body(value, options)
    if responses is not None:
        request = responses.chat
    else:
        request = parse_chat(body) if url == CHAT_URL else parse_completion(body)
    sampling = {**options.sampling, **request.sampling}
    is_thinking = options.think is not False
    if isinstance(request, CompletionRequest):
        sampling.pop("thinking_budget", None)
        if kind is Kind.OPENAI:
            sampling.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    else:
        if request.thinking.enabled is not None:
            is_thinking = request.thinking.enabled
        if not is_thinking:
            sampling.pop("thinking_budget", None)
    check_sampling(sampling)  # the record's own and the run's may contradict each other
    return make(request, sampling, is_thinking, responses, url, body)


def _prompt_body(value: dict[str, Any], options: BatchOptions) -> tuple[str, dict[str, Any]]:
    name = "prompt"
    if options.prompt_field is not None and options.prompt_field in value:
        name = options.prompt_field
    prompt = value[name]
    is_raw = value.get("raw", options.is_raw)
    if not isinstance(is_raw, bool):
        raise InvalidParameterError("raw must be true or false", param="raw")
    body = with_format({k: v for k, v in value.items() if k in _SIMPLE_FIELDS}, options)
    is_ids = isinstance(prompt, list) and not isinstance((prompt or [0])[0], str | list)
    if is_ids or (is_raw and isinstance(prompt, str)):
        return COMPLETIONS_URL, {**body, "prompt": prompt}
    if not isinstance(prompt, str):
        raise InvalidParameterError(f"{name} must be text or token ids", param=name)
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    system = value.get("system")
    if system is not None:
        if not isinstance(system, str):
            raise InvalidParameterError("system must be text", param="system")
        messages.insert(0, {"role": "system", "content": system})
    return CHAT_URL, with_system({**body, "messages": messages}, options)
