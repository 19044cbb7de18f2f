"""Triton kernel: the rows of the embedding and of the rotary table that a step begins with.

Three small kernels of a library, none of which takes part in dependent launch, stood here before
the first layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nvcli.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit(do_not_specialize=["first_id", "num_ids"])  # type: ignore[untyped-decorator]
def _look_up_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,  # [T] int64
    positions_ptr,  # [T] int64
    weight_ptr,  # [V, E]
    cos_sin_ptr,  # [L, 2, D] float32
    x_ptr,  # [T, E]
    rotary_ptr,  # [T, 2, D] float32
    first_id,
    num_ids,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    D: tl.constexpr,
    D_POW2: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    local = tl.load(ids_ptr + token) - first_id
    position = tl.load(positions_ptr + token)
    size = tl.where((local >= 0) & (local < num_ids), E, 0)  # of what is read
    column = tl.arange(0, E_POW2)
    angle = tl.arange(0, D_POW2)
    x = tl.load(weight_ptr + local * E + column, mask=column < size, other=0.0)
    rotary = tl.load(cos_sin_ptr + position * D + angle, mask=angle < D)
    tl.store(x_ptr + token * E + column, x, mask=column < E)
    tl.store(rotary_ptr + token * D + angle, rotary, mask=angle < D)


def look_up(
    ids: Tensor, positions: Tensor, weight: Tensor, cos_sin: Tensor, first_id: int, num_ids: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of ids and of positions. Reference: `reference.look_up`.

    ids, positions:  [T] int64
    weight:          [V, E], contiguous; row i is of id first_id + i, for num_ids of them
    cos_sin:         [L, 2, D] float32, contiguous
    returns          x [T, E], zeros for other ids; cos and sin [T, D], two parts of one tensor

    Moves 2 T E elements and 16 T D bytes; one program a token.
    """
    (num_tokens,), size, width = ids.shape, weight.shape[1], 2 * cos_sin.shape[2]
    assert positions.shape == ids.shape, "one position a token"
    assert weight.is_contiguous(), "the embedding must be contiguous"
    assert cos_sin.is_contiguous(), "the rotary table must be contiguous"
    x = torch.empty((num_tokens, size), dtype=weight.dtype, device=ids.device)
    rotary = torch.empty((num_tokens, *cos_sin.shape[1:]), dtype=cos_sin.dtype, device=ids.device)
    if num_tokens > 0:
        _look_up_kernel[(num_tokens,)](
            ids,
            positions,
            weight,
            cos_sin,
            x,
            rotary,
            first_id,
            num_ids,
            E=size,
            E_POW2=triton.next_power_of_2(size),
            D=width,
            D_POW2=triton.next_power_of_2(width),
            **launch_options(ids.device, num_warps=4),
        )
    return x, rotary[:, 0], rotary[:, 1]
