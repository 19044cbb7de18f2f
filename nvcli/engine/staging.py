"""Uploads from the host that do not wait: a step's small arrays travel as one copy.

Hot path: yes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

STAGING_RING = 4  # buffers in turn, as up to depth + 2 steps may have their copy outstanding


@dataclass(slots=True)
class _StagingBuffer:
    host: Tensor  # pinned, uint8
    device: Tensor
    event: Any = None


class Staging:
    """Uploads a step's arrays as one copy that does not wait.

    On CUDA through a ring of pinned buffers; a buffer is filled again only after its copy is done.
    On the CPU the arrays are used where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ring: list[_StagingBuffer | None] = [None] * STAGING_RING
        self.turn = 0

    def upload(self, arrays: list[Array]) -> list[Tensor]:
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        offsets, size = [], 0
        for array in arrays:
            offsets.append(size)
            size += -(-array.nbytes // 16) * 16
        buffer = self._next_buffer(size)
        host = buffer.host.numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            host[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        buffer.device[:size].copy_(buffer.host[:size], non_blocking=True)
        buffer.event.record()
        return [
            buffer.device[offset : offset + array.nbytes]
            .view(torch.from_numpy(array[:0]).dtype)
            .view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    def _next_buffer(self, size: int) -> _StagingBuffer:
        self.turn = (self.turn + 1) % STAGING_RING
        buffer = self.ring[self.turn]
        if buffer is not None:
            buffer.event.synchronize()  # STAGING_RING steps old: done long ago
        if buffer is None or buffer.host.numel() < size:
            capacity = max(1 << 16, 1 << size.bit_length())
            buffer = self.ring[self.turn] = _StagingBuffer(
                host=torch.empty(capacity, dtype=torch.uint8, pin_memory=True),
                device=torch.empty(capacity, dtype=torch.uint8, device=self.device),
                event=torch.cuda.Event(),  # type: ignore[no-untyped-call]
            )
        return buffer

    def upload_once(self, array: Array) -> Tensor:
        """For what a sequence brings once; torch keeps the pinned copy until it is used."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def upload_masks(self, masks: list[Array | None], width: int) -> Tensor:
        """Bit masks as booleans, [len(masks), width]; None allows everything."""
        words = np.full((len(masks), -(-width // 32)), -1, np.int32)
        for row, mask in enumerate(masks):
            if mask is not None:
                words[row] = mask
        bits = torch.arange(32, dtype=torch.int32, device=self.device)
        spread = (self.upload_once(words)[:, :, None] >> bits) & 1  # [m, W, 32]
        return spread.flatten(1)[:, :width].bool()

    def upload_index(self, values: list[int]) -> Tensor:
        """[len(values)] int64 on the device."""
        return self.upload_once(np.array(values, np.int64))
