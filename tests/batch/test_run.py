"""What comes out of a run: kinds, errors, order, formats, selection."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from nvcli.batch.admission import Waves, group_by_prefix
from nvcli.batch.options import (
    BatchOptions,
    InputFormat,
    OnDuplicate,
    Order,
    OutputFormat,
    Shard,
    parse_shard,
)
from nvcli.batch.output_lines import encode_line, text_line
from nvcli.batch.run import TooManyErrorsError
from nvcli.batch.sink import LineSink
from nvcli.batch.source import InputError
from nvcli.errors import EngineClosedError, UsageError
from tests.batch.lockstep import keep_in_step
from tests.batch.support import (
    Ran,
    essences,
    mixed_records,
    read_lines,
    run_here,
    run_process,
    write_lines,
)

CHAT = {"method": "POST", "url": "/v1/chat/completions"}


def run(tmp_path: Path, records: list[Any], **options: Any) -> tuple[list[dict[str, Any]], Ran]:
    source = write_lines(tmp_path / "in.jsonl", records)
    ran = run_here(source, tmp_path / "out.jsonl", force=True, **options)
    return read_lines(tmp_path / "out.jsonl"), ran


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


B1 = ['{"prompt":"ok"}', "{bad", "[1,2]", '"x"', "null", '{"prompt":123}', '{"prompt":"ok"}']


def test_a_record_with_prompt_and_messages_is_an_error_record(tmp_path: Path) -> None:
    both = {"prompt": "a", **user("b")}
    body = {"url": "/v1/chat/completions", "body": both}
    (_, first, second), ran = run(tmp_path, [{"prompt": "ok"}, both, body])
    assert ran.code == 4
    assert [first["error"]["line"], second["error"]["line"]] == [2, 3]
    assert "has both messages and prompt" in first["error"]["message"]
    assert second["error"]["message"] == "prompt cannot be given beside messages"
    with pytest.raises(UsageError, match=r"in\.jsonl, line 2: .* both messages and prompt"):
        run(tmp_path, [{"prompt": "ok"}, both], is_strict=True)


def test_bad_lines_are_error_records_with_their_line(tmp_path: Path) -> None:
    """B1"""
    lines, ran = run(tmp_path, B1)
    assert ran.code == 4
    reason = "invalid JSON: Expecting property name enclosed in double quotes (column 2)"
    retry = "--retry-errors runs them again"
    assert ran.err == f"nvcli: 5 of 7 records failed, the first at line 2: {reason}; {retry}\n"
    assert [line["index"] for line in lines] == list(range(7))
    errors = [line["error"] and line["error"]["line"] for line in lines]
    assert errors == [None, 2, 3, 4, 5, 6, None]
    assert [line["text"] is None for line in lines] == [bool(error) for error in errors]


def test_a_wrong_format_and_an_empty_file_are_told(tmp_path: Path) -> None:
    _, ran = run(tmp_path, ["one", "two"])
    assert "the first at line 1: invalid JSON" in ran.err
    assert "; --input-format text takes a line for a prompt; " in ran.err
    role = {"role": "\x1b[2J\u202e", "content": "x"}
    ran = run_here(write_lines(tmp_path / "b", [{"messages": [role]}]), tmp_path / "b.jsonl")
    assert "1 of 1 records failed at line 1: messages[0].role" in ran.err
    assert not {"\x1b", "\u202e"} & set(ran.err)
    ran = run_here(write_lines(tmp_path / "c", []), tmp_path / "c.jsonl")
    assert (ran.code, ran.err) == (0, f"nvcli: {tmp_path / 'c'} holds no record\n")


def test_strict_ends_before_the_model_is_loaded(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", B1)
    with pytest.raises(UsageError, match=r"line 2: .*5 bad records"):
        run_here(source, tmp_path / "out.jsonl", is_strict=True, engine_bug="never loaded")
    assert not (tmp_path / "out.jsonl").exists()


def test_strict_on_a_pipe_stops_at_the_bad_line(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, "{bad", {"prompt": "b"}])
    with source.open("rb") as file:
        done = run_process("-", "--strict", stdin=file)
    assert done.returncode == 2
    assert b"line 2" in done.stderr
    assert done.stdout.count(b"\n") == 1


def test_duplicate_ids_end_the_run_before_it_starts(tmp_path: Path) -> None:
    """B6"""
    records = [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"}, {"id": "a", "prompt": "y"}]
    source = write_lines(tmp_path / "in.jsonl", records)
    with pytest.raises(UsageError, match="id 'a' of line 3 is that of line 1"):
        run_here(source, tmp_path / "out.jsonl", engine_bug="never loaded")
    assert not (tmp_path / "out.jsonl").exists()
    lines, ran = run(tmp_path, records, on_duplicate=OnDuplicate.SUFFIX)
    assert [line["id"] for line in lines] == ["a", "b", "a#2"]
    lines, ran = run(tmp_path, records, on_duplicate=OnDuplicate.KEEP)
    assert [line["id"] for line in lines] == ["a", "b", "a"]
    assert ran.code == 0


def test_ids_missing_empty_numbers_and_others(tmp_path: Path) -> None:
    """B6"""
    ids: list[Any] = ["", 7, 1.5, True, None, ["a"], "7b"]
    records = [{"custom_id": i, **CHAT, "body": user("hi")} for i in ids]
    lines, _ = run(tmp_path, records)
    errors = [line["error"] and line["error"]["code"] for line in lines]
    bad = "invalid_id"
    assert errors == [bad, None, bad, bad, None, bad, None]
    assert lines[1]["custom_id"] == "7"
    assert lines[4]["custom_id"].startswith("rec-")


def test_duplicates_on_a_pipe_become_error_records(tmp_path: Path) -> None:
    records = [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}]
    source = write_lines(tmp_path / "in.jsonl", records)
    with source.open("rb") as file:
        done = run_process("-", stdin=file)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 4
    assert lines[1]["error"] == {
        "code": "duplicate_id",
        "message": "id 'a' is that of line 1",
        "line": 2,
    }


def test_poisoned_records_cost_one_line_each(tmp_path: Path) -> None:
    """B7 and the issue's list: the good ones among them do not notice."""
    good = {"prompt": "good"}
    records: list[Any] = [
        good,
        {"prompt": "x" * 5000},
        good,
        {"prompt": [1, 2, 999]},
        {"prompt": "x", "stop_token_ids": [2**40]},
        {"prompt": "x", "logit_bias": {"5000": 1}},
        b'{"id":"\\ud800","prompt":"[/INST] list[int] \\ud800 \\u001b[2J"}',
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"x": 1}}},
        {"prompt": "x", "guided_json": {}},
        {"prompt": "x", "tools": [{"function": {"name": "f"}}], "tool_choice": "required"},
        {"custom_id": "e", "url": "/v1/rerank", "body": {"query": "x"}},
        {"prompt": "FAIL"},
        {"prompt": "x", "temperature": "hot"},
        {"prompt": "x", "top_p": 0},
        {"prompt": ""},
        {"prompt": []},
        {"messages": []},
        {"messages": [{"role": "alien", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"prompt": "x", "seed": 10**30},
        {"custom_id": "u", "url": "/v1/nothing", "body": {}},
        {"custom_id": "g", "method": "GET", "url": "/v1/completions", "body": {}},
        {"custom_id": "n", "url": "/v1/completions"},
        good,
    ]
    lines, ran = run(tmp_path, records)
    assert len(lines) == len(records)
    codes = [line["error"] and line["error"]["code"] for line in lines]
    assert codes == [
        None,
        "context_length_exceeded",
        None,
        *["invalid_parameter"] * 3,
        None,
        "invalid_parameter",
        None,
        "unsupported_field",
        "unsupported_endpoint",
        "engine_error",
        "invalid_parameter",
        "invalid_parameter",
        None,
        "invalid_parameter",
        "invalid_parameter",
        "invalid_messages",
        "invalid_messages",
        "invalid_parameter",
        "unsupported_endpoint",
        "invalid_parameter",
        "invalid_parameter",
        None,
    ]
    assert "5,0" in lines[1]["error"]["message"]
    assert lines[6]["id"] == "\ufffd"
    assert ran.code == 4


def test_a_good_prompt_may_be_empty_for_a_chat_only(tmp_path: Path) -> None:
    lines, _ = run(tmp_path, [{"prompt": ""}, {"prompt": "", "raw": True}])
    assert lines[0]["error"] is None
    assert lines[1]["error"]["code"] == "invalid_parameter"


# --- equal text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 3, 100])
@pytest.mark.parametrize("order", list(Order))
def test_window_and_order_change_no_text(tmp_path: Path, window: int, order: Order) -> None:
    source = write_lines(tmp_path / "in.jsonl", mixed_records(60))
    run_here(source, tmp_path / "plain.jsonl", seed=5)
    run_here(source, tmp_path / "out.jsonl", seed=5, window=window, order=order)
    found = essences(tmp_path / "out.jsonl")
    assert (found if order is Order.INPUT else sorted(found)) == essences(tmp_path / "plain.jsonl")


def test_another_seed_is_another_text(tmp_path: Path) -> None:
    one, _ = run(tmp_path, [{"prompt": "a"}] * 3, seed=1)
    two, _ = run(tmp_path, [{"prompt": "a"}] * 3, seed=2)
    assert [line["text"] for line in one] != [line["text"] for line in two]
    assert len({line["text"] for line in one}) > 1  # equal prompts, seeds of their own


def test_a_record_may_bring_its_seed(tmp_path: Path) -> None:
    one, _ = run(tmp_path, [{"prompt": "a", "seed": 3}] * 2, seed=1)
    two, _ = run(tmp_path, [{"prompt": "a", "seed": 3}], seed=2)
    assert {line["text"] for line in one} == {line["text"] for line in two}


def test_shard_and_skip_keep_the_index(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", mixed_records(31))
    run_here(source, tmp_path / "plain.jsonl", seed=5)
    whole = essences(tmp_path / "plain.jsonl")
    for options, expected in [
        ({"skip": 4}, whole[4:]),
        ({"limit": 7}, whole[:7]),
        ({"skip": 3, "limit": 2}, whole[3:5]),
        ({"shard": Shard(1, 3)}, whole[0::3]),
        ({"shard": Shard(3, 3), "limit": 2}, whole[2:8:3]),
    ]:
        run_here(source, tmp_path / "out.jsonl", seed=5, force=True, **options)
        assert essences(tmp_path / "out.jsonl") == expected


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2"])
def test_bad_shards(text: str) -> None:
    with pytest.raises(UsageError):
        parse_shard(text)


# --- parameters ----------------------------------------------------------------------------------


def test_record_wins_over_flag(tmp_path: Path) -> None:
    records = [{"prompt": "a"}, {"prompt": "a", "max_tokens": 2}]
    lines, _ = run(tmp_path, records, sampling={"max_tokens": 1}, seed=1)
    assert [line["usage"]["completion_tokens"] for line in lines] == [1, 2]


def test_system_prompt_goes_where_there_is_none(tmp_path: Path) -> None:
    records = [
        {"prompt": "a"},
        {"prompt": "a", "system": "own"},
        {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}]},
        {"custom_id": "c", **CHAT, "body": user("a")},
        {"prompt": "a", "raw": True},
    ]
    lines, _ = run(tmp_path, records, system="be brief")
    sizes = [
        (line.get("usage") or line["response"]["body"]["usage"])["prompt_tokens"] for line in lines
    ]
    with_run, own = len("<system>be brief\n<user>a\n"), len("<system>own\n<user>a\n")
    assert sizes == [with_run, own, own, with_run, 1]


