"""Linear layers, fused where the checkpoint keeps parts apart, and the embedding.

A fused layer is one parameter whose row ranges are named: `qkv_proj` holds q_proj, k_proj and
v_proj one below the other. The loader asks `checkpoint_parts` which of a checkpoint tensor fills
which rows, so that fusing costs no copy and no tensor is forgotten.

Under tensor parallelism a parameter is this rank's share: of the rows of each part, or of the
columns (see `nvcli.parallel`). In the second case the product is this rank's part of a sum, as is
what the embedding gives, and the norm that takes it adds the ranks' parts up (`layers.norm`).

A weight may be float8_e4m3fn with a scale for each block of 128 x 128, as in Qwen3-*-FP8; shares of
it are made of whole blocks. Where no kernel multiplies it so, it becomes dense once it is loaded.

Parameters are born as NaN: a row that no tensor filled cannot pass for a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack, cast

import torch
from torch import nn

from nvcli import kernels
from nvcli.kernels.reference import dequantise_weight
from nvcli.parallel import SOLO, Share, TPGroup
from nvcli.types import FP8_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from nvcli.layers.rotary import RotaryEmbedding


class Placement(TypedDict):
    """How every layer of a model is built; passed on as keywords from each module to its parts."""

    dtype: torch.dtype  # of the parameters and of what is computed with them
    device: torch.device
    group: TPGroup  # the ranks that hold the model together


def unfilled(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter full of NaN, to be filled by the loader."""
    if dtype == torch.float8_e4m3fn:
        data = torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)
    else:
        data = torch.full(shape, float("nan"), dtype=dtype, device=device)
    return nn.Parameter(data, requires_grad=False)


class Part(NamedTuple):
    """What of a checkpoint tensor fills what of a parameter."""

    target: Tensor  # of the parameter
    shape: tuple[int, ...]  # of the whole checkpoint tensor
    rows: Share  # of its first dimension
    columns: Share | None = None  # of its second

    @property
    def is_whole(self) -> bool:
        return self.rows.is_whole and (self.columns is None or self.columns.is_whole)

    def cut(self, whole: Any) -> Tensor:
        """This part of the whole tensor, or of one in a file, which is read only there."""
        rows = slice(self.rows.start, self.rows.start + self.rows.count)
        if self.columns is None:
            return cast("Tensor", whole[rows])
        first = self.columns.start
        return cast("Tensor", whole[rows, first : first + self.columns.count])


