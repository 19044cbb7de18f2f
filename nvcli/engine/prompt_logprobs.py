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


def pack_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> Tensor:
    """logits: [r, v], the real vocabulary; token_ids: [r] int64 -> [r, 2 + 2 k] int32."""
    step = max(1, MAX_ELEMENTS // logits.shape[1])
    pieces = [
        _pack_piece(logits[i : i + step], token_ids[i : i + step], k)
        for i in range(0, logits.shape[0], step)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def pack_prompt_logprobs(
    hidden: Tensor,
    token_ids: Tensor,
    k: int,
    compute_logits: Callable[[Tensor], Tensor],
    vocab_size: int,
) -> Tensor:
    """As `pack_logprobs`, from hidden states [r, E], piece by piece through the head."""
    step = max(1, MAX_ELEMENTS // vocab_size)
    return torch.cat(
        [
            _pack_piece(
                compute_logits(hidden[i : i + step])[:, :vocab_size], token_ids[i : i + step], k
            )
            for i in range(0, hidden.shape[0], step)
        ]
    )


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
