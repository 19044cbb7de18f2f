"""Prompts from a file: `jsonl:PATH` and `sharegpt:PATH`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from nvcli.errors import UsageError
from nvcli.paths import MAX_DATA_BYTES, read_whole


def digest_of(data: str) -> str:
    kind, _, path = data.partition(":")
    try:
        return f"{kind}:{hashlib.sha256(read_whole(Path(path), MAX_DATA_BYTES)).hexdigest()}"
    except OSError as exc:
        raise UsageError(f"--data {path}: {exc.strerror or exc}", param="data") from exc


def read_prompts(data: str) -> list[str | list[dict[str, Any]]]:
    """Prompts of `jsonl:PATH` ({"prompt"} or {"messages"} a line) or `sharegpt:PATH`.

    Raises `UsageError`.
    """
    kind, _, path = data.partition(":")
    try:
        raw = read_whole(Path(path), MAX_DATA_BYTES)
        found = _jsonl_prompts(raw, path) if kind == "jsonl" else _sharegpt_prompts(raw)
    except OSError as exc:
        raise UsageError(f"--data {path}: {exc.strerror or exc}", param="data") from exc
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise UsageError(f"--data {path} is no {kind} file of prompts", param="data") from exc
    if not found:
        raise UsageError(f"--data {path} holds no prompts", param="data")
    return found


def _jsonl_prompts(raw: bytes, path: str) -> list[str | list[dict[str, Any]]]:
    prompts: list[str | list[dict[str, Any]]] = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        if line.strip():
            value = json.loads(line)
            body = value.get("body", value)
            asked = _questions(body)
            beside = [] if body is value else _questions(value)
            if len(asked) > 1 or beside:
                one, other = asked[:2] if len(asked) > 1 else ("body", beside[0])
                both = f"the record has both {one} and {other}"
                raise UsageError(f"--data {path}, line {number}: {both}", param="data")
            prompt = body[asked[0]] if asked else None
            if not isinstance(prompt, str | list) or not prompt:
                raise ValueError("no prompt")
            prompts.append(prompt)
    return prompts


def _questions(record: dict[str, Any]) -> list[str]:
    """The keys that ask for something; null asks for nothing."""
    return [key for key in ("messages", "prompt") if record.get(key) is not None]


def _sharegpt_prompts(raw: bytes) -> list[str | list[dict[str, Any]]]:
    """The first human turn of every conversation."""
    prompts: list[str | list[dict[str, Any]]] = []
    for item in json.loads(raw):
        turns = [t["value"] for t in item["conversations"] if t["from"] in ("human", "user")]
        if turns and turns[0]:
            prompts.append([{"role": "user", "content": turns[0]}])
    return prompts
