"""How a group gets its short sums: whatever goes wrong on any rank, all ranks are left to NCCL."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvcli import kernels
from nvcli.engine import cuda_graph, peer_memory, peers
from nvcli.errors import EngineClosedError, UsageError
from nvcli.kernels import all_reduce, compiling
from nvcli.parallel import TPGroup, find_store, make_store
from tests.engine.short_sums import LibrarySums
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
COLUMNS = 5120
Ranks = Callable[[Callable[[TPGroup], Any]], list[Any]]


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Runs something on all ranks of a new group at once; they are threads."""
    size = request.param
    store = make_store(size)
    pools = [ThreadPoolExecutor(1) for _ in range(size)]

    def start(rank: int) -> TPGroup:
        own = store if rank == 0 else find_store(store.port, size)
        return TPGroup.at(own, rank, size, CPU)

    groups = [f.result(PATIENCE_S) for f in [p.submit(start, i) for i, p in enumerate(pools)]]

    def everywhere(work: Callable[[TPGroup], Any]) -> list[Any]:
        futures = [pool.submit(work, group) for pool, group in zip(pools, groups, strict=True)]
        return [future.result(PATIENCE_S) for future in futures]

    yield everywhere
    for pool in pools:
        pool.shutdown(wait=False)


class Memory:
    """Stands in for `PeerMemory`; tells what is done to it."""

    def __init__(self, events: list[str], refused: str | None = None) -> None:
        self.events = events
        self.refused = refused
        self.address = 4096
        self.handle = bytes(range(64))

    def allocate(self, num_bytes: int) -> None:
        assert num_bytes % 8 == 0
        self._do("allocate")

    def open(self, handle: bytes) -> int:
        assert handle == bytes(range(64))
        self._do("open")
        return 8192

    def let_go(self) -> None:
        self._do("let go")

    def close(self) -> None:
        self._do("close")

    def _do(self, what: str) -> None:
        if what == self.refused:
            raise OSError(f"{what}: CUDA_ERROR_OF_ALL_KINDS\nand more")
        self.events.append(what)


class Meeting:
    """Where the sums of a group's threads meet: what each brings, and how far each one is."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.parts: dict[tuple[int, int], Tensor] = {}  # number, rank
        self.ended: Counter[int] = Counter()  # steps, by rank


class ThreadSums(LibrarySums):
    """Between threads. Whoever waits for one that has left gives up. `fault` is one's own."""

    inbox_bytes = staticmethod(all_reduce.ShortSums.inbox_bytes)

    def __init__(
        self,
        rank: int,
        inboxes: list[int],
        *,
        meeting: Meeting,
        fault: str,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        fuses_norm: bool,
        memory: Memory,
        **_: Any,
    ) -> None:
        super().__init__(TPGroup(rank, 1), rows, fuses_norm=fuses_norm)
        self.rank, self.size = rank, len(inboxes)
        self.columns, self.dtype = columns, dtype
        self.meeting, self.fault, self.memory = meeting, fault, memory
        self.limit = 1
        self.number = 0
        self.gave_up = False
        self.is_captured = False
        self.group.library_sum = self._sum  # type: ignore[method-assign]

    def _sum(self, x: Tensor) -> Tensor:
        self.number += 1
        if self.fault == "error":
            raise RuntimeError("no such kernel image")
        if self.fault == "wait":
            self.gave_up = True
            return x
        keys = [(self.number, rank) for rank in range(self.size)]
        changed = self.meeting.changed
        with changed:
            parts, ended = self.meeting.parts, self.meeting.ended
            parts[keys[self.rank]] = x.clone()
            changed.notify_all()
            changed.wait_for(
                lambda: all(k in parts or ended[k[1]] > ended[self.rank] for k in keys)
            )
            if not all(key in parts for key in keys):
                self.gave_up = True
                return x
            x.copy_(torch.stack([parts[key] for key in keys]).float().sum(0))
        if self.fault == "sum" or (self.fault == "captured" and self.is_captured):
            x[-1, -1] += 1
        return x

    def add_rms_norm(self, *args: Any) -> tuple[Tensor, Tensor]:
        normed, total = super().add_rms_norm(*args)
        if self.fault == "norm":
            normed[0, 0] += 1
        return normed, total

    def close(self) -> None:
        self.memory.close()


