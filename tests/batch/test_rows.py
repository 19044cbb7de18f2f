"""Rows of every input format; a bad row is a row with a problem."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvcli.batch.options import BatchOptions, InputFormat
from nvcli.batch.records import Failure, identify, parse_record
from nvcli.batch.rows import Row, _csv_rows, detect_format, read_rows
from nvcli.batch.source import InputError, Line
from nvcli.errors import UsageError


def rows(tmp_path: Path, data: bytes, name: str = "in.jsonl", **options: object) -> list[Row]:
    path = tmp_path / name
    path.write_bytes(data)
    return list(read_rows(str(path), **options))  # type: ignore[arg-type]


def test_json_lines_with_separators_inside_strings(tmp_path: Path) -> None:
    """B3"""
    text = "a\u2028b\u2029c\u0085d\x0be"
    raw = json.dumps({"prompt": text}, ensure_ascii=False).replace("\\u000b", "\u000b")
    found = rows(tmp_path, raw.encode() + b"\n")
    assert len(found) == 1
    # U+000B is a control character, which JSON wants escaped
    assert found[0].problem is not None
    found = rows(tmp_path, json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\r\n")
    assert [(row.line, row.value) for row in found] == [(1, {"prompt": text})]


@pytest.mark.parametrize(
    ("line", "code", "part"),
    [
        (b"{bad", "invalid_json", "column 2"),
        (b'{"a": NaN}', "invalid_json", "NaN"),
        (b'{"a": -Infinity}', "invalid_json", "Infinity"),
        (b"[" * 200_000, "invalid_json", "nested too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json", "Exceeds the limit"),
        (b'{"a": "\xff"}', "invalid_utf8", "byte 8"),
        (b'{"a": "\xed\xa0\x80"}', "invalid_utf8", "byte 8"),
        (b'{"a":1}{"b":2}', "invalid_json", "Extra data"),
        (b'\x00{"a":1}', "invalid_json", ""),
    ],
)
def test_bad_json_costs_its_own_line(tmp_path: Path, line: bytes, code: str, part: str) -> None:
    found = rows(tmp_path, b'{"prompt":"1"}\n' + line + b'\n{"prompt":"2"}')
    assert [row.line for row in found] == [1, 2, 3]
    assert found[0].problem is None
    assert found[2].problem is None
    problem = found[1].problem
    assert problem is not None
    assert problem.code == code
    assert part in problem.message
    assert "\n" not in problem.message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "a", "max_tokens": 1e400}', "max_tokens must be a finite number"),
        (b'{"prompt": "a", "temperature": -1e400}', "temperature must be a finite number"),
        (b'{"prompt": "a", "top_k": 5.5}', "top_k must be a whole number, got 5.5"),
        (b'{"prompt": "a", "id": 5.5}', "id must be text or a whole number"),
        (b'{"prompt": "a", "id": 1%b}' % (b"0" * 40), "id has over 40 digits; write it as text"),
    ],
)
def test_numbers_that_are_none_of_ours(tmp_path: Path, line: bytes, said: str) -> None:
    options = BatchOptions(input="-")
    for flag in (True, False):
        (row,) = rows(tmp_path, line, is_exact=flag)
        record = parse_record(row, identify(row), options, record_id="a", index=0)
        assert isinstance(record, Failure)
        assert record.message == said


@pytest.mark.parametrize(
    "line",
    [
        b'{"id": 123456789012345678901234, "prompt": "x"}',
        b'{"custom_id": 1.5}',
        b'{"prompt": "\\ud800"}',
        b'{"a": NaN}',
        b"{bad",
        b'{"a": "\xff"}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'"text"',
        b'{"a": 1e999}',
    ],
)
def test_the_quick_reading_knows_the_same_ids_and_problems(tmp_path: Path, line: bytes) -> None:
    exact, quick = (rows(tmp_path, line, is_exact=flag) for flag in (True, False))
    assert [identify(row) for row in exact] == [identify(row) for row in quick]
    assert [row.identity for row in exact] == [row.identity for row in quick]


def test_blank_lines_are_no_records_but_count_as_lines(tmp_path: Path) -> None:
    found = rows(tmp_path, b'\n  \t\r\n{"a":1}\n\n')
    assert [row.line for row in found] == [3]


def test_text_keeps_what_json_lines_would_not(tmp_path: Path) -> None:
    data = "\ufeffone \u2028 two\r\n\n{three\n".encode()
    found = rows(tmp_path, data, "in.txt")
    assert [(r.line, r.value["prompt"]) for r in found] == [(1, "one \u2028 two"), (3, "{three")]


def test_csv_with_quotes_line_ends_and_bad_rows(tmp_path: Path) -> None:
    data = 'id,text\na,"two\r\nlines, ""q"""\nb\nc,gré\n'.encode() + b"d,\xff\ne,last\n"
    found = rows(tmp_path, data, "in.csv", prompt_field="text")
    assert [row.line for row in found] == [2, 4, 5, 6, 7]
    assert found[0].value == {"id": "a", "text": 'two\nlines, "q"', "prompt": 'two\nlines, "q"'}
    assert found[0].is_prompt
    assert [row.problem and row.problem.code for row in found] == [
        None,
        "invalid_csv",
        None,
        "invalid_utf8",
        None,
    ]


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n", b'\ne,""five""\n'])
def test_csv_quote_without_end_is_no_prompt(tmp_path: Path, end: bytes) -> None:
    """Its row would take in all rows behind it, and look like one long prompt."""
    data = b'id,text\na,one\nb,"two\nc,three\nd,four' + end
    found = rows(tmp_path, data, "in.csv", prompt_field="text")
    assert [(row.line, row.problem and row.problem.code) for row in found] == [
        (2, None),
        (3, "invalid_csv"),
    ]
    assert found[1].problem is not None
    assert "no end" in found[1].problem.message