class Linear(nn.Module):
    """y = x W^T + b over named parts, whose rows stand one below the other in W.

    parts: name in the checkpoint -> output rows, in order. A plain layer has one part.
    in_features: a share that is not whole makes a row-parallel layer, whose products are parts of a
    sum over the group. All ranks have the bias, and the first one adds it.
    is_fp8: the checkpoint has the weight in fp8; `dtype` is what it is multiplied in.
    """

    weight_scale_inv: nn.Parameter | None  # [out / 128, in / 128] float32, of an fp8 weight

    def __init__(
        self,
        in_features: Share | int,
        parts: dict[str, Share],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        group: TPGroup = SOLO,
        is_fp8: bool = False,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.deterministic = False  # see `kernels.linear`; the runner sets it
        self.parts = parts
        self.columns = Share.all_of(in_features) if isinstance(in_features, int) else in_features
        self.is_part = not self.columns.is_whole
        self.adds_bias = not self.is_part or group.rank == 0
        out_features = sum(share.size for share in parts.values())
        shape = (out_features, self.columns.size)
        stored = torch.float8_e4m3fn if is_fp8 else dtype
        self.weight = unfilled(*shape, dtype=stored, device=device)
        self.weight_scale_inv = None
        if is_fp8:
            blocks = (size // FP8_BLOCK for size in shape)
            self.weight_scale_inv = unfilled(*blocks, dtype=torch.float32, device=device)
        self.bias = unfilled(out_features, dtype=dtype, device=device) if bias else None
        start = 0
        for share in parts.values():
            clear_padding(self.weight[start : start + share.size], share)
            start += share.size
        assert not (bias and any(share.padding for share in parts.values())), "a padded bias"

    def forward(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out], or this rank's part of it
        return self.product(x, self.bias if self.adds_bias else None)

    def addends(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], or addends: [S, T, out] float32, whose sum over S is the result.

        Few rows are multiplied faster in S parts, which the `RMSNorm` behind the layer adds up.
        Not for a part of a sum over the ranks.
        """
        if self.is_part or self.bias is not None:
            return cast("Tensor", self(x))
        return kernels.linear(
            *(x, self.weight, None),
            scales=self.weight_scale_inv,
            deterministic=self.deterministic,
            as_addends=True,
        )

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        """Add x W^T to total [T, out], in place. For a dense layer, whole and without a bias."""
        return kernels.add_linear(x, self.weight, total)

    def product(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x W^T, into `out` where it is given."""
        return kernels.linear(
            *(x, self.weight, bias, out),
            scales=self.weight_scale_inv,
            deterministic=self.deterministic,
        )

    def dense_weight(self, dtype: torch.dtype, first_row: int = 0) -> Tensor:
        """[out - first_row, in]: the rows from `first_row` on, where a block of fp8 begins."""
        rows = self.weight[first_row:]
        if self.weight_scale_inv is None:
            return rows.to(dtype)
        return dequantise_weight(rows, self.weight_scale_inv[first_row // FP8_BLOCK :], dtype)

    def after_load(self) -> None:
        if self.weight_scale_inv is not None and not kernels.keeps_fp8(self.weight.device):
            self.weight = nn.Parameter(self.dense_weight(self.dtype), requires_grad=False)
            self.weight_scale_inv = None

    def checkpoint_parts(self) -> Iterator[tuple[str, Part]]:
        """(checkpoint name, what it fills), relative to the layer's parent module."""
        start = 0
        for name, share in self.parts.items():
            rows = slice(start, start + share.count)
            shape = (share.whole, self.columns.whole)
            yield f"{name}.weight", Part(self.weight[rows], shape, share, self.columns)
            if self.weight_scale_inv is not None:
                yield f"{name}.weight_scale_inv", self._scales_part(start, share)
            if self.bias is not None:
                yield f"{name}.bias", Part(self.bias[rows], (share.whole,), share)
            start += share.size

    def _scales_part(self, start: int, share: Share) -> Part:
        """Of the part whose rows begin at `start`."""
        assert self.weight_scale_inv is not None, "fp8 has scales"
        rows, columns = share.in_blocks(FP8_BLOCK), self.columns.in_blocks(FP8_BLOCK)
        first = start // FP8_BLOCK
        target = self.weight_scale_inv[first : first + rows.count]
        return Part(target, (rows.whole, columns.whole), rows, columns)


class Embedding(nn.Module):
    """The table of token ids' hidden states; its weight may serve as the LM head too.

    Under tensor parallelism each rank holds some ids' rows and answers zero for the others', so
    what it gives is its part of a sum.
    """

    def __init__(self, vocab_size: int, hidden_size: int, **place: Unpack[Placement]) -> None:
        super().__init__()
        self.share = place["group"].padded_share(vocab_size)
        size = (self.share.size, hidden_size)
        self.weight = unfilled(*size, dtype=place["dtype"], device=place["device"])
        clear_padding(self.weight, self.share)

    def forward(
        self, input_ids: Tensor, positions: Tensor, rotary: RotaryEmbedding
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[T] and [T] -> [T, E], and cos and signed sin of the positions, [T, D] float32 each."""
        first, count = self.share.start, self.share.count
        return kernels.look_up(input_ids, positions, self.weight, rotary.cos_sin, first, count)

    def checkpoint_parts(self) -> Iterator[tuple[str, Part]]:
        """As in `Linear`, relative to this module."""
        hidden_size = self.weight.shape[1]
        target = self.weight[: self.share.count]
        shape = (self.share.whole, hidden_size)
        yield "weight", Part(target, shape, self.share, Share.all_of(hidden_size))


def clear_padding(rows: Tensor, share: Share) -> None:
    """No checkpoint tensor fills these rows.  rows: [share.size, ...]"""
    if share.padding:
        rows[share.count :].zero_()
