"""Triton kernels: one token a row from 16-bit logits, in one pass and without float32 copies.

Greedy rows take the argmax. Random rows take argmax((logit - max) / temperature + noise), the noise
of `noise.py` bit by bit up to its logarithms, which draws from the softmax. Rows with a top_k of at
most MAX_TOP_K first find their k best, then apply top_k, top_p and min_p to those few as
`sampler.filter_sorted` does. Anything else is the eager sampler's.

A row is cut into chunks of fixed width, each reduced by a program of its own, so that its result
depends on the row alone and not on how many others are in the batch:

    _draw_kernel     chunk -> its maximum, and its best perturbed logit with its id
    _best_kernel     chunk -> its MAX_TOP_K best, as sorted keys; only where top_k is set
    _finish_kernel   row   -> the token, written to `out` and to `tokens[slot, position]`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels import noise
from nvcli.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 4096
MAX_TOP_K = 32

_GOLDEN = tl.constexpr(noise.GOLDEN)
_MIX_1 = tl.constexpr(noise.MIX_1)
_MIX_2 = tl.constexpr(noise.MIX_2)
_LOW_32 = tl.constexpr((1 << 32) - 1)
_LOW_30_OF_34 = tl.constexpr((1 << 34) - 1)  # what is left of 64 bits after >> 30
_LOW_27_OF_37 = tl.constexpr((1 << 37) - 1)
_LOW_31_OF_33 = tl.constexpr((1 << 33) - 1)


@triton.jit
def _splitmix64(x):  # type: ignore[no-untyped-def]
    """As in `noise.splitmix64`: int64 wraps, and shifts are made logical by masks."""
    z = x + _GOLDEN
    z = (z ^ ((z >> 30) & _LOW_30_OF_34)) * _MIX_1
    z = (z ^ ((z >> 27) & _LOW_27_OF_37)) * _MIX_2
    return z ^ ((z >> 31) & _LOW_31_OF_33)


@triton.jit
def _uniform(key, ids):  # type: ignore[no-untyped-def]
    """Bit-identical to `noise.uniforms`.  key: scalar int64; ids: [K] int64 -> [K] float32."""
    bits = _splitmix64(key + ids * _GOLDEN)
    high = (bits >> 32).to(tl.uint32).to(tl.float32)
    return tl.minimum((high + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)


@triton.jit
def _gumbel(key, ids):  # type: ignore[no-untyped-def]
    """-log(-log1p(-u)). Small u, which make the large values, take the series of log1p: the
    device's fast logarithm is only good in absolute terms near 1.
    """
    u = _uniform(key, ids)
    series = 1.0 / 6.0 + u * (1.0 / 7.0)
    series = 1.0 / 5.0 + u * series
    series = 1.0 / 4.0 + u * series
    series = 1.0 / 3.0 + u * series
    series = 1.0 / 2.0 + u * series
    series = u + u * u * series
    exponential = tl.where(u < 0.0625, series, -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit
def _row_key(params_i, slot, position):  # type: ignore[no-untyped-def]
    seed = tl.load(params_i + slot * 8 + 1)
    return _splitmix64(_splitmix64(seed) + position * _GOLDEN)


@triton.jit
def _inverse(temperature):  # type: ignore[no-untyped-def]
    """Finite, so that the best logit stays 0 at any temperature."""
    return tl.minimum(1.0 / temperature, 3.0e38)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])  # type: ignore[untyped-decorator]
def _draw_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [B, V]
    slots_ptr,  # [B] int64; -1: not sampled
    positions_ptr,  # [B] int64
    params_f_ptr,  # [S, 8] float64
    params_i_ptr,  # [S, 8] int64
    maxima_ptr,  # [B, C] float32
    best_ptr,  # [B, C] float32
    ids_ptr,  # [B, C] int32
    logits_row_stride,
    vocab_size,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    temperature = tl.load(params_f_ptr + slot * 8).to(tl.float32)
    if (temperature > 0) & (tl.load(params_i_ptr + slot * 8) > 0):
        return  # top_k: the next kernel's
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(
        logits_ptr + row * logits_row_stride + ids, mask=ids < vocab_size, other=-float("inf")
    ).to(tl.float32)
    at = row * tl.num_programs(0) + chunk
    top = tl.maximum(tl.max(logits, axis=0), -3.0e38)
    if temperature > 0:
        key = _row_key(params_i_ptr, slot, tl.load(positions_ptr + row))
        logits = (logits - top) * _inverse(temperature) + _gumbel(key, ids.to(tl.int64))
    best, index = tl.max(logits, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(maxima_ptr + at, top)
    tl.store(best_ptr + at, best)
    tl.store(ids_ptr + at, chunk * CHUNK + index)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # type: ignore[untyped-decorator]
def _best_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [B, V]
    slots_ptr,  # [B] int64; -1: not sampled
    params_f_ptr,  # [S, 8] float64
    params_i_ptr,  # [S, 8] int64
    keys_ptr,  # [B, C, K] int64
    logits_row_stride,
    vocab_size,
    CHUNK: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    if tl.load(params_i_ptr + slot * 8) <= 0:
        return
    if tl.load(params_f_ptr + slot * 8) <= 0:
        return  # greedy: the kernel before did it
    # Keys order by value, and by falling id among equal values: see `sampler._sort_keys`.
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(
        logits_ptr + row * logits_row_stride + ids, mask=ids < vocab_size, other=-float("inf")
    ).to(tl.float32)
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    keys = (ordered << 32) | (_LOW_32 - ids.to(tl.int64))
    keys = tl.where(ids < vocab_size, keys, -0x7FFFFFFFFFFFFFFF)
    best = tl.topk(keys, K)
    at = (row * tl.num_programs(0) + chunk) * K
    tl.store(keys_ptr + at + tl.arange(0, K), best)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])  # type: ignore[untyped-decorator]
def _finish_kernel(  # type: ignore[no-untyped-def]
    slots_ptr,  # [B] int64; -1: not sampled
    positions_ptr,  # [B] int64
    params_f_ptr,  # [S, 8] float64
    params_i_ptr,  # [S, 8] int64
    maxima_ptr,  # [B, C] float32
    best_ptr,  # [B, C] float32
    ids_ptr,  # [B, C] int32
    keys_ptr,  # [B, C, K] int64
    tokens_ptr,  # [S, L] int32
    out_ptr,  # [B] int32
    tokens_row_stride,
    num_chunks,
    C_POW2: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        tl.store(out_ptr + row, -1)
        return
    position = tl.load(positions_ptr + row)
    temperature = tl.load(params_f_ptr + slot * 8).to(tl.float32)
    top_k = tl.load(params_i_ptr + slot * 8)
    if (temperature > 0) & (top_k > 0):
        # The candidates of all chunks, best first; then the filters in the order of the sampler.
        i = tl.arange(0, C_POW2 * K)
        keys = tl.load(
            keys_ptr + row * num_chunks * K + i,
            mask=i < num_chunks * K,
            other=-0x7FFFFFFFFFFFFFFF,
        )
        keys = tl.topk(keys, K)
        rank = tl.arange(0, K)
        ordered = (keys >> 32).to(tl.int32)
        values = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        ids = _LOW_32 - (keys & _LOW_32)
        y = (values - tl.max(values, axis=0)) * _inverse(temperature)
        y = tl.where(rank < top_k, y, -float("inf"))
        top_p = tl.load(params_f_ptr + slot * 8 + 1)
        weights = tl.exp(y).to(tl.float64)
        before = tl.cumsum(weights, axis=0) - weights
        enough = tl.where(top_p < 1, top_p * tl.sum(weights, axis=0), float("inf"))
        y = tl.where((before >= enough) & (rank > 0), -float("inf"), y)
        min_p = tl.load(params_f_ptr + slot * 8 + 2).to(tl.float32)
        y = tl.where(y < tl.log(min_p), -float("inf"), y)
        key = _row_key(params_i_ptr, slot, position)
        score = y + _gumbel(key, ids)
        winner = tl.argmax(score, axis=0, tie_break_left=True)
        token = tl.sum(tl.where(rank == winner, ids, 0), axis=0).to(tl.int32)
    else:
        chunk = tl.arange(0, C_POW2)
        is_chunk = chunk < num_chunks
        at = row * num_chunks + chunk
        best = tl.load(best_ptr + at, mask=is_chunk, other=-float("inf"))
        if temperature > 0:
            maxima = tl.load(maxima_ptr + at, mask=is_chunk, other=-float("inf"))
            best += (maxima - tl.max(maxima, axis=0)) * _inverse(temperature)
        winner = tl.argmax(best, axis=0, tie_break_left=True)
        token = tl.load(ids_ptr + row * num_chunks + winner)
    tl.store(out_ptr + row, token)
    tl.store(tokens_ptr + slot * tokens_row_stride + position, token)


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    params_f: Tensor,
    params_i: Tensor,
    tokens: Tensor,
    out: Tensor,
    vocab_size: int,
) -> None:
    """Sample the rows and write the tokens to their places. Reference: `Sampler.sample`.

    logits:              [B, V]           read only; ids from vocab_size up are never sampled
    slots:               [B] int64        -1: the row is not sampled, its out is -1
    positions:           [B] int64        where the sample goes
    params_f, params_i:  [S, 8]           columns as `device_state.F` and `I`; top_k is 0 or at
                                          most MAX_TOP_K, top_p and min_p count only beside it
    tokens:              [S, L] int32     written at [slot, position]
    out:                 [B] int32        written

    Reads 2 B V bytes, once.
    """
    num_rows = logits.shape[0]
    assert logits.stride(1) == 1, "logits must be contiguous in a row"
    assert tokens.stride(1) == 1, "tokens must be contiguous in a row"
    assert params_f.shape[1] == params_i.shape[1] == 8, "eight parameters a slot"
    assert params_f.is_contiguous(), "parameters must be contiguous"
    assert params_i.is_contiguous(), "parameters must be contiguous"
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    device = logits.device
    maxima = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device)
    best = torch.empty_like(maxima)
    ids = torch.empty_like(maxima, dtype=torch.int32)
    keys = torch.empty((num_rows, num_chunks, MAX_TOP_K), dtype=torch.int64, device=device)
    grid = (num_chunks, num_rows)
    _draw_kernel[grid](
        logits,
        slots,
        positions,
        params_f,
        params_i,
        maxima,
        best,
        ids,
        logits.stride(0),
        vocab_size,
        CHUNK=CHUNK,
        **launch_options(device, num_warps=8),
    )
    _best_kernel[grid](
        logits,
        slots,
        params_f,
        params_i,
        keys,
        logits.stride(0),
        vocab_size,
        CHUNK=CHUNK,
        K=MAX_TOP_K,
        **launch_options(device, num_warps=8),
    )
    _finish_kernel[(num_rows,)](
        slots,
        positions,
        params_f,
        params_i,
        maxima,
        best,
        ids,
        keys,
        tokens,
        out,
        tokens.stride(0),
        num_chunks,
        C_POW2=triton.next_power_of_2(num_chunks),
        K=MAX_TOP_K,
        **launch_options(device, num_warps=4),
    )
