"""Embeddings records: OpenAI's lines for /v1/embeddings, through the engine that generates."""

from __future__ import annotations

import base64
import struct
from pathlib import Path
from typing import Any

import pytest

from nvcli.batch.options import OutputFormat
from tests.batch.support import read_lines, run_here, run_process, source_and_output, write_lines


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body}


RECORDS = [
    line("one", input="hello"),
    {"prompt": "hello"},
    line("two", input=["hello", "you"], encoding_format="base64", dimensions=32),
    line("ids", input=[1, 2, 3]),
    line("query", input="hello", input_type="query"),
    line("large", input="x", dimensions=65),
    line("empty", input=""),
    line("none"),
    line("long", input="x" * 2000),
    line("far", input=[999]),
    line("messages", messages=[{"role": "user", "content": "hello"}]),
]


def run(tmp_path: Path, **options: Any) -> list[dict[str, Any]]:
    source, out = source_and_output(tmp_path, RECORDS)
    assert run_here(source, out, seed=1, force=True, **options).code == 4
    return read_lines(out)


def test_embeddings_stand_among_other_kinds(tmp_path: Path) -> None:
    lines = run(tmp_path)
    codes = [entry["error"] and entry["error"]["code"] for entry in lines]
    bad = "invalid_parameter"
    assert codes == [None] * 5 + [bad, bad, bad, "context_length_exceeded", bad, None]
    body = lines[0]["response"]["body"]
    assert set(body) == {"object", "data", "model", "usage"}
    vector = body["data"][0]["embedding"]
    assert len(vector) == 64
    assert sum(number * number for number in vector) == pytest.approx(1)
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    data = lines[2]["response"]["body"]["data"]
    assert [item["index"] for item in data] == [0, 1]
    first = struct.unpack("<32f", base64.b64decode(data[0]["embedding"]))
    assert sum(number * number for number in first) == pytest.approx(1)
    query = lines[4]["response"]["body"]["data"][0]["embedding"]
    assert query != vector  # it stands behind its task
    assert lines[1]["text"]


def test_embeddings_in_the_other_formats(tmp_path: Path) -> None:
    lines = run(tmp_path, output_format=OutputFormat.SIMPLE)
    assert len(lines[0]["embedding"]) == 64
    assert lines[0]["usage"]["completion_tokens"] == 0
    assert [len(choice["embedding"]) for choice in lines[2]["choices"]] == [32, 32]
    source = write_lines(tmp_path / "one.jsonl", [line("a", input="hello")])
    done = run_process(source, "--output-format", "text")
    assert (done.returncode, done.stdout) == (4, b"\n")


def test_embeddings_resume(tmp_path: Path) -> None:
    whole = run(tmp_path)
    out = tmp_path / "out.jsonl"
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:1]))
    source = tmp_path / "in.jsonl"
    run_here(source, out, seed=1, resume=True)
    found = read_lines(out)
    assert [entry.get("custom_id") for entry in found] == [
        entry.get("custom_id") for entry in whole
    ]
    assert found[2]["response"]["body"]["data"] == whole[2]["response"]["body"]["data"]
