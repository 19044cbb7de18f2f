"""`benchmarks.plan_error` as a GPU machine runs it: random weights, no web packages."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.waiting import run_command

ROOT = Path(__file__).parents[2]
CODE = """
import sys
for name in ("pydantic", "prompt_toolkit", "orjson", "starlette", "uvicorn", "uvloop", "httptools",
             "llguidance", "hdrh", "aiohttp", "httpx", "prometheus_client"):
    sys.modules[name] = None
from benchmarks import plan_error
from benchmarks.engine.workloads import Shape
plan_error.SHAPES["tiny"] = Shape(64, 64, 1, 8, 8, tied=True)
plan_error.SHORTEST_S = 0.3
from nvcli.bench import points
few = [(0, 8, 0), (0, 16, 0), (1, 0, 8), (1, 0, 16), (2, 0, 8)]
points.default_points = lambda bench: [points.Point(*p) for p in few]
sys.argv = ["plan_error", "tiny", "--concurrency", "1,2", "--in-len", "8", "--out-len", "4",
            "--max-num-seqs", "2", "--duration", "1", "--repeat", "3", "--rounds", "1"]
plan_error.main()
"""


@pytest.mark.torch
def test_random_weights_without_web_packages(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "NVCLI_RESULTS": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = run_command([sys.executable, "-c", CODE], env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "plan_error.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    points = [p for row in rows for p in row["metrics"]["points"]]
    assert [p["concurrency"] for p in points] == [1, 2]  # a row each
    assert all(p["ok"] > 0 for p in points)
    for point in points:
        for steps in (point["steps"]["measured"], point["steps"]["predicted"]):
            assert 0 < steps["rows"] <= point["concurrency"]
            assert 0 < steps["prompt_share"] < 1
            assert steps["decode_s"] > 0
            assert steps["prompt_s"] > 0
        assert point["breakdown_ms"]["decode"] > 0
    assert {row["metrics"]["nvml"] for row in rows} == {None}
    assert {row["config"]["weights"] for row in rows} == {"random"}
