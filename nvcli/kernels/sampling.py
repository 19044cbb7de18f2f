"""Triton kernel: one token a row from 16-bit logits, without a sort and without float32 copies.

A token is drawn as `noise.py` says: a group of 64 ids, then the id. Greedy rows take the group with
the greatest maximum, and its first greatest id. Penalties, biases and masked ids are applied to
logits as they are read.

    every program of a row   groups -> their maxima, and for random rows the sums of
                             exp((x - maximum) / temperature)
    the last one to end      row -> the token, written to `out` and to `tokens[slot, position]`

Filters come after the draw, which they seldom change. Small top_k: the k best lie in the k groups
with the greatest maxima, so those alone are read again; top_p and min_p are applied to the k. Other
filters: one more pass tells, by the mass and the number of the tokens before it, whether the token
is left. If it is not, everything from it down is out, and the best of the rest by other noise is
next: that is the best of what the filter leaves, however many passes it takes.

A row's result depends on the row alone: groups have a fixed width, and sums a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels.launch import launch_options
from nvcli.kernels.noise import GROUP
from nvcli.kernels.sampling_draw import of_all, of_the_best, unfiltered
from nvcli.kernels.sampling_parts import exp2, row_key, values_of

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 4096  # ids that a program reads at once
PART = 512  # groups that the last program of a row holds at once
TILE = 2048  # of a pass over a whole row by one program
# Of the scan, from so many rows on: the more rows, the fewer programs each, whose last one waits
# for the others. As many rows as programs run at once have one each.
CHUNKS_A_PROGRAM = ((192, 1 << 20), (32, 10), (16, 4), (1, 1))
MAX_TOP_K = 64
LOW_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # of float32, that are 0


@dataclass(frozen=True, slots=True)
class Tables:
    """What penalties and biases need: `DeviceState` has them."""

    counts: Tensor  # [S, V] int32, output tokens; the sample of a row with penalties is counted
    prompt_seen: Tensor  # [S, V] bool
    logit_bias: Tensor  # [S, V] float32
    masked_ids: Tensor  # [S, M] int32, masked until min_tokens


@triton.jit
def _top_k(params_i, vocab_size):  # type: ignore[no-untyped-def]
    k = tl.load(params_i).to(tl.int32)
    return tl.where(k < vocab_size, k, 0)


@triton.jit
def _num_masked(params_i, position):  # type: ignore[no-untyped-def]
    """Of the row's masked ids, those that count now: none after min_tokens outputs."""
    is_early = position - tl.load(params_i + 3) < tl.load(params_i + 2)
    return tl.where(is_early, tl.load(params_i + 5), 0).to(tl.int32)


