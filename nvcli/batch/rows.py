"""Rows: what one record of the input is before anybody asks what it means.

JSON Lines, plain text, CSV and Parquet all come out as a JSON value with the line it stood on and
the bytes that identify it, or as the problem it has. A row never raises; only an input that cannot
be read on does.
"""

from __future__ import annotations

import csv
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import orjson

from nvcli.batch.options import InputFormat
from nvcli.batch.source import MAX_LINE_BYTES, InputError, Line, open_chunks, split_lines
from nvcli.errors import UsageError
from nvcli.protocol import GENERATION_FIELDS
from nvcli.text.unicode import repair_surrogates

if TYPE_CHECKING:
    from collections.abc import Iterator

_DELIMITERS = ",;\t|"
_VALUE_COLUMNS = frozenset(GENERATION_FIELDS) | {"raw"}
_SUFFIXES = {
    ".jsonl": InputFormat.JSONL,
    ".ndjson": InputFormat.JSONL,
    ".json": InputFormat.JSONL,
    ".txt": InputFormat.TEXT,
    ".csv": InputFormat.CSV,
    ".tsv": InputFormat.CSV,
    ".parquet": InputFormat.PARQUET,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a row is no record; `code` is for programs."""

    code: str
    message: str


@dataclass(slots=True)
class Row:
    """`identity` stands for the record where it has no id of its own. A row of a table that has a
    prompt is a prompt, whatever its other columns are called."""

    line: int
    value: Any = None
    identity: bytes = b""
    problem: Problem | None = None
    is_prompt: bool = False


def detect_format(path: str) -> InputFormat:
    """By the name, without .gz or .zst; JSON Lines where the name says nothing."""
    name = path.lower()
    for packed in (".gz", ".zst"):
        name = name.removesuffix(packed)
    for suffix, found in _SUFFIXES.items():
        if name.endswith(suffix):
            return found
    return InputFormat.JSONL


def read_rows(
    path: str,
    input_format: InputFormat = InputFormat.AUTO,
    prompt_field: str | None = None,
    *,
    is_exact: bool = True,
) -> Iterator[Row]:
    """The rows of an input, blank lines left out. Without `is_exact` whole numbers beyond 64 bits
    may come out as others, and nesting is not counted: enough for kinds and ids, and much faster.

    Raises `UsageError` when it cannot be opened or lacks the column, `InputError` when it cannot
    be read to its end.
    """
    if input_format is InputFormat.AUTO:
        input_format = detect_format(path)
    if input_format is InputFormat.PARQUET:
        yield from _parquet_rows(path, prompt_field)
        return
    with open_chunks(path) as chunks:
        lines = split_lines(chunks)
        if input_format is InputFormat.CSV:
            delimiter = "\t" if ".tsv" in path.lower() else ","
            yield from _csv_rows(lines, prompt_field, delimiter)
        else:
            make = _text_row
            if input_format is InputFormat.JSONL:
                make = _json_row if is_exact else _quick_json_row
            for line in lines:
                if line.data is None:
                    yield _overlong(line)
                elif line.data.strip():
                    yield make(line.number, line.data)


def _overlong(line: Line) -> Row:
    message = f"the line is longer than {MAX_LINE_BYTES:,} bytes"
    identity = b"overlong %d" % line.number
    return Row(line.number, identity=identity, problem=Problem("line_too_long", message))


def _decode(line: int, data: bytes) -> str | Row:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"the line is not UTF-8 (byte {error.start + 1})"
        return Row(line, identity=data, problem=Problem("invalid_utf8", message))


def _text_row(line: int, data: bytes) -> Row:
    text = _decode(line, data)
    return text if isinstance(text, Row) else Row(line, {"prompt": text}, data)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _json_row(line: int, data: bytes) -> Row:
    text = _decode(line, data)
    if isinstance(text, Row):
        return text
    try:
        return Row(line, _DECODER.decode(text), data)
    except json.JSONDecodeError as error:
        message = f"invalid JSON: {error.msg} (column {error.colno})"
    except RecursionError:
        message = "invalid JSON: nested too deep"
    except ValueError as error:  # a number with thousands of digits, NaN
        message = f"invalid JSON: {str(error).partition(';')[0][:120]}"
    return Row(line, identity=data, problem=Problem("invalid_json", message))


def _quick_json_row(line: int, data: bytes) -> Row:
    try:
        value = orjson.loads(data)
    except ValueError:
        return _json_row(line, data)  # it may be good all the same, and knows what is wrong
    if isinstance(value, dict) and {type(value.get("id")), type(value.get("custom_id"))} & {float}:
        return _json_row(line, data)
    return Row(line, value, data)


# --- tables --------------------------------------------------------------------------------------


def find_prompt_column(columns: list[str], prompt_field: str | None) -> str:
    """The column that holds the prompts. Raises `UsageError` naming those there are, where two that
    are read have the same name, and where one seems to be several with another separator."""
    read = _VALUE_COLUMNS | {"id", "system", prompt_field or "prompt"}
    for name in columns:
        if name in read and columns.count(name) > 1:
            raise UsageError(f"two columns are called {name!r}", hint="Rename one.", param="column")
    if prompt_field is not None:
        if prompt_field in columns:
            return prompt_field
        problem = f"there is no column {prompt_field!r}"
    elif "prompt" in columns:
        return "prompt"
    elif len(columns) == 1 and not set(columns[0]) & set(_DELIMITERS):
        return columns[0]
    elif len(columns) == 1:
        raise UsageError(
            f"the only column is called {repair_surrogates(columns[0])!r}",
            hint="Fields are separated by commas, in .tsv by tabs. Is it one column: name it "
            "with --column.",
            param="column",
        )
    else:
        problem = "it is not clear which column holds the prompts"
    names = ", ".join(repair_surrogates(c) for c in columns[:20])
    raise UsageError(problem, hint=f"Give --column with one of: {names}.", param="column")


def _csv_rows(lines: Iterator[Line], prompt_field: str | None, delimiter: str) -> Iterator[Row]:
    """RFC 4180: a quoted field may hold line ends. A byte that is no UTF-8 costs its own row."""
    csv.field_size_limit(MAX_LINE_BYTES)
    counter = _CountedLines(lines)
    reader = csv.reader(counter, delimiter=delimiter)
    columns: list[str] | None = None
    column = ""
    while True:
        first = counter.number + 1
        counter.has_overlong = False
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield Row(first, identity=b"csv %d" % first, problem=Problem("invalid_csv", str(error)))
            continue
        if not cells and not counter.has_overlong:
            continue
        if counter.has_ended:  # the reader asked for one more line, inside of a field
            message = "a quoted field that begins in this row has no end; the file ends in it"
            yield Row(first, identity=b"csv %d" % first, problem=Problem("invalid_csv", message))
            return
        if counter.has_overlong:
            yield _overlong(Line(first, None))
            continue
        if columns is None:
            columns = cells
            column = find_prompt_column(columns, prompt_field)
            continue
        yield _table_row(first, columns, cells, column)


class _CountedLines:
    """Decoded lines with their ends for the csv module; knows the number of the last one."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self.number = 0
        self.has_ended = False  # a line was asked for and there was none
        self.has_overlong = False  # since this was last set

    def __iter__(self) -> _CountedLines:
        return self

    def __next__(self) -> str:
        line = next(self._lines, None)
        if line is None:
            self.has_ended = True
            raise StopIteration
        self.number = line.number
        if line.data is None:
            self.has_overlong = True
            return "\n"
        return line.data.decode("utf-8", "surrogateescape") + "\n"


def _table_row(line: int, columns: list[str], cells: list[str], column: str) -> Row:
    identity = json.dumps(cells).encode()
    if len(cells) != len(columns):
        message = f"the row has {len(cells)} fields, the header {len(columns)}"
        return Row(line, identity=identity, problem=Problem("invalid_csv", message))
    value = dict(zip(columns, cells, strict=True))
    try:
        "".join(cells).encode("utf-8")
    except UnicodeEncodeError:
        message = "the row is not UTF-8"
        return Row(line, identity=identity, problem=Problem("invalid_utf8", message))
    value.update({k: as_value(value[k]) for k in _VALUE_COLUMNS.intersection(value) - {column}})
    if value.get("system") == "":
        del value["system"]
    value["prompt"] = cells[columns.index(column)]
    return Row(line, value, identity, is_prompt=True)


def as_value(text: str) -> Any:
    """A sampling value in a table of texts: a number, true, a list; nothing where it is empty."""
    if not text.strip():
        return None
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text


def _as_text(value: object) -> str:
    """Dates, decimals and bytes of a table: a record is JSON."""
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):  # texts without their annotation
            return value.decode("utf-8")
    return str(value)


def _parquet_rows(path: str, prompt_field: str | None) -> Iterator[Row]:
    from importlib import import_module

    try:
        pyarrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(
            f"{path} is Parquet, which needs the Python package pyarrow",
            hint="Run 'pip install pyarrow'.",
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = list(file.schema_arrow.names)
            has_prompt = prompt_field is not None or "messages" not in columns
            column = find_prompt_column(columns, prompt_field) if has_prompt else ""
            for batch in file.iter_batches(batch_size=1024):
                for raw in batch.to_pylist():
                    number += 1
                    identity = json.dumps(raw, default=_as_text, sort_keys=True).encode()
                    value = json.loads(identity)
                    if has_prompt:
                        value["prompt"] = value[column]
                    yield Row(number, value, identity, is_prompt=has_prompt)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"cannot read {path}: {reason}") from error
