"""Products by an algorithm of cuBLAS that is named, through cublasLt's C interface.

cuBLAS guesses from the shape which of its kernels is the fastest, and for many products of a
language model it guesses wrong, by up to a fifth. PyTorch cannot be told another; cublasLt can. So
the library that PyTorch has loaded is called here once more, by way of ctypes, with an algorithm
that `python -m benchmarks.kernels.tune_library` found and `tuned.json` names. Names and numbers of
enumerations are those of NVIDIA's cublasLt.h.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

CUDA_R_32F, CUDA_R_16BF = 0, 14
CUBLAS_COMPUTE_32F = 68
CUBLAS_OP_T = 1
DESC_TRANSA = 3
MAX_WORKSPACE = 64 << 20  # bytes
ALIGNMENT = 256  # of addresses, in bytes, with which cuBLAS offered the algorithms


class Algorithm(NamedTuple):
    """An algorithm's configuration: cublasLtMatmulAlgoConfigAttributes_t, in its order."""

    id: int
    tile: int
    splits: int  # of the columns
    reduction: int  # how splits are added up
    swizzle: int
    custom: int
    stages: int
    inner: int
    cluster: int


ATTRIBUTE_TYPES = (*[c_uint32] * 7, ctypes.c_uint16, ctypes.c_uint16)


