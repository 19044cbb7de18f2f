"""Request and response shapes of the API, and the one place that checks them. No torch here.

body --parse_*--> request --prepare_*--> token ids --engine_request--> engine.Request
outputs --*_body--> OpenAI's response
"""

from nvcli.protocol.bodies import AnswerHead, chat_body, completion_body, usage_body
from nvcli.protocol.chat import GENERATION_FIELDS, ChatRequest, parse_chat
from nvcli.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest, parse_completion
from nvcli.protocol.fields import Fields, UnsupportedEndpointError, UnsupportedFieldError
from nvcli.protocol.prepare import PreparedPrompt, engine_request, prepare_chat, prepare_completion

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "GENERATION_FIELDS",
    "AnswerHead",
    "ChatRequest",
    "CompletionRequest",
    "Fields",
    "PreparedPrompt",
    "UnsupportedEndpointError",
    "UnsupportedFieldError",
    "chat_body",
    "completion_body",
    "engine_request",
    "parse_chat",
    "parse_completion",
    "prepare_chat",
    "prepare_completion",
    "usage_body",
]
