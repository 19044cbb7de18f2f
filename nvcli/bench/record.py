"""The stored run: raw samples as JSON Lines, from which every number can be computed again.

    {"kind": "run", "schema": "nvcli.bench/1", "id": ..., what was asked for and on what machine}
    {"kind": "request", "id": ..., "s_star_ns": ..., "s_ns": ..., "chunks": [[t_ns, k], ...], ...}
    {"kind": "step", "t_ns": ..., "dt_s": ..., "b": ..., "S": ..., "p": ..., "c": ...}
    {"kind": "gauge", "t_ns": ..., "running": ..., "waiting": ..., ...}
    {"kind": "point", "name": ..., "t_s": [...], ...}
    {"kind": "end", "planned": ..., "interrupted": false, ...}

Lines are appended while the run goes on, so Ctrl-C keeps what was measured. A file may hold several
runs, one after another: the points of a sweep, or repeats. All moments are nanoseconds of one
monotonic clock. A run that was cut has no `end` line, or half a last line, and is still read.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from nvcli.bench import checked
from nvcli.errors import NvcliError, UsageError
from nvcli.paths import MAX_DATA_BYTES, read_whole, state_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SCHEMA = "nvcli.bench/1"
OK, ERROR, TIMEOUT, UNFINISHED = "ok", "error", "timeout", "unfinished"


@dataclass(slots=True)
class RequestRecord:
    """One request, sent or not, finished or not."""

    id: str
    s_star_ns: int  # when it was meant to be sent
    s_ns: int  # when it was sent
    end_ns: int  # the last chunk; for a failure when it was noticed
    status: str = OK
    chunks: list[tuple[int, int]] = field(default_factory=list)  # (arrival, tokens)
    n_in: int | None = None
    n_out: int | None = None
    cached: int | None = None  # prompt tokens found in the prefix cache
    conn_ns: int | None = None  # connecting took so long; None: a connection was there
    server: dict[str, int] = field(default_factory=dict)  # arrive, sched, first, done
    error: str | None = None
    turn: int = 1  # of its conversation
    lost: bool = False  # there was no server, or its connection broke

    @property
    def num_tokens(self) -> int:
        """Output tokens: as the engine says, else as counted in the chunks."""
        return self.n_out if self.n_out is not None else sum(k for _, k in self.chunks)


@dataclass(slots=True)
class StepRecord:
    """One engine step: b sequences decoding over S tokens, p prompt tokens behind c others."""

    t_ns: int  # when it was read
    dt_s: float  # since the step before, or since it was scheduled after idling
    b: int
    S: int
    p: int
    c: int
    pairs: int = 0  # query-key pairs of the prompt tokens: sum of p_i c_i + p_i (p_i + 1) / 2
    heads: int = 0  # rows that got logits
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    preemptions: int = 0  # so far


@dataclass(slots=True)
class Run:
    """One measured run, as read from its file."""

    header: dict[str, Any]
    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    gauges: list[dict[str, Any]] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return str(self.header.get("id", "?"))


def new_id() -> str:
    return secrets.token_hex(3)


def now_ns() -> int:
    """The one clock of a run. Monotonic: no NTP step reaches it."""
    return time.monotonic_ns()


def dump(value: object) -> str:
    """One line of JSON; +inf is the text "inf", NaN is refused."""
    return json.dumps(clean(value), ensure_ascii=True, allow_nan=False)


def clean(value: object) -> Any:
    """`value` with infinities as text, and no NaN: it becomes null."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return ("inf" if value > 0 else "-inf") if math.isinf(value) else value
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return value


