"""Attention backends: one interface, and the choice between them.

A backend attends over the paged cache only; this step's keys and values are stored before it runs.
`torch` works everywhere. FlashAttention is imported when it is chosen, so a machine without it
starts just the same. `select_backend` returns the backend and the reason for it, which is shown at
start: a slow fallback that nobody notices is the worst of outcomes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nvcli import kernels
from nvcli.errors import DeviceError
from nvcli.kernels.flash_attention import FlashAttention2, FlashAttention3
from nvcli.kernels.torch_attention import TorchAttention
from nvcli.kernels.triton_attention import TritonAttention

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
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """The meaning is `reference.paged_attention`.

        q:                 [T, Hq, D]
        k_cache, v_cache:  [N, P, Hk, D]   one layer's, any strides, unit in D
        kv_scales:         [2, Hk]         with an fp8 cache, as in `kernels.store_kv`
        returns            [T, Hq, D]; rows without keys (padding) are finite
        """
        ...


_FAST: dict[str, type[TritonAttention | FlashAttention2 | FlashAttention3]] = {
    "triton": TritonAttention,
    "fa3": FlashAttention3,
    "fa2": FlashAttention2,
}  # fastest first


def select_backend(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    deterministic: bool = False,
) -> tuple[AttentionBackend, str]:
    """The backend for these shapes, and one line that says why.

    name: `auto`, `torch`, `fa2`, `fa3` or `triton`; dtype is the KV cache's. On CUDA,
    `deterministic` leaves our own, which then takes one way for all rows.

    Raises `DeviceError` when a backend named by the user cannot run here.
    """
    if deterministic and device.type == "cuda":
        return _deterministic(name, device, dtype, head_dim, block_size)
    if name == "torch":
        return TorchAttention(is_uniform=deterministic), "torch, as asked"
    if name in _FAST:
        fast = _FAST[name]
        obstacle = fast.obstacle(device, dtype, head_dim, block_size)
        if obstacle is not None:
            raise DeviceError(
                f"attention backend {name} cannot run: {obstacle}", param="attention_backend"
            )
        return fast(), f"{name}, as asked"
    assert name == "auto", f"unknown attention backend {name!r}"
    if device.type != "cuda":
        return TorchAttention(is_uniform=deterministic), f"torch, for the {device.type.upper()}"
    obstacles: list[str] = []
    candidates = _FAST if kernels.uses_triton() else {k: _FAST[k] for k in ("fa3", "fa2")}
    for key, fast in candidates.items():
        obstacle = fast.obstacle(device, dtype, head_dim, block_size)
        if obstacle is None and fast is TritonAttention:
            return _with_library_prefill(device, dtype, head_dim, block_size)
        if obstacle is None:
            return fast(), "; ".join([f"{key}, the fastest that fits", *obstacles])
        obstacles.append(f"no {key}: {obstacle}")
    return TorchAttention(), "; ".join(["torch, slow on CUDA", *obstacles])


def _deterministic(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> tuple[AttentionBackend, str]:
    if name not in ("auto", "triton"):
        obstacle: str | None = f"attention backend {name} is not deterministic; use triton"
    elif not kernels.uses_triton():
        obstacle = "it needs Triton, which is not installed or turned off by NVCLI_KERNELS"
    else:
        obstacle = TritonAttention.obstacle(device, dtype, head_dim, block_size)
    if obstacle is not None:
        raise DeviceError(f"--deterministic cannot run: {obstacle}", param="deterministic")
    return TritonAttention(is_uniform=True), "triton, deterministic"


def _with_library_prefill(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> tuple[AttentionBackend, str]:
    """Our kernels, and FlashAttention 3 for the prompts of eager steps where it is installed."""
    if FlashAttention3.obstacle(device, dtype, head_dim, block_size) is not None:
        return TritonAttention(), "triton, the fastest that fits"
    try:
        library = FlashAttention3()
    except (ImportError, OSError) as error:
        return TritonAttention(), f"triton; no fa3 for long prompts: {error}"
    return TritonAttention(prefill=library), "triton, with fa3 for long prompts"


def attend_qkv(
    qkv: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: ForwardBatch,
    softmax_scale: float,
    kv_scales: Tensor | None = None,
    rms_of: Tensor | None = None,
) -> Tensor:
    """Norm and rotate q and k, store k and v, attend.

    qkv:               [T, Hq + 2 Hk, D]
    weight, cos, sin:  as in `kernels.rope_norm_store`
    k_cache, v_cache:  [N, P, Hk, D]   one layer's, written at batch.slot_mapping
    kv_scales:         [2, Hk]         with an fp8 cache, as in `kernels.store_kv`
    rms_of:            [T, E]          as in `kernels.rope_norm_store`
    returns            [T, Hq, D]
    """
    q = kernels.rope_norm_store(
        *(qkv, weight, cos, sin, eps, k_cache, v_cache, batch.slot_mapping, kv_scales, rms_of)
    )
    return batch.attention.forward(q, k_cache, v_cache, batch, softmax_scale, kv_scales)
