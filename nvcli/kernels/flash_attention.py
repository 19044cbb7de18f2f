"""FlashAttention 2 and 3 as attention backends; imported only when chosen.

FA2 is the package `flash-attn`, whose pages hold a multiple of 256 tokens. FA3 is the module
`flash_attn_interface` for Hopper, with pages of any size; its varlen function knows no page table,
so `flash_attn_with_kvcache` serves prefill chunks and decode alike.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.layers.forward_batch import ForwardBatch

FLASH_DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


class _FlashAttention:
    name: ClassVar[str]
    module: ClassVar[str]
    extra: ClassVar[str]
    capabilities: ClassVar[tuple[int, ...]]  # major compute capabilities with kernels
    block_multiple: ClassVar[int]

    def __init__(self) -> None:
        self._library: Any = importlib.import_module(self.module)

    @classmethod
    def obstacle(
        cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
    ) -> str | None:
        """Why it cannot run here, in a few words that say what to do; None when it can."""
        if device.type != "cuda":
            return "it needs a CUDA device"
        major, minor = torch.cuda.get_device_capability(device)
        if major not in cls.capabilities:
            return f"it has no kernels for compute capability {major}.{minor}"
        if dtype == torch.float8_e4m3fn:
            return "it has no fp8 KV cache"
        if dtype not in FLASH_DTYPES:
            return f"it needs float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
        if head_dim > MAX_HEAD_DIM or head_dim % 8:
            return f"it has no head dimension {head_dim}"
        if block_size % cls.block_multiple:
            return f"--block-size must be a multiple of {cls.block_multiple}, not {block_size}"
        if importlib.util.find_spec(cls.module) is None:
            return f"it is not installed (pip install 'nvcli[{cls.extra}]')"
        return None


class FlashAttention2(_FlashAttention):
    name = "fa2"
    module = "flash_attn"
    extra = "flash-attn"
    capabilities = (8, 9, 10, 12)
    block_multiple = 256

    def forward(
        self,
        q: Tensor,  # [T, Hq, D]
        k_cache: Tensor,  # [N, P, Hk, D]
        v_cache: Tensor,
        batch: ForwardBatch,
        softmax_scale: float,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        assert kv_scales is None, "refused before: see `obstacle`"
        if batch.plan is None:
            cu_seqlens_k = torch.nn.functional.pad(
                batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)
            )
            batch.plan = batch.gather_block_tables(), cu_seqlens_k
        block_tables, cu_seqlens_k = cast("tuple[Tensor, Tensor]", batch.plan)
        out = self._library.flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=batch.cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            softmax_scale=softmax_scale,
            causal=True,
            block_table=block_tables,
        )
        return cast("Tensor", out)


class FlashAttention3(_FlashAttention):
    name = "fa3"
    module = "flash_attn_interface"
    extra = "fa3"
    capabilities = (9,)
    block_multiple = 1

    def forward(
        self,
        q: Tensor,  # [T, Hq, D]
        k_cache: Tensor,  # [N, P, Hk, D]
        v_cache: Tensor,
        batch: ForwardBatch,
        softmax_scale: float,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        assert kv_scales is None, "refused before: see `obstacle`"
        if batch.plan is None:
            batch.plan = batch.gather_block_tables()
        out = self._library.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=batch.seq_lens,
            page_table=cast("Tensor", batch.plan),
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=batch.max_seqlen_q,
            softmax_scale=softmax_scale,
            causal=True,
        )
        return cast("Tensor", out[0] if isinstance(out, tuple) else out)
