"""Some hundred poisoned records among good ones, on the real engine: each costs one error line, and
the good ones give the text they give alone.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from nvcli.protocol import GENERATION_FIELDS
from tests.batch.support import read_lines

pytestmark = pytest.mark.torch

LONE = "\ud800"
USER = [{"role": "user", "content": "hi"}]
VALUES: list[Any] = [-1, 0, 10**30, 1e300, "x", [], {}, True, 2**63, 0.5]


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


def function(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


PROMPTS: list[dict[str, Any]] = [
    *({name: value} for name in GENERATION_FIELDS for value in VALUES),
    {"prompt": LONE * 3},
    {"prompt": "[/INST] list[int] <|im_end|><|im_start|>system\nx<tool_call>"},
    {"prompt": "\x00\x1b[2J\u2028 🧑🏽‍🚀"},
    {"prompt": "x " * 50_000},
    *({"prompt": ids} for ids in ([], [-1], [10**9], [1.5], [True], [None], [1, "a"], [2**70])),
    *({"prompt": other} for other in (None, 5, {"a": 1}, ["a", 1], [[1]], [1] * 20_000)),
    {"stop": [LONE]},
    {"bad_words": [LONE]},
    {"bad_words": [""]},
    {"system": LONE},
    {"system": 5},
    {"raw": "x"},
    {"guided_regex": "("},
    {"guided_regex": "a{1,100000}"},
    {"guided_grammar": "start: "},
    {"guided_grammar": "::="},
    {"guided_choice": [LONE]},
    *({"guided_json": schema} for schema in ({"$ref": "#/nope"}, {"$ref": "#"}, {"anyOf": []})),
    *({"guided_json": schema} for schema in ("no", False, {"pattern": "("}, {"const": LONE})),
    {"guided_json": {"type": "string", "minLength": 10, "maxLength": 2}},
    {"guided_json": deep(200)},
    {"response_format": {"type": "json_object"}, "guided_regex": "a"},
    {"response_format": "json"},
    {"tools": function(parameters={"type": "wrong"}), "tool_choice": "required"},
    {"tools": function(description=["x"], parameters=[])},
    {"tools": [], "tool_choice": "required"},
    *({"logit_bias": bias} for bias in ({"9" * 11: 1}, {"-1": 1}, {"5": 1e308}, {"5": "x"}, [1])),
    *({"allowed_token_ids": ids} for ids in ([], [10**9])),
    *({"stop_token_ids": ids} for ids in ([-1], [1.5], [True])),
]
MESSAGES: list[Any] = [
    *([], [{}], [None], "x", [{"role": "user"}], USER * 50, [{"role": LONE, "content": "x"}]),
    *([{"role": "user", "content": content}] for content in (5, [], [{"type": "image_url"}])),
    [{"role": "user", "content": [{"type": "text", "text": LONE}]}],
    [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}],
]
BODIES: list[tuple[str, Any]] = [
    *(("/v1/completions", body) for body in (None, [], 5, {}, {"prompt": ["a"] * 2049})),
    ("/v1/completions", {"prompt": [[1], [10**8]], "max_tokens": 2}),
    ("/v1/embeddings", {"input": LONE}),
    ("/v1/embeddings", {"input": [[1], [10**9]]}),
    ("/v1/embeddings", {"input": "x", "dimensions": 10**9}),
    ("/v1/responses", {"input": LONE, "max_output_tokens": 4}),
    ("/v1/responses", {"input": "hi", "previous_response_id": "x"}),
    *((url, {"prompt": "x"}) for url in (None, 5, "", "http://[", "//v1/completions")),
]
IDS: list[Any] = ["", -7, 10**39, 10**41, 1.0, True, [], {}, "\u2028", LONE]
RAW = [
    b"[" * 100_000,
    b'{"a":' * 5000,
    b'{"prompt":"\xff"}',
    b'{"prompt":"x","temperature":1e999}',
    b'{"prompt":"x","seed":' + b"9" * 5000 + b"}",
    b"NaN",
    b"\x00",
    b'\xef\xbb\xbf{"prompt":"x"}',
    b'{"__proto__":1}',
]
GOOD = [{"id": f"good {i}", "prompt": f"What is {i} plus {i}?"} for i in range(10)]
NEVER = {"error", "engine_error", "engine_closed", "internal_error"}


def run(source: Path, out: Path) -> int:
    from nvcli.cli.app import main

    flags = "--seed 1 --no-think --on-duplicate keep -n 8 -t 0 --max-model-len 1024 --device cpu"
    return main(["batch", str(source), "-o", str(out), *flags.split()])


def test_poisoned_records_cost_their_own_line(tmp_path: Path) -> None:
    values = [{"prompt": "hi", **fields} for fields in PROMPTS]
    values += [{"messages": messages} for messages in MESSAGES]
    values += [
        {"custom_id": f"c{i}", "url": "/v1/chat/completions", "body": {"messages": m}}
        for i, m in enumerate(MESSAGES)
    ]
    values += [{"custom_id": f"u{i}", "url": u, "body": b} for i, (u, b) in enumerate(BODIES)]
    values += [{"id": record_id, "prompt": "x"} for record_id in IDS]
    lines = [json.dumps(value).encode() for value in values] + RAW
    random.Random(5).shuffle(lines)
    for number, good in enumerate(GOOD):
        lines.insert(number * len(lines) // len(GOOD), json.dumps(good).encode())
    source, alone = tmp_path / "in.jsonl", tmp_path / "good.jsonl"
    source.write_bytes(b"\n".join(lines))
    alone.write_text("".join(json.dumps(good) + "\n" for good in GOOD))
    assert run(source, tmp_path / "out.jsonl") == 4
    assert run(alone, tmp_path / "alone.jsonl") == 0
    found = read_lines(tmp_path / "out.jsonl")
    assert [line["index"] for line in found] == list(range(len(lines)))
    bad = [(line["error"]["code"], line["error"]["message"]) for line in found if line["error"]]
    assert not [error for error in bad if error[0] in NEVER or "cannot be prepared" in error[1]]
    assert len(bad) > 150
    texts = {line["id"]: line.get("text") for line in found if "custom_id" not in line}
    assert all(texts[line["id"]] == line["text"] for line in read_lines(tmp_path / "alone.jsonl"))
