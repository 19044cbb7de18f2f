"""One benchmark row: what was run, where, at which commit, beside whom. Appended to
`benchmarks/results/NAME.jsonl`, and printed as the last line, unless the benchmark has said it all.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def write_row(
    name: str,
    *,
    metrics: dict[str, Any],
    config: dict[str, Any],
    peer: str | None = None,
    prints: bool = True,
) -> None:
    """Append a row. `peer` names what was measured beside nvcli in the same run."""
    row = {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "command": command_line(),
        "hardware": hardware(),
        "versions": versions("torch", "triton", "transformers", "tokenizers", "vllm"),
        "peer": peer,
        "config": config,
        "metrics": metrics,
    }
    folder = Path(os.environ.get("NVCLI_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps(row, ensure_ascii=False)
    with (folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    if prints:
        print(line)


def command_line() -> str:
    """How this run was started, without the machine's paths."""
    spec = sys.modules["__main__"].__spec__
    program = (
        ["-m", spec.name.removesuffix(".__main__")]
        if spec is not None
        else [_relative(sys.argv[0])]
    )
    return shlex.join(["python", *program, *map(_relative, sys.argv[1:])])


def git_commit() -> str:
    """Short commit, with `+` when tracked files differ from it; `NVCLI_COMMIT` where git is not."""
    given = os.environ.get("NVCLI_COMMIT")
    if given:
        return given
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def hardware() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores"


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(*args: str) -> str:
    return subprocess.run(
        ["git", *args], capture_output=True, text=True, check=True, cwd=RESULTS.parent
    ).stdout.strip()


def _relative(argument: str) -> str:
    """Paths below the current folder without the machine's part of them; others by name only."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return path.name
