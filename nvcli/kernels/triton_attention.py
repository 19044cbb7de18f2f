"""Our own attention backend: Triton kernels for decode and prefill rows of one step.

A mixed step runs both kernels: rows of one token go to the split-KV decode kernel, the others to
the prefill kernel, as the plan made on the device says. Nothing depends on a host integer but the
size of the grids, so a step can be captured in a CUDA graph. Steps that are not captured may leave
their prompts to a library, which is ahead where there is much to compute.

Captured decode steps of few rows have no plan: `attention_plan.RowPlan`.

Decode rows that begin with the same keys get one more kernel, which reads those once for many rows
(`shared_prefix`). A captured step has it or not, as its batch says; any other step looks itself.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.kernels.attention import AttentionBackend
    from nvcli.kernels.attention_plan import AttentionPlan, RowPlan
    from nvcli.kernels.shared_prefix import SharedPrefixes, SharedWork
    from nvcli.layers.forward_batch import ForwardBatch

DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)  # of the cache
MIN_COUNTERS = 1024  # rows


class TritonAttention:
    name = "triton"

    def __init__(
        self, prefill: AttentionBackend | None = None, *, is_uniform: bool = False
    ) -> None:
        """prefill: takes eager steps that are not all decode. is_uniform: one kernel for all rows,
        and no row's result depends on another.
        """
        assert prefill is None or not is_uniform, "a library does not know uniform rows"
        self._prefill = prefill
        self.is_uniform = is_uniform
        self._counters: list[Tensor] = []  # the last is in use; captured graphs know the others
        self._num_sms: int | None = None

    @classmethod
    def obstacle(
        cls, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
    ) -> str | None:
        """Why it cannot run here, in a few words that say what to do; None when it can."""
        if device.type != "cuda":
            return "it needs a CUDA device"
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"it has no kernels for compute capability {major}.{minor}"
        if dtype == torch.float8_e4m3fn and (major, minor) < (8, 9):
            return f"an fp8 KV cache needs compute capability 8.9, not {major}.{minor}"
        if dtype not in DTYPES:
            return f"it needs float16, bfloat16 or fp8, not {str(dtype).removeprefix('torch.')}"
        if head_dim not in (32, 64, 128):
            return f"it has no head dimension {head_dim}"
        if block_size & (block_size - 1) or not 4 <= block_size <= 256:
            return f"--block-size must be 16, 32, 64, 128 or 256, not {block_size}"
        return None

    def forward(
        self,
        q: Tensor,  # [T, Hq, D]
        k_cache: Tensor,  # [N, P, Hk, D]
        v_cache: Tensor,
        batch: ForwardBatch,
        softmax_scale: float,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        from nvcli.kernels.attention_parts import Parts
        from nvcli.kernels.decode_attention import decode_attention
        from nvcli.kernels.prefill_attention import prefill_attention
        from nvcli.kernels.shared_attention import shared_attention

        if self._prefill is not None and not (
            batch.is_padded or self._is_decode(q.shape[0], batch)
        ):
            return self._prefill.forward(q, k_cache, v_cache, batch, softmax_scale, kv_scales)
        if batch.plan is None:
            batch.plan = self._make_plan(q, k_cache, batch)
        plan, table = cast("AttentionPlan | RowPlan", batch.plan), batch.block_table
        # Tokens that belong to no row are written by no kernel, and must be finite.
        out = torch.zeros_like(q) if batch.is_padded and plan.has_prefill else torch.empty_like(q)
        if plan.has_decode:
            counters = self._counters_for(batch.seq_lens.shape[0] * k_cache.shape[2], q.device)
            parts = Parts.allocate(plan, q, k_cache.shape[2])
            if plan.shared is not None:
                shared_attention(
                    *(q, k_cache, v_cache, table, batch.slots, plan, parts),
                    *(softmax_scale, kv_scales),
                )
            decode_attention(
                *(q, k_cache, v_cache, table, plan, parts, counters),
                *(softmax_scale, out, kv_scales),
            )
        if plan.has_prefill:
            prefill_attention(
                *(q, k_cache, v_cache, table, cast("AttentionPlan", plan), softmax_scale, out),
                kv_scales,
                is_uniform=self.is_uniform,
            )
        return out

    @staticmethod
    def _is_decode(num_tokens: int, batch: ForwardBatch) -> bool:
        return batch.is_decode if batch.is_padded else num_tokens == batch.seq_lens.shape[0]

    def _make_plan(
        self, q: Tensor, k_cache: Tensor, batch: ForwardBatch
    ) -> AttentionPlan | RowPlan:
        from nvcli.kernels import tuned
        from nvcli.kernels.attention_plan import make_plan, row_plan
        from nvcli.kernels.prefill_attention import tokens_per_tile

        num_tokens, num_heads = q.shape[:2]
        num_kv_heads = k_cache.shape[2]
        group_size = num_heads // num_kv_heads
        is_fp8 = k_cache.dtype == torch.float8_e4m3fn
        is_early = (
            batch.rows is not None and len(batch.rows) <= tuned.attention(q.device).early_rows
        )
        if is_early and batch.shared is None and not self.is_uniform:
            assert batch.rows is not None, "rows that are few"
            early = row_plan(
                batch.rows,
                num_kv_heads=num_kv_heads,
                num_sms=self._sms(q.device),
                group_size=group_size,
                is_fp8=is_fp8,
            )
            if early is not None:
                return early
        is_decode = self._is_decode(num_tokens, batch)
        has_decode = not self.is_uniform and (is_decode or batch.is_padded or 1 in batch.query_lens)
        shared = batch.shared
        if has_decode and not batch.is_padded:
            shared = self._find_shared(q, k_cache, batch)
        return make_plan(
            batch.cu_seqlens_q,
            batch.seq_lens,
            batch.slots,
            num_tokens=num_tokens,
            num_kv_heads=num_kv_heads,
            num_sms=self._sms(q.device),
            tokens_per_tile=tokens_per_tile(group_size, q.device, is_uniform=self.is_uniform),
            has_decode=has_decode,
            has_prefill=self.is_uniform or not is_decode,
            is_uniform=self.is_uniform,
            group_size=group_size,
            is_fp8=is_fp8,
            shared=shared,
        )

    def shared_prefixes(
        self, num_heads: int, num_kv_heads: int, block_size: int, device: torch.device
    ) -> SharedPrefixes | None:
        """What finds keys to read once for many rows; None where that is off, or where no row's
        result may depend on the others.
        """
        from nvcli.kernels.shared_prefix import QUERY_ROWS, SharedPrefixes, uses_sharing

        if self.is_uniform or not uses_sharing() or num_heads // num_kv_heads > QUERY_ROWS:
            return None
        return SharedPrefixes(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            num_sms=self._sms(device),
        )

    def _find_shared(self, q: Tensor, k_cache: Tensor, batch: ForwardBatch) -> SharedWork | None:
        """Of a step that is not captured."""
        block_size, num_kv_heads = k_cache.shape[1:3]
        prefixes = self.shared_prefixes(q.shape[1], num_kv_heads, block_size, q.device)
        if prefixes is None:
            return None
        tables = [
            ids if n == 1 else [] for ids, n in zip(batch.block_ids, batch.query_lens, strict=True)
        ]
        groups = prefixes.find(tables, batch.key_lens)
        if not groups:
            return None
        work = prefixes.allocate(len(tables), q.device)
        return work.cut(work.send(prefixes.fill(work, groups, batch.query_lens)), len(tables))

    def _sms(self, device: torch.device) -> int:
        if self._num_sms is None:
            self._num_sms = (
                torch.cuda.get_device_properties(device).multi_processor_count
                if device.type == "cuda"
                else 6  # the interpreter in the tests
            )
        return self._num_sms

    def _counters_for(self, size: int, device: torch.device) -> Tensor:
        """Zeros, as the decode kernel leaves them: one int32 a row and KV head."""
        if not self._counters or self._counters[-1].numel() < size:
            size = max(size, MIN_COUNTERS * 8)
            self._counters.append(torch.zeros(size, dtype=torch.int32, device=device))
        return self._counters[-1]
