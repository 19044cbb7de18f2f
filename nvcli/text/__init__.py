"""Strings and tokens: tokenizer, chat template, detokenizer, output parsers. No torch here."""

from nvcli.text.detokenizer import IncrementalDetokenizer, StopMatcher, StopPiece, Vocabulary
from nvcli.text.messages import (
    call_json,
    content_text,
    message_json,
    normalize_messages,
    parse_message,
    parse_messages,
    split_think_block,
)
from nvcli.text.parsers import OutputRouter, RouterDelta, RouterState, start_state
from nvcli.text.tokenizer import Tokenizer, load_tokenizer
from nvcli.text.tool_formats import TOOL_FORMATS, HermesParser, ToolFormat
from nvcli.text.unicode import repair_surrogates

__all__ = [
    "TOOL_FORMATS",
    "HermesParser",
    "IncrementalDetokenizer",
    "OutputRouter",
    "RouterDelta",
    "RouterState",
    "StopMatcher",
    "StopPiece",
    "Tokenizer",
    "ToolFormat",
    "Vocabulary",
    "call_json",
    "content_text",
    "load_tokenizer",
    "message_json",
    "normalize_messages",
    "parse_message",
    "parse_messages",
    "repair_surrogates",
    "split_think_block",
    "start_state",
]
