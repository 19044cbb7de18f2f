"""The server's benchmarks run from end to end, small and without a device."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE_S, run_command


def run(folder: Path, module: str, *args: str) -> dict[str, Any]:
    """The metrics of the row that it writes."""
    done = run_command(
        [sys.executable, "-m", module, *args],
        timeout=4 * PATIENCE_S,
        env={**os.environ, "NVCLI_RESULTS": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    row = json.loads((folder / f"{module.rpartition('.')[2]}.jsonl").read_text())
    metrics: dict[str, Any] = row["metrics"]
    return metrics


def test_streams_over_http(tmp_path: Path) -> None:
    args = ("--simulated", "1", "--streams", "3", "--input", "8", "--output", "6")
    (found,) = run(tmp_path, "benchmarks.serve_load", "qwen3-0.6b", *args)["passes"]
    assert found["streams"] == 3
    assert 3 <= found["events"] <= 3 * 6
    assert found["http_tokens_per_s"] > 0


@pytest.mark.parametrize("streams", [3, 20])
def test_streams_in_virtual_time(tmp_path: Path, streams: int) -> None:
    args = ("--streams", str(streams), "--input", "8", "--output", "6", "--passes", "1")
    (found,) = run(tmp_path, "benchmarks.serve_host", *args, "--step-ms", "50")["passes"]
    longest = streams * 6 / 0.3  # no faster than six steps
    for side in ("batch", "serve"):
        assert 0 < found[side]["tokens_per_s"] <= longest
        assert found[side]["cpu_us_per_token"] > 0
    assert 1 <= found["serve"]["tokens_per_piece"] <= 6
