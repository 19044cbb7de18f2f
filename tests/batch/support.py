"""Runs of `nvcli batch` with the scripted engine: in this process, or in one that can be killed."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvcli.batch.job import run_job
from nvcli.batch.options import BatchOptions, ProgressMode
from nvcli.batch.progress import Progress
from nvcli.config import EngineConfig
from tests.batch.fake_llm import FakeLLM
from tests.waiting import PATIENCE_S

RUNNER = Path(__file__).with_name("run_nvcli.py")


@dataclass
class Ran:
    code: int
    err: str
    engines: list[FakeLLM] = field(default_factory=list)

    @property
    def engine(self) -> FakeLLM:
        return self.engines[0]


def run_here(input: Path, output: Path, model: Path | None = None, **options: Any) -> Ran:
    """Run a job to its end; errors are raised as they are. `engine_*` options go to the fake."""
    fake = {k.removeprefix("engine_"): options.pop(k) for k in list(options) if k[:7] == "engine_"}
    engines: list[FakeLLM] = []

    def load() -> FakeLLM:
        engines.append(FakeLLM(**fake))
        return engines[-1]

    err = io.StringIO()
    code = run_job(
        BatchOptions(input=str(input), output=output, **options),
        EngineConfig(),
        find_model=lambda: model or input.parent,
        load=load,
        progress=Progress(ProgressMode.AUTO, err),
    )
    return Ran(code, err.getvalue(), engines)


def command(*args: str | Path, fake: dict[str, Any] | None = None) -> list[str]:
    return [sys.executable, str(RUNNER), json.dumps(fake or {}), "batch", *map(str, args)]


def run_process(
    *args: str | Path, fake: dict[str, Any] | None = None, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(*args, fake=fake), capture_output=True, timeout=PATIENCE_S, check=False, **options
    )


def start_process(
    *args: str | Path, fake: dict[str, Any] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command(*args, fake=fake), **options)


def write_lines(path: Path, values: Iterable[Any]) -> Path:
    """Each value as a line of JSON; bytes and text as they are."""
    with path.open("wb") as file:
        for value in values:
            if isinstance(value, str):
                value = value.encode()
            file.write((value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n")
    return path


def source_and_output(folder: Path, values: Iterable[Any]) -> tuple[Path, Path]:
    """A file with each value as a line, and one that is not there yet."""
    return write_lines(folder / "in.jsonl", values), folder / "out.jsonl"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every line must be whole and JSON."""
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def mixed_records(count: int, seed: int = 0) -> list[Any]:
    """Good records of all kinds, equal ones without ids, and some that fail."""
    rng = random.Random(seed)
    records: list[Any] = []
    for number in range(count):
        text = "word " * rng.randrange(1, 6) + str(rng.randrange(50))
        match rng.randrange(8):
            case 0:
                records.append(
                    {"id": f"m{number}", "messages": [{"role": "user", "content": text}]}
                )
            case 1:
                body = {"messages": [{"role": "user", "content": text}], "temperature": 0.3}
                url = "/v1/chat/completions"
                records.append(
                    {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}
                )
            case 2:
                records.append("{bad " + str(rng.randrange(3)))
            case 3:
                records.append({"prompt": "the same"})
            case _:
                records.append({"prompt": text, "max_tokens": rng.randrange(1, 9)})
    return records


def essence(line: dict[str, Any]) -> tuple[Any, ...]:
    """A line without what differs between equal runs: times."""
    record_id = line.get("id") if "custom_id" not in line else line["custom_id"]
    error = line["error"] and line["error"]["code"]
    if "custom_id" in line:
        choices = line["response"]["body"].get("choices", ())
        return (line["index"], record_id, error, tuple(c["message"]["content"] for c in choices))
    return (line["index"], record_id, error, line["text"], line["finish_reason"])


def essences(path: Path) -> list[tuple[Any, ...]]:
    return [essence(line) for line in read_lines(path)]


def quiet_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1"}