def test_csv_overlong_lines_cost_their_own_rows() -> None:
    lines = [b"id,text", b"a,one", None, b'b,"two', None, b'three"', b"c,four"]
    numbered = (Line(number, data) for number, data in enumerate(lines, start=1))
    found = list(_csv_rows(numbered, "text", ","))
    assert [(row.line, row.problem and row.problem.code) for row in found] == [
        (2, None),
        (3, "line_too_long"),
        (4, "line_too_long"),
        (7, None),
    ]


@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.text('ab,"\n\r '))))
def test_csv_written_by_python_comes_back(
    tmp_path_factory: pytest.TempPathFactory, values: list[tuple[str, str]]
) -> None:
    import csv
    import io

    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["prompt", "note"])
    writer.writerows(values)
    path = tmp_path_factory.mktemp("csv") / "in.csv"
    path.write_bytes(text.getvalue().encode())
    found = [(r.value["prompt"], r.value["note"]) for r in read_rows(str(path))]

    def seen(cell: str) -> str:  # CR before LF is dropped, as everywhere
        return cell.replace("\r\n", "\n")

    assert found == [(seen(a), seen(b)) for a, b in values]


def test_csv_cells_of_sampling_fields_are_values(tmp_path: Path) -> None:
    data = b"""prompt,temperature,stop,n,raw,url,body,messages,system
a,0.5,END,2,true,http://x,some text,x,
b,,,,,,,,be brief
"""
    first, second = rows(tmp_path, data, "in.csv")
    assert first.value["temperature"] == 0.5
    assert (first.value["stop"], first.value["n"], first.value["raw"]) == ("END", 2, True)
    assert "system" not in first.value
    assert second.value["temperature"] is None
    assert second.value["system"] == "be brief"
    assert [identify(row).kind for row in (first, second)] == ["prompt", "prompt"]


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"prompt": "x", "url": "http://x", "body": "text"}, "prompt"),
        ({"messages": [], "url": "http://x"}, "messages"),
        ({"prompt": "x", "messages": None}, "prompt"),
        ({"messages": [], "prompt": None}, "messages"),
        ({"messages": None}, "messages"),
        ({"prompt": None}, "prompt"),
        ({"url": "/v1/completions"}, "openai"),
        ({"body": {}}, "openai"),
        ({"text": "x"}, None),
    ],
)
def test_kinds_where_data_has_keys_of_its_own(
    tmp_path: Path, record: dict[str, object], kind: str | None
) -> None:
    (row,) = rows(tmp_path, json.dumps(record).encode())
    found = identify(row)
    assert found.kind == kind
    assert (found.problem is None) == (kind is not None)


