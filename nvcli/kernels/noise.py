"""Seeded noise: the same (seed, position, token id) gives the same number in every kernel.

Two generators, both used as counters. A key a row and position comes from SplitMix64 (Steele, Lea,
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants as in Vigna's
public-domain splitmix64.c), modulo 2**64. A number a token comes from that key's halves and a hash
of 32 bits, a third of the instructions, for there are as many as the vocabulary has tokens
(`triple32` of github.com/skeeto/hash-prospector, public domain; the upper half goes in halfway):

    splitmix64(x): z = x + GOLDEN                   GOLDEN = 0x9E3779B97F4A7C15
                   z = (z ^ (z >> 30)) * MIX_1      MIX_1  = 0xBF58476D1CE4E5B9
                   z = (z ^ (z >> 27)) * MIX_2      MIX_2  = 0x94D049BB133111EB
                   z ^ (z >> 31)
    key(seed, position)  = splitmix64(splitmix64(seed) + position * GOLDEN)
    bits(key, token_id): x = token_id + (key mod 2**32)
                         x = (x ^ (x >> 17)) * HASH_1                     HASH_1 = 0xED5AD4BB
                         x = (x ^ (x >> 11) ^ (key >> 32)) * HASH_2       HASH_2 = 0xAC4C1B51
                         x = (x ^ (x >> 15)) * HASH_3                     HASH_3 = 0x31848BAB
                         x ^ (x >> 14)                                    modulo 2**32
    uniform(bits)        = min((float32(bits) + 0.5) * 2**-32, 1 - 2**-24)
    gumbel(uniform)      = -log(-log1p(-uniform))

A draw from weights exp(y) takes the group of GROUP ids first, then the id within it:

    group = argmax over g of   log(sum of exp(y) over the group) + gumbel(GROUPS + g)
    token = argmax over the group's ids of                     y + gumbel(id)

Both are Gumbel-max, so each is a draw from a softmax, and their product is the whole one. Numbers
are made for a 64th of the tokens, and adding up exp(y) takes a fifth of the instructions of one.
Where filters have dropped the token, what they left is drawn from once more, with numbers of its
own: argmax of y + gumbel(AGAIN + id). Given that the first is dropped, that is a draw from what is
left; given that it is not, so is the first. So a filter changes a draw only if it dropped it, and
nobody has to know what is left before most tokens are drawn.

So the uniforms are exact in integers and one float32 rounding, and any kernel can give the same
ones bit by bit. The large values of a Gumbel variable, which decide an argmax, come from small
uniforms, where float32 is finest: steps of 2**-32, values up to 22.8.

torch has no unsigned arithmetic: signed integers wrap in the same way, and a logical shift right is
an arithmetic one with the copied sign bits masked away.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 64  # ids drawn from as one
GROUPS = 1 << 30  # counters of groups, and of second draws: apart from those of tokens
AGAIN = 1 << 29

_WRAP = 1 << 64


def as_int64(value: int) -> int:
    """The signed 64-bit integer with the same bits as `value` modulo 2**64."""
    value %= _WRAP
    return value - _WRAP if value >= 1 << 63 else value


GOLDEN = as_int64(0x9E3779B97F4A7C15)
MIX_1 = as_int64(0xBF58476D1CE4E5B9)
MIX_2 = as_int64(0x94D049BB133111EB)
HASH_1 = 0xED5AD4BB - (1 << 32)  # signed, as int32 has it
HASH_2 = 0xAC4C1B51 - (1 << 32)
HASH_3 = 0x31848BAB


def splitmix64(x: Tensor) -> Tensor:
    """The SplitMix64 output function, element by element.  x: [...] int64."""
    z = x + GOLDEN
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(MIX_1)
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(MIX_2)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """One key per row.  seeds, positions: [R] int64 -> [R] int64."""
    return splitmix64(splitmix64(seeds) + positions * GOLDEN)


def hash_ids(keys: Tensor, token_ids: Tensor) -> Tensor:
    """keys: [R] int64; token_ids: [K] or [R, K] int64 -> [R, K] int32, whose bits are the hash."""
    x = token_ids.to(torch.int32) + keys.to(torch.int32)[:, None]  # narrowing keeps the low bits
    x.bitwise_xor_((x >> 17).bitwise_and_(0x7FFF)).mul_(HASH_1)
    x.bitwise_xor_((x >> 11).bitwise_and_(0x1FFFFF))
    x.bitwise_xor_((keys >> 32).to(torch.int32)[:, None]).mul_(HASH_2)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(HASH_3)
    return x.bitwise_xor_((x >> 14).bitwise_and_(0x3FFFF))


def uniforms(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Numbers in (0, 1).  keys: [R] int64; token_ids: [K] or [R, K] int64 -> [R, K] float32."""
    bits = hash_ids(keys, token_ids)  # [R, K]
    whole = bits.long().bitwise_and_((1 << 32) - 1).to(torch.float32)
    return whole.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel variables.  Shapes as in `uniforms`; -> [R, K] float32."""
    return uniforms(keys, token_ids).neg_().log1p_().neg_().log_().neg_()
