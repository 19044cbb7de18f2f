"""Writes a small byte-level tokenizer in Qwen3's manner, in milliseconds.

256 byte tokens, then merges, then Qwen3's 26 added tokens at the end; Qwen3's pre-tokenizer and
NFC; and a chat template that gives the same text as Qwen3's (compared where the real one is at
hand: set NVCLI_QWEN3_TOKENIZER to its folder). The template is our own formulation; the strings it
writes are Qwen3's prompt format, which leaves no choice.

    write_tokenizer(folder, vocab_size=290)     # 256 bytes + 8 merges + 26 added tokens
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

NUM_BYTES = 256
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARKER_TOKENS = (  # shown in text: not special
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
ADDED_TOKENS = SPECIAL_TOKENS + MARKER_TOKENS
MIN_VOCAB_SIZE = NUM_BYTES + len(ADDED_TOKENS)
MERGE_TEXT = " the and you are what hello system user assistant think tool name arguments answer"

CHAT_TEMPLATE = r"""
{%- macro open(role) %}<|im_start|>{{ role }}{{ '\n' }}{% endmacro %}
{%- macro close() %}<|im_end|>{{ '\n' }}{% endmacro %}

{#- the last turn that a person wrote: reasoning after it belongs to a tool loop and is kept #}
{%- set last = namespace(index=messages|length - 1, found=false) %}
{%- for i in range(messages|length - 1, -1, -1) %}
  {%- set m = messages[i] %}
  {%- if not last.found and m.role == 'user' %}
    {%- if not (m.content.startswith('<tool_response>')
                and m.content.endswith('</tool_response>')) %}
      {%- set last.index = i %}
      {%- set last.found = true %}
    {%- endif %}
  {%- endif %}
{%- endfor %}

{%- set has_system = messages[0].role == 'system' %}
{%- if has_system or tools %}
  {{- open('system') }}
  {%- if has_system %}{{ messages[0].content }}{% endif %}
  {%- if tools %}
    {%- if has_system %}{{ '\n\n' }}{% endif %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n' }}
    {%- for tool in tools %}{{ tool|tojson }}{{ '\n' }}{% endfor %}
    {{- '</tools>\n\nFor each function call, return a json object with function name and ' }}
    {{- 'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
  {%- endif %}
  {{- close() }}
{%- endif %}

{%- for m in messages %}
  {%- if m.role == 'user' or (m.role == 'system' and loop.index0 > 0) %}
    {{- open(m.role) ~ m.content ~ close() }}
  {%- elif m.role == 'assistant' %}
    {%- set text = m.content %}
    {%- set thought = m.reasoning_content|default('', true) %}
    {%- if m.reasoning_content is not defined and '</think>' in text %}
      {%- set pieces = text.split('</think>') %}
      {%- set thought = pieces[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
      {%- set text = pieces[-1].lstrip('\n') %}
    {%- endif %}
    {{- open('assistant') }}
    {%- if loop.index0 > last.index and (loop.last or thought) %}
      {{- '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' ~ text.lstrip('\n') }}
    {%- else %}
      {{- text }}
    {%- endif %}
    {%- for call in m.tool_calls or [] %}
      {%- if text or not loop.first %}{{ '\n' }}{% endif %}
      {%- set f = call.function or call %}
      {%- set values = f.arguments if f.arguments is string else f.arguments|tojson %}
      {{- '<tool_call>\n{"name": "' ~ f.name ~ '", "arguments": ' ~ values ~ '}\n</tool_call>' }}
    {%- endfor %}
    {{- close() }}
  {%- elif m.role == 'tool' %}
    {%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}
      {{- '<|im_start|>user' }}
    {%- endif %}
    {{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{ close() }}{% endif %}
  {%- endif %}
{%- endfor %}

{%- if add_generation_prompt %}
  {{- open('assistant') }}
  {%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\n\n</think>\n\n' }}
  {%- endif %}
{%- endif %}
"""


def byte_alphabet() -> list[str]:
    """The character that stands for each byte, in byte order."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(shifted)) for byte in range(NUM_BYTES)]


def build_vocab(num_merges: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Byte tokens and `num_merges` merges, the most useful for MERGE_TEXT first."""
    alphabet = byte_alphabet()
    vocab = {token: byte for byte, token in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    words = MERGE_TEXT.replace(" ", f" {alphabet[0x20]}").split()
    pieces = [list(word) for word in words]
    pieces.append([alphabet[0x0A]] * 2)  # the newline pair is one token, as in Qwen3
    while len(merges) < num_merges:
        counts: dict[tuple[str, str], int] = {}
        for word in pieces:
            for pair in itertools.pairwise(word):
                if pair[0] + pair[1] not in vocab:
                    counts[pair] = counts.get(pair, 0) + 1
        newlines = (alphabet[0x0A], alphabet[0x0A])
        if newlines in counts:
            counts[newlines] = len(MERGE_TEXT)
        if not counts:
            first = next(
                (a, b) for a in alphabet[0x61:] for b in alphabet[0x61:] if a + b not in vocab
            )
            counts = {first: 1}
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        vocab[best[0] + best[1]] = len(vocab)
        pieces = [_merge(word, best) for word in pieces]
    return vocab, merges


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for piece in word:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def _added_token(token: str, token_id: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": token, **flags, "special": token in SPECIAL_TOKENS}


def write_tokenizer(
    folder: Path,
    vocab_size: int = 290,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    slow_format: bool = False,
) -> Path:
    """Writes tokenizer.json and tokenizer_config.json; `vocab_size` counts the added tokens.

    With `slow_format`: vocab.json and merges.txt in place of tokenizer.json.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB_SIZE}")
    folder.mkdir(parents=True, exist_ok=True)
    vocab, merges = build_vocab(vocab_size - MIN_VOCAB_SIZE)
    added = [_added_token(token, len(vocab) + i) for i, token in enumerate(ADDED_TOKENS)]
    config: dict[str, Any] = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": 4096,
        "split_special_tokens": False,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in added
        },
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    _write(folder / "tokenizer_config.json", config)
    if slow_format:
        _write(folder / "vocab.json", vocab)
        lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
        (folder / "merges.txt").write_text("\n".join(lines) + "\n", "utf-8")
        return folder
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": SPLIT_PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [list(pair) for pair in merges],
    }
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": model,
    }
    _write(folder / "tokenizer.json", document)
    return folder


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), "utf-8")
