"""Triton kernels: a step's inputs, made on the device from four integers a row.

The host sends `rows [B, 4]` and nothing else; tokens, block tables and sampling state are on the
device already. What comes out has fixed addresses, so the kernels can stand at the head of a
captured step. Rows of no tokens are padding: no keys, nothing stored, nothing sampled.

    rows: slot, start, n, flags
    flags: SAMPLES | IS_STORED | READS_NEW | (block + 1) << BLOCK_SHIFT

A decoding row may bring the block that its token is the first of: a table's most usual change then
needs no copy and no kernel of its own. 0: no block.

What a step gives goes straight to the host's memory (`hand_over`): a copy by the copy engine would
have the next step wait for two changes of engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
import triton
import triton.language as tl

from nvcli.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

SAMPLES = 1
IS_STORED = 2
READS_NEW = 4  # keys before `start` may be written in this very step
BLOCK_SHIFT = 3
TOKENS_AT_ONCE = 256
MIN_LANES = 256  # one variant serves every batch up to it


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The inputs of a step of at most B rows and T tokens. `head` and `rows` are written by the
    host's copy, everything else by `prepare`.
    """

    sent: Tensor  # [1 + B, 4] int32: head, then rows
    head: Tensor  # [4] int32: which of the host's buffers the results go to; three unused
    rows: Tensor  # [B, 4] int32
    cu_seqlens_q: Tensor  # [B + 1] int32
    seq_lens: Tensor  # [B] int32
    slots: Tensor  # [B] int64
    logits_indices: Tensor  # [B] int64, the last token of each row
    sample_slots: Tensor  # [B] int64; -1: the row is not sampled
    sample_positions: Tensor  # [B] int64
    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64

    @classmethod
    def allocate(cls, num_rows: int, num_tokens: int, device: torch.device) -> Self:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        sent = zeros(1 + num_rows, 4, dtype=torch.int32)
        return cls(
            sent=sent,
            head=sent[0],
            rows=sent[1:],
            cu_seqlens_q=zeros(num_rows + 1, dtype=torch.int32),
            seq_lens=zeros(num_rows, dtype=torch.int32),
            slots=zeros(num_rows),
            logits_indices=zeros(num_rows),
            sample_slots=zeros(num_rows),
            sample_positions=zeros(num_rows),
            input_ids=zeros(num_tokens),
            positions=zeros(num_tokens),
            slot_mapping=zeros(num_tokens),
        )

    def cut(self, num_rows: int, num_tokens: int) -> Self:
        """Views of the first rows and tokens, at the same addresses."""
        return type(self)(
            sent=self.sent[: 1 + num_rows],
            head=self.head,
            rows=self.rows[:num_rows],
            cu_seqlens_q=self.cu_seqlens_q[: num_rows + 1],
            seq_lens=self.seq_lens[:num_rows],
            slots=self.slots[:num_rows],
            logits_indices=self.logits_indices[:num_rows],
            sample_slots=self.sample_slots[:num_rows],
            sample_positions=self.sample_positions[:num_rows],
            input_ids=self.input_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            slot_mapping=self.slot_mapping[:num_tokens],
        )


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _rows_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,  # [B, 4] int32
    tokens_ptr,  # [S, L] int32
    block_table_ptr,  # [S, M] int32
    cu_seqlens_ptr,  # [B + 1] int32
    seq_lens_ptr,  # [B] int32
    slots_ptr,  # [B] int64
    logits_indices_ptr,  # [B] int64
    sample_slots_ptr,  # [B] int64
    sample_positions_ptr,  # [B] int64
    input_ids_ptr,  # [T] int64
    positions_ptr,  # [T] int64
    slot_mapping_ptr,  # [T] int64
    tokens_row_stride,
    table_row_stride,
    num_rows,
    P: tl.constexpr,
    ROWS_POW2: tl.constexpr,
    BLOCK_SHIFT: tl.constexpr,
    IS_DECODE: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program, one lane a row.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.arange(0, ROWS_POW2)
    is_row = row < num_rows
    slot = tl.load(rows_ptr + row * 4, mask=is_row, other=0).to(tl.int64)
    start = tl.load(rows_ptr + row * 4 + 1, mask=is_row, other=0)
    n = tl.load(rows_ptr + row * 4 + 2, mask=is_row, other=0)
    flags = tl.load(rows_ptr + row * 4 + 3, mask=is_row, other=0)
    samples = (flags & 1) != 0
    tl.store(seq_lens_ptr + row, start + n, mask=is_row)
    tl.store(slots_ptr + row, slot, mask=is_row)
    tl.store(sample_slots_ptr + row, tl.where(samples, slot, -1), mask=is_row)
    tl.store(sample_positions_ptr + row, (start + n).to(tl.int64), mask=is_row)
    if IS_DECODE:
        # Every row is one token, or padding in its place.
        tl.store(cu_seqlens_ptr + row, row, mask=is_row)
        tl.store(cu_seqlens_ptr + num_rows, num_rows)
        tl.store(logits_indices_ptr + row, row.to(tl.int64), mask=is_row)
        is_real = is_row & (n > 0)
        token = tl.load(tokens_ptr + slot * tokens_row_stride + start, mask=is_real, other=0)
        entry = block_table_ptr + slot * table_row_stride + start // P
        block = tl.load(entry, mask=is_real, other=0)
        brought = (flags >> BLOCK_SHIFT) - 1
        block = tl.where(brought >= 0, brought, block)
        tl.store(entry, block, mask=is_real & (brought >= 0))
        block = block.to(tl.int64)
        is_new = is_real & ((flags & 2) == 0)
        tl.store(input_ids_ptr + row, token.to(tl.int64), mask=is_row)
        tl.store(positions_ptr + row, start.to(tl.int64), mask=is_row)
        at = tl.where(is_new, block * P + start % P, -1)
        tl.store(slot_mapping_ptr + row, at, mask=is_row)
    else:
        end = tl.cumsum(n, axis=0)
        tl.store(cu_seqlens_ptr + row + 1, end, mask=is_row)
        tl.store(cu_seqlens_ptr, 0)
        tl.store(logits_indices_ptr + row, tl.maximum(end - 1, 0).to(tl.int64), mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])  # type: ignore[untyped-decorator]