SHAPE = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"title": "of the run"}}}


def test_the_run_shapes_answers_of_records_that_ask_for_no_shape(tmp_path: Path) -> None:
    own = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"title": "its own"}}}
    records = [
        {"prompt": "a"},
        {"prompt": "a", "response_format": None},
        {"prompt": "a", "raw": True},
        {"prompt": [1, 2]},
        user("a"),
        {"custom_id": "c", **CHAT, "body": user("a")},
        {"custom_id": "t", "url": "/v1/completions", "body": {"prompt": "a"}},
        {"prompt": "a", "response_format": own},
        {"prompt": "a", "guided_choice": ["x"]},
        {"prompt": "a", "response_format": {"type": "text"}},
        {"custom_id": "e", "url": "/v1/embeddings", "body": {"input": "a"}},
        {"custom_id": "d", **CHAT, "body": {**user("a"), "response_format": own}},
        {"custom_id": "r", "url": "/v1/responses", "body": {"input": "a"}},
        {
            "custom_id": "s",
            "url": "/v1/responses",
            "body": {"input": "a", "text": {"format": {"type": "text"}, "verbosity": "low"}},
        },
    ]
    lines, ran = run(tmp_path, records, response_format=SHAPE)
    assert [line["error"] for line in lines] == [None] * 14
    grammars = ran.engine.grammars
    assert sum("of the run" in source for source in grammars) == 9  # one is to see if it compiles
    assert sum("its own" in source for source in grammars) == 2
    assert len(grammars) == 12


