"""Linear layers, fused where the checkpoint keeps parts apart, and the embedding.

A fused layer is one parameter whose row ranges are named: `qkv_proj` holds q_proj, k_proj and
v_proj one below the other. The loader asks `checkpoint_parts` which of a checkpoint tensor fills
which rows, so that fusing costs no copy and no tensor is forgotten.

Under tensor parallelism a parameter is this rank's share: of the rows of each part, or of the
columns (see `nvcli.parallel`). In the second case the product is this rank's part of a sum, as is
what the embedding gives, and the norm that takes it adds the ranks' parts up (`layers.norm`).

Parameters are born as NaN: a row that no tensor filled cannot pass for a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from nvcli import kernels
from nvcli.parallel import SOLO, Share, TPGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def unfilled(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter full of NaN, to be filled by the loader."""
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
    """

    def __init__(
        self,
        in_features: Share | int,
        parts: dict[str, Share],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        group: TPGroup = SOLO,
    ) -> None:
        super().__init__()
        self.deterministic = False  # see `kernels.linear`; the runner sets it
        self.parts = parts
        self.columns = Share.all_of(in_features) if isinstance(in_features, int) else in_features
        self.is_part = not self.columns.is_whole
        self.adds_bias = not self.is_part or group.rank == 0
        out_features = sum(share.size for share in parts.values())
        self.weight = unfilled(out_features, self.columns.size, dtype=dtype, device=device)
        self.bias = unfilled(out_features, dtype=dtype, device=device) if bias else None
        start = 0
        for share in parts.values():
            clear_padding(self.weight[start : start + share.size], share)
            start += share.size
        assert not (bias and any(share.padding for share in parts.values())), "a padded bias"

    def forward(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out], or this rank's part of it
        return self.product(x, self.bias if self.adds_bias else None)

    def addends(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], or what adds up to it, [S, T, out] float32, for `RMSNorm` to add.
        A part of a sum over the ranks has no addends.
        """
        if self.is_part or self.bias is not None:
            return cast("Tensor", self(x))
        return kernels.linear(
            x, self.weight, None, deterministic=self.deterministic, as_addends=True
        )

    def product(self, x: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x W^T, into `out` where it is given."""
        return kernels.linear(x, self.weight, bias, out, deterministic=self.deterministic)

    def checkpoint_parts(self) -> Iterator[tuple[str, Part]]:
        """(checkpoint name, what it fills), relative to the layer's parent module."""
        start = 0
        for name, share in self.parts.items():
            rows = slice(start, start + share.count)
            shape = (share.whole, self.columns.whole)
            yield f"{name}.weight", Part(self.weight[rows], shape, share, self.columns)
            if self.bias is not None:
                yield f"{name}.bias", Part(self.bias[rows], (share.whole,), share)
            start += share.size


class Embedding(nn.Module):
    """Token ids -> hidden states; its weight may serve as the LM head too.

    Under tensor parallelism each rank holds some ids' rows and answers zero for the others', so
    what it gives is its part of a sum.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: TPGroup = SOLO,
    ) -> None:
        super().__init__()
        self.share = group.padded_share(vocab_size)
        self.weight = unfilled(self.share.size, hidden_size, dtype=dtype, device=device)
        clear_padding(self.weight, self.share)

    def forward(self, input_ids: Tensor) -> Tensor:  # [T] -> [T, E]
        if self.share.is_whole:
            return torch.nn.functional.embedding(input_ids, self.weight)
        local = input_ids - self.share.start
        is_mine = (local >= 0) & (local < self.share.count)
        x = torch.nn.functional.embedding(local.clamp(0, self.share.size - 1), self.weight)
        return x.masked_fill_(~is_mine[:, None], 0)

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
