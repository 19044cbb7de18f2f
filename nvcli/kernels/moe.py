"""Triton kernels: products of tokens with the matrices of their experts, grouped by expert.

    group ->  gate and up, SwiGLU  ->  down, times the routing weight  ->  sum of each token's K

A program multiplies a tile: some tokens of one expert by some rows of its matrix. With few tokens
the matrices decide, and tiles are as low as a tensor core takes; prompts take tiles as high as the
registers hold. Products of a pair are left in its own row, so the sum over a token's experts is in
the order of its experts, whatever came first. Of few tokens the next norm adds them up as it reads.

A row's bits follow from the tile's shape and the order of its columns, not from the rows beside it;
`deterministic` keeps one shape for every number of tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from nvcli.kernels.launch import launch_options
from nvcli.kernels.moe_route import group

if TYPE_CHECKING:
    from torch import Tensor

SUM_COLUMNS = 1024
ADDENDS_TOKENS = 64  # up to which float32 addends cost less than a kernel that adds them up
LARGE_TILE_BYTES = 160 << 10  # of shared memory


class Tile(NamedTuple):
    rows: int  # tokens
    outputs: int  # rows of W, twice as many where gate and up are computed together
    columns: int  # of x and W, held at a time
    num_warps: int
    num_stages: int


# By the tokens that an expert has in the mean: up to 8, to 16, to 64, and more.
TILES = (Tile(16, 32, 128, 4, 4), Tile(32, 32, 128, 4, 4), Tile(64, 64, 64, 4, 4))
LARGE_TILE = Tile(128, 128, 64, 8, 3)


@lru_cache
def _holds_large_tiles(index: int) -> bool:
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return bool(properties["max_shared_mem"] >= LARGE_TILE_BYTES)


def tile_for(x: Tensor, num_pairs: int, num_experts: int, *, deterministic: bool) -> Tile:
    mean = num_pairs / num_experts
    if deterministic:
        return TILES[2]
    if mean <= 16:
        return TILES[mean > 8]
    is_large = mean > 64 and x.element_size() == 2
    if is_large and (x.device.type == "cpu" or _holds_large_tiles(x.device.index or 0)):
        return LARGE_TILE
    return TILES[2]


@triton.jit  # type: ignore[untyped-decorator]
def _expert_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [T, SIZE] with SwiGLU, else [T K, SIZE]
    w_ptr,  # [X, N, SIZE], with SwiGLU [X, 2 N, SIZE]: gate, then up
    order_ptr,  # [T K] int32
    tiles_ptr,  # [max_tiles, 4] int32
    weights_ptr,  # [T K] float32
    y_ptr,  # [T, K, N], any strides but in N
    y_token_stride,
    y_slot_stride,
    N: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    X: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SWIGLU: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    # 1. The tile. Programs of one tile are neighbours, and so are tiles of one expert.
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    across: tl.constexpr = (N + OUTPUTS - 1) // OUTPUTS
    record = tiles_ptr + tl.program_id(0) // across * 4
    expert = tl.load(record).to(tl.int64)
    first = tl.load(record + 1)
    end = tl.load(record + 2)
    if expert >= X:
        return
    place = first + tl.arange(0, ROWS)
    is_row = place < end
    pair = tl.load(order_ptr + place, mask=is_row, other=0).to(tl.int64)

    # 2. Its tokens by the rows of W, over all columns in order.
    n = tl.program_id(0) % across * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, COLUMNS)
    x_row = pair // TOP_K if SWIGLU else pair
    x_ptrs = x_ptr + x_row[:, None] * SIZE + k[None, :]
    w_ptrs = w_ptr + (expert * (2 * N if SWIGLU else N) + n)[:, None] * SIZE + k[None, :]
    y = tl.zeros((ROWS, OUTPUTS), tl.float32)
    up = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, SIZE, COLUMNS):
        x_mask = is_row[:, None]
        w_mask = (n < N)[:, None]
        if SIZE % COLUMNS != 0:
            is_k = (start + k < SIZE)[None, :]
            x_mask = x_mask & is_k
            w_mask = w_mask & is_k
        x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
        w = tl.load(w_ptrs + start, mask=w_mask, other=0.0)
        y = tl.dot(x, tl.trans(w), y, input_precision=PRECISION)
        if SWIGLU:
            w = tl.load(w_ptrs + start + N * SIZE, mask=w_mask, other=0.0)
            up = tl.dot(x, tl.trans(w), up, input_precision=PRECISION)

    # 3. To the rows of its pairs.
    if SWIGLU:
        y = y * tl.sigmoid(y) * up
    else:
        y *= tl.load(weights_ptr + pair, mask=is_row, other=0.0)[:, None]
    at = pair // TOP_K * y_token_stride + pair % TOP_K * y_slot_stride
    to = y_ptr + at[:, None] + n[None, :]
    tl.store(to, y.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & (n < N)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    y_ptr,  # [T, K, E]
    expert_ids_ptr,  # [T, K] int32
    out_ptr,  # [T, E]
    E: tl.constexpr,
    K: tl.constexpr,
    K_POW2: tl.constexpr,
    X: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.arange(0, K_POW2)
    expert = tl.load(expert_ids_ptr + row * K + slot, mask=slot < K, other=X)
    # Rows of pairs without an expert were never written.
    mask = (expert < X)[:, None] & (column < E)[None, :]
    at = (row * K + slot)[:, None] * E + column[None, :]
    total = tl.sum(tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32), axis=0)
    tl.store(out_ptr + row * E + column, total.to(out_ptr.dtype.element_ty), mask=column < E)


def experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    deterministic: bool = False,
    as_addends: bool = False,
) -> Tensor:
    """The weighted sum of each token's experts, or its addends. Reference: `reference.experts`.

    x:           [T, E]
    expert_ids:  [T, K] int32; X: none
    weights:     [T, K] float32
    gate_up:     [X, 2F, E], gate above up
    down:        [X, E, F]
    returns      [T, E]; with `as_addends`, of few tokens, [K, T, E] float32, where what belongs to
                 no expert is unset

    Reads 3 E F elements of each expert that is hit, once a tile of it; 6 T K E F operations,
    rounded up to tiles.
    """
    num_tokens, size = x.shape
    num_experts, inner_size = down.shape[0], down.shape[2]
    top_k = expert_ids.shape[1]
    assert gate_up.shape == (num_experts, 2 * inner_size, size), "gate and up have another shape"
    assert down.shape[1] == size, "down has another shape"
    assert weights.shape == expert_ids.shape == (num_tokens, top_k), "weights by experts"
    for tensor in (x, expert_ids, weights, gate_up, down):
        assert tensor.is_contiguous(), "all must be contiguous"
    num_pairs = num_tokens * top_k
    if num_tokens == 0:
        return torch.empty_like(x)
    inner = torch.empty((num_tokens, top_k, inner_size), dtype=x.dtype, device=x.device)
    is_split = as_addends and num_tokens <= ADDENDS_TOKENS and not deterministic
    if is_split:
        y = torch.empty((top_k, num_tokens, size), dtype=torch.float32, device=x.device)
        y = y.transpose(0, 1)
    else:
        y = torch.empty((num_tokens, top_k, size), dtype=x.dtype, device=x.device)
    tile = tile_for(x, num_pairs, num_experts, deterministic=deterministic)
    order, tiles = group(expert_ids, num_experts, tile.rows)
    for source, matrices, to, is_swiglu in ((x, gate_up, inner, True), (inner, down, y, False)):
        outputs = tile.outputs if is_swiglu else 2 * tile.outputs
        width = to.shape[2]
        _expert_kernel[(len(tiles) * triton.cdiv(width, outputs),)](
            source,
            matrices,
            order,
            tiles,
            weights,
            to,
            to.stride(0),
            to.stride(1),
            N=width,
            SIZE=matrices.shape[2],
            TOP_K=top_k,
            X=num_experts,
            ROWS=tile.rows,
            OUTPUTS=outputs,
            COLUMNS=tile.columns,
            SWIGLU=is_swiglu,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            **launch_options(x.device, num_warps=tile.num_warps, num_stages=tile.num_stages),
        )
    if is_split:
        return y.transpose(0, 1)
    out = torch.empty_like(x)
    _sum_kernel[(num_tokens, triton.cdiv(size, SUM_COLUMNS))](
        y,
        expert_ids,
        out,
        E=size,
        K=top_k,
        K_POW2=triton.next_power_of_2(top_k),
        X=num_experts,
        COLUMNS=min(SUM_COLUMNS, triton.next_power_of_2(size)),
        **launch_options(x.device, num_warps=4),
    )
    return out
