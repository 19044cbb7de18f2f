"""GPU memory of one process that others write to: CUDA's IPC handles, by the driver's library."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


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
            torch.cuda.synchronize(self.device)  # which makes the context this thread's
            yield call
