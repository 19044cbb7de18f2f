"""Triton kernels: which experts each token goes to, and each expert's tokens side by side.

    logits [T, X]  -> route ->  ids, weights [T, K]  -> group ->  order [T K], tiles

A pair is a token and one of its experts; pair p is of token p // K. `group` puts the pairs in order
of their experts, those of one expert as they come, and cuts each expert's into tiles of some rows:

    order:   pairs of expert 0 | of expert 2 | of expert 3, ...
    tiles:   (0, first, end), (0, ...), (2, first, end), ...; the rest have no expert

All of it happens on the device, in buffers whose sizes follow from T, K and X alone: so it can
stand in a captured step. Places are counted and not drawn by atomics: they are the same in every
run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

RIVALS = 32  # logits that all experts are compared with at a time
HOT = 4096  # elements of a one-hot matrix, pairs by experts
FEW_PAIRS, SMALL_CHUNK, LARGE_CHUNK = 4096, 128, 512  # pairs that one program places
CHUNKS_AT_ONCE = 32
TILES_AT_ONCE = 32


@triton.jit  # type: ignore[untyped-decorator]
def _route_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [T, X]
    is_token_ptr,  # [T] bool
    expert_ids_ptr,  # [T, K] int32
    weights_ptr,  # [T, K] float32
    X: tl.constexpr,
    X_POW2: tl.constexpr,
    K: tl.constexpr,
    RIVALS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, X_POW2)
    is_expert = expert < X
    logits = tl.load(logits_ptr + row * X + expert, mask=is_expert, other=float("-inf"))
    logits = logits.to(tl.float32)
    weight = tl.exp(logits - tl.max(logits, axis=0))
    weight /= tl.sum(weight, axis=0)

    # An expert's rank is how many come before it. What is no number comes last, so that ranks are
    # distinct whatever the logits: the ids are used as addresses.
    logits = tl.where(logits == logits, logits, float("-inf"))
    rank = tl.zeros((X_POW2,), tl.int32)
    for start in range(0, X, RIVALS):
        rival = start + tl.arange(0, RIVALS)
        theirs = tl.load(logits_ptr + row * X + rival, mask=rival < X, other=float("-inf"))
        theirs = theirs.to(tl.float32)
        theirs = tl.where(theirs == theirs, theirs, float("-inf"))[None, :]
        is_tie = (theirs == logits[:, None]) & (rival[None, :] < expert[:, None])
        rank += tl.sum(((theirs > logits[:, None]) | is_tie).to(tl.int32), axis=1)
    is_chosen = is_expert & (rank < K)
    if RENORMALISE:
        weight /= tl.sum(tl.where(is_chosen, weight, 0.0), axis=0)
    if HAS_PADDING:
        is_token = tl.load(is_token_ptr + row).to(tl.int1)
        expert = tl.where(is_token, expert, X)
        weight = tl.where(is_token, weight, 0.0)
    tl.store(expert_ids_ptr + row * K + rank, expert, mask=is_chosen)
    tl.store(weights_ptr + row * K + rank, weight, mask=is_chosen)


def route(
    logits: Tensor, top_k: int, *, renormalise: bool, is_token: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The K likeliest experts of each token, and their weights. Reference: `reference.route`.

    logits:    [T, X], contiguous
    is_token:  [T] bool or None
    returns    [T, K] int32 and [T, K] float32

    X^2 comparisons a token, one program each.
    """
    num_tokens, num_experts = logits.shape
    assert logits.is_contiguous(), "logits must be contiguous"
    assert 0 < top_k <= num_experts, "more experts a token than there are"
    expert_ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty(expert_ids.shape, dtype=torch.float32, device=logits.device)
    if num_tokens == 0:
        return expert_ids, weights
    _route_kernel[(num_tokens,)](
        logits,
        expert_ids if is_token is None else is_token,
        expert_ids,
        weights,
        X=num_experts,
        X_POW2=triton.next_power_of_2(num_experts),
        K=top_k,
        RIVALS=RIVALS,
        RENORMALISE=renormalise,
        HAS_PADDING=is_token is not None,
        **launch_options(logits.device, num_warps=4),
    )
    return expert_ids, weights


@triton.jit  # type: ignore[untyped-decorator]
def _one_hot(expert_ids_ptr, pair, end, X, X_POW2: tl.constexpr):  # type: ignore[no-untyped-def]
    """[PAIRS, X_POW2] int32: 1 where the pair is the expert's; pairs of no expert are nobody's."""
    expert = tl.load(expert_ids_ptr + pair, mask=pair < end, other=-1)
    expert = tl.where(expert < X, expert, -1)
    return (expert[:, None] == tl.arange(0, X_POW2)[None, :]).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _count(  # type: ignore[no-untyped-def]
    expert_ids_ptr, first, end, X, X_POW2: tl.constexpr, PAIRS: tl.constexpr
):
    """[X_POW2] int32: each expert's pairs from `first` on."""
    found = tl.zeros((PAIRS, X_POW2), tl.int32)
    for start in range(first, end, PAIRS):
        found += _one_hot(expert_ids_ptr, start + tl.arange(0, PAIRS), end, X, X_POW2)
    return tl.sum(found, axis=0)


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]
def _count_kernel(  # type: ignore[no-untyped-def]
    expert_ids_ptr,  # [T K] int32
    counts_ptr,  # [C, X_POW2] int32
    num_pairs,
    X: tl.constexpr,
    X_POW2: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0) * CHUNK
    end = tl.minimum(first + CHUNK, num_pairs)
    counts = _count(expert_ids_ptr, first, end, X, X_POW2, PAIRS)
    tl.store(counts_ptr + tl.program_id(0) * X_POW2 + tl.arange(0, X_POW2), counts)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "max_tiles"])  # type: ignore[untyped-decorator]
