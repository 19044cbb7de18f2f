"""`best_of`: more answers are drawn than are given, and the likeliest are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvcli.types import RequestOutput


class BestOf:
    """Collects the `best_of` outputs of one request and keeps the n with the best mean logprob."""

    def __init__(self, n: int, best_of: int, *, keeps_logprobs: bool) -> None:
        self._n = n
        self._best_of = best_of
        self._keeps_logprobs = keeps_logprobs
        self._done: list[RequestOutput] = []

    def add(self, output: RequestOutput) -> list[RequestOutput]:
        """Take one finished output; when it was the last, return the chosen, indexed 0 .. n-1."""
        self._done.append(output)
        if len(self._done) < self._best_of:
            return []
        best = sorted(self._done, key=lambda o: (-_mean_logprob(o), o.index))[: self._n]
        return [
            replace(o, index=i, logprobs=o.logprobs if self._keeps_logprobs else None)
            for i, o in enumerate(best)
        ]


def _mean_logprob(output: RequestOutput) -> float:
    if not output.logprobs:
        return float("-inf")
    return sum(lp.logprob for lp in output.logprobs) / len(output.logprobs)