def test_a_schema_that_does_not_compile_costs_its_record_or_ends_the_run(tmp_path: Path) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no such type"}}}
    lines, _ = run(tmp_path, [{"prompt": "a", "response_format": bad}, {"prompt": "b"}])
    assert [line["error"] and line["error"]["code"] for line in lines] == ["invalid_grammar", None]
    out = tmp_path / "other.jsonl"
    with pytest.raises(UsageError, match="--schema: no such type"):
        run_here(tmp_path / "in.jsonl", out, response_format=bad)
    assert not out.exists()


def test_prompt_field(tmp_path: Path) -> None:
    records = [{"question": "abc", "id": "1"}, {"prompt": "abc"}]
    lines, _ = run(tmp_path, records, prompt_field="question", echo=("question", "x"))
    assert [line["error"] for line in lines] == [None, None]
    assert lines[0]["input"] == {"question": "abc", "x": None}


def test_thinking_has_its_own_field(tmp_path: Path) -> None:
    records = [{"prompt": "THINK"}, {"prompt": "plain"}]
    lines, _ = run(tmp_path, records, include_thinking=True)
    assert [line["thinking"] for line in lines] == ["let me see", None]
    lines, _ = run(tmp_path, records)
    assert "thinking" not in lines[0]


def test_tools_auto_and_none(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    records = [
        {"prompt": "CALL", "tools": tools},
        {"prompt": "CALL", "tools": tools, "tool_choice": "none"},
        {"custom_id": "c", **CHAT, "body": {**user("CALL"), "tools": tools}},
    ]
    lines, _ = run(tmp_path, records)
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": "look", "arguments": '{"at":"é"}'},
    }
    assert lines[0]["tool_calls"] == [call]
    assert lines[0]["finish_reason"] == "tool_calls"
    assert "tool_calls" not in lines[1]
    choice = lines[2]["response"]["body"]["choices"][0]
    assert choice["message"]["tool_calls"] == [call]
    assert choice["finish_reason"] == "tool_calls"