@triton.jit
def _inverse(temperature, unit):  # type: ignore[no-untyped-def]
    """unit / temperature; finite, so that the best logit stays 0 at any temperature."""
    return tl.minimum(unit / temperature, 3.0e38)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["per"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"],
)
def _sample_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [B, V]
    slots_ptr,  # [B] int64; -1: not sampled
    positions_ptr,  # [B] int64
    params_f_ptr,  # [S, 8] float64
    params_i_ptr,  # [S, 8] int64
    counts_ptr,  # [S, V] int32
    seen_ptr,  # [S, V] int8
    bias_ptr,  # [S, V] float32
    masked_ptr,  # [S, M] int32
    maxima_ptr,  # [B, G] float32
    masses_ptr,  # [B, G] float32
    list_ptr,  # [B, K] int32, scratch
    values_ptr,  # [B, K] float32, scratch
    counters_ptr,  # [B] int32, zero before and after
    tokens_ptr,  # [S, L] int32
    out_ptr,  # [B] int32
    logits_row_stride,
    table_row_stride,
    tokens_row_stride,
    vocab_size,
    width,
    num_groups,
    per,  # chunks a program
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    GROUPS_POW2: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    LOW: tl.constexpr,
    TABLES: tl.constexpr,
    PDL: tl.constexpr,
):
    # 1. The logits are asked for first: what to do with them takes three loads in a row to know.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    row_ptr = logits_ptr + row * logits_row_stride
    NUM_GROUPS: tl.constexpr = CHUNK // GROUP
    group = tl.arange(0, NUM_GROUPS)
    lane = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    first = tl.program_id(0) * per
    end = tl.minimum(first + per, tl.cdiv(vocab_size, CHUNK))
    ids = first * CHUNK + lane
    first_next = tl.load(row_ptr + ids, mask=ids < width, other=-float("inf"))
    ids += CHUNK
    stop = tl.where(first + 1 < end, width, 0)
    second_next = tl.load(row_ptr + ids, mask=ids < stop, other=-float("inf"))
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        if first == 0:
            tl.store(out_ptr + row, -1)
        return
    position = tl.load(positions_ptr + row)
    params_i = params_i_ptr + slot * 8
    params_f = params_f_ptr + slot * 8
    temperature = tl.load(params_f).to(tl.float32)
    flags = tl.zeros((), tl.int64)
    num_masked = tl.zeros((), tl.int32)
    if TABLES:
        flags = tl.load(params_i + 4)
        num_masked = _num_masked(params_i, position)
    row_of = (
        row_ptr,
        vocab_size,
        slot,
        flags,
        num_masked,
        params_f_ptr,
        counts_ptr,
        seen_ptr,
        bias_ptr,
        masked_ptr,
        table_row_stride,
        width,
    )
    maxima_ptr += row * num_groups
    masses_ptr += row * num_groups

    # 2. Chunk by chunk, the next two on their way: what the groups amount to.
    inverse_2 = _inverse(temperature, 1.4426950408889634)  # for powers of two
    for chunk in range(first, end):
        ids = chunk * CHUNK + lane
        fetched, first_next = first_next, second_next
        stop = tl.where(chunk + 2 < end, width, 0)
        later = ids + 2 * CHUNK
        second_next = tl.load(row_ptr + later, mask=later < stop, other=-float("inf"))
        x = values_of(fetched, ids, (chunk + 1) * CHUNK, row_of, M, TABLES)
        maxima = tl.max(x, axis=1)
        at = chunk * NUM_GROUPS + group
        tl.store(maxima_ptr + at, maxima, mask=at < num_groups)
        if temperature > 0:
            top = tl.maximum(maxima, -3.0e38)
            mass = tl.sum(exp2((x - top[:, None]) * inverse_2), axis=1)
            tl.store(masses_ptr + at, mass, mask=at < num_groups)

    # 3. The last program of the row goes on. The barrier puts all stores of a program before its
    #    count, whose release makes them visible to whoever acquires it.
    tl.debug_barrier()
    counter = counters_ptr + row
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") < tl.num_programs(0) - 1:
        return
    tl.store(counter, 0)

    # 4. The draw, and what the filters say to it.
    top_k = _top_k(params_i, vocab_size)
    top_p = tl.load(params_f + 1)
    log_min_p = tl.log(tl.load(params_f + 2).to(tl.float32))
    key = row_key(tl.load(params_i + 1), position)
    inverse = _inverse(temperature, 1.0)
    score, token, peak = unfiltered(
        temperature,
        inverse,
        key,
        maxima_ptr,
        masses_ptr,
        num_groups,
        row_of,
        PARTS,
        PART,
        GROUP,
        M,
        TABLES,
    )
    if (temperature > 0) & (score > -float("inf")):
        if (top_k > 0) & (top_k <= K):
            token = of_the_best(
                token,
                top_k,
                top_p,
                log_min_p,
                inverse,
                tl.where(flags != 0, 0, LOW),
                key,
                maxima_ptr,
                list_ptr + row * K,
                values_ptr + row * K,
                num_groups,
                row_of,
                GROUPS_POW2,
                GROUP,
                K,
                M,
                TABLES,
            )
        elif (top_p < 1) | (log_min_p > -float("inf")) | (top_k > 0):
            token = of_all(
                token,
                peak,
                top_k,
                top_p,
                log_min_p,
                inverse,
                key,
                row_of,
                M,
                TABLES,
                TILE,
            )

    # 5. Where masks forbid everything, nothing is sampled; a step already launched reads id 0.
    token = tl.where(score > -float("inf"), token, -1)
    tl.store(out_ptr + row, token)
    tl.store(tokens_ptr + slot * tokens_row_stride + position, tl.maximum(token, 0))
    if TABLES:  # noqa: SIM102 - one is decided when it is compiled, the other when it runs
        if ((flags & 1) != 0) & (token >= 0):
            count_ptr = counts_ptr + slot * table_row_stride + token
            tl.store(count_ptr, tl.load(count_ptr) + 1)


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    params_f: Tensor,
    params_i: Tensor,
    tokens: Tensor,
    out: Tensor,
    counters: Tensor,
    vocab_size: int,
    tables: Tables | None = None,
) -> None:
    """Sample the rows and write the tokens to their places. Reference: `Sampler.sample`.

    logits:              [B, V]           read only; ids from vocab_size up are never sampled
    slots:               [B] int64        -1: the row is not sampled, its out is -1
    positions:           [B] int64        where the sample goes
    params_f, params_i:  [S, 8]           columns as `device_state.F` and `I`
    tokens:              [S, L] int32     written at [slot, position]
    out:                 [B] int32        written; -1 where masks forbid every token
    counters:            [B] int32        or longer; zeros, and zeros again afterwards
    tables:              for rows whose flags or masked ids say so; None: there are none

    Reads 2 B V bytes once, and twice or more for rows with top_p alone, min_p or a top_k beyond
    MAX_TOP_K.
    """
    num_rows = logits.shape[0]
    assert vocab_size <= 1 << 20, "a place has 20 bits for the id"
    assert logits.stride(1) == 1, "logits must be contiguous in a row"
    assert tokens.stride(1) == 1, "tokens must be contiguous in a row"
    assert params_f.shape[1] == params_i.shape[1] == 8, "eight parameters a slot"
    assert counters.numel() >= num_rows, "a counter a row"
    assert params_f.is_contiguous(), "parameters must be contiguous"
    assert params_i.is_contiguous(), "parameters must be contiguous"
    device = logits.device
    width = logits.shape[1]
    num_groups = triton.cdiv(vocab_size, GROUP)

    def empty(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((num_rows, width), dtype=dtype, device=device)

    maxima, masses = empty(num_groups), empty(num_groups)
    if tables is None:
        counts = seen = bias = masked = logits
        stride = 0
    else:
        counts, bias, masked = tables.counts, tables.logit_bias, tables.masked_ids
        seen = tables.prompt_seen.view(torch.int8)
        stride = counts.stride(0)
        assert stride == seen.stride(0) == bias.stride(0), "tables differ in layout"
        assert counts.stride(1) == seen.stride(1) == bias.stride(1) == 1, "V must be contiguous"
        assert counts.shape[1] >= width, "tables must be as wide as the logits"
        assert masked.is_contiguous(), "masked ids must be contiguous"
    most = next(chunks for least, chunks in CHUNKS_A_PROGRAM if num_rows >= least)
    per = min(most, triton.cdiv(vocab_size, CHUNK))
    _sample_kernel[(triton.cdiv(vocab_size, CHUNK * per), num_rows)](
        logits,
        slots,
        positions,
        params_f,
        params_i,
        counts,
        seen,
        bias,
        masked,
        maxima,
        masses,
        empty(MAX_TOP_K, torch.int32),
        empty(MAX_TOP_K),
        counters,
        tokens,
        out,
        logits.stride(0),
        stride,
        tokens.stride(0),
        vocab_size,
        width,
        num_groups,
        per,
        CHUNK=CHUNK,
        PARTS=triton.cdiv(num_groups, PART),
        PART=PART,
        GROUPS_POW2=triton.next_power_of_2(num_groups),
        GROUP=GROUP,
        TILE=min(TILE, triton.next_power_of_2(vocab_size)),
        K=MAX_TOP_K,
        M=masked.shape[1],
        LOW=LOW_BITS[logits.dtype],
        TABLES=tables is not None,
        # Two programs a multiprocessor: the filters alone would take the registers of one.
        **launch_options(device, num_warps=8, maxnreg=128),
    )
