"""One row's token, once its chunks are scanned: the two ways of `sampling`'s last kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from nvcli.kernels.sampling_parts import (
    best_before,
    choose,
    gumbel,
    kth_largest,
    kth_place,
    load_row,
    mass_before,
    ordered,
    place_of,
)


@triton.jit  # type: ignore[untyped-decorator]
def of_the_best(  # type: ignore[no-untyped-def]
    top_k,
    top_p,
    log_min_p,
    inverse,
    low,
    key,
    groups_ptr,  # [G] float32, the row's
    list_ptr,  # [K] int32, scratch of the row
    values_ptr,  # [K] float32, the same
    num_groups,
    row_of,
    GROUPS_POW2: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    TABLES: tl.constexpr,
):
    """(score, id) of a row with a small top_k."""
    # 1. The k groups with the greatest maxima, as a list of rising ids.
    g = tl.arange(0, GROUPS_POW2)
    maxima = tl.load(groups_ptr + g, mask=g < num_groups, other=0.0)
    keys = tl.where(g < num_groups, ordered(maxima), 0)
    is_chosen, place = choose(keys, kth_largest(keys, top_k, low), top_k)
    tl.store(list_ptr + place, g, mask=is_chosen)
    tl.debug_barrier()
    rank = tl.arange(0, K)
    is_group = (rank < tl.minimum(top_k, num_groups))[:, None]
    group = tl.load(list_ptr + rank)[:, None]
    ids = tl.where(is_group, group * GROUP, row_of[1]) + tl.arange(0, GROUP)[None, :]
    tl.debug_barrier()

    # 2. The k best of them, rising in id again: equal values stand in their order.
    x = load_row(ids, row_of, M, TABLES)
    x = tl.reshape(x, (K * GROUP,))
    ids = tl.reshape(ids, (K * GROUP,))
    keys = tl.where(ids < row_of[1], ordered(x), 0)
    is_chosen, place = choose(keys, kth_largest(keys, top_k, low), top_k)
    tl.store(list_ptr + place, ids, mask=is_chosen)
    tl.store(values_ptr + place, x, mask=is_chosen)
    tl.debug_barrier()
    is_kept = rank < top_k
    ids = tl.load(list_ptr + rank, mask=is_kept, other=0)
    x = tl.load(values_ptr + rank, mask=is_kept, other=-float("inf"))

    # 3. top_p and min_p, by what stands before each: k by k comparisons instead of an order.
    y = (x - tl.maximum(tl.max(x, axis=0), -3.0e38)) * inverse
    weight = tl.exp(y).to(tl.float64)
    is_before = (x[None, :] > x[:, None]) | (
        (x[None, :] == x[:, None]) & (rank[None, :] < rank[:, None])
    )
    before = tl.sum(tl.where(is_before, weight[None, :], 0.0), axis=1)
    enough = tl.where(top_p < 1, top_p * tl.sum(weight, axis=0), float("inf"))
    is_kept = is_kept & ((before < enough) | (before == 0))
    y = tl.where(is_kept & (y >= log_min_p), y, -float("inf"))
    scores = y + gumbel(key, ids)
    score = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == score, ids, 0x7FFFFFFF), axis=0)
    return score, token


@triton.jit  # type: ignore[untyped-decorator]
def of_all(  # type: ignore[no-untyped-def]
    temperature,
    top_k,
    top_p,
    log_min_p,
    inverse,
    key,
    maxima_ptr,  # [C] float32, the row's
    best_ptr,  # [C] float32
    ids_ptr,  # [C] int32
    num_chunks,
    row_of,
    C_POW2: tl.constexpr,
    M: tl.constexpr,
    TABLES: tl.constexpr,
    TILE: tl.constexpr,
):
    """(score, id) of any other row."""
    # 1. The best of all chunks.
    chunk = tl.arange(0, C_POW2)
    is_chunk = chunk < num_chunks
    scores = tl.load(best_ptr + chunk, mask=is_chunk, other=-float("inf"))
    maxima = tl.load(maxima_ptr + chunk, mask=is_chunk, other=-float("inf"))
    peak = tl.max(maxima, axis=0)
    if temperature > 0:
        scores += (maxima - peak) * inverse
    score = tl.max(scores, axis=0)
    winner = tl.argmax(scores, axis=0, tie_break_left=True)
    token = tl.load(ids_ptr + winner)
    has_filter = (top_p < 1) | (log_min_p > -float("inf")) | (top_k > 0)
    if (temperature > 0) & has_filter & (score > -float("inf")):
        # 2. With a large top_k and a top_p: the place of the k-th, as mass counts down to it.
        last = tl.zeros((), tl.int64)
        if (top_k > 0) & (top_p < 1):
            last = kth_place(top_k, row_of, M, TABLES, TILE)

        # 3. Is the candidate left by the filters? If not, the best of what stands before it.
        is_open = score > -float("inf")
        while is_open:
            value = tl.max(load_row(token + tl.arange(0, 1), row_of, M, TABLES), axis=0)
            here = place_of(value, token)
            is_left = (value - peak) * inverse >= log_min_p
            if is_left & ((top_p < 1) | (top_k > 0)):
                before, total, count = mass_before(
                    here, last, peak, inverse, row_of, M, TABLES, TILE
                )
                is_mass_left = (top_p >= 1) | (before < top_p * total)
                is_rank_left = (top_k <= 0) | (count < top_k)
                is_left = (is_mass_left & is_rank_left) | (count == 0)
            if not is_left:
                score, token = best_before(here, peak, inverse, key, row_of, M, TABLES, TILE)
            is_open = (not is_left) & (score > -float("inf"))
    return score, token
