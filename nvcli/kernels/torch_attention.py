"""Attention in plain PyTorch over the paged cache: the CPU's fast path, and CUDA's last resort.

Few calls and few copies decide the speed on the CPU:
  * a row whose blocks happen to be consecutive is a view of the cache, never copied
  * other decoding rows are gathered together, as long as padding them to the longest costs little
  * a decoding token's query heads that share a KV head stand as that many queries of one head, so
    grouped-query attention needs no repeated keys
How rows are grouped depends on host lists alone and is worked out once per step, for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.functional import scaled_dot_product_attention

from nvcli.kernels.reference import dequantise

if TYPE_CHECKING:
    from torch import Tensor

    from nvcli.layers.forward_batch import ForwardBatch

MAX_PADDING = 1.25  # gathered keys over needed keys, for rows gathered together
MIN_VIEW_KEYS = 256  # a shorter row is cheaper to copy with others than to call alone


@dataclass(slots=True)
class _Group:
    """Rows attended in one call: either b rows of one token each, or one row of n tokens."""

    tokens: slice | Tensor  # where the group's tokens are in T
    num_rows: int  # b
    num_tokens: int  # n
    num_keys: int  # L, the longest row's, to which the others are padded
    first_slot: int | None  # the row's keys are slots first_slot .. first_slot + L of the cache
    slots: Tensor | None  # [b * L] int64, otherwise
    mask: Tensor | None  # [b, 1, 1, L] or [n, L], added to the scores
    is_causal: bool  # the row has no keys before this step


@dataclass(slots=True)
class _Plan:
    groups: list[_Group]
    covers_all: bool  # one group that holds all tokens in order


class TorchAttention:
    name = "torch"

    def __init__(self, *, is_uniform: bool = False) -> None:
        """is_uniform: keys always stand in the same layout, however their blocks lie."""
        self.is_uniform = is_uniform
        self._scratch: list[Tensor] = []  # for gathered K and V: a large malloc costs page faults

    def forward(
        self,
        q: Tensor,  # [T, Hq, D]
        k_cache: Tensor,  # [N, P, Hk, D]
        v_cache: Tensor,
        batch: ForwardBatch,
        softmax_scale: float,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        if kv_scales is not None:  # bits, which every op can move
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        if batch.plan is None:
            batch.plan = _make_plan(batch, q, k_cache, can_view=not self.is_uniform)
        plan = cast("_Plan", batch.plan)
        if plan.covers_all:
            return self._attend(q, k_cache, v_cache, plan.groups[0], softmax_scale, kv_scales)
        out = torch.zeros_like(q)  # padding rows stay 0
        for group in plan.groups:
            out[group.tokens] = self._attend(
                q[group.tokens], k_cache, v_cache, group, softmax_scale, kv_scales
            )
        return out

    def _attend(
        self,
        q: Tensor,  # [b * n, Hq, D]
        k_cache: Tensor,
        v_cache: Tensor,
        group: _Group,
        softmax_scale: float,
        kv_scales: Tensor | None,
    ) -> Tensor:  # [b * n, Hq, D]
        num_heads, head_dim = q.shape[1:]
        k, v = self._keys_values(k_cache, v_cache, group)  # [b, Hk, L, D]
        num_kv_heads = k.shape[1]
        if kv_scales is not None:
            k, v = (
                dequantise(bits.transpose(1, 2), scales, q.dtype).transpose(1, 2)
                for bits, scales in zip((k, v), kv_scales, strict=True)
            )
        elif k.dtype != q.dtype:
            k, v = k.to(q.dtype), v.to(q.dtype)
        if group.num_tokens == 1:
            grouped = q.view(group.num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
            out = scaled_dot_product_attention(
                grouped, k, v, attn_mask=group.mask, scale=softmax_scale
            )
            return out.reshape(q.shape)
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None],  # [1, Hq, n, D]
            k,
            v,
            attn_mask=group.mask,
            is_causal=group.is_causal,
            scale=softmax_scale,
            enable_gqa=num_heads != num_kv_heads,
        )
        return out[0].transpose(0, 1)

    def _keys_values(
        self, k_cache: Tensor, v_cache: Tensor, group: _Group
    ) -> tuple[Tensor, Tensor]:
        """K and V of the group's rows, each [b, Hk, L, D]."""
        if group.first_slot is not None:
            keys = slice(group.first_slot, group.first_slot + group.num_keys)
            k = k_cache.flatten(0, 1)[keys].transpose(0, 1)[None]
            v = v_cache.flatten(0, 1)[keys].transpose(0, 1)[None]
            return k, v
        assert group.slots is not None, "a group has a first slot or slots"
        shape = (group.num_rows, group.num_keys, *k_cache.shape[2:])
        k, v = self._gather(k_cache, v_cache, group.slots)  # [b * L, Hk, D]
        return k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)

    def _gather(self, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        if not k_cache.is_contiguous():
            block, offset = slots // k_cache.shape[1], slots % k_cache.shape[1]
            return k_cache[block, offset], v_cache[block, offset]
        tail, dtype = k_cache.shape[2:], k_cache.dtype
        old = self._scratch[0] if self._scratch else None
        if old is None or len(old) < len(slots) or (old.shape[1:], old.dtype) != (tail, dtype):
            size = len(slots) * 3 // 2  # contexts grow by a token a step
            self._scratch = [k_cache.new_zeros(size, *tail) for _ in range(2)]
        k, v = (buffer[: len(slots)] for buffer in self._scratch)
        torch.index_select(k_cache.flatten(0, 1), 0, slots, out=k)
        torch.index_select(v_cache.flatten(0, 1), 0, slots, out=v)
        return k, v


def _make_plan(batch: ForwardBatch, q: Tensor, k_cache: Tensor, *, can_view: bool) -> _Plan:
    block_size = k_cache.shape[1]
    can_view = can_view and k_cache.is_contiguous()
    groups: list[_Group] = []
    decoding: list[tuple[int, int]] = []  # (token, row) still to be gathered in groups
    token = 0
    for row, (num_tokens, num_keys) in enumerate(
        zip(batch.query_lens, batch.key_lens, strict=True)
    ):
        start, token = token, token + num_tokens
        if num_keys == 0 or num_tokens == 0:
            continue
        ids = batch.block_ids[row][: -(-num_keys // block_size)]
        is_view = can_view and ids[-1] - ids[0] == len(ids) - 1 and _is_consecutive(ids)
        is_alone = batch.num_rows == 1 or num_tokens > 1
        if not is_alone and not (is_view and num_keys >= MIN_VIEW_KEYS):
            decoding.append((start, row))
            continue
        is_causal = num_tokens > 1 and num_tokens == num_keys
        needs_mask = num_tokens > 1 and not is_causal
        groups.append(
            _Group(
                tokens=slice(start, token),
                num_rows=1,
                num_tokens=num_tokens,
                num_keys=num_keys,
                first_slot=ids[0] * block_size if is_view else None,
                slots=None if is_view else _slots_of_blocks(ids, block_size, q)[:num_keys],
                mask=_chunk_mask(num_tokens, num_keys, q) if needs_mask else None,
                is_causal=is_causal,
            )
        )
    groups += _group_decoding(batch, decoding, block_size, q)
    covers_all = len(groups) == 1 and groups[0].num_rows * groups[0].num_tokens == q.shape[0]
    return _Plan(groups, covers_all)


def _is_consecutive(ids: list[int]) -> bool:
    return ids == list(range(ids[0], ids[0] + len(ids)))


def _group_decoding(
    batch: ForwardBatch, rows: list[tuple[int, int]], block_size: int, q: Tensor
) -> list[_Group]:
    """Longest rows first, each with as many of the next ones as MAX_PADDING allows."""
    pending = sorted(rows, key=lambda entry: -batch.key_lens[entry[1]])
    groups = []
    while pending:
        longest = batch.key_lens[pending[0][1]]
        size, total = 0, 0
        for _, row in pending:
            total += batch.key_lens[row]
            if longest * (size + 1) > MAX_PADDING * total:
                break
            size += 1
        members, pending = sorted(pending[:size]), pending[size:]
        groups.append(_decode_group(batch, members, longest, block_size, q))
    return groups


def _decode_group(
    batch: ForwardBatch, members: list[tuple[int, int]], longest: int, block_size: int, q: Tensor
) -> _Group:
    width = -(-longest // block_size)
    key_lens = [batch.key_lens[row] for _, row in members]
    ids: list[int] = []
    for (_, row), num_keys in zip(members, key_lens, strict=True):
        own = batch.block_ids[row][: -(-num_keys // block_size)]
        ids += own + own[-1:] * (width - len(own))
    slots = _slots_of_blocks(ids, block_size, q).view(len(members), -1)[:, :longest]
    mask = None
    if min(key_lens) != longest:
        lens = torch.tensor(key_lens, device=q.device)[:, None]
        hidden = torch.arange(longest, device=q.device) >= lens  # [b, L]
        mask = q.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None]
        # A hidden key is multiplied by 0 all the same, and what its slot holds may be NaN: the
        # row's first key stands in.
        slots = torch.where(hidden, slots[:, :1], slots)
    tokens = [token for token, _ in members]
    is_run = tokens[-1] - tokens[0] == len(tokens) - 1
    return _Group(
        tokens=slice(tokens[0], tokens[-1] + 1)
        if is_run
        else torch.tensor(tokens, device=q.device),
        num_rows=len(members),
        num_tokens=1,
        num_keys=longest,
        first_slot=None,
        slots=slots.reshape(-1),
        mask=mask,
        is_causal=False,
    )


def _slots_of_blocks(ids: list[int], block_size: int, q: Tensor) -> Tensor:
    """[len(ids) * P] int64: the slots of these blocks, in order."""
    first = torch.tensor(ids, device=q.device)[:, None] * block_size
    return (first + torch.arange(block_size, device=q.device)).view(-1)


def _chunk_mask(num_tokens: int, num_keys: int, q: Tensor) -> Tensor:
    """[n, L]: the row's tokens are the last n of its L keys, each sees the keys up to its own."""
    future = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=q.device)
    future = future.triu_(num_keys - num_tokens + 1)
    return q.new_zeros(num_tokens, num_keys).masked_fill_(future, float("-inf"))
