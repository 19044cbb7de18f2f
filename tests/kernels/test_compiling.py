"""Kernels compiled side by side, for a GPU that is not there: by Triton's own compiler, in a
process of its own whose driver is a stand-in.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.kernels.triton_testing import needs_triton


def compile_three() -> None:
    import torch
    import triton
    from triton.runtime.jit import JITFunction

    from benchmarks.kernels.compile_ahead import NoGpu
    from nvcli.kernels import norm
    from nvcli.kernels.compiling import compiled_only

    triton.runtime.driver.set_active(NoGpu())
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    cpu = torch.device("cpu")
    launched_elsewhere, run = [], JITFunction.run

    def run_or_note(function: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        if not warmup:
            launched_elsewhere.append(function)
            return None
        return run(function, *args, warmup=warmup, **options)

    JITFunction.run = run_or_note
    ready: list[Any] = []
    with compiled_only(cpu, ready.append) as kernels:
        for _ in range(3):
            out = norm.rms_norm(x, x[0], 1e-6).fill_(7)
            norm.silu_and_mul(x)
            norm.silu_and_mul(x[:1])
            norm.add_rms_norm(x, x, x[0], 1e-6)
        assert not launched_elsewhere
        other = threading.Thread(target=norm.silu_and_mul, args=(x,))
        other.start()
        other.join()
        assert len(launched_elsewhere) == 1, "another engine's launch is none of ours"
        assert not ready
    assert JITFunction.run is run_or_note
    assert (out == 7).all(), "something was launched"
    names = sorted(kernel.metadata.name for kernel in kernels.values())
    assert names == ["_rms_norm_kernel"] * 2 + ["_silu_and_mul_kernel"], names
    assert sorted(kernel.hash for kernel in ready) == sorted(kernels)
    assert all(kernel.asm["cubin"] for kernel in ready)
    with compiled_only(cpu, ready.append) as kernels:  # once more: they are there
        norm.silu_and_mul(x)
    assert len(kernels) == 1
    try:
        with compiled_only(cpu, ready.append):
            raise KeyError("a model that cannot be run")
    except KeyError:
        assert JITFunction.run is run_or_note


@needs_triton
@pytest.mark.torch
def test_launches_are_compiled_and_nothing_is_launched(tmp_path: object) -> None:
    code = "from tests.kernels.test_compiling import compile_three as f; f(); print('done')"
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (run.stdout, run.returncode) == ("done\n", 0), run.stderr


def test_launchers_are_not_mixed_up_between_threads() -> None:
    """As the interpreter loads an extension module again: into the object that has its name."""
    from nvcli.kernels.compiling import keep_apart

    shared = ModuleType("__triton_launcher")
    inside, most = 0, 0

    def load(name: str, path: str) -> ModuleType:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        vars(shared).update(launch=path, name_given=name)
        inside -= 1
        return shared

    builder = SimpleNamespace(_load_module_from_path=load)
    keep_apart(builder)
    once = builder._load_module_from_path
    keep_apart(builder)
    assert builder._load_module_from_path is once, "once is enough"
    with ThreadPoolExecutor(8) as pool:
        paths = [f"{i}.so" for i in range(400)]
        found = list(pool.map(lambda path: builder._load_module_from_path("launcher", path), paths))
    assert [module.launch for module in found] == paths
    assert {module.name_given for module in found} == {"launcher"}
    assert most == 1, "one at a time"
    keep_apart(SimpleNamespace())  # a Triton that loads nothing


@needs_triton
@pytest.mark.torch
def test_this_tritons_loader_is_known() -> None:
    """Where launchers are compiled (before Triton 3.9), this is what has to be kept apart."""
    from triton.runtime import build

    assert hasattr(build, "_load_module_from_path")