class Algo(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class Heuristic(ctypes.Structure):
    _fields_ = [
        ("algo", Algo),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class CublasLtError(RuntimeError):
    """A call failed that was checked before."""


@lru_cache
def _library() -> ctypes.CDLL | None:
    """PyTorch's; None where there is none: without CUDA, on Windows, or built otherwise."""
    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
    library.cublasLtGetVersion.restype = c_size_t
    return library


@lru_cache
def version() -> int | None:
    """Of cublasLt, as in 130100; None where it cannot be called."""
    library = _library()
    return None if library is None else int(library.cublasLtGetVersion())


def call(name: str, *arguments: object) -> None:
    """A function of the C interface. Raises `CublasLtError`."""
    library = _library()
    assert library is not None, "ask `version` first"  # and whoever names an algorithm has
    status = getattr(library, name)(*arguments)
    if status:
        raise CublasLtError(f"{name} answered {status}")


def configuration(algo: Algo) -> Algorithm:
    """What an algorithm of cuBLAS's own choice is."""
    values = []
    for i, kind in enumerate(ATTRIBUTE_TYPES):
        number, written = kind(), c_size_t()
        size = c_size_t(ctypes.sizeof(number))
        call(
            *("cublasLtMatmulAlgoConfigGetAttribute", byref(algo), i),
            *(byref(number), size, byref(written)),
        )
        values.append(number.value)
    return Algorithm(*values)


@lru_cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        call("cublasLtCreate", byref(handle))
    return handle


@lru_cache
def operation() -> c_void_p:
    """y^T = W x^T as column-major matrices, in which W is transposed."""
    operation, transposed = c_void_p(), c_int(CUBLAS_OP_T)
    call("cublasLtMatmulDescCreate", byref(operation), CUBLAS_COMPUTE_32F, CUDA_R_32F)
    size = c_size_t(ctypes.sizeof(transposed))
    call("cublasLtMatmulDescSetAttribute", operation, DESC_TRANSA, byref(transposed), size)
    return operation


class Problem:
    """A product of bfloat16 matrices [T, K] and [N, K], all contiguous, on a device."""

    def __init__(self, device: int, num_rows: int, num_outputs: int, size: int) -> None:
        self.handle = _handle(device)
        self.weight = _layout(size, num_outputs)
        self.x = _layout(size, num_rows)
        self.y = _layout(num_outputs, num_rows)
        end = weakref.finalize(self, _destroy, self.weight, self.x, self.y)
        end.atexit = False  # when the process ends, nothing needs to be given back

    @property
    def layouts(self) -> tuple[c_void_p, ...]:
        return self.weight, self.x, self.y, self.y

    def prepare(self, algorithm: Algorithm) -> tuple[Algo, int] | None:
        """What `run` takes: the algorithm and the bytes it works in; None where it cannot compute
        this product.
        """
        algo = Algo()
        types = (CUBLAS_COMPUTE_32F, CUDA_R_32F, *[CUDA_R_16BF] * 4)
        library = _library()
        assert library is not None, "there is one"
        if library.cublasLtMatmulAlgoInit(self.handle, *types, algorithm.id, byref(algo)):
            return None
        for i, (kind, value) in enumerate(zip(ATTRIBUTE_TYPES, algorithm, strict=True)):
            if i == 0:  # what it was made with
                continue
            number = kind(value)
            size = c_size_t(ctypes.sizeof(number))
            if library.cublasLtMatmulAlgoConfigSetAttribute(byref(algo), i, byref(number), size):
                return None
        found = Heuristic()
        status = library.cublasLtMatmulAlgoCheck(
            self.handle, operation(), *self.layouts, byref(algo), byref(found)
        )
        if status or found.state or found.workspace_bytes > MAX_WORKSPACE:
            return None
        return algo, int(found.workspace_bytes)

    def run(
        self, prepared: tuple[Algo, int], x: Tensor, weight: Tensor, y: Tensor, *, adds: bool
    ) -> None:
        """y = x W^T, or y + x W^T, on the current stream. Raises `CublasLtError`."""
        algo, num_bytes = prepared
        # Of the caching allocator, so that streams and captured graphs do not share it.
        work = torch.empty(num_bytes, dtype=torch.uint8, device=x.device) if num_bytes else None
        one, beta = c_float(1.0), c_float(1.0 if adds else 0.0)
        result = c_void_p(y.data_ptr())
        call(
            *("cublasLtMatmul", self.handle, operation(), byref(one)),
            *(c_void_p(weight.data_ptr()), self.weight, c_void_p(x.data_ptr()), self.x),
            *(byref(beta), result, self.y, result, self.y, byref(algo)),
            c_void_p(None if work is None else work.data_ptr()),
            c_size_t(num_bytes),
            c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )


def _layout(rows: int, columns: int) -> c_void_p:
    layout = c_void_p()
    shape = (c_uint64(rows), c_uint64(columns), c_int64(rows))
    call("cublasLtMatrixLayoutCreate", byref(layout), CUDA_R_16BF, *shape)
    return layout


def _destroy(*layouts: c_void_p) -> None:
    for layout in layouts:
        call("cublasLtMatrixLayoutDestroy", layout)


@lru_cache(maxsize=4096)
def _prepared(
    device: int, num_rows: int, num_outputs: int, size: int, algorithm: Algorithm
) -> tuple[Problem, tuple[Algo, int]] | None:
    problem = Problem(device, num_rows, num_outputs, size)
    prepared = problem.prepare(algorithm)
    return None if prepared is None else (problem, prepared)


def multiply(x: Tensor, weight: Tensor, y: Tensor, algorithm: Algorithm, *, adds: bool) -> bool:
    """y = x W^T, or with `adds` y + x W^T; False, with nothing done, where the algorithm cannot.

    x: [T, K]; weight: [N, K]; y: [T, N]; bfloat16 and contiguous, on the current device. False for
    any others, too: what they mean, or what is wrong with them, PyTorch knows.
    """
    (num_rows, size), num_outputs = x.shape, weight.shape[0]
    if weight.shape[1] != size or y.shape != (num_rows, num_outputs):
        return False  # the library takes addresses, and would read and write beyond
    if not all(
        t.dtype == torch.bfloat16 and t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0
        for t in (x, weight, y)
    ):
        return False
    if not x.device == weight.device == y.device or x.device.index != torch.cuda.current_device():
        return False  # the library goes by the thread's device
    found = _prepared(x.device.index or 0, num_rows, num_outputs, size, algorithm)
    if found is None:
        return False
    problem, prepared = found
    problem.run(prepared, x, weight, y, adds=adds)
    return True