def test_several_answers(tmp_path: Path) -> None:
    records = [
        {"prompt": "a", "n": 3},
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": ["a", "b"], "n": 2}},
    ]
    lines, _ = run(tmp_path, records, seed=1)
    assert len(lines[0]["choices"]) == 3
    assert lines[0]["text"] == lines[0]["choices"][0]["text"]
    body = lines[1]["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 2


# --- formats -------------------------------------------------------------------------------------


def test_openai_envelope(tmp_path: Path) -> None:
    records = [
        {"custom_id": "c", **CHAT, "body": {**user("a"), "logprobs": True, "top_logprobs": 1}},
        {"custom_id": "d", **CHAT, "body": {}},
    ]
    lines, _ = run(tmp_path, records)
    assert set(lines[0]) == {"id", "custom_id", "index", "response", "error"}
    body = lines[0]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert set(body["choices"][0]) >= {"index", "message", "finish_reason", "logprobs"}
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["token"] == "a"
    assert lines[1]["response"]["status_code"] == 400
    assert lines[1]["response"]["body"]["error"]["param"] == "messages"
    assert lines[1]["error"]["line"] == 2


@pytest.mark.parametrize("output_format", [OutputFormat.OPENAI, OutputFormat.SIMPLE])
def test_one_format_for_all_kinds(tmp_path: Path, output_format: OutputFormat) -> None:
    records = [{"prompt": "a"}, {"custom_id": "c", **CHAT, "body": user("a")}, "{bad"]
    lines, _ = run(tmp_path, records, output_format=output_format)
    key = "custom_id" if output_format is OutputFormat.OPENAI else "text"
    assert all(key in line for line in lines)


def test_text_output_is_one_line_a_record(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.txt", ["one", "two"])
    ran = run_here(source, tmp_path / "out.txt", output_format=OutputFormat.TEXT)
    assert ran.code == 0
    assert len((tmp_path / "out.txt").read_text().splitlines()) == 2
    assert text_line("a\nb\\\u2028\x1b[2J é") == "a\\nb\\\\\\u2028\\u001b[2J é\n".encode()


def test_text_through_a_pipe() -> None:
    done = run_process(
        "-", "--input-format", "text", "--output-format", "text", input=b"one\n\ntwo \xe2\x80\xa8\n"
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"\n") == 2


@pytest.mark.parametrize("text", ["plain", "\x00\x1b\x7f", "\u2028\u0085é😀", '"\\', "\ud800"])
def test_every_text_comes_back_in_ascii_without_controls(text: str) -> None:
    line = encode_line({"text": text, "ids": (1, 2), "n": 0.1})
    assert line.isascii()
    assert re.fullmatch(rb"[ -~]*\n", line)
    expected = text if text != "\ud800" else "\ufffd"
    assert json.loads(line) == {"text": expected, "ids": [1, 2], "n": 0.1}


def test_lines_are_ascii_and_always_read() -> None:
    value = {"text": "\u2028\u0085é\ud800😀", "n": float("nan"), "deep": [{"\udc00": 1}]}
    line = encode_line(value)
    assert line.isascii()
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"text": "\u2028\u0085é\ufffd😀", "n": None, "deep": [{"\ufffd": 1}]}


def test_no_standard_error_is_no_reason_to_stop() -> None:
    done = run_process("-", input=b'{"prompt":"a"}\n{bad\n', preexec_fn=lambda: os.close(2))
    assert (done.returncode, done.stdout.count(b"\n")) == (4, 2)


def test_a_folder_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="it is a folder"):
        run_here(tmp_path, tmp_path / "out.jsonl", engine_bug="never loaded")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    for name in (".", "..", "./"):  # those that have no name of their own, too
        with pytest.raises(UsageError, match="is a folder"):
            run_here(tmp_path / "in.jsonl", Path(name), engine_bug="never loaded")
    assert [*(tmp_path / "here").iterdir()] == []


