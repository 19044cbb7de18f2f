"""Tensor parallelism: the ranks that hold one model together, and what they say to each other.

Each rank holds a share of every matrix: rows of those that make heads or the inner MLP size
(column-parallel: the outputs are split), columns of those that lead back to the hidden size
(row-parallel: every rank has a part of each sum, and `all_reduce` adds them), and rows of the
vocabulary. Everything else is on all ranks. `SOLO` is the group of one, for which every operation
here is free.

The groups are made by hand rather than as torch's process-wide default, so that two engines in one
process, or on one host, have nothing in common: no port, no name, no state.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nvcli.errors import EngineClosedError

if TYPE_CHECKING:
    from torch import Tensor

# How long ranks wait for each other; at the start that has to suffice for the slowest disk. Ranks
# that died are noticed sooner, by `engine.workers`.
TIMEOUT = timedelta(minutes=10)
_ABORT_S = 5.0
# Bytes that a GPU may write to its peers in one of our own all-reduces. Beyond it NCCL's is taken,
# which writes less. For two GPUs that is 256 rows of 4,096 in 16 bits: there ours takes half of
# NCCL's time between two H200s, and more was not measured (`python -m benchmarks.tensor_parallel
# reduce` does).
SHORT_BYTES = 256 * 4096 * 4
MAX_SHORT_ROWS = 256  # each has a program, and all programs are on the GPU at once


def short_rows(size: int, columns: int, itemsize: int) -> int:
    """How many rows of so many columns our own all-reduce takes; 0: not even one."""
    each = (size - 1) * columns * 2 * itemsize  # an element travels beside a number of its size
    return min(SHORT_BYTES // each, MAX_SHORT_ROWS)


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of a dimension: `start .. start + count - 1` of `whole`, then padding."""

    whole: int
    start: int
    count: int
    padding: int = 0  # zeros behind the share, so that all ranks' parameters have one shape

    @classmethod
    def all_of(cls, whole: int) -> Share:
        return cls(whole, 0, whole)

    @property
    def size(self) -> int:
        """Of the parameter's dimension on this rank."""
        return self.count + self.padding

    @property
    def is_whole(self) -> bool:
        return self.count == self.whole

    def in_blocks(self, size: int) -> Share:
        """The same share counted in blocks of `size`, which must divide it."""
        numbers = (self.whole, self.start, self.count, self.padding)
        assert not any(number % size for number in numbers), f"a block of {size} is cut: {self}"
        return Share(*(number // size for number in numbers))


class ShortSums(Protocol):
    """What takes sums of few rows from the library: `kernels.all_reduce`."""

    def fits(self, x: Tensor) -> bool: ...
    def fits_norm(self, x: Tensor) -> bool: ...
    def all_reduce(self, x: Tensor) -> Tensor: ...
    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...

    @property
    def gave_up(self) -> bool: ...


class TPGroup:
    """One rank's end of the group. Operations are called by all ranks in the same order; they
    enqueue on the current stream and can be captured in a CUDA graph.
    """

    def __init__(self, rank: int, size: int, backend: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._backend = backend  # a torch.distributed process group of our own
        self.short: ShortSums | None = None  # set by `engine.peers`
        if size > 1:
            import torch.distributed.distributed_c10d as c10d

            # On the current stream: another one would cost two events an operation.
            self._sum = c10d.AllreduceOptions()
            self._sum.asyncOp = False
            self._gather = c10d.AllgatherOptions()  # type: ignore[attr-defined]
            self._gather.asyncOp = False

    # --- shares ----------------------------------------------------------------------------------

    def share(self, whole: int) -> Share:
        """An equal share; `whole` must divide."""
        assert whole % self.size == 0, f"{whole} is not a multiple of {self.size}"
        count = whole // self.size
        return Share(whole, self.rank * count, count)

    def share_of_heads(self, num_heads: int, head_dim: int) -> Share:
        """Rows of whole heads; where there are fewer heads than ranks, neighbours hold the same."""
        if num_heads % self.size == 0:
            return self.share(num_heads * head_dim)
        assert self.size % num_heads == 0, f"{num_heads} heads for {self.size} ranks"
        head = self.rank * num_heads // self.size
        return Share(num_heads * head_dim, head * head_dim, head_dim)

    def padded_share(self, whole: int) -> Share:
        """An equal share of `padded(whole)`, of which the last ranks' end is padding."""
        size = -(-whole // self.size)
        start = min(self.rank * size, whole)
        count = min(size, whole - start)
        return Share(whole, start, count, size - count)

    def padded(self, whole: int) -> int:
        """`whole` rounded up to equal shares."""
        return -(-whole // self.size) * self.size

    # --- collectives -----------------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, written to `x`, which must be contiguous."""
        if self.short is not None and self.short.fits(x):
            return self.short.all_reduce(x)
        return self.library_sum(x)

    def library_sum(self, x: Tensor) -> Tensor:
        """The same, by NCCL or gloo."""
        if self.size > 1:
            _wait(self._backend.allreduce([x], self._sum))
        return x

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        """`all_reduce`, the residual's addition and the norm as one kernel, where there is one for
        x: (norm of the sum, the sum), [T, E] each. None where there is not, and nothing done.
        """
        if self.short is None or not self.short.fits_norm(x):
            return None
        return self.short.add_rms_norm(x, residual, weight, eps)

    def gather_columns(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """All ranks' columns beside each other, the same bits on every rank.

        x:       [R, C]
        out:     [R, size * C] to write to
        returns  [R, size * C]
        """
        if self.size == 1:
            return x if out is None else out.copy_(x)
        num_rows, width = x.shape
        parts = torch.empty(self.size * x.numel(), dtype=x.dtype, device=x.device)
        _wait(self._backend._allgather_base(parts, x.flatten(), self._gather))
        if out is None:
            out = torch.empty((num_rows, self.size * width), dtype=x.dtype, device=x.device)
        out.view(num_rows, self.size, width).copy_(
            parts.view(self.size, num_rows, width).transpose(0, 1)
        )
        return out

    def least(self, values: list[int], device: torch.device) -> list[int]:
        """The least of each value over all ranks. Waits for them."""
        if self.size == 1:
            return values
        negated = torch.tensor([[-value for value in values]], device=device)
        everyone = self.gather_columns(negated).view(self.size, len(values))
        return [-int(value) for value in everyone.amax(0).tolist()]

    # --- begin and end ---------------------------------------------------------------------------

    @classmethod
    def at(cls, store: Any, rank: int, size: int, device: torch.device) -> TPGroup:
        """The group of the ranks that meet at the store."""
        return cls(rank, size, _make_backend(store, rank, size, device))

    def greet(self, device: torch.device) -> None:
        """Wait for the others and open the connections, so that the first operation need not."""
        self.least([0], device)

    def check(self) -> None:
        """Raises `EngineClosedError` once an operation has waited too long for another rank."""
        if self.short is not None and self.short.gave_up:
            raise EngineClosedError(
                f"the engine stopped: rank {self.rank} of {self.size} waited too long for another"
            )

    def stop_waiting(self) -> None:
        """Make our own operations return at once, with rubbish, instead of waiting for a rank."""
        if self.short is not None:
            self.short.stop()

    def close(self) -> None:
        """Give our own operations' memory back, when nothing runs any more. Safe to call twice."""
        if self.short is not None:
            self.short.close()

    def abort(self) -> None:
        """Make operations that wait for a dead rank return, with rubbish. From any thread.

        The library may take its time, as long as captured graphs are alive; it is not waited for.
        """
        self.stop_waiting()
        abort = getattr(self._backend, "abort", None)
        if abort is None:
            return

        def run() -> None:
            with suppress(RuntimeError):  # not every backend has something to abort
                abort()

        thread = threading.Thread(target=run, name="nvcli-abort", daemon=True)
        thread.start()
        thread.join(_ABORT_S)


def _wait(work: Any) -> None:
    if work is not None:  # some backends give nothing where there is nothing to wait for
        work.wait()


SOLO = TPGroup(0, 1)


def _make_backend(store: Any, rank: int, size: int, device: torch.device) -> Any:
    import torch.distributed as dist

    if device.type == "cuda":
        nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined, unused-ignore]
        options = nccl.Options()
        options._timeout = TIMEOUT
        return nccl(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo  # type: ignore[attr-defined, unused-ignore]
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    return gloo(store, rank, size, options)


def make_store(size: int) -> Any:
    """Where ranks find each other: a server on a free port that only this machine reaches."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        size,
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=sock.detach(),
    )


def find_store(port: int, size: int) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", port, size, is_master=False, timeout=TIMEOUT)


def prepare_environment() -> None:
    """What NCCL and torch read when a group is made; what the user has set stays.

    NVLink multicast (NVLS) is left off: where a driver or a virtual machine offers it in name only,
    the group hangs, and two GPUs gain nothing from it. Torch's own answer to a lost rank is to end
    this process; `engine.workers` has a better one.
    """
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
