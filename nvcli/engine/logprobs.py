"""Log-probabilities of given tokens: of samples, and of a prompt's own tokens.

They come from the model's distribution, so from the raw logits, in float32, over the real
vocabulary. On the device one token's answer is a row of int32 (floats by their bits), so that a
step's tokens and log-probabilities travel to the host in one copy:

    logprob | rank | k best ids ... | their logprobs ...        [2 + 2 k]

Whole float32 rows exist for a piece of the rows at a time; a long prompt never makes [T, V].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nvcli.engine.sampler import top_candidates
from nvcli.types import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


MAX_ELEMENTS = 1 << 24  # of one float32 [rows, V]


def packed_width(k: int) -> int:
    return 2 + 2 * k


def pack_logprobs(
    x: Tensor,
    token_ids: Tensor,
    k: int,
    vocab_size: int,
    compute_logits: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Log-probability and rank of each token id, and the k best ids beside it.

    x:               [r, V] logits, or what `compute_logits` makes them of: [r, E] hidden states
    token_ids:       [r] int64
    vocab_size:      the real vocabulary's, at most V
    returns          [r, 2 + 2 k] int32
    """
    step = max(1, MAX_ELEMENTS // vocab_size)
    pieces = []
    for i in range(0, x.shape[0], step):
        logits = x[i : i + step] if compute_logits is None else compute_logits(x[i : i + step])
        pieces.append(_pack_piece(logits[:, :vocab_size], token_ids[i : i + step], k))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _pack_piece(logits: Tensor, token_ids: Tensor, k: int) -> Tensor:
    logits = logits.float()  # [r, v]
    index = token_ids[:, None]  # [r, 1]
    normalizer = logits.logsumexp(1, keepdim=True)  # [r, 1]
    chosen = logits.gather(1, index)  # [r, 1]
    ids = torch.arange(logits.shape[1], device=logits.device)
    is_better = (logits > chosen) | ((logits == chosen) & (ids < index))  # ties: lower id first
    rank = is_better.sum(1, keepdim=True).to(torch.int32) + 1
    columns = [(chosen - normalizer).view(torch.int32), rank]
    if k:
        best, best_ids = top_candidates(logits, k)
        columns += [best_ids.to(torch.int32), (best - normalizer).view(torch.int32)]
    return torch.cat(columns, 1)


def unpack_logprobs(
    packed: NDArray[np.int32], token_ids: Sequence[int], k: int
) -> list[TokenLogprob]:
    """packed: [r, 2 + 2 K] with K >= k, on the host."""
    width = packed.shape[1] // 2 - 1  # K
    floats = packed.view(np.float32)
    return [
        TokenLogprob(
            token_id=token_id,
            logprob=float(floats[i, 0]),
            rank=int(packed[i, 1]),
            top=tuple(
                zip(
                    packed[i, 2 : 2 + k].tolist(),
                    floats[i, 2 + width : 2 + width + k].tolist(),
                    strict=True,
                )
            ),
        )
        for i, token_id in enumerate(token_ids)
    ]
