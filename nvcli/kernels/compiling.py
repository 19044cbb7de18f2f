"""Compile kernels side by side, before the first of them is launched.

Triton compiles a kernel at its first launch, and so one after the other. Here launches only say
what they would launch, and all of it is compiled in threads: the compiler and the assembler, which
are most of the time, do not hold the interpreter.

Tritons that compile the code which launches a kernel, too, load it as an extension module, all of
them by one name. Python gives a module that it loads for the second time the object that has the
name now, and fills it anew: between two threads a kernel may get another's launcher. So loading
is made one at a time, and each kernel is given a module of its own (`keep_apart`).
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import triton

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_one_at_a_time = threading.Lock()


def load(kernel: Any) -> None:
    """Onto the current device, with the code that launches it, which some Tritons compile too."""
    _ = kernel.run


def keep_apart(builder: Any) -> None:
    """From now on what Triton's `build` module loads is nobody else's.

    builder: a module with `_load_module_from_path(name, path)`; one without it loads nothing
    """
    load_module = getattr(builder, "_load_module_from_path", None)
    if load_module is None or hasattr(load_module, "is_apart"):
        return
    lock = threading.Lock()

    def load_apart(name: str, path: str) -> ModuleType:
        with lock:
            own = ModuleType(name)
            vars(own).update(vars(load_module(name, path)))
        return own

    load_apart.is_apart = True  # type: ignore[attr-defined]
    builder._load_module_from_path = load_apart


@contextmanager
def compiled_only(
    device: torch.device, ready: Callable[[Any], None] = load
) -> Iterator[dict[str, Any]]:
    """This thread's launches inside compile their kernels and launch nothing: what they would have
    written keeps its value. Leaving waits until all are compiled, and `ready` was called for each,
    in some thread. Yields the kernels by their hash, all of them when it is left.
    """
    from triton.runtime import build
    from triton.runtime.jit import JITFunction

    keep_apart(build)
    asked_for: list[Any] = []
    compiled: dict[str, Any] = {}
    owner = threading.get_ident()

    def compile_it(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != owner:
            return run(function, *args, grid=grid, warmup=warmup, **options)
        asked_for.append(run(function, *args, grid=grid, warmup=True, **options))
        return None

    def on_device() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)

    num_threads = len(os.sched_getaffinity(0))
    with _one_at_a_time, ThreadPoolExecutor(num_threads, initializer=on_device) as pool:
        run = JITFunction.run
        # Before Triton 3.5 they are compiled here, one after the other.
        has_threads = hasattr(triton, "AsyncCompileMode")
        with triton.AsyncCompileMode(pool) if has_threads else nullcontext():
            JITFunction.run = compile_it
            try:
                yield compiled
            finally:
                JITFunction.run = run
        for kernel in asked_for:
            is_future = has_threads and isinstance(kernel, triton.FutureKernel)
            done = kernel.result() if is_future else kernel
            compiled[done.hash] = done
        for _ in pool.map(ready, compiled.values()):
            pass