@pytest.mark.parametrize(
    ("field", "record", "kind"),
    [
        ("body", {"body": "text"}, "prompt"),
        ("body", {"url": "http://x", "body": "text"}, "prompt"),
        ("body", {"url": "/v1/completions", "body": {"prompt": "x"}}, "openai"),
        ("url", {"url": "http://x", "body": "text"}, "prompt"),
        ("messages", {"messages": []}, "messages"),
        ("q", {"q": "x", "prompt": "data"}, "prompt"),
        ("q", {"prompt": "x"}, "prompt"),
    ],
)
def test_kinds_where_the_prompt_has_another_name(
    tmp_path: Path, field: str, record: dict[str, object], kind: str
) -> None:
    (row,) = rows(tmp_path, json.dumps(record).encode())
    found = identify(row, field)
    assert (found.kind, found.problem) == (kind, None)


@pytest.mark.parametrize(
    ("record", "keys"),
    [
        ({"prompt": "x", "messages": []}, "messages and prompt"),
        ({"q": "x", "messages": []}, "messages and q"),
        ({"url": "/v1/completions", "body": {"prompt": "x"}, "prompt": "y"}, "body and prompt"),
        ({"url": "/v1/completions", "body": {"prompt": "x"}, "messages": []}, "body and messages"),
    ],
)
def test_a_record_with_two_questions(tmp_path: Path, record: dict[str, object], keys: str) -> None:
    record = {"id": "a", "custom_id": "a", **record}
    (row,) = rows(tmp_path, json.dumps(record).encode())
    found = identify(row, "q")
    assert found.given_id == "a"
    assert found.problem is not None
    assert found.problem.code == "invalid_record"
    assert found.problem.message.startswith(f"the record has both {keys};")


def test_csv_column(tmp_path: Path) -> None:
    assert rows(tmp_path, b"q\nhello\n", "in.csv")[0].value["prompt"] == "hello"
    assert rows(tmp_path, b"x\tprompt\n1\thello\n", "in.tsv")[0].value["prompt"] == "hello"
    with pytest.raises(UsageError, match="a, b"):
        rows(tmp_path, b"a,b\n1,2\n", "in.csv")
    with pytest.raises(UsageError, match="there is no column 'c'"):
        rows(tmp_path, b"a,b\n1,2\n", "in.csv", prompt_field="c")


@pytest.mark.parametrize(
    ("name", "header"),
    [("in.csv", b"id;prompt"), ("in.csv", b"id\tprompt"), ("in.tsv", b"id,prompt")],
)
def test_one_column_that_seems_to_be_several(tmp_path: Path, name: str, header: bytes) -> None:
    """A spreadsheet in a country of decimal commas separates by semicolons."""
    data = header + b"\n1;hello\n"
    with pytest.raises(UsageError, match="the only column is called"):
        rows(tmp_path, data, name)
    found = rows(tmp_path, data, name, prompt_field=header.decode())
    assert found[0].value["prompt"] == "1;hello"


