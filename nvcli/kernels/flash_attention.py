"""FlashAttention 2 and 3 as attention backends; imported only when chosen.

FA2 is the package `flash-attn`, whose pages hold a multiple of 256 tokens. FA3 is the module
`flash_attn_interface` for Hopper, with pages of any size; its varlen function knows no page table,
so `flash_attn_with_kvcache` serves prefill chunks and decode alike. It reads pages without the
tensor memory accelerator and is slower for it, so the keys of a long chunk alone
in its step are gathered first. `NVCLI_FLAT_KEYS=0` in the environment turns that off.

FA3's functions call the operator of the library by way of a `torch.library.custom_op`, whose first
call imports `torch._dynamo`: 900 modules, which nothing else here needs. So the operator is called
itself, with what those functions give it, where it has names for all of that and can do without
the rest: older builds want every argument.
`NVCLI_FA3_OPERATOR=0` in the environment goes through the functions.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from nvcli import kernels
from nvcli.kernels import switches

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.layers.forward_batch import ForwardBatch

FLASH_DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
FLAT_TOKENS = (
    4096  # of a row's chunk, on average, from which gathering keys takes less than it saves
)
FLAT_BYTES = 256 << 20  # of gathered keys and values at most
_use_flat_keys = switches.is_on("NVCLI_FLAT_KEYS")
# What FA3's operator is given by name: by both calls below, and by one of them.
GIVEN_ALWAYS = {"cu_seqlens_q", "max_seqlen_q", "softmax_scale", "is_causal", "num_splits"}
OPERATOR_ARGUMENTS = GIVEN_ALWAYS | {"cu_seqlens_k", "seqused_k", "max_seqlen_k", "page_table"}
_use_operator = switches.is_on("NVCLI_FA3_OPERATOR")


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

    def __init__(self) -> None:
        super().__init__()
        self._operator = _operator() if _use_operator else None

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
            num_key_bytes = 4 * k_cache.shape[2] * k_cache.shape[3]
            is_flat = _use_flat_keys and _gathering_pays(batch, num_key_bytes)
            batch.plan = _FlatKeys.of(batch) if is_flat else batch.gather_block_tables()
        if isinstance(batch.plan, _FlatKeys):
            return self._over_flat_keys(q, k_cache, v_cache, batch, batch.plan, softmax_scale)
        given: dict[str, Any] = {
            "page_table": batch.plan,
            "cu_seqlens_q": batch.cu_seqlens_q,
            "max_seqlen_q": batch.max_seqlen_q,
            "softmax_scale": softmax_scale,
        }
        if self._operator is not None:
            given |= {"seqused_k": batch.seq_lens, "num_splits": 0}  # 0: the library's choice
            out = self._operator(q, k_cache, v_cache, is_causal=True, **given)
        else:
            out = self._library.flash_attn_with_kvcache(
                q, k_cache, v_cache, cache_seqlens=batch.seq_lens, causal=True, **given
            )
        return _first(out)

    def _over_flat_keys(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: ForwardBatch,
        flat: _FlatKeys,
        softmax_scale: float,
    ) -> Tensor:
        k, v = kernels.gather_kv(k_cache, v_cache, flat.block_ids)
        given: dict[str, Any] = {
            "cu_seqlens_q": batch.cu_seqlens_q,
            "cu_seqlens_k": flat.bounds,
            "max_seqlen_q": batch.max_seqlen_q,
            "max_seqlen_k": batch.max_seqlen_k,
            "softmax_scale": softmax_scale,
        }
        if self._operator is not None:
            out = self._operator(q, k, v, is_causal=True, num_splits=1, **given)
        else:
            out = self._library.flash_attn_varlen_func(q, k, v, causal=True, **given)
        return _first(out)


def _operator() -> Any:
    """What the imported library has registered; None where it lacks an argument that we give, or
    wants one that we do not.
    """
    found = getattr(getattr(torch.ops.flash_attn_3, "fwd", None), "default", None)
    if found is None:
        return None
    arguments = found._schema.arguments[3:]  # q, k, v
    names = {argument.name for argument in arguments}
    wanted = {argument.name for argument in arguments if not argument.has_default_value()}
    return found if wanted <= GIVEN_ALWAYS and names >= OPERATOR_ARGUMENTS else None


def _first(out: Any) -> Tensor:
    """Of what may have log-sums and parts beside it."""
    return cast("Tensor", out[0] if isinstance(out, tuple | list) else out)


@dataclass(frozen=True, slots=True)
class _FlatKeys:
    """Of a step of one row."""

    block_ids: Tensor  # [J] int32
    bounds: Tensor  # [2] int32: 0, and how many keys there are; the last block may be part full

    @classmethod
    def of(cls, batch: ForwardBatch) -> _FlatKeys:
        (block_ids,), (num_keys,), device = batch.block_ids, batch.key_lens, batch.seq_lens.device
        return cls(_send(block_ids, device), _send([0, num_keys], device))


def _send(numbers: list[int], device: torch.device) -> Tensor:
    """As int32, without waiting for the device."""
    host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _gathering_pays(batch: ForwardBatch, num_key_bytes: int) -> bool:
    """num_key_bytes: of a key and its value, in all heads."""
    is_long = batch.num_rows == 1 and batch.query_lens[0] >= FLAT_TOKENS
    return is_long and batch.key_lens[0] * num_key_bytes <= FLAT_BYTES
