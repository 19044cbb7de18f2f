"""The files of a batch: what is wrong with an input as a whole, and the two files it ends as."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any, BinaryIO

from nvcli.protocol.fields import kind_of
from nvcli.server.batch_object import batch_error

if TYPE_CHECKING:
    from pathlib import Path

MAX_LINES = 50_000
MAX_ERRORS = 100  # told of a file that is refused


def validate(
    path: Path, endpoint: str, model_names: tuple[str, ...]
) -> tuple[int, list[dict[str, Any]]]:
    """Lines of an input file, and why it cannot be taken. What is wrong with a body only costs
    its own line, later."""
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    total = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            total += 1
            problem = _line_problem(line, endpoint, model_names, seen)
            if problem is not None:
                errors.append(batch_error(*problem, line=number))
            if len(errors) >= MAX_ERRORS or total > MAX_LINES:
                break
    if total == 0:
        errors.append(batch_error("empty_file", "the input file holds no request"))
    if total > MAX_LINES:
        errors.append(
            batch_error("too_many_requests", f"the file holds more than {MAX_LINES:,} lines")
        )
    return total, errors


def _line_problem(
    line: bytes, endpoint: str, model_names: tuple[str, ...], seen: set[str]
) -> tuple[str, str] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return "invalid_json_line", "the line is not valid JSON"
    if not isinstance(value, dict):
        return "invalid_json_line", "the line is no JSON object"
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return "missing_custom_id", f"custom_id {_missing_or_no_text(custom_id)}"
    if custom_id in seen:
        return "duplicate_custom_id", f"custom_id {custom_id[:80]!r} stands twice"
    seen.add(custom_id)
    if value.get("method") != "POST":
        return "invalid_method", "method must be POST"
    if value.get("url") != endpoint:
        return "invalid_url", f"url must be the batch's endpoint, {endpoint}"
    body = value.get("body")
    if not isinstance(body, dict):
        return "invalid_body", "body must be an object"
    model = body.get("model")
    if not isinstance(model, str):
        return "invalid_body", f"body.model {_missing_or_no_text(model)}"
    if model not in model_names:
        return "model_not_found", f"there is no model {model[:80]!r}"
    if body.get("stream"):
        return "invalid_body", "a batch cannot stream"
    return None


def _missing_or_no_text(value: Any) -> str:
    return "is missing" if value in (None, "") else f"must be text, got {kind_of(value)}"


def split_output(output: Path, good: Path, bad: Path) -> tuple[int, int, set[str]]:
    """Part a run's lines in OpenAI's two files; -> how many went where, and the ids of all."""
    counts = [0, 0]
    ids: set[str] = set()
    with good.open("wb") as first, bad.open("wb") as second:
        if not output.exists():
            return 0, 0, ids
        with output.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # a server was killed as it wrote
                value = json.loads(line)
                has_failed = value["error"] is not None
                kept = {key: value[key] for key in ("id", "custom_id", "response")}
                _write(second if has_failed else first, {**kept, "error": None})
                counts[has_failed] += 1
                ids.add(value["custom_id"])
    return counts[0], counts[1], ids


def add_unanswered(bad: Path, source: Path, answered: set[str], code: str, message: str) -> int:
    """Put the requests of an input file that were not answered behind the failed ones, with the
    reason, so that none is in neither file; -> how many. None where the input is gone."""
    count = 0
    if not source.exists():
        return count
    with source.open("rb") as lines, bad.open("ab") as file:
        for line in lines:
            if not line.strip() or (custom_id := json.loads(line)["custom_id"]) in answered:
                continue
            error = {"code": code, "message": message}
            name = f"batch_req_{secrets.token_hex(12)}"
            value = {"id": name, "custom_id": custom_id, "response": None, "error": error}
            _write(file, value)
            count += 1
    return count


def _write(file: BinaryIO, value: dict[str, Any]) -> None:
    file.write(json.dumps(value).encode() + b"\n")
