"""Memory that the ranks of a group write to directly, and whether sums over it can be trusted.

`connect` gives a group on GPUs its own all-reduce for few rows (`kernels.all_reduce`), or says why
the sums are left to NCCL. A surprise costs speed and nothing else: every rank tries each step, and
all hear of each other before the next one, so either all go on or none does. The last step is sums
of known numbers, launched and captured, with waits of seconds.

The memory is CUDA's own, shared by IPC handles that the ranks exchange through the group, so that
nothing here has a name, a port or a path. (torch's symmetric memory shares memory too; it wants a
process group registered under a name, has one socket path a process, and waits without a limit.)

`NVCLI_ALL_REDUCE=nccl` leaves all sums to NCCL.
"""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from nvcli import kernels
from nvcli.errors import DeviceError, UsageError
from nvcli.parallel import short_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from nvcli.kernels.all_reduce import ShortSums
    from nvcli.parallel import TPGroup

logger = logging.getLogger(__name__)

CHOICES = ("auto", "nccl")
CHECK_LIMIT = 1 << 22  # looks: some seconds
_HANDLE_BYTES = 64
_TEXT_BYTES = 192
_LAZY_PEER_ACCESS = 1
_LATE = "another GPU's part did not come"


def connect(
    group: TPGroup,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fuses_norm: bool,
    rows: int | None = None,
) -> str:
    """Give the group its short sums; all ranks call it at the same time. -> who sums, in words.

    columns, dtype: of what is summed between layers.
    fuses_norm: as in `ShortSums`.
    rows: that are few, instead of `short_rows`: to measure beyond it.

    Raises:
        UsageError: `NVCLI_ALL_REDUCE` is neither of `CHOICES`.
        DeviceError: the GPU can do nothing more after what was tried.
    """
    choice = os.environ.get("NVCLI_ALL_REDUCE") or "auto"
    if choice not in CHOICES:
        raise UsageError(
            f"NVCLI_ALL_REDUCE must be one of {', '.join(CHOICES)}, got {choice!r}",
            param="NVCLI_ALL_REDUCE",
        )
    if device.type != "cuda":
        return "gloo"
    if choice == "nccl":
        return "NCCL"
    if rows is None:
        rows = short_rows(group.size, columns, dtype.itemsize)
    attempt = _Attempt(group, rows, columns, dtype, device, fuses_norm=fuses_norm)
    try:
        reason = attempt.make()
        if reason is not None:
            attempt.memory.let_go()
            _exchange(group, device, bytes(8))  # nobody has another's memory open any more
            attempt.memory.close()
    except Exception as error:
        raise DeviceError(
            f"the GPUs could not sum up over each other's memory: {_line(error)}",
            hint="NVCLI_ALL_REDUCE=nccl in the environment leaves that to NCCL.",
        ) from error
    if reason is None:
        group.short = attempt.sums
        return f"ours up to {rows} rows, NCCL"
    if group.rank == 0 and kernels.uses_triton():
        logger.warning("sums over the GPUs are left to NCCL: %s", reason)
    return "NCCL"


class _Attempt:
    """The steps of `connect`. Whatever goes wrong in one on any rank is told to all of them."""

    def __init__(
        self,
        group: TPGroup,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fuses_norm: bool,
    ) -> None:
        self.group = group
        self.rows = rows
        self.columns = columns
        self.dtype = dtype
        self.device = device
        self.fuses_norm = fuses_norm
        self.memory = PeerMemory(device)
        self.sums: ShortSums | None = None

    def make(self) -> str | None:
        """-> why it is not to be, or None: then `sums` are there."""
        for step in (self.prepare, self.open, self.load, self.compare):
            text = ""
            try:
                with torch.inference_mode():
                    step()
                _finish(self.device)
            except Exception as error:  # noqa: BLE001 - whatever it is, NCCL does it then
                text = _line(error)
            data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
            everyone = enumerate(_exchange(self.group, self.device, data))
            told = [
                f"{found.rstrip(bytes(1)).decode(errors='replace')} (rank {rank})"
                for rank, found in everyone
                if found.rstrip(bytes(1))
            ]
            if told:  # who waited in vain did so because of another
                return min(told, key=lambda reason: reason.startswith(_LATE))
        return None

    def prepare(self) -> None:
        from nvcli.kernels.all_reduce import ShortSums

        assert kernels.uses_triton(), "our kernels are off"
        assert self.rows > 0, f"rows of {self.columns:,} columns are too long"
        own = self.device.index or 0
        for index in range(own - self.group.rank, own - self.group.rank + self.group.size):
            if index != own:
                can = torch.cuda.can_device_access_peer(own, index)
                assert can, f"GPU {own} cannot write to the memory of GPU {index}"
        size = self.group.size
        self.memory.allocate(ShortSums.inbox_bytes(size, self.rows, self.columns, self.dtype))

    def open(self) -> None:
        from nvcli.kernels.all_reduce import ShortSums

        handles = _exchange(self.group, self.device, self.memory.handle)
        inboxes = [
            self.memory.address if rank == self.group.rank else self.memory.open(handle)
            for rank, handle in enumerate(handles)
        ]
        self.sums = ShortSums(
            *(self.group.rank, inboxes),
            rows=self.rows,
            columns=self.columns,
            dtype=self.dtype,
            device=self.device,
            fuses_norm=self.fuses_norm,
            memory=self.memory,
        )

    def load(self) -> None:
        """So that no rank waits for one that compiles."""
        from nvcli.kernels.compiling import compiled_only

        assert self.sums is not None, "opened"
        with compiled_only(self.device):
            for rows in (1, self.rows):
                _sum_known(self.sums, self.group, self.device, rows, 0)

    def compare(self) -> None:
        from nvcli.kernels.all_reduce import LIMIT

        assert self.sums is not None, "opened"
        self.sums.limit = CHECK_LIMIT
        _compare(self.sums, self.group, self.device)
        self.sums.limit = LIMIT


