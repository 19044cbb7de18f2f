"""Attention backends: one interface, and the choice between them.

A backend attends over the paged cache only; this step's keys and values are stored before it runs.
`torch` works everywhere. FlashAttention is imported when it is chosen, so a machine without it
starts just the same. `select_backend` returns the backend and the reason for it, which is shown at
start: a slow fallback that nobody notices is the worst of outcomes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nvcli.errors import DeviceError, UnsupportedParameterError
from nvcli.kernels.flash_attention import FlashAttention2, FlashAttention3
from nvcli.kernels.torch_attention import TorchAttention

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nvcli.layers.forward_batch import ForwardBatch


class AttentionBackend(Protocol):
    """Causal attention of a step's rows over their paged keys and values."""

    @property
    def name(self) -> str: ...

    def forward(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: ForwardBatch,
        softmax_scale: float,
    ) -> Tensor:
        """The meaning is `reference.paged_attention`.

        q:                 [T, Hq, D]
        k_cache, v_cache:  [N, P, Hk, D]   one layer's, any strides, unit in D
        returns            [T, Hq, D]; rows without keys (padding) are finite
        """
        ...


_FLASH: dict[str, type[FlashAttention2 | FlashAttention3]] = {
    "fa3": FlashAttention3,
    "fa2": FlashAttention2,
}  # fastest first


def select_backend(
    name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> tuple[AttentionBackend, str]:
    """The backend for these shapes, and one line that says why.

    name: `auto`, `torch`, `fa2`, `fa3` or `triton`; dtype is the KV cache's.

    Raises `DeviceError` when a backend named by the user cannot run here, and
    `UnsupportedParameterError` for one that this version does not have.
    """
    if name == "triton":
        raise UnsupportedParameterError(
            "attention backend triton is not available in this version",
            hint="Use auto, torch, fa2 or fa3.",
            param="attention_backend",
        )
    if name == "torch":
        return TorchAttention(), "torch, as asked"
    if name in _FLASH:
        flash = _FLASH[name]
        obstacle = flash.obstacle(device, dtype, head_dim, block_size)
        if obstacle is not None:
            raise DeviceError(
                f"attention backend {name} cannot run: {obstacle}", param="attention_backend"
            )
        return flash(), f"{name}, as asked"
    assert name == "auto", f"unknown attention backend {name!r}"
    if device.type != "cuda":
        return TorchAttention(), f"torch, for the {device.type.upper()}"
    obstacles: list[str] = []
    for key, flash in _FLASH.items():
        obstacle = flash.obstacle(device, dtype, head_dim, block_size)
        if obstacle is None:
            return flash(), "; ".join([f"{key}, the fastest that fits", *obstacles])
        obstacles.append(f"no {key}: {obstacle}")
    return TorchAttention(), "; ".join(["torch, slow on CUDA", *obstacles])