def test_gzip_input(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(gzip.compress(b'{"prompt":"a"}\n' * 5))
    run_here(source, tmp_path / "out.jsonl")
    assert len(read_lines(tmp_path / "out.jsonl")) == 5


def test_input_that_ends_early_keeps_what_was_read(tmp_path: Path) -> None:
    import random

    rng = random.Random(3)
    records = [{"prompt": f"{rng.random()}"} for _ in range(60)]
    plain = write_lines(tmp_path / "plain.jsonl", records).read_bytes()
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(gzip.compress(plain)[:-300])
    with source.open("rb") as file:
        done = run_process("-", "--seed", "1", stdin=file)
    assert done.returncode == 1
    num_lines = done.stdout.count(b"\n")
    assert 10 < num_lines < 60
    assert f"{num_lines} records are safe".encode() in done.stderr
    # a file is found out before anything is written
    with pytest.raises(InputError, match="0 records are safe") as caught:
        run_here(source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    assert caught.value.hint == "Mend the input, then run it again with --resume to go on."


# --- the run -------------------------------------------------------------------------------------


def test_max_errors_stops_the_run(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ["{bad"] * 100)
    with pytest.raises(TooManyErrorsError, match=r"more than 2 records failed.* records are safe"):
        run_here(source, tmp_path / "out.jsonl", max_errors=2, window=2)
    assert 3 <= len(read_lines(tmp_path / "out.jsonl")) < 10


def test_an_engine_that_dies_ends_the_run_and_makes_no_error_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.batch.fake_llm import FakeEngine

    real = FakeEngine.step

    def step(self: FakeEngine, deliver: Any) -> None:
        if len(self.num_busy) == 20:
            raise RuntimeError("the device is lost")
        real(self, deliver)

    source = write_lines(tmp_path / "in.jsonl", mixed_records(60))
    run_here(source, tmp_path / "clean.jsonl", seed=7)
    monkeypatch.setattr(FakeEngine, "step", step)
    out = tmp_path / "out.jsonl"
    with pytest.raises(EngineClosedError, match=r"the device is lost.* records are safe"):
        run_here(source, out, seed=7)
    assert 0 < len(read_lines(out)) < 60
    assert all((line["error"] or {}).get("code") != "engine_closed" for line in read_lines(out))
    monkeypatch.undo()
    run_here(source, out, seed=7, resume=True)
    assert essences(out) == essences(tmp_path / "clean.jsonl")


def test_the_engine_stays_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_in_step(monkeypatch)
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(400)])
    ran = run_here(source, tmp_path / "out.jsonl", seed=7, engine_length=20)
    busy = ran.engine.engine.num_busy[:-25]
    assert set(busy) == {ran.engine.engine.max_num_seqs}


