"""What the sampling kernels are made of: noise, a row's logits as they are sampled from, and the
best of many without a sort.

The order of tokens is that of `sampler._sort_keys` everywhere: by value, and by falling id among
equal values. As an unsigned integer it is

    place = ordered bits of the float32 (32) | 2**20 - 1 - id (20)

so a place stands for one token, and "everything before it" for a comparison. The k-th place is
found bit by bit from above, by counting.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from nvcli.kernels import noise

ID_BITS = 20
FLAG_PENALTIES = 1
FLAG_BIAS = 2

# The interpreter knows no assembly.
_IS_COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
GROUPS = tl.constexpr(noise.GROUPS)
AGAIN = tl.constexpr(noise.AGAIN)
_GOLDEN = tl.constexpr(noise.GOLDEN)
_MIX_1 = tl.constexpr(noise.MIX_1)
_MIX_2 = tl.constexpr(noise.MIX_2)
_HASH_1 = tl.constexpr(noise.HASH_1)
_HASH_2 = tl.constexpr(noise.HASH_2)
_HASH_3 = tl.constexpr(noise.HASH_3)
_LOW_30_OF_34 = tl.constexpr((1 << 34) - 1)  # what is left of 64 bits after >> 30
_LOW_27_OF_37 = tl.constexpr((1 << 37) - 1)
_LOW_31_OF_33 = tl.constexpr((1 << 33) - 1)
NO_ID = tl.constexpr(0x7FFFFFFF)
NO_ORDER = tl.constexpr(-(1 << 31))
_ID_BITS = tl.constexpr(ID_BITS)
_LAST_ID = tl.constexpr((1 << ID_BITS) - 1)


# --- noise ---------------------------------------------------------------------------------------


@triton.jit
def _splitmix64(x):  # type: ignore[no-untyped-def]
    """As in `noise.splitmix64`: int64 wraps, and shifts are made logical by masks."""
    z = x + _GOLDEN
    z = (z ^ ((z >> 30) & _LOW_30_OF_34)) * _MIX_1
    z = (z ^ ((z >> 27) & _LOW_27_OF_37)) * _MIX_2
    return z ^ ((z >> 31) & _LOW_31_OF_33)


@triton.jit
def row_key(seed, position):  # type: ignore[no-untyped-def]
    """As `noise.noise_keys`.  int64, int64 -> int64."""
    return _splitmix64(_splitmix64(seed) + position * _GOLDEN)


@triton.jit
def uniform(key, ids):  # type: ignore[no-untyped-def]
    """Bit-identical to `noise.uniforms`.  key: scalar int64; ids: [...] int32 -> [...] float32."""
    x = ids + key.to(tl.int32)
    x = (x ^ ((x >> 17) & 0x7FFF)) * _HASH_1
    x = (x ^ ((x >> 11) & 0x1FFFFF) ^ (key >> 32).to(tl.int32)) * _HASH_2
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _HASH_3
    x = x ^ ((x >> 14) & 0x3FFFF)
    whole = x.to(tl.uint32, bitcast=True).to(tl.float32)
    return tl.minimum((whole + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)


@triton.jit
def log(x):  # type: ignore[no-untyped-def]
    """The device's logarithm of a normal number: one instruction and a product, where the library's
    takes thirty. Off by at most 2**-22 of the value, between 1/2 and 2 by 2**-22.
    """
    if _IS_COMPILED:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return log2 * 0.6931471805599453
    return tl.log(x)


@triton.jit
def exp2(x):  # type: ignore[no-untyped-def]
    """The device's power of two, off by two units at most; 0 instead of what is not normal."""
    if _IS_COMPILED:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def gumbel(key, ids):  # type: ignore[no-untyped-def]
    """-log(-log1p(-u)), to 4e-6. Small u, which make the large values, take the series of log1p:
    the device's logarithm is only good in absolute terms near 1.
    """
    u = uniform(key, ids)
    series = 1.0 / 4.0 + u * (1.0 / 5.0)
    series = 1.0 / 3.0 + u * series
    series = 1.0 / 2.0 + u * series
    series = u + u * u * series
    exponential = tl.where(u < 0.0625, series, -log(1.0 - u))
    return -log(exponential)


