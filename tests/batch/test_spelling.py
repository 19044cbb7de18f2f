"""Misspelt fields of records are told, data is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nvcli.batch.spelling import MAX_TOLD, meant, misspelt
from nvcli.errors import UsageError
from nvcli.protocol import GENERATION_FIELDS
from tests.batch.support import read_lines, run_here, run_process, write_lines
from tests.batch.test_reports import look

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("temprature", 0.5, "temperature"),
        ("temperatur", 0, "temperature"),
        ("Temperature", 1.5, "temperature"),
        ("temprature", "0.5", "temperature"),  # of a table
        ("maxTokens", 5, "max_tokens"),
        ("max-tokens", 5, "max_tokens"),
        ("max_token", 5, "max_tokens"),
        ("max_new_tokens", 5, "max_tokens"),
        ("maxNewTokens", 5, "max_tokens"),
        ("Temprature", 1, "temperature"),
        ("num_predict", 5, "max_tokens"),
        ("topP", 0.9, "top_p"),
        ("top-k", 5, "top_k"),
        ("repeat_penalty", 1.1, "repetition_penalty"),
        ("frequency_penality", 0.1, "frequency_penalty"),
        ("stop_sequences", ["x"], "stop"),
        ("Seed", 1, "seed"),
        ("enable_thinkng", False, "enable_thinking"),
        ("response_formt", {"type": "json_object"}, "response_format"),
        ("sytem", "Be brief.", "system"),
        ("system_prompt", "Be brief.", "system"),
    ],
)
def test_what_is_misspelt(key: str, value: Any, field: str) -> None:
    (doubt,) = misspelt({"prompt": "x", key: value}, has_messages=False, data=())
    assert doubt.key == key
    assert doubt.text.endswith(f"the field is called {field}")
    assert misspelt({"prompt": "x", key: value}, has_messages=False, data=(key,)) == ()
    assert misspelt({"prompt": "x", key: value, field: value}, has_messages=False, data=()) == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("label", 1),
        ("speed", 5),
        ("topic", "x"),
        ("top_n", 3),
        ("steps", 5),
        ("score", 0.5),
        ("source", "x"),
        ("num_tokens", 512),
        ("input_tokens", 512),
        ("reason", "x"),
        ("user", "x"),
        ("index", 5),
        ("model", "x"),
        ("Temperature", 21.5),  # of the weather
        ("Temperature", "warm"),
        ("temprature", None),
        ("Tools", "a hammer"),
        ("Priority", "high"),
        ("", 1),
        ("x" * 100_000, 1),
        ("温度", 1),
    ],
)
def test_what_is_data(key: str, value: Any) -> None:
    assert misspelt({"prompt": "x", key: value}, has_messages=False, data=()) == ()


def test_every_field_is_itself() -> None:
    assert {meant(name) for name in GENERATION_FIELDS} == set(GENERATION_FIELDS)


RECORDS = [
    {"prompt": "a", "label": "x"},
    {"prompt": "b", "temprature": 0.5},
    {"prompt": "c", "temprature": 0.7, "n_predict": 2},
    {"messages": USER, "system": "Be brief."},
    {
        "custom_id": "d",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": USER, "max_token": 3, "stream_options": {"x": 1}},
    },
]
TOLD = [
    "line 2: 'temprature' is taken as data of the record; the field is called temperature",
    "line 3: 'n_predict' is taken as data of the record; the field is called max_tokens",
    "line 4: 'system' counts beside a prompt only; put it into the messages",
    "line 5: 'max_token' in body is no known field and changes nothing; "
    "the field is called max_tokens",
    "line 5: 'stream_options.x' in body is no known field and changes nothing",
]


def test_a_run_tells_each_key_once(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", RECORDS)
    ran = run_here(source, tmp_path / "out.jsonl", echo=("label",))
    assert ran.code == 0
    assert ran.err.splitlines() == [f"nvcli: {line}" for line in TOLD]
    assert read_lines(tmp_path / "out.jsonl")[0]["input"] == {"label": "x"}
    named = run_here(source, tmp_path / "2.jsonl", echo=("temprature", "n_predict"))
    assert named.err.splitlines() == [f"nvcli: {line}" for line in TOLD[2:]]


def test_a_pipe_too_unless_quiet(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", RECORDS)
    for flags, told in (([], [f"nvcli: {line}" for line in TOLD]), (["-q"], [])):
        with source.open("rb") as file:
            ran = run_process("-", *flags, stdin=file)
        assert ran.returncode == 0
        assert ran.stderr.decode().splitlines() == told


def test_strict_refuses(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", RECORDS)
    with pytest.raises(
        UsageError, match=r"line 2: 'temprature' .*\(4 bad records in all\)"
    ) as caught:
        run_here(source, tmp_path / "out.jsonl", is_strict=True, engine_bug="never loaded")
    assert caught.value.hint == "Without --strict this is a warning. What --echo names is data."
    assert not (tmp_path / "out.jsonl").exists()
    with source.open("rb") as file:
        ran = run_process("-", "--strict", stdin=file)
    assert ran.returncode == 2
    assert b"nvcli: line 2: 'temprature' is taken as data" in ran.stderr


def test_a_dry_run(tmp_path: Path) -> None:
    found = look(tmp_path, RECORDS)
    assert found.doubts == TOLD
    assert set(TOLD) < set(found.lines("in.jsonl"))
    assert found.as_json()["warnings"] == TOLD


def test_a_table(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("prompt,label,Temprature\nhi,x,\nho,x,0.5\n")
    ran = run_here(source, tmp_path / "out.jsonl")
    told = "'Temprature' is taken as data of the record; the field is called temperature"
    assert ran.err == f"nvcli: line 3: {told}\n"


def test_only_the_first_few_are_told(tmp_path: Path) -> None:
    body = {"messages": USER, **{f"x{i}": i for i in range(100)}}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    ran = run_here(write_lines(tmp_path / "in.jsonl", [line]), tmp_path / "out.jsonl")
    assert len(ran.err.splitlines()) == MAX_TOLD


def test_names_are_shown_without_escapes(tmp_path: Path) -> None:
    body = {"messages": USER, "\x1b[2J\u202e": 1}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(line) + "\n")
    ran = run_here(source, tmp_path / "out.jsonl")
    assert ran.err.isascii()
    assert "\x1b" not in ran.err
