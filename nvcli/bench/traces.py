"""Recorded traffic: four public formats, recognised by their fields.

    Mooncake      JSONL  timestamp (ms), input_length, output_length, hash_ids of 512 tokens
    Qwen-Bailian  JSONL  timestamp (s), chat_id, input_length, output_length, hash_ids of 16 tokens
    Azure         CSV    TIMESTAMP, ContextTokens, GeneratedTokens
    BurstGPT      CSV    Timestamp (s), Request tokens, Response tokens (0: it failed, left out)

A block id always stands for the same tokens, so prefixes are shared as they were. Mooncake's
clock ticks only every three seconds: `jitter` spreads the requests of a tick over it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import math
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from nvcli.bench.workload import Planned, cut_to
from nvcli.errors import UsageError
from nvcli.paths import MAX_DATA_BYTES, read_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

_Row = TypeVar("_Row")
_Read = TypeVar("_Read")

MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16


@dataclass(frozen=True, slots=True)
class Entry:
    at_s: float
    n_in: int
    n_out: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Sorted by time, which starts at 0."""

    kind: str
    entries: list[Entry]
    block_size: int
    digest: str

    @property
    def duration_s(self) -> float:
        return self.entries[-1].at_s

    @property
    def rate(self) -> float:
        """Requests a second over the trace."""
        return len(self.entries) / self.duration_s if self.duration_s > 0 else math.inf

    @property
    def gap_cv(self) -> float:
        gaps = np.diff([e.at_s for e in self.entries])
        mean = float(gaps.mean()) if len(gaps) else 0.0
        return float(gaps.std()) / mean if mean > 0 else 0.0

    def paced(self, *, speed: float, jitter: bool, seed: int) -> Trace:
        """Faster or slower, and with the requests of one tick spread over it."""
        times = [e.at_s for e in self.entries]
        if jitter:
            ticks = sorted(set(times))
            widths = [b - a for a, b in itertools.pairwise(ticks)]
            quantum = min(widths) if widths else 0.0
            rng = np.random.default_rng([seed, 0])
            times = [t + float(rng.uniform(0, quantum)) for t in times]
        moved = [replace(e, at_s=t / speed) for t, e in zip(times, self.entries, strict=True)]
        return replace(self, entries=_from_zero(moved))

    def requests(self, *, vocab_size: int, max_len: int | None, salt: int) -> Iterator[Planned]:
        content = np.random.default_rng([salt, 3])
        for index, e in enumerate(self.entries):
            ids: list[int] = []
            for block in e.blocks:
                rng = np.random.default_rng([salt, 4, block])
                ids += rng.integers(0, vocab_size, self.block_size).tolist()
            ids = ids[: e.n_in]
            ids += content.integers(0, vocab_size, e.n_in - len(ids)).tolist()
            ids, n_out = cut_to(max_len, ids, e.n_out)
            yield Planned(index, ids, n_out, len(ids))


def _from_zero(entries: list[Entry]) -> list[Entry]:
    """In order, with the first at 0."""
    entries = sorted(entries, key=lambda e: e.at_s)
    return [replace(e, at_s=e.at_s - entries[0].at_s) for e in entries]


def read_trace(path: Path) -> Trace:
    """Raises `UsageError` for a file of none of the four kinds, naming the line that is wrong."""
    try:
        raw = read_whole(path, MAX_DATA_BYTES)
    except OSError as exc:
        raise UsageError(f"--trace {path}: {exc.strerror or exc}", param="trace") from exc
    try:
        kind, entries, block_size = _parse(raw)
    except _TraceError as exc:
        raise UsageError(f"--trace {path}{exc}", param="trace") from exc
    if not entries:
        raise UsageError(f"--trace {path} holds no requests", param="trace")
    return Trace(kind, _from_zero(entries), block_size, hashlib.sha256(raw).hexdigest()[:12])


class _TraceError(Exception):
    """What comes behind the file's name in the message."""


def _parse(raw: bytes) -> tuple[str, list[Entry], int]:
    unknown = _TraceError(" is no trace of Mooncake, Qwen-Bailian, Azure or BurstGPT")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise unknown from exc
    if text.lstrip().startswith("{"):
        lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        rows = _each(lines, json.loads)
        if isinstance(rows[0], dict) and "chat_id" in rows[0]:
            kind, scale, block_size = "Qwen-Bailian", 1.0, BAILIAN_BLOCK
        else:
            kind, scale, block_size = "Mooncake", 1e-3, MOONCAKE_BLOCK
        numbered = zip((n for n, _ in lines), rows, strict=True)
        return kind, _each(numbered, lambda row: _json_entry(row, scale)), block_size
    reader = csv.DictReader(io.StringIO(text))
    try:
        names = set(reader.fieldnames or ())
    except csv.Error as exc:
        raise unknown from exc
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:
        return "Azure", _each(_numbered(reader), _azure), 0
    if {"Timestamp", "Request tokens", "Response tokens"} <= names:
        found = _each(_numbered(reader), _burst)
        return "BurstGPT", [entry for entry in found if entry is not None], 0
    raise unknown


def _numbered(reader: csv.DictReader[str]) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as exc:
        raise _TraceError(f", line {reader.line_num}: {exc}") from exc


def _each(numbered: Iterable[tuple[int, _Row]], read: Callable[[_Row], _Read]) -> list[_Read]:
    """Every row read, or the first line that cannot be."""
    found = []
    for number, row in numbered:
        try:
            found.append(read(row))
        except json.JSONDecodeError as exc:
            raise _TraceError(f", line {number}: invalid JSON: {exc.msg}") from exc
        except KeyError as exc:
            raise _TraceError(f", line {number}: {exc.args[0]} is missing") from exc
        except (TypeError, AttributeError) as exc:
            raise _TraceError(f", line {number}: a field is missing or of another type") from exc
        except (ValueError, OverflowError, RecursionError) as exc:
            raise _TraceError(f", line {number}: {str(exc)[:120]}") from exc
    return found


def _entry(at_s: float, n_in: int, n_out: int, blocks: tuple[int, ...] = ()) -> Entry:
    if not math.isfinite(at_s) or n_in < 0 or n_out < 0:
        raise ValueError("a time that is none, or a negative length")
    return Entry(at_s, max(n_in, 1), max(n_out, 1), blocks)


def _json_entry(row: dict[str, Any], scale: float) -> Entry:
    blocks = tuple(abs(int(b)) for b in row.get("hash_ids") or ())
    at = float(row["timestamp"]) * scale
    return _entry(at, int(row["input_length"]), int(row["output_length"]), blocks)


def _azure(row: dict[str, str]) -> Entry:
    stamp = row["TIMESTAMP"].strip()
    head, _, fraction = stamp.partition(".")  # seven digits, more than Python reads
    fraction = "".join(itertools.takewhile(str.isdigit, fraction))
    at = datetime.fromisoformat(f"{head[:19]}+00:00").timestamp() + float(f"0.{fraction or 0}")
    return _entry(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _burst(row: dict[str, str]) -> Entry | None:
    """None for a request that failed."""
    n_in, n_out = int(float(row["Request tokens"])), int(float(row["Response tokens"]))
    if n_out <= 0:
        return None
    return _entry(float(row["Timestamp"]), n_in, n_out)