def _tokens_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,  # [B, 4] int32
    tokens_ptr,  # [S, L] int32
    block_table_ptr,  # [S, M] int32
    cu_seqlens_ptr,  # [B + 1] int32
    input_ids_ptr,  # [T] int64
    positions_ptr,  # [T] int64
    slot_mapping_ptr,  # [T] int64
    tokens_row_stride,
    table_row_stride,
    num_rows,
    num_tokens,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program a row lays its tokens out; the last one fills what is left of T.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    lane = tl.arange(0, TOKENS)
    first = tl.load(cu_seqlens_ptr + row)
    if row == num_rows:
        for i in range(first, num_tokens, TOKENS):
            mask = i + lane < num_tokens
            zero = tl.zeros((TOKENS,), tl.int64)
            tl.store(input_ids_ptr + i + lane, zero, mask=mask)
            tl.store(positions_ptr + i + lane, zero, mask=mask)
            tl.store(slot_mapping_ptr + i + lane, zero - 1, mask=mask)
    else:
        slot = tl.load(rows_ptr + row * 4).to(tl.int64)
        start = tl.load(rows_ptr + row * 4 + 1)
        n = tl.load(rows_ptr + row * 4 + 2)
        is_new = (tl.load(rows_ptr + row * 4 + 3) & 2) == 0
        table = block_table_ptr + slot * table_row_stride
        for i in range(0, n, TOKENS):
            mask = i + lane < n
            position = start + i + lane
            token = tl.load(tokens_ptr + slot * tokens_row_stride + position, mask=mask, other=0)
            block = tl.load(table + position // P, mask=mask, other=0).to(tl.int64)
            at = tl.where(is_new, block * P + position % P, -1)
            to = first + i + lane
            tl.store(input_ids_ptr + to, token.to(tl.int64), mask=mask)
            tl.store(positions_ptr + to, position.to(tl.int64), mask=mask)
            tl.store(slot_mapping_ptr + to, at, mask=mask)


def prepare(
    step: StepTensors, tokens: Tensor, block_table: Tensor, block_size: int, *, is_decode: bool
) -> None:
    """Fill the step's tensors from its rows. Reference: `DeviceState.prepare`.

    step:         rows [B, 4] and tensors for T tokens; the rows' tokens are at most T
    tokens:       [S, L] int32
    block_table:  [S, M] int32         of decoding rows, gets the blocks that they bring
    is_decode:    B = T, and row i is token i: one token, or none as padding
    """
    num_rows, num_tokens = step.rows.shape[0], step.input_ids.shape[0]
    assert block_size & (block_size - 1) == 0, "the block size must be a power of two"
    assert tokens.stride(1) == block_table.stride(1) == 1, "tables must be contiguous in a row"
    assert not is_decode or num_rows == num_tokens, "a decoding row is one token"
    _rows_kernel[(1,)](
        step.rows,
        tokens,
        block_table,
        step.cu_seqlens_q,
        step.seq_lens,
        step.slots,
        step.logits_indices,
        step.sample_slots,
        step.sample_positions,
        step.input_ids,
        step.positions,
        step.slot_mapping,
        tokens.stride(0),
        block_table.stride(0),
        num_rows,
        P=block_size,
        ROWS_POW2=max(MIN_LANES, triton.next_power_of_2(num_rows)),
        BLOCK_SHIFT=BLOCK_SHIFT,
        IS_DECODE=is_decode,
        **launch_options(tokens.device, num_warps=4),
    )
    if not is_decode:
        _tokens_kernel[(num_rows + 1,)](
            step.rows,
            tokens,
            block_table,
            step.cu_seqlens_q,
            step.input_ids,
            step.positions,
            step.slot_mapping,
            tokens.stride(0),
            block_table.stride(0),
            num_rows,
            num_tokens,
            P=block_size,
            TOKENS=TOKENS_AT_ONCE,
            **launch_options(tokens.device, num_warps=4),
        )


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _hand_over_kernel(  # type: ignore[no-untyped-def]
    out_ptr,  # [B] int32
    head_ptr,  # [4] int32
    host_ptr,  # [RING, Bmax] int32, the host's memory
    host_row_stride,
    num_rows,
    ROWS_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.arange(0, ROWS_POW2)
    is_row = row < num_rows
    to = host_ptr + tl.load(head_ptr) * host_row_stride + row
    tl.store(to, tl.load(out_ptr + row, mask=is_row, other=-1), mask=is_row)


def hand_over(out: Tensor, head: Tensor, host: Tensor) -> None:
    """Write a step's samples to the host's buffer that the head names. Reference: `Tensor.copy_`.

    out:   [B] int32
    head:  [4] int32          of `StepTensors`
    host:  [RING, Bmax] int32, in pinned memory; there when an event behind the kernel has passed
    """
    num_rows = out.shape[0]
    _hand_over_kernel[(1,)](
        out,
        head,
        host,
        host.stride(0),
        num_rows,
        ROWS_POW2=max(MIN_LANES, triton.next_power_of_2(num_rows)),
        **launch_options(out.device, num_warps=4),
    )