def _exchange(group: TPGroup, device: torch.device, data: bytes) -> list[bytes]:
    """Every rank's data, of the same length, a multiple of 8. Waits for all."""
    own = torch.frombuffer(bytearray(data), dtype=torch.int64).to(device)
    everyone = group.gather_columns(own[None]).cpu().view(group.size, -1)
    return [row.numpy().tobytes() for row in everyone]


def _line(error: Exception) -> str:
    reason = (str(error).splitlines() or [""])[0].strip()
    return reason or type(error).__name__


def _finish(device: torch.device) -> None:
    torch.cuda.synchronize(device)


# --- known numbers -------------------------------------------------------------------------------


def _known(sums: ShortSums, rank: int, device: torch.device, rows: int, step: int) -> Tensor:
    """A rank's x [rows, E] of a step: whole numbers, whose sums 16 bits hold for 16 ranks."""
    count = torch.arange(rows * sums.columns, device=device).view(rows, sums.columns)
    return (count * (2 * rank + 3) + 5 * step + rank).remainder(31).sub(15).to(sums.dtype)


def _sum_known(
    sums: ShortSums, group: TPGroup, device: torch.device, rows: int, step: int
) -> list[tuple[Tensor, Tensor]]:
    """What comes out, beside what must: sums, and norms where they are one with the sum."""
    parts = [_known(sums, rank, device, rows, step) for rank in range(group.size)]
    expected = torch.stack(parts).float().sum(0).to(sums.dtype)
    found = [(sums.all_reduce(parts[group.rank].clone()), expected)]
    if sums.fits_norm(expected):
        weight = parts[0][0] / 8
        for residual in (parts[0] / 4, None):
            normed, total = sums.add_rms_norm(parts[group.rank], residual, weight, 1e-6)
            exact = expected if residual is None else expected + residual
            norm = kernels.rms_norm(exact, weight, 1e-6)  # adds up in another order
            near = torch.where((normed - norm).abs() <= norm.abs() / 64, norm, normed)
            found += [(total, exact), (near, norm)]
    return found


def _compare(sums: ShortSums, group: TPGroup, device: torch.device) -> None:
    """Launched, then captured and replayed with other numbers each time. Raises `AssertionError`
    where something else comes out, or nothing.
    """

    def check(found: list[tuple[Tensor, Tensor]], what: str) -> None:
        are_equal = [torch.equal(one, other) for one, other in found]  # waits for them
        assert not sums.gave_up, _LATE
        assert all(are_equal), f"{what} came out wrong"

    for step in range(4):
        for rows in (1, sums.rows):
            check(_sum_known(sums, group, device, rows, step), "a sum")
    from nvcli.engine.cuda_graph import Capture

    rows = min(3, sums.rows)
    x = [torch.empty(rows, sums.columns, dtype=sums.dtype, device=device) for _ in range(3)]

    def body() -> None:
        for each in x:
            sums.all_reduce(each)

    graph = Capture(device)(body)
    for step in range(0, 80, 10):
        parts = [
            [_known(sums, rank, device, rows, step + i) for rank in range(group.size)]
            for i in range(len(x))
        ]
        for each, known in zip(x, parts, strict=True):
            each.copy_(known[group.rank])
        graph.replay()
        expected = [torch.stack(known).float().sum(0).to(sums.dtype) for known in parts]
        check(list(zip(x, expected, strict=True)), "a captured sum")


# --- the driver ----------------------------------------------------------------------------------


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * _HANDLE_BYTES)]


class PeerMemory:
    """A piece of this rank's GPU memory that the others can write to, and those of the others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.address = 0
        self.handle = b""
        self._opened: list[int] = []

    def allocate(self, num_bytes: int) -> None:
        """Zeros at `address`, and the `handle` by which another process opens them.

        Raises `OSError`, as every method does for what the driver refuses.
        """
        address, handle = ctypes.c_uint64(), _Handle()
        with self._driver() as call:
            call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
            self.address = address.value
            call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
            call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        self.handle = bytes(handle)

    def open(self, handle: bytes) -> int:
        """-> the address, here, of another process's memory."""
        address = ctypes.c_uint64()
        with self._driver() as call:
            call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                _Handle.from_buffer_copy(handle),
                ctypes.c_uint(_LAZY_PEER_ACCESS),
            )
        self._opened.append(address.value)
        return address.value

    def let_go(self) -> None:
        """Of the others' memory, which nothing here may use any more."""
        opened, self._opened = self._opened, []
        if opened:
            with suppress(OSError, RuntimeError), self._driver() as call:
                for address in opened:
                    call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def close(self) -> None:
        """Give all of it back, when no other rank has it open any more. Safe to call twice."""
        self.let_go()
        address, self.address = self.address, 0
        if address:
            with suppress(OSError, RuntimeError), self._driver() as call:
                call("cuMemFree_v2", ctypes.c_uint64(address))

    @contextmanager
    def _driver(self) -> Iterator[Callable[..., None]]:
        """Calls to the driver's library, in torch's context on the device."""
        library = ctypes.CDLL("libcuda.so.1")

        def call(name: str, *arguments: object) -> None:
            code = getattr(library, name)(*arguments)
            if code:
                text = ctypes.c_char_p()
                library.cuGetErrorName(code, ctypes.byref(text))
                what = (text.value or b"").decode() or f"error {code}"
                raise OSError(f"{name.removesuffix('_v2')}: {what}")

        with torch.cuda.device(self.device):
            _finish(self.device)  # which makes the context this thread's
            yield call