FAULTS = {
    "allocate": "allocate: CUDA_ERROR_OF_ALL_KINDS",
    "open": "open: CUDA_ERROR_OF_ALL_KINDS",
    "access": "GPU 0 cannot write to the memory of GPU",
    "triton": "our kernels are off",
    "sum": "a sum came out wrong",
    "norm": "a sum came out wrong",
    "captured": "a captured sum came out wrong",
    "wait": "another GPU's part did not come",
    "error": "no such kernel image",
}


def stand_in(monkeypatch: pytest.MonkeyPatch, fault: str | None, bad_rank: int) -> Any:
    """Everything of a GPU, with a fault on one rank. -> `connect` of a rank, events by rank."""
    events: dict[int, list[str]] = {}
    made: dict[int, ThreadSums] = {}
    meeting = Meeting()
    real_exchange = peers._exchange

    def fault_of(rank: int) -> str:
        return fault if fault and rank == bad_rank else ""

    def memory(device: torch.device) -> Memory:
        rank = device.index
        return Memory(events.setdefault(rank, []), fault_of(rank))

    def sums(rank: int, inboxes: list[int], **more: Any) -> ThreadSums:
        assert inboxes[rank] == 4096
        assert set(inboxes) == {4096, 8192}
        more |= {"meeting": meeting, "fault": fault_of(rank)}
        made[rank] = ThreadSums(rank, inboxes, **more)
        return made[rank]

    sums.inbox_bytes = ThreadSums.inbox_bytes  # type: ignore[attr-defined]

    def exchange(group: TPGroup, device: torch.device, data: bytes) -> list[bytes]:
        with meeting.changed:
            meeting.ended[group.rank] += 1
            meeting.changed.notify_all()
        return real_exchange(group, CPU, data)

    class Capture:
        def __init__(self, device: torch.device) -> None:
            self.rank = device.index

        def __call__(self, body: Callable[[], None]) -> Any:
            body()
            made[self.rank].is_captured = True
            return SimpleNamespace(replay=body)

    def connect(group: TPGroup, *, fuses_norm: bool = True) -> str:
        device = torch.device("cuda", group.rank)
        return peers.connect(group, COLUMNS, torch.bfloat16, device, fuses_norm=fuses_norm)

    def on_the_cpu(make: Any) -> Any:
        return lambda *args, device, **more: make(*args, **more)

    monkeypatch.delenv("NVCLI_ALL_REDUCE", raising=False)
    monkeypatch.setattr(peers, "_finish", lambda device: None)
    monkeypatch.setattr(peers, "_exchange", exchange)
    monkeypatch.setattr(peers, "PeerMemory", memory)
    monkeypatch.setattr(all_reduce, "ShortSums", sums)
    monkeypatch.setattr(cuda_graph, "Capture", Capture)
    monkeypatch.setattr(compiling, "compiled_only", lambda device: nullcontext())
    monkeypatch.setattr(kernels, "uses_triton", lambda: fault != "triton")
    monkeypatch.setattr(torch, "arange", on_the_cpu(torch.arange))
    monkeypatch.setattr(torch, "empty", on_the_cpu(torch.empty))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: fault != "access")
    return connect, events


