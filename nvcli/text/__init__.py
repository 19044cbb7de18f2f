"""Strings and tokens: tokenizer, chat template, detokenizer, output parsers. No torch here."""

from nvcli.text.messages import (
    call_json,
    content_text,
    message_json,
    parse_message,
    parse_messages,
)
from nvcli.text.parsers import OutputRouter, RouterDelta, RouterState
from nvcli.text.tokenizer import Tokenizer, load_tokenizer
from nvcli.text.unicode import repair_surrogates

__all__ = [
    "OutputRouter",
    "RouterDelta",
    "RouterState",
    "Tokenizer",
    "call_json",
    "content_text",
    "load_tokenizer",
    "message_json",
    "parse_message",
    "parse_messages",
    "repair_surrogates",
]
