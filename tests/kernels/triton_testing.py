"""Helpers for tests of Triton kernels: the interpreter in its own process, and the oracle."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def run_in_interpreter(module: str, function: str) -> None:
    """Call `module.function()` where Triton interprets: it decides that when it is imported."""
    code = (
        "import numpy, torch; numpy.seterr(over='ignore')\n"
        f"from {__name__} import find_builtins_once; find_builtins_once()\n"
        f"from {module} import {function}\n"
        f"with torch.inference_mode(): {function}()\n"
        "print('all equal')"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (run.stdout, run.returncode) == ("all equal\n", 0), run.stderr


def find_builtins_once() -> None:
    """The interpreter looks through all of Triton's language for what to replace, anew for each
    call of a function of a kernel: a fifth of its time. What it finds is always the same."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def names_of(package: Any) -> list[str]:
        return [name for name in dir(package) if is_builtin(getattr(package, name, None))]

    def patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
        for name in names_of(package):
            if is_builtin(member := getattr(package, name)):  # not replaced by a caller
                interpreter._patch_attr(package, name, member, builder, *scope)

    interpreter._patch_builtin = patch_builtin


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