def _place_kernel(  # type: ignore[no-untyped-def]
    expert_ids_ptr,  # [T K] int32
    counts_ptr,  # [C, X_POW2] int32
    order_ptr,  # [T K] int32
    tiles_ptr,  # [max_tiles, 4] int32: expert, first, end of its pairs in `order`
    num_pairs,
    num_chunks,
    max_tiles,
    X: tl.constexpr,
    X_POW2: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    TILES: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    # 1. Each expert's pairs: all of them, and those in chunks before this one.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    each = tl.arange(0, X_POW2)
    total = tl.zeros((X_POW2,), tl.int32)
    before = tl.zeros((X_POW2,), tl.int32)
    if ONE_CHUNK:
        total = _count(expert_ids_ptr, 0, num_pairs, X, X_POW2, PAIRS)
    else:
        for first in range(0, num_chunks, AT_ONCE):
            other = first + tl.arange(0, AT_ONCE)
            counts_ptrs = counts_ptr + other[:, None] * X_POW2 + each[None, :]
            counts = tl.load(counts_ptrs, mask=(other < num_chunks)[:, None], other=0)
            total += tl.sum(counts, axis=0)
            before += tl.sum(tl.where((other < chunk)[:, None], counts, 0), axis=0)
    start = tl.cumsum(total, axis=0) - total  # of the expert's pairs in `order`

    # 2. This chunk's pairs to their places.
    if chunk < num_chunks:
        at = start + before
        end = tl.minimum(chunk * CHUNK + CHUNK, num_pairs)
        for first in range(chunk * CHUNK, end, PAIRS):
            pair = first + tl.arange(0, PAIRS)
            hot = _one_hot(expert_ids_ptr, pair, end, X, X_POW2)
            place = tl.sum(hot * (at[None, :] + tl.cumsum(hot, axis=0) - 1), axis=1)
            tl.store(order_ptr + place, pair, mask=tl.sum(hot, axis=1) > 0)
            at += tl.sum(hot, axis=0)
        return

    # 3. The last program cuts the tiles. A tile is of the first expert whose tiles reach beyond it.
    num_tiles = (total + (ROWS - 1)) // ROWS
    tile_end = tl.cumsum(num_tiles, axis=0)
    skipped = start - (tile_end - num_tiles) * ROWS
    for first in range(0, max_tiles, TILES):
        tile = first + tl.arange(0, TILES)
        expert = tl.sum((tile_end[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        is_mine = (each[None, :] == expert[:, None]).to(tl.int32)
        is_tile = tile < max_tiles
        record = tiles_ptr + tile * 4
        tl.store(record, expert, mask=is_tile)  # X_POW2 beyond the last
        tl.store(record + 1, tl.sum(is_mine * skipped[None, :], axis=1) + tile * ROWS, mask=is_tile)
        tl.store(record + 2, tl.sum(is_mine * (start + total)[None, :], axis=1), mask=is_tile)


def max_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """The most tiles that so many pairs can make: an expert that has any leaves one unfilled."""
    return (num_pairs + min(num_pairs, num_experts) * (rows - 1)) // rows


def group(expert_ids: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Pairs in the order of their experts, and tiles of at most `rows` of one expert.

    expert_ids:  [T, K] int32, contiguous; ids from X on: none
    returns      order [T K] int32, whose end is unset where pairs have no expert, and tiles
              [max_tiles, 4] int32: expert (X or more: no tile), first and end in `order`, unset

    T K X additions, chunk by chunk; the counts of all chunks are read by each.
    """
    num_pairs = expert_ids.numel()
    assert num_pairs > 0, "no pairs"
    assert expert_ids.is_contiguous(), "ids must be contiguous"
    device = expert_ids.device
    width = triton.next_power_of_2(num_experts)
    chunk = SMALL_CHUNK if num_pairs <= FEW_PAIRS else LARGE_CHUNK
    num_chunks = triton.cdiv(num_pairs, chunk)
    shape = {
        "X": num_experts,
        "X_POW2": width,
        "CHUNK": chunk,
        "PAIRS": min(max(16, HOT // width), chunk),
    }
    counts = torch.empty((num_chunks, width), dtype=torch.int32, device=device)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    count = max_tiles(num_pairs, num_experts, rows)
    tiles = torch.empty((count, 4), dtype=torch.int32, device=device)
    if num_chunks > 1:
        _count_kernel[(num_chunks,)](
            expert_ids, counts, num_pairs, **shape, **launch_options(device, num_warps=4)
        )
    _place_kernel[(num_chunks + 1,)](
        expert_ids,
        counts,
        order,
        tiles,
        num_pairs,
        num_chunks,
        count,
        **shape,
        ROWS=rows,
        AT_ONCE=CHUNKS_AT_ONCE,
        TILES=TILES_AT_ONCE,
        ONE_CHUNK=num_chunks == 1,
        **launch_options(device, num_warps=4),
    )
    return order, tiles