class RunWriter:
    """Appends a run to a file, a line at a time. Safe to leave at any point. What writes raises
    `NvcliError` when the disk refuses."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = path
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._is_ended = False
        self._write({"kind": "run", "schema": SCHEMA, **header})

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """A write knows no name, and would be taken for one of standard output."""
        try:
            yield
        except OSError as exc:
            raise NvcliError(f"cannot write {self.path}: {exc.strerror or exc}") from exc

    def _write(self, value: dict[str, Any]) -> None:
        self._write_line(dump(value))

    def _write_line(self, line: str) -> None:
        with self._errors():
            self._file.write(line + "\n")

    def _write_record(self, kind: str, record: RequestRecord | StepRecord) -> None:
        """Flat and finite, so nothing is copied or cleaned: this is done while requests wait."""
        value = {"kind": kind} | {f.name: getattr(record, f.name) for f in fields(record)}
        self._write_line(json.dumps(value, allow_nan=False))

    def request(self, record: RequestRecord) -> None:
        self._write_record("request", record)
        self.flush()  # a kill loses none that ended

    def step(self, record: StepRecord) -> None:
        self._write_record("step", record)

    def gauge(self, **values: Any) -> None:
        self._write({"kind": "gauge", **values})

    def point(self, **values: Any) -> None:
        self._write({"kind": "point", **values})

    def flush(self) -> None:
        with self._errors():
            self._file.flush()

    def finish(self, **values: Any) -> None:
        self._write({"kind": "end", **values})
        self._is_ended = True
        self.flush()

    def close(self) -> None:
        with self._errors():
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if not self._is_ended:
                self.finish(interrupted=True)
        finally:
            self.close()


def runs_folder() -> Path:
    return state_folder() / "bench"


def new_path() -> Path:
    """Where a run that begins is stored; its name is the run's id."""
    return runs_folder() / f"{new_id()}.jsonl"


def id_in(path: Path) -> str:
    """Of the next run in a file: the file's name, where there is none yet."""
    return new_id() if path.exists() else path.stem


def find_run(name: str) -> Path:
    """The file of a run: a path, the id that was printed (or its start), or `last`.

    Raises `UsageError`.
    """
    path = Path(name)
    if path.is_file():
        return path
    stored = sorted(runs_folder().glob("*.jsonl"), key=lambda p: p.stat().st_mtime)
    if name == "last" and stored:
        return stored[-1]
    found = [p for p in stored if p.stem.startswith(name)] if name and "/" not in name else []
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{name!r} fits {len(found)} stored runs", hint="Give more of the id.")
    raise UsageError(
        f"there is no run {name!r}", hint="Name a .jsonl file, the id of a stored run, or 'last'."
    )


def read_runs(path: Path) -> list[Run]:
    """Every run in a file. Half a last line, as a kill leaves it, is dropped.

    Raises `UsageError` naming the line that is no line of a run.
    """
    try:
        lines = read_whole(path, MAX_DATA_BYTES).split(b"\n")
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror or exc}") from exc
    return parse_runs(lines, str(path))


def parse_runs(lines: Iterable[bytes], name: str) -> list[Run]:
    runs: list[Run] = []
    rows = list(lines)
    last = len(rows) - 1
    for number, line in enumerate(rows):
        if not line.strip():
            continue
        try:
            _take(json.loads(line, parse_constant=_no_constant), runs)
        except _BROKEN as exc:
            if number == last and runs:  # no line end behind it: the run was killed in a write
                break
            raise UsageError(
                f"{name}: line {number + 1} is no line of a benchmark run ({_reason(exc)})"
            ) from exc
    if not runs:
        raise UsageError(f"{name} holds no benchmark run")
    return runs


def _reason(exc: Exception) -> str:
    if isinstance(exc, json.JSONDecodeError | UnicodeDecodeError | RecursionError):
        return "it is not JSON"
    if isinstance(exc, KeyError):
        return f"it has no {exc}"
    if isinstance(exc, IndexError):
        return "no run begins before it"
    return str(exc) if isinstance(exc, ValueError) else "its fields are others"


_BROKEN = (
    *(ValueError, RecursionError, TypeError),
    *(KeyError, IndexError, AttributeError, OverflowError),
)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of a run")


def _take(value: dict[str, Any], runs: list[Run]) -> None:
    kind = value.pop("kind")
    if kind == "run":
        if value.get("schema") != SCHEMA:
            raise ValueError(f"schema is not {SCHEMA}")
        header = {k: v for k, v in value.items() if v is not None}
        checked.header(header)
        runs.append(Run(header))
        return
    run = runs[-1]
    if kind == "request":
        value["chunks"] = [(t, k) for t, k in value.get("chunks", [])]
        record = RequestRecord(**value)
        if record.status not in (OK, ERROR, TIMEOUT, UNFINISHED):
            raise ValueError(f"status {record.status!r}")  # else it would be lost without a word
        checked.request(record)
        run.requests.append(record)
    elif kind == "step":
        step = StepRecord(**value)
        checked.step(step)
        run.steps.append(step)
    elif kind == "gauge":
        checked.gauge(value)
        run.gauges.append(value)
    elif kind == "point":
        checked.point(value)
        run.points.append(value)
    elif kind == "end":
        checked.end(value)
        run.end = value
    else:
        raise ValueError(f"kind {kind!r}")
