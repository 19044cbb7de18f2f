"""Helpers for tests of Triton kernels: the interpreter in its own process, and the oracle."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

# Of norms. Beside rows of mean square 1 it shows when another is taken, or none; 1e-6 does not.
EPS = 0.2


def run_in_interpreter(module: str, function: str) -> None:
    """Call `module.function()` where Triton interprets: it decides that when it is imported. In a
    process of its own, which begins as a fork of one that has imported it (`interpreted`).
    """
    process = _interpreter()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{module} {function}\n")
        process.stdin.flush()
        status, text = json.loads(process.stdout.readline())
    except BaseException:  # a time limit, or its end: the next call must not read this one's answer
        _interpreter.cache_clear()
        process.kill()
        raise
    assert status == 0, text


@functools.cache
def _interpreter() -> subprocess.Popen[str]:
    """It ends with this process, at the latest."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kernels.interpreted"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    atexit.register(process.communicate)
    return process


def assert_as_good_as_torch(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """The twice-PyTorch-error rule: `got` may be twice as far from the float32 result as `plain`,
    which is PyTorch's in the same dtype. In float32 both are equal up to rounding.
    """
    assert got.shape == exact.shape
    assert got.isfinite().all()
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=2e-5)
        return
    error = (got.float() - exact).abs().max().item()
    allowed = (plain.float() - exact).abs().max().item()
    assert error <= 2 * allowed + 1e-6, f"error {error:.3g}, PyTorch's {allowed:.3g}"
