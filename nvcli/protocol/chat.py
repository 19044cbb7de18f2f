"""`POST /v1/chat/completions`: the request, checked without a model.

A known field is implemented or refused by name; unknown ones are listed in `ignored_fields`. The
server, `nvcli batch` and the bench read chat requests through here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvcli.protocol.fields import Fields
from nvcli.protocol.sampling import SAMPLING_FIELDS, check_sampling, read_sampling, read_token_limit
from nvcli.protocol.shared import TextRequest, read_options
from nvcli.protocol.structured import STRUCTURED_FIELDS, read_structure
from nvcli.protocol.thinking import THINKING_FIELDS, Thinking, read_thinking
from nvcli.protocol.tools import TOOL_FIELDS, Allowed, Tools, read_tools
from nvcli.text import content_text, parse_messages
from nvcli.types import MAX_LOGPROBS

if TYPE_CHECKING:
    from nvcli.protocol.mcp import McpTools
    from nvcli.types import Message

MAX_METADATA = 16
MAX_MESSAGES = 10_000

# Accepted and without effect here.
_ACCEPTED = (
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "prediction",
    "request_id",
    "rid",
    "session_id",
)
_REFUSED = {
    "audio": "is not supported; this model reads and writes text only",
    "documents": "is not supported; put the documents into a message",
}
# What a record of `nvcli batch` that is no OpenAI body may set: everything that changes the answer.
GENERATION_FIELDS = (
    *SAMPLING_FIELDS,
    *STRUCTURED_FIELDS,
    *THINKING_FIELDS,
    *TOOL_FIELDS,
    "response_format",
    "continue_final_message",
    "add_generation_prompt",
    "truncate_prompt_tokens",
    "truncation_side",
    "priority",
    "cache_salt",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(TextRequest):
    """What a chat request asks for."""

    messages: tuple[Message, ...]
    thinking: Thinking = field(default_factory=Thinking)
    template_variables: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Tools = field(default_factory=Tools)
    mcp: tuple[McpTools, ...] = ()  # servers whose tools are not in `tools` yet
    allowed: Allowed | None = None  # what `tool_choice` narrows all tools to
    include_obfuscation: bool | None = None
    has_logprobs: bool = False
    store: bool = False
    metadata: dict[str, str] = field(default_factory=dict)


def parse_chat(
    body: object, *, is_strict: bool = False, allow_template: bool = False, allow_mcp: bool = False
) -> ChatRequest:
    """Read a request body.

    Args:
        body: the decoded JSON.
        is_strict: unknown fields are errors (`--strict-api`).
        allow_template: a request may bring its own chat template.
        allow_mcp: `tools` may name MCP servers, whose calls the caller makes.

    Raises:
        InvalidParameterError: a field has the wrong type or value, or contradicts another.
        UnsupportedFieldError: a known field that this version does not have.
        TemplateError: a message is malformed; the place is in the error.
    """
    fields = Fields(body)
    fields.alone("messages", "prompt", "input")
    messages = tuple(parse_messages(message_list(fields)))
    for i, message in enumerate(messages):
        content_text(message, f"messages[{i}]")  # media parts are refused by place
        if message.content is None and message.role in ("user", "system", "developer"):
            fields.fail(f"messages[{i}].content", "is missing")
    sampling = read_sampling(fields)
    has_logprobs = _read_logprobs(fields, sampling)
    may_be_zero = fields.flag("echo") or "prompt_logprobs" in sampling
    limit = read_token_limit(fields, may_be_zero=may_be_zero)
    if limit is not None:
        sampling["max_tokens"] = limit
    thinking, variables = read_thinking(fields)
    if thinking.budget is not None:
        sampling["thinking_budget"] = thinking.budget
    check_sampling(sampling)
    tools, servers, allowed = read_tools(fields, allow_mcp=allow_mcp)
    if servers:
        _check_alone(fields, sampling)
    structure = read_structure(fields)
    _read_refused(fields)
    continues = fields.flag("continue_final_message") or False
    adds_prompt = fields.flag("add_generation_prompt")
    if continues and adds_prompt:
        fields.fail("add_generation_prompt", "contradicts continue_final_message")
    if continues and messages[-1].role != "assistant":
        fields.fail("continue_final_message", "needs an assistant message at the end")
    template = fields.text("chat_template")
    if template is not None and not allow_template:
        fields.refuse("chat_template", "a request may not bring its own template here")
    fields.ignore(_ACCEPTED)
    return ChatRequest(
        messages=messages,
        sampling=sampling,
        thinking=thinking,
        template_variables=variables,
        chat_template=template,
        add_generation_prompt=adds_prompt is not False,
        continue_final_message=continues,
        tools=tools,
        mcp=servers,
        allowed=allowed,
        structure=structure,
        include_obfuscation=fields.inner("stream_options").flag("include_obfuscation"),
        has_logprobs=has_logprobs,
        store=fields.flag("store") or False,
        metadata=read_metadata(fields),
        **read_options(fields),
        ignored_fields=fields.unknown(is_strict=is_strict),
    )


def message_list(fields: Fields) -> list[Any]:
    """`messages` as it was given, neither empty nor too long."""
    given = fields.array("messages")
    if not given:
        fields.fail("messages", "must hold at least one message")
    if len(given) > MAX_MESSAGES:
        fields.fail("messages", f"must hold at most {MAX_MESSAGES:,} messages")
    return given


def _check_alone(fields: Fields, sampling: dict[str, Any]) -> None:
    """An answer of several turns is one, and its numbers would be those of several prompts."""
    for name, alone in (("n", 1), ("logprobs", None), ("prompt_logprobs", None)):
        if sampling.get(name, alone) != alone:
            fields.refuse(name, "cannot be given beside MCP tools")
    for name in ("return_token_ids", "continue_final_message", "echo"):
        if fields.flag(name):
            fields.refuse(name, "cannot be given beside MCP tools")


def _read_logprobs(fields: Fields, sampling: dict[str, Any]) -> bool:
    is_on = fields.flag("logprobs") or False
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top and not is_on:
        fields.fail("top_logprobs", "needs logprobs: true")
    if is_on:
        sampling["logprobs"] = top or 0
    return is_on


def _read_refused(fields: Fields) -> None:
    """Fields that ask for what a text model does not have."""
    modalities = fields.texts("modalities")
    if modalities is not None and modalities != ("text",):
        fields.refuse("modalities", "only text is supported")
    fields.refuse_given(_REFUSED)
    fields.choice("verbosity", ("low", "medium", "high"))
    fields.choice("service_tier", ("auto", "default", "flex", "scale", "priority"))


def read_metadata(fields: Fields) -> dict[str, str]:
    """`metadata` within OpenAI's limits: 16 pairs, keys of 64 and values of 512 characters."""
    given = fields.inner("metadata")
    if len(given.raw) > MAX_METADATA:
        fields.fail("metadata", f"takes at most {MAX_METADATA} pairs, got {len(given.raw)}")
    pairs: dict[str, str] = {}
    for key in given.raw:
        if len(key) > 64:
            fields.fail("metadata", "takes keys of at most 64 characters")
        value = given.text(key)
        if value is not None and len(value) > 512:
            fields.fail("metadata", "takes values of at most 512 characters")
        pairs[key] = value or ""
    return pairs
