"""The paged KV cache: how many bytes a block takes, how many blocks fit, and where they lie.

    one layer's K (and V alike), logically [N + 1, P, Hk, D]:

        block 0 | block 1 | ... | block N - 1 | dummy
        |<------- the block manager's ------->|

The dummy block belongs to no sequence: unused block-table entries, padding rows and graph capture
point at it, so whatever they read or write reaches no request.

In float8_e4m3fn what is stored is K and V over a scale each, by layer and head (`fp8_scales`).

On CUDA a block is stored as [Hk, P, D], so that a kernel reads one head's keys of a block as one
piece; on the CPU as [P, Hk, D], so that one token is one piece. Callers see [N + 1, P, Hk, D]
either way.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nvcli.config import DEFAULT_BLOCK_SIZE
from nvcli.errors import OutOfMemoryError
from nvcli.kernels.reference import FP8_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_SHARE = {"cuda": 0.9, "cpu": 0.5}
_MEMINFO = Path("/proc/meminfo")
# What torch and numpy raise when memory, or the range of a size, does not suffice.
_REFUSALS = (RuntimeError, MemoryError, OverflowError, ValueError)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The numbers that decide the size of the cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def fp8_scales(limits: Tensor) -> Tensor:
    """What keys and values are divided by before they are stored in float8_e4m3fn.

    limits: [...] float32, bounds on their size -> [...] float32

    The least power of two under which nothing can overflow. A power of two costs no rounding of its
    own, and a floating-point type loses nothing when a bound is loose by some octaves; so scales
    follow from the weights alone, and are the same for whatever is generated.
    """
    mantissa, exponent = torch.frexp(limits.float().cpu().clamp(min=1e-6) / FP8_MAX)
    exponent = exponent - (mantissa == 0.5).int()  # limits / FP8_MAX <= 2 ** exponent
    return ((exponent + 127) << 23).view(torch.float32).to(limits.device)


def format_bytes(size: int) -> str:
    """`512 B`, `3.4 MB`, `1.2 GB`: decimal units, as memory is sold."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def available_memory(meminfo: Path = _MEMINFO) -> int:
    """Bytes of main memory that a new allocation can have without swapping."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # no /proc: not Linux
    names = os.sysconf_names
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in names else "SC_PHYS_PAGES"
    return int(os.sysconf(pages)) * int(os.sysconf("SC_PAGE_SIZE"))


@contextmanager
def reserving(size: int, what: str, device: torch.device, *, hint: str) -> Iterator[None]:
    """Around an allocation of `size` bytes: `OutOfMemoryError` when the device refuses it, and
    before it is tried when main memory cannot hold it, as the system may kill us only later.
    """
    message = f"{what} need {format_bytes(size)}"
    if device.type == "cpu" and size > (free := available_memory()):
        raise OutOfMemoryError(f"{message}, and {format_bytes(free)} are available", hint=hint)
    try:
        yield
    except _REFUSALS as error:
        raise OutOfMemoryError(f"{message}, and the device refused it", hint=hint) from error


def block_size_hint(budget_bytes: int, bytes_per_token: int) -> str | None:
    """What to do where two blocks do not fit, if those of a usual size would."""
    largest = budget_bytes // (2 * bytes_per_token)
    if largest < DEFAULT_BLOCK_SIZE:
        return None
    return f"Use a --block-size of at most {largest}; {DEFAULT_BLOCK_SIZE} is the default."


def size_pool(
    spec: KVCacheSpec,
    *,
    budget_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    is_len_requested: bool,
) -> tuple[int, int]:
    """(number of blocks, settled max_model_len) for a cache of at most `budget_bytes`.

    Never more blocks than `max_num_seqs` sequences of full length can use. Where the model's own
    limit does not fit, the limit shrinks to what does; a limit that the user asked for raises
    `OutOfMemoryError` instead.
    """
    fitting = budget_bytes // spec.bytes_per_block - 1  # one block is the dummy
    if fitting < 1:
        hint = block_size_hint(budget_bytes, spec.bytes_per_token)
        raise OutOfMemoryError(
            f"{format_bytes(max(budget_bytes, 0))} are left for the KV cache, and two blocks of "
            f"{spec.block_size} tokens need {format_bytes(2 * spec.bytes_per_block)}",
            hint=hint or "Free memory, raise --gpu-memory-utilization, or use a smaller model.",
            param=None if hint is None else "block_size",
        )
    capacity = fitting * spec.block_size
    if capacity < max_model_len:
        if is_len_requested:
            needed = (spec.blocks_for(max_model_len) + 1) * spec.bytes_per_block
            raise OutOfMemoryError(
                f"--max-model-len {max_model_len} needs {format_bytes(needed)} of KV cache, and "
                f"{format_bytes(budget_bytes)} are left",
                hint=f"Use --max-model-len {capacity} or less, or raise --gpu-memory-utilization.",
                param="max_model_len",
            )
        max_model_len = capacity
    return min(fitting, max_num_seqs * spec.blocks_for(max_model_len)), max_model_len


def _lazy_zeros(size: int) -> Tensor:
    """[size] uint8 in main memory whose pages are taken when they are first written: numpy gets
    zeroed memory from the system, where torch would write every byte now.
    """
    alignment = 64
    array = np.zeros(size + alignment, np.uint8)
    start = -array.ctypes.data % alignment
    return torch.from_numpy(array[start : start + size])


class KVCache:
    """The pool and its views per layer."""

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        device: torch.device,
        scales: Tensor | None = None,
    ) -> None:
        """scales: [L, 2, Hk] float32, with float8_e4m3fn.

        Raises `OutOfMemoryError` when the device has no room for it.
        """
        assert (scales is not None) == (spec.dtype == torch.float8_e4m3fn), "fp8 has scales"
        self.spec = spec
        self.scales = None if scales is None else list(scales.to(device))  # per layer [2, Hk]
        self.num_blocks = num_blocks  # without the dummy
        self.dummy_block = num_blocks
        num_stored, is_cuda = num_blocks + 1, device.type == "cuda"
        inner = (
            (spec.num_kv_heads, spec.block_size)
            if is_cuda
            else (spec.block_size, spec.num_kv_heads)
        )
        shape = (spec.num_layers, 2, num_stored, *inner, spec.head_dim)
        try:
            # zeros, so that a masked key that was never written cannot be a NaN
            if is_cuda:
                bits = spec.dtype if scales is None else torch.uint8
                pool = torch.zeros(shape, dtype=bits, device=device).view(spec.dtype)
            else:
                pool = _lazy_zeros(num_stored * spec.bytes_per_block).view(spec.dtype).view(shape)
        except _REFUSALS as error:
            raise OutOfMemoryError(
                f"the KV cache of {num_blocks} blocks needs "
                f"{format_bytes(num_stored * spec.bytes_per_block)}, and the device refused it",
                hint="Lower --gpu-memory-utilization, --max-num-seqs or --max-model-len.",
            ) from error
        self.pool = pool.transpose(3, 4) if is_cuda else pool  # [L, 2, N + 1, P, Hk, D]
        self.layers: list[tuple[Tensor, Tensor]] = [  # per layer: K and V, [N + 1, P, Hk, D]
            (layer[0], layer[1]) for layer in self.pool
        ]

    @property
    def nbytes(self) -> int:
        return (self.num_blocks + 1) * self.spec.bytes_per_block