def test_a_wide_window_brings_shared_prefixes_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten long prefixes in turn: far apart in the input, next to each other in the engine."""
    records = [{"prompt": f"{i % 10}" * 40 + f" {i}", "raw": True} for i in range(400)]
    source = write_lines(tmp_path / "in.jsonl", records)
    together = {}
    for window in (8, 80):
        with monkeypatch.context() as patch:
            keep_in_step(patch)
            options: dict[str, Any] = {"window": window, "seed": 7, "engine_length": 6}
            ran = run_here(source, tmp_path / "out.jsonl", force=True, **options)
        positions = [int(name.split("-")[1]) for name in ran.engine.engine.admitted]
        pairs = itertools.pairwise(position % 10 for position in positions)
        together[window] = sum(a == b for a, b in pairs)
        busy = ran.engine.engine.num_busy[:-25]
        assert sum(busy) / len(busy) > 0.9 * ran.engine.engine.max_num_seqs
        assert [line["index"] for line in read_lines(tmp_path / "out.jsonl")] == list(range(400))
    assert together[8] < 20
    assert together[80] > 150


def test_the_heap_is_frozen_for_the_run_only(tmp_path: Path) -> None:
    import gc

    before, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        real = LineSink.write

        def write(self: LineSink, line: bytes) -> None:
            seen.append(gc.get_freeze_count())
            real(self, line)

        patch.setattr(LineSink, "write", write)
        run(tmp_path, [{"prompt": "a"}])
    assert seen[0] > 1000
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, num_frozen)


def test_the_engine_is_closed(tmp_path: Path) -> None:
    _, ran = run(tmp_path, [{"prompt": "a"}])
    assert ran.engine.is_closed


def test_stats_json(tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    run(tmp_path, [{"prompt": "abc"}, "{bad"], stats_json=stats)
    value = json.loads(stats.read_text())
    assert set(value) == {"command", "model", "usage", "timings", "records", "engine"}
    assert value["records"] == {"written": 2, "failed": 1, "resumed": 0}
    assert value["usage"]["prompt_tokens"] == len("<user>abc\n")
    assert value["model"] is not None
    stats.unlink()
    again = run_here(tmp_path / "in.jsonl", tmp_path / "out.jsonl", resume=True, stats_json=stats)
    assert not again.engines  # nothing was left to do
    value = json.loads(stats.read_text())
    assert set(value) == {"command", "model", "usage", "timings", "records", "engine"}
    assert value["records"] == {"written": 0, "failed": 0, "resumed": 2}
    assert value["usage"]["total_tokens"] == 0


# --- admission -----------------------------------------------------------------------------------


class Item:
    def __init__(self, name: str, ids: list[int]) -> None:
        self.name = name
        self.prompts = [type("P", (), {"token_ids": ids})()]


def test_shared_prefixes_stand_together_in_order_of_appearance() -> None:
    one, two = list(range(16)), list(range(50, 66))
    items = [
        Item("a", [*one, 3]),
        Item("b", [*two, 9]),
        Item("c", [1, 2]),
        Item("d", [*one, 1]),
        Item("e", [*two, 8]),
        Item("f", [*one, 2]),
    ]
    assert "".join(i.name for i in group_by_prefix(items)) == "dfabec"  # type: ignore[arg-type, attr-defined]


def test_a_wave_ends_before_the_next_begins() -> None:
    waves = Waves(2)
    for name in "abcd":
        waves.add(Item(name, [1, 2, 3]))  # type: ignore[arg-type]
    assert [waves.take().name for _ in range(2)] == ["a", "b"]  # type: ignore[attr-defined]
    assert len(waves) == 2
    waves.clear()
    with pytest.raises(IndexError):
        waves.take()


def test_contradicting_options(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for options in [
        {"resume": True},
        {"output": out, "resume": True, "force": True},
        {"output": out, "append": True, "force": True},
        {"output": out, "resume": True, "output_format": OutputFormat.TEXT},
        {"output_format": OutputFormat.TEXT, "echo": ("a",)},
        {"limit": 0},
        {"input": "-", "input_format": InputFormat.PARQUET},
        {"window": 0},
        {"skip": -1},
        {"is_raw": True, "system": "x"},
    ]:
        with pytest.raises(UsageError):
            BatchOptions(**{"input": "x", **options})