def test_a_group_gets_its_sums(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    connect, events = stand_in(monkeypatch, None, 0)

    def work(group: TPGroup) -> Any:
        said = connect(group)
        assert isinstance(group.short, ThreadSums)
        assert group.short.limit == all_reduce.LIMIT
        assert {"norm", "sum"} <= set(group.short.calls)
        return said

    size = len(found := ranks(work))
    assert set(found) == {f"ours up to {204 // (size - 1)} rows, NCCL"}
    assert all(told == ["allocate", *["open"] * (size - 1)] for told in events.values())
    ranks(lambda group: group.close())
    assert all(told[-1] == "close" for told in events.values())


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_goes_wrong_on_one_rank_leaves_all_to_nccl(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ranks: Ranks,
    fault: str,
    bad_rank: int,
) -> None:
    connect, events = stand_in(monkeypatch, fault, bad_rank)
    with caplog.at_level(logging.WARNING, "nvcli"):
        assert set(ranks(connect)) == {"NCCL"}
    assert ranks(lambda group: group.short)[0] is None
    for told in events.values():
        assert told[-2:] == ["let go", "close"]
    warnings = [record.getMessage() for record in caplog.records]
    if fault == "triton":  # who switched our kernels off need not be told
        assert warnings == []
        return
    (line,) = warnings
    assert line.startswith("sums over the GPUs are left to NCCL: " + FAULTS[fault])
    if fault != "wait":  # of which all may complain
        assert line.endswith("(rank 0)" if fault == "access" else f"(rank {bad_rank})")
    assert "\n" not in line


def test_a_group_of_which_nothing_is_fused(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    connect, _ = stand_in(monkeypatch, "norm", 0)  # which nobody calls then
    assert all(said.startswith("ours") for said in ranks(lambda g: connect(g, fuses_norm=False)))


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    connect, events = stand_in(monkeypatch, None, 0)
    monkeypatch.setenv("NVCLI_ALL_REDUCE", "nccl")
    assert set(ranks(connect)) == {"NCCL"}
    monkeypatch.setenv("NVCLI_ALL_REDUCE", "twoshot")
    with pytest.raises(UsageError, match=r"must be one of auto, nccl, got 'twoshot'"):
        ranks(connect)
    assert events == {}


def test_a_wait_that_was_given_up_is_an_error() -> None:
    group = TPGroup(1, 1)
    group.check()
    group.short = SimpleNamespace(gave_up=False)  # type: ignore[assignment]
    group.check()
    group.short = SimpleNamespace(gave_up=True)  # type: ignore[assignment]
    with pytest.raises(EngineClosedError, match="rank 1 of 1 waited too long for another"):
        group.check()


# --- the driver ----------------------------------------------------------------------------------


class Library:
    """Some of libcuda, over a dictionary."""

    def __init__(self) -> None:
        self.memory: dict[int, bytes | None] = {}
        self.refuses = ""

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            if name == self.refuses:
                return 2
            return int(getattr(self, f"do_{name}")(*args) or 0)

        return call

    def do_cuMemAlloc_v2(self, address: Any, size: Any) -> None:
        address._obj.value = 0x7F00_0000_0000
        self.memory[address._obj.value] = b"\xff" * size.value

    def do_cuMemsetD8_v2(self, address: Any, value: Any, size: Any) -> None:
        self.memory[address.value] = bytes([value.value]) * size.value

    def do_cuIpcGetMemHandle(self, handle: Any, address: Any) -> None:
        ctypes.memmove(ctypes.byref(handle._obj), address.value.to_bytes(64, "little"), 64)

    def do_cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> None:
        assert flags.value == 1
        address._obj.value = int.from_bytes(bytes(handle), "little") + 0x1000
        self.memory[address._obj.value] = None

    def do_cuIpcCloseMemHandle(self, address: Any) -> None:
        assert self.memory.pop(address.value) is None

    def do_cuMemFree_v2(self, address: Any) -> None:
        del self.memory[address.value]

    def do_cuGetErrorName(self, code: int, text: Any) -> None:
        text._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"


def test_memory_is_shared_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(peer_memory.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    memory = peer_memory.PeerMemory(CPU)
    memory.allocate(24)
    assert library.memory == {memory.address: bytes(24)}
    assert len(memory.handle) == 64
    other = memory.open(memory.handle)
    assert other == memory.address + 0x1000
    library.refuses = "cuIpcOpenMemHandle_v2"
    with pytest.raises(OSError, match="cuIpcOpenMemHandle: CUDA_ERROR_OUT_OF_MEMORY"):
        memory.open(memory.handle)
    memory.close()
    assert library.memory == {}
    memory.close()