# --- a row ---------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def changed(x, ids, is_there, row, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Penalties, bias and masked ids, in the sampler's order: `Sampler._change_logits`.

    x: [...] float32, the logits of ids; is_there: which ids the tables have; row: as in `load_row`
    """
    slot, flags, num_masked, params_f = row[2], row[3], row[4], row[5]
    at = slot * row[10]
    if (flags & 1) != 0:
        count = tl.load(row[6] + at + ids, mask=is_there, other=0)
        seen = tl.load(row[7] + at + ids, mask=is_there, other=0)
        presence = tl.load(params_f + slot * 8 + 3).to(tl.float32)
        frequency = tl.load(params_f + slot * 8 + 4).to(tl.float32)
        repetition = tl.load(params_f + slot * 8 + 5).to(tl.float32)
        is_output = count > 0
        repeated = tl.where(x > 0, x / repetition, x * repetition)
        x = tl.where((seen != 0) | is_output, repeated, x)
        x = x - count.to(tl.float32) * frequency
        x = x - tl.where(is_output, presence, 0.0)
    if (flags & 2) != 0:
        x = x + tl.load(row[8] + at + ids, mask=is_there, other=0.0)
    for i in range(num_masked):
        x = tl.where(ids == tl.load(row[9] + slot * M + i), -float("inf"), x)
    return x


@triton.jit
def fetch(ids, row):  # type: ignore[no-untyped-def]
    """Logits as they lie there: asked for early, used by `values_of`. Arguments as `load_row`'s."""
    return tl.load(row[0] + ids, mask=ids < row[11], other=-float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def values_of(fetched, ids, stop, row, M: tl.constexpr, TABLES: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `load_row` gives, of logits that were fetched; stop: above all ids."""
    x = fetched.to(tl.float32)
    if (row[3] != 0) | (row[4] > 0) | (stop > row[1]):
        if TABLES:
            x = changed(x, ids, ids < row[11], row, M)
        x = tl.where(ids < row[1], x, -float("inf"))
    return x


@triton.jit  # type: ignore[untyped-decorator]
def load_row(ids, row, M: tl.constexpr, TABLES: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 logits of these ids as they are sampled from; -inf beyond the vocabulary.

    ids: [...] int32
    row: what tells a row: (its logits, vocabulary size, slot, flags, how many ids are masked,
         params_f [S, 8], counts [S, V], prompt_seen [S, V], logit_bias [S, V], masked_ids [S, M],
         stride of the tables, width of a row)

    What lies between the vocabulary and the row's end is read and put aside: the width is a
    multiple of 16 where the vocabulary is not, so eight ids are one load.
    """
    return values_of(fetch(ids, row), ids, row[1] + 1, row, M, TABLES)


# --- the best of many ----------------------------------------------------------------------------


@triton.jit
def ordered(x):  # type: ignore[no-untyped-def]
    """float32 -> int32 above NO_ORDER, in the order of the floats; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def place_of(x, ids):  # type: ignore[no-untyped-def]
    """The token's place among all, as int64: greater is better."""
    return ((ordered(x).to(tl.int64) + 0x80000000) << _ID_BITS) | (_LAST_ID - ids.to(tl.int64))


@triton.jit
def kth_largest(values, k, low):  # type: ignore[no-untyped-def]
    """The k-th of [N] int32 numbers of 32 - low bits; of fewer, the least of so many bits."""
    one = tl.full((), 1, tl.int32)
    found = -(one << (31 - low))
    for i in range(32 - low):
        trial = found + (one << (31 - low - i))  # the first time 0, modulo 2**32
        count = tl.sum((values >= trial).to(tl.int32), axis=0)
        found = tl.where(count >= k, trial, found)
    return found


@triton.jit
def choose(keys, k, low):  # type: ignore[no-untyped-def]
    """The k largest of [N], the earliest among equals: which, and where each goes in a list that
    keeps their order.

    keys: int32 as `ordered` makes them, NO_ORDER for what cannot be chosen; low: how many bits at
    the end say nothing: all 0, or all 1 where the number is negative.
    """
    values = keys >> low
    threshold = kth_largest(values, k, low)
    is_above = (values > threshold).to(tl.int32)
    is_equal = tl.where((values == threshold) & (keys != NO_ORDER), 1, 0)
    left = k - tl.sum(is_above, axis=0)
    chosen = tl.where(tl.cumsum(is_equal, axis=0) <= left, is_equal, 0) + is_above
    return chosen > 0, tl.cumsum(chosen, axis=0) - 1


# --- passes over a whole row ---------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def kth_place(k, row, M: tl.constexpr, TABLES: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place of the row's k-th token: 52 passes, for a large top_k beside a top_p."""
    found = tl.zeros((), tl.int64)
    lane = tl.arange(0, TILE)
    for i in range(32 + _ID_BITS):
        trial = found + (tl.full((), 1, tl.int64) << (31 + _ID_BITS - i))
        count = tl.zeros((TILE,), tl.int32)
        following = fetch(lane, row)
        for start in range(0, row[1], TILE):
            ids = start + lane
            fetched = following
            following = fetch(ids + TILE, row)
            place = place_of(values_of(fetched, ids, start + TILE, row, M, TABLES), ids)
            count += ((place >= trial) & (ids < row[1])).to(tl.int32)
        found = tl.where(tl.sum(count, axis=0) >= k, trial, found)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def mass_before(  # type: ignore[no-untyped-def]
    here, last, peak, inverse, row, M: tl.constexpr, TABLES: tl.constexpr, TILE: tl.constexpr
):
    """Of exp((x - peak) * inverse): the sum before `here`, the sum down to `last`; and how many
    tokens are before `here`.
    """
    lane = tl.arange(0, TILE)
    before = tl.zeros((TILE,), tl.float64)
    total = tl.zeros((TILE,), tl.float64)
    count = tl.zeros((TILE,), tl.int32)
    following = fetch(lane, row)
    for start in range(0, row[1], TILE):
        ids = start + lane
        fetched = following
        following = fetch(ids + TILE, row)
        x = values_of(fetched, ids, start + TILE, row, M, TABLES)
        place = place_of(x, ids)
        weight = tl.exp((x - peak) * inverse).to(tl.float64)  # 0 beyond the vocabulary
        is_before = (place > here) & (ids < row[1])
        before += tl.where(is_before, weight, 0.0)
        total += tl.where(place >= last, weight, 0.0)
        count += is_before.to(tl.int32)
    return tl.sum(before, axis=0), tl.sum(total, axis=0), tl.sum(count, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def best_before(  # type: ignore[no-untyped-def]
    here, peak, inverse, key, row, M: tl.constexpr, TABLES: tl.constexpr, TILE: tl.constexpr
):
    """(score, id) of a second draw from what is before `here`; (-inf, any) where nothing is."""
    lane = tl.arange(0, TILE)
    best = tl.full((TILE,), -float("inf"), tl.float32)
    found = tl.zeros((TILE,), tl.int32)
    following = fetch(lane, row)
    for start in range(0, row[1], TILE):
        ids = start + lane
        fetched = following
        following = fetch(ids + TILE, row)
        x = values_of(fetched, ids, start + TILE, row, M, TABLES)
        scores = (x - peak) * inverse + gumbel(key, AGAIN + ids)
        is_before = (place_of(x, ids) > here) & (ids < row[1])
        scores = tl.where(is_before, scores, -float("inf"))
        found = tl.where(scores > best, ids, found)
        best = tl.maximum(best, scores)
    score = tl.max(best, axis=0)
    return score, tl.min(tl.where(best == score, found, NO_ID), axis=0)
