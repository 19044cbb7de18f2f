"""The process in which kernels are interpreted: `python -m tests.kernels.interpreted`.

A line of its input names a module and a function of it, which a fork of the process calls; a line
of its output tells how that ended: `[exit status, what it wrote]`. Importing torch and Triton takes
longer than most of these functions do, so that is done once, and each of them still finds every
module as new.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import sys
import traceback
from typing import Any

import numpy
import torch
import triton.language as tl
from triton.language.core import is_builtin
from triton.runtime import interpreter


def main() -> None:
    numpy.seterr(over="ignore")
    hurry()
    for line in sys.stdin:
        module, function = line.split()
        print(json.dumps(called(module, function)), flush=True)


def called(module: str, function: str) -> tuple[int, str]:
    """The exit status and what was written, of a fork that calls it."""
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        status = 1
        try:
            for target in (1, 2):
                os.dup2(theirs, target)
            os.close(theirs)
            with torch.inference_mode():
                getattr(importlib.import_module(module), function)()
            status = 0
        except BaseException:  # noqa: BLE001 - the fork ends here, whatever it was
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    os.close(theirs)
    with open(ours, encoding="utf-8", errors="replace") as pipe:
        text = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def hurry() -> None:
    """What the interpreter does over and over with one and the same result is done once: two thirds
    of its time.
    """
    builder = interpreter.interpreter_builder
    # Every sum and product of integers is computed again in 64 bits and compared, and what was
    # found is dropped, because `debug` is off.
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _patch_language_once()
    _keep_numpy_types()
    _keep_shapes()
    _reduce_xor_at_once()


def _patch_language_once() -> None:
    """For each kernel, and each call of a function of one, all of Triton's language is looked
    through for what to replace, and put back after the kernel. Here nothing else wants it."""
    patch = interpreter._patch_lang
    patched: set[int] = set()

    class Kept:
        def restore(self) -> None:
            """Nothing: it stays replaced."""

    def patch_once(function: Any) -> Kept:
        names = function.__globals__
        if id(names) not in patched:
            patched.add(id(names))
            patch(function)
        return Kept()

    @functools.cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name in dir(package) if is_builtin(getattr(package, name, None))]

    def patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
        for name in builtins_of(package):
            if is_builtin(member := getattr(package, name)):  # not replaced by a caller
                interpreter._patch_attr(package, name, member, builder, *scope)

    interpreter._patch_lang, interpreter._patch_builtin = patch_once, patch_builtin


def _keep_numpy_types() -> None:
    """The table of them is made anew for each value."""
    find = functools.cache(interpreter._get_np_dtype)
    pointer = numpy.dtype(numpy.uint64)

    def of(kind: Any) -> Any:
        element = kind.scalar
        return pointer if isinstance(element, tl.pointer_type) else find(element)

    interpreter._get_np_dtype = of


def _keep_shapes() -> None:
    """Every tensor and every type of one has objects of its own that say its shape, and they make
    others for what they hold. Those of equal shape say the same, and nothing changes them."""
    language: Any = importlib.import_module("triton.language.core")
    make_type, make_tensor = language.block_type.__init__, language.tensor.__init__
    of_types: dict[tuple[int, ...], tuple[Any, int]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def plain(values: Any) -> tuple[int, ...]:
        return tuple([v.value if isinstance(v, tl.constexpr) else v for v in values])

    def new_type(self: Any, element_ty: Any, shape: Any) -> None:
        kept = of_types.get(key := plain(shape))
        if kept is None:
            make_type(self, element_ty, shape)
            of_types[key] = self.shape, self.numel
            return
        self.element_ty = element_ty
        self.shape, self.numel = kept
        self.name = f"<{self.shape}, {element_ty}>"

    def new_tensor(self: Any, handle: Any, kind: Any) -> None:
        if not kind.is_block():
            make_tensor(self, handle, kind)
            return
        kept = of_tensors.get(key := plain(kind.shape))
        if kept is None:
            make_tensor(self, handle, kind)
            of_tensors[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = kept

    language.block_type.__init__, language.tensor.__init__ = new_type, new_tensor


def _reduce_xor_at_once() -> None:
    """Triton's sort is made of them, and the interpreter goes from element to element."""
    reduce = interpreter.ReduceOps.apply_impl

    def apply(self: Any, values: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine or self.axis is None:
            return reduce(self, values)
        (value,) = values
        found = numpy.bitwise_xor.reduce(value.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, value.dtype)

    interpreter.ReduceOps.apply_impl = apply


if __name__ == "__main__":
    main()