@pytest.mark.parametrize("header", [b"prompt,prompt", b"prompt,id,id", b"prompt,n,x,n"])
def test_two_columns_of_one_name_that_is_read(tmp_path: Path, header: bytes) -> None:
    cells = b",".join([b"1"] * (header.count(b",") + 1))
    with pytest.raises(UsageError, match="two columns are called"):
        rows(tmp_path, header + b"\n" + cells + b"\n", "in.csv")
    (row,) = rows(tmp_path, b"prompt,,\n" + b"hello,,\n", "in.csv")  # data may
    assert row.value["prompt"] == "hello"


def test_packed_formats_go_by_the_inner_name(tmp_path: Path) -> None:
    found = rows(tmp_path, gzip.compress(b"hello\n"), "in.txt.gz")
    assert found[0].value == {"prompt": "hello"}
    assert detect_format("a/B.JSONL.zst") is InputFormat.JSONL
    assert detect_format("-") is InputFormat.JSONL


def test_parquet_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match="pyarrow"):
        list(read_rows(str(path)))


class TestParquet:
    @pytest.fixture
    def write(self, tmp_path: Path) -> Callable[..., str]:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")

        def write(columns: dict[str, object], **options: object) -> str:
            path = tmp_path / "in.parquet"
            parquet.write_table(pyarrow.table(columns), path, **options)
            return str(path)

        return write

    def test_many_row_groups_and_packings(self, write: Callable[..., str]) -> None:
        path = write({"prompt": [f"p{i}" for i in range(3000)]}, row_group_size=70)
        assert [row.value["prompt"] for row in read_rows(path)] == [f"p{i}" for i in range(3000)]
        for packing in ("none", "zstd", "gzip"):
            path = write({"id": [1, 2], "prompt": ["a", "b\u2028"]}, compression=packing)
            found = list(read_rows(path))
            assert [row.value for row in found] == [
                {"id": 1, "prompt": "a"},
                {"id": 2, "prompt": "b\u2028"},
            ]
            assert [row.line for row in found] == [1, 2]

    def test_every_value_is_json(self, write: Callable[..., str]) -> None:
        path = write(
            {
                "text": [b"as bytes", None],
                "when": [datetime(2020, 1, 2), None],
                "price": [Decimal("1.50"), None],
                "raw_bytes": [b"\xff", None],
                "list": [[{"a": b"x"}], []],
                "temperature": [0.5, None],
            }
        )
        first, second = read_rows(path, prompt_field="text")
        assert first.value == {
            "text": "as bytes",
            "prompt": "as bytes",
            "when": "2020-01-02 00:00:00",
            "price": "1.50",
            "raw_bytes": "b'\\xff'",
            "list": [{"a": "x"}],
            "temperature": 0.5,
        }
        assert second.value["prompt"] is None
        json.dumps([first.value, second.value])

    def test_conversations(self, write: Callable[..., str]) -> None:
        (row,) = read_rows(write({"messages": [[{"role": "user", "content": "hi"}]]}))
        assert identify(row).kind == "messages"

    def test_conversations_beside_prompts(self, write: Callable[..., str]) -> None:
        turns = [{"role": "user", "content": "hi"}]
        path = write({"messages": [turns, turns, None], "prompt": ["a", None, "c"]})
        both, messages, prompt = map(identify, read_rows(path))
        assert both.problem is not None
        assert "both messages and prompt" in both.problem.message
        assert (messages.kind, messages.problem) == ("messages", None)
        assert (prompt.kind, prompt.problem) == ("prompt", None)
        (first, *_) = read_rows(path, prompt_field="prompt")  # said, so nothing is unclear
        assert identify(first, "prompt").problem is None

    @pytest.mark.parametrize("data", [b"", b"hello\n", b"PAR1" + b"x" * 50 + b"PAR1", None])
    def test_damaged(self, write: Callable[..., str], data: bytes | None) -> None:
        path = Path(write({"prompt": ["a"] * 50}))
        path.write_bytes(path.read_bytes()[:-20] if data is None else data)
        with pytest.raises(InputError, match=r"cannot read .*in.parquet: \S"):
            list(read_rows(str(path)))
