"""One row's token, once its groups are scanned: a draw from the whole row, or its best; then what
the filters say to it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nvcli.kernels.sampling_parts import (
    AGAIN,
    GROUPS,
    NO_ID,
    NO_ORDER,
    best_before,
    choose,
    gumbel,
    kth_place,
    load_row,
    log,
    mass_before,
    ordered,
    place_of,
)


@triton.jit  # type: ignore[untyped-decorator]
def unfiltered(  # type: ignore[no-untyped-def]
    temperature,
    inverse,
    key,
    maxima_ptr,  # [G] float32, the row's
    masses_ptr,  # [G] float32, the same: of exp((x - maximum) * inverse), for random rows
    num_groups,
    row_of,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    TABLES: tl.constexpr,
):
    """(score, id, the row's maximum) of a row without filters. Score: that of the id's group, -inf
    where nothing can be sampled.
    """
    # 1. The row's maximum; PART groups at a time.
    lane = tl.arange(0, PART)
    top = tl.full((PART,), -3.0e38, tl.float32)
    for i in tl.static_range(PARTS):
        is_group = i * PART + lane < num_groups
        maxima = tl.load(maxima_ptr + i * PART + lane, mask=is_group, other=-float("inf"))
        top = tl.maximum(top, maxima)
    peak = tl.max(top, axis=0)

    # 2. The best group, the first among equals.
    best = tl.full((PART,), -float("inf"), tl.float32)
    found = tl.zeros((PART,), tl.int32)
    for i in tl.static_range(PARTS):
        group = i * PART + lane
        is_group = group < num_groups
        scores = tl.load(maxima_ptr + group, mask=is_group, other=-float("inf"))
        if temperature > 0:
            mass = tl.load(masses_ptr + group, mask=is_group, other=0.0)
            scores = (scores - peak) * inverse + log(mass) + gumbel(key, GROUPS + group)
        found = tl.where(scores > best, group, found)
        best = tl.maximum(best, scores)
    score = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == score, found, num_groups - 1), axis=0)

    # 3. The best id of it, the first among equals.
    ids = winner * GROUP + tl.arange(0, GROUP)
    y = load_row(ids, row_of, M, TABLES)
    if temperature > 0:
        y = (y - peak) * inverse + gumbel(key, ids)
    token = tl.min(tl.where(y == tl.max(y, axis=0), ids, NO_ID), axis=0)
    return score, token, peak


@triton.jit  # type: ignore[untyped-decorator]
def of_the_best(  # type: ignore[no-untyped-def]
    token,
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
    """The id of a row with a small top_k; token: what was drawn from all."""
    # 1. The k groups with the greatest maxima, as a list of rising ids.
    g = tl.arange(0, GROUPS_POW2)
    maxima = tl.load(groups_ptr + g, mask=g < num_groups, other=0.0)
    keys = tl.where(g < num_groups, ordered(maxima), NO_ORDER)
    is_chosen, place = choose(keys, top_k, low)
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
    keys = tl.where(ids < row_of[1], ordered(x), NO_ORDER)
    is_chosen, place = choose(keys, top_k, low)
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
    is_left = tl.max(tl.where((ids == token) & (y > -float("inf")), 1, 0), axis=0)
    if is_left == 0:
        scores = y + gumbel(key, AGAIN + ids)
        token = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, NO_ID), axis=0)
    return token


@triton.jit  # type: ignore[untyped-decorator]
def of_all(  # type: ignore[no-untyped-def]
    token,
    peak,
    top_k,
    top_p,
    log_min_p,
    inverse,
    key,
    row_of,
    M: tl.constexpr,
    TABLES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The id of a row with any other filter; token: what was drawn from all."""
    # 1. With a large top_k and a top_p: the place of the k-th, as mass counts down to it.
    last = tl.zeros((), tl.int64)
    if (top_k > 0) & (top_p < 1):
        last = kth_place(top_k, row_of, M, TABLES, TILE)

    # 2. Is the token left by the filters? If not, the best of what stands before it.
    score = tl.zeros((), tl.float32)
    is_open = top_p == top_p
    while is_open:
        value = tl.max(load_row(token + tl.arange(0, 1), row_of, M, TABLES), axis=0)
        here = place_of(value, token)
        is_left = (value - peak) * inverse >= log_min_p
        if is_left & ((top_p < 1) | (top_k > 0)):
            before, total, count = mass_before(here, last, peak, inverse, row_of, M, TABLES, TILE)
            is_mass_left = (top_p >= 1) | (before < top_p * total)
            is_rank_left = (top_k <= 0) | (count < top_k)
            is_left = (is_mass_left & is_rank_left) | (count == 0)
        if not is_left:
            score, token = best_before(here, peak, inverse, key, row_of, M, TABLES, TILE)
        is_open = (not is_left) & (score > -float("inf"))
    return token
