"""Prompts from a file: `jsonl:PATH` and `sharegpt:PATH`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from nvcli.errors import UsageError


def digest_of(data: str) -> str:
    kind, _, path = data.partition(":")
    try:
        return f"{kind}:{hashlib.sha256(Path(path).read_bytes()).hexdigest()}"
    except OSError as exc:
        raise UsageError(f"--data {path}: {exc.strerror or exc}", param="data") from exc


def read_prompts(data: str) -> list[str | list[dict[str, Any]]]:
    """Prompts of `jsonl:PATH` ({"prompt"} or {"messages"} a line) or `sharegpt:PATH`.

    Raises `UsageError`.
    """
    kind, _, path = data.partition(":")
    try:
        raw = Path(path).read_bytes()
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
            if body.get("messages") is not None and body.get("prompt") is not None:
                both = "the record has both messages and prompt"
                raise UsageError(f"--data {path}, line {number}: {both}", param="data")
            prompt = body["messages"] if "messages" in body else body["prompt"]
            if not isinstance(prompt, str | list) or not prompt:
                raise ValueError("no prompt")
            prompts.append(prompt)
    return prompts


def _sharegpt_prompts(raw: bytes) -> list[str | list[dict[str, Any]]]:
    """The first human turn of every conversation."""
    prompts: list[str | list[dict[str, Any]]] = []
    for item in json.loads(raw):
        turns = [t["value"] for t in item["conversations"] if t["from"] in ("human", "user")]
        if turns and turns[0]:
            prompts.append([{"role": "user", "content": turns[0]}])
    return prompts
