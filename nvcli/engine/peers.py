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

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nvcli import kernels
from nvcli.engine.peer_memory import PeerMemory
from nvcli.errors import DeviceError, UsageError, first_line
from nvcli.parallel import short_rows

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.kernels.all_reduce import ShortSums
    from nvcli.parallel import TPGroup

logger = logging.getLogger(__name__)

CHOICES = ("auto", "nccl")
CHECK_LIMIT = 1 << 22  # looks: some seconds
_TEXT_BYTES = 192
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
    memory = PeerMemory(device)
    attempt = _Attempt(group, rows, columns, dtype, device, fuses_norm, memory)
    try:
        reason = attempt.make()
        if reason is not None:
            memory.let_go()
            _exchange(group, device, bytes(8))  # nobody has another's memory open any more
            memory.close()
    except Exception as error:
        raise DeviceError(
            f"the GPUs could not sum up over each other's memory: {first_line(error)}",
            hint="NVCLI_ALL_REDUCE=nccl in the environment leaves that to NCCL.",
        ) from error
    if reason is None:
        group.short = attempt.sums
        return f"ours up to {rows} rows, NCCL"
    if group.rank == 0 and kernels.uses_triton():
        logger.warning("sums over the GPUs are left to NCCL: %s", reason)
    return "NCCL"


@dataclass(slots=True)
class _Attempt:
    """The steps of `connect`. Whatever goes wrong in one on any rank is told to all of them."""

    group: TPGroup
    rows: int
    columns: int
    dtype: torch.dtype
    device: torch.device
    fuses_norm: bool
    memory: PeerMemory
    sums: ShortSums | None = None

    def make(self) -> str | None:
        """-> why it is not to be, or None: then `sums` are there."""
        for step in (self.prepare, self.open, self.load, self.compare):
            text = ""
            try:
                with torch.inference_mode():
                    step()
                _finish(self.device)
            except Exception as error:  # noqa: BLE001 - whatever it is, NCCL does it then
                text = first_line(error)
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

        _require(kernels.uses_triton(), "our kernels are off")
        _require(self.rows > 0, f"rows of {self.columns:,} columns are too long")
        own = self.device.index or 0
        for index in range(own - self.group.rank, own - self.group.rank + self.group.size):
            if index != own:
                can = torch.cuda.can_device_access_peer(own, index)
                _require(can, f"GPU {own} cannot write to the memory of GPU {index}")
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


class _RefusedError(Exception):
    """Why our own sums are not to be used."""


def _require(is_so: bool, reason: str) -> None:
    if not is_so:
        raise _RefusedError(reason)


def _exchange(group: TPGroup, device: torch.device, data: bytes) -> list[bytes]:
    """Every rank's data, of the same length, a multiple of 8. Waits for all."""
    own = torch.frombuffer(bytearray(data), dtype=torch.int64).to(device)
    everyone = group.gather_columns(own[None]).cpu().view(group.size, -1)
    return [row.numpy().tobytes() for row in everyone]


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
    """Launched, then captured and replayed with other numbers each time. Raises `_RefusedError`
    where something else comes out, or nothing.
    """

    def check(found: list[tuple[Tensor, Tensor]], what: str) -> None:
        are_equal = [torch.equal(one, other) for one, other in found]  # waits for them
        _require(not sums.gave_up, _LATE)
        _require(all(are_equal), f"{what} came out wrong")

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
