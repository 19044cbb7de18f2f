"""Log-probabilities in OpenAI's two shapes, aligned with the text that was shown.

A token belongs to the text when at least one of its bytes is in it: reasoning, markup, the end of
the sequence and what a stop string cut off are left out, so the bytes of all tokens are the text's.
Text is held back where a tag or a stop string may follow, so in a stream the entries wait with it.
"""

from __future__ import annotations

import codecs
import math
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nvcli.text import Tokenizer
    from nvcli.types import RequestOutput, TokenLogprob

LEAST = -9999.0  # stands for a probability of 0, which JSON cannot write
_REPLACEMENT = "\ufffd".encode()


def token_bytes(token_id: int, tokenizer: Tokenizer | None) -> bytes:
    return tokenizer.token_bytes(token_id) if tokenizer is not None else b""


def token_text(token_id: int, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> str:
    if as_ids or tokenizer is None:
        return f"token_id:{token_id}"
    return token_bytes(token_id, tokenizer).decode("utf-8", "replace")


def finite(value: float) -> float:
    """A log-probability as JSON has it."""
    return value if math.isfinite(value) and value > LEAST else LEAST


def chat_logprob(
    logprob: TokenLogprob, tokenizer: Tokenizer | None, *, as_ids: bool = False
) -> dict[str, Any]:
    """One entry of `logprobs.content`, with the token's raw bytes."""

    def entry(token_id: int, value: float) -> dict[str, Any]:
        return {
            "token": token_text(token_id, tokenizer, as_ids=as_ids),
            "logprob": finite(value),
            "bytes": list(token_bytes(token_id, tokenizer)),
        }

    top = [entry(token_id, value) for token_id, value in logprob.top]
    return {**entry(logprob.token_id, logprob.logprob), "top_logprobs": top}


def prompt_logprobs_body(
    entries: Iterable[TokenLogprob | None], tokenizer: Tokenizer | None
) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each prompt token a map of token id to log-probability, null first."""
    body: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            body.append(None)
            continue
        values = {token_id: (value, rank) for rank, (token_id, value) in enumerate(entry.top, 1)}
        values[entry.token_id] = (entry.logprob, entry.rank)
        body.append(
            {
                str(token_id): {
                    "logprob": finite(value),
                    "rank": rank,
                    "decoded_token": token_text(token_id, tokenizer),
                }
                for token_id, (value, rank) in values.items()
            }
        )
    return body


class TextLogprobs:
    """The entries of one output's text, as far as the text was shown: `feed` each delta in turn.

    Every decision looks at the first waiting entry and the first bytes of the text only, and waits
    where more text could change it. So the entries are the same however the output was cut.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._waiting: deque[TokenLogprob] = deque()
        self._shown = b""  # text whose tokens were not found yet
        self._is_broken = False  # the last entry was bytes of no character

    def feed(self, output: RequestOutput) -> list[TokenLogprob]:
        entries = output.logprobs or ()
        if self._tokenizer is None:
            return list(entries)
        flags = output.content_flags
        if flags is None:
            self._waiting.extend(entries)
        else:
            pairs = zip(entries, flags, strict=True)
            self._waiting.extend(entry for entry, is_content in pairs if is_content)
        self._shown += output.text.encode("utf-8", "replace")
        taken: list[TokenLogprob] = []
        while self._waiting and self._shown:
            data = token_bytes(self._waiting[0].token_id, self._tokenizer)
            if not self._match(data, taken, is_last=output.is_finished):
                break
        return taken

    def _match(self, data: bytes, taken: list[TokenLogprob], *, is_last: bool) -> bool:
        """Settle the first waiting entry, or the first byte shown. False: more text is needed."""
        shown = self._shown
        # Newlines next to a tag are no text.
        spellings = (data, data.rstrip(b"\n"), data.lstrip(b"\n"), data.strip(b"\n"))
        for spelling in spellings:
            if spelling and shown.startswith(spelling):
                self._take(taken, len(spelling))
                return True
            if len(shown) < len(spelling) and spelling.startswith(shown):
                if is_last:  # a stop string cut the token
                    self._take(taken, len(shown))
                return is_last
        if _is_broken(data) and (self._is_broken or shown.startswith(_REPLACEMENT)):
            size = len(_REPLACEMENT) if shown.startswith(_REPLACEMENT) else 0
            self._take(taken, size)
            self._is_broken = True
        elif not data.strip(b"\n"):
            self._waiting.popleft()
        else:  # text of no token, as of a tool call that turned out to be none
            self._shown = shown[1:]
        return True

    def _take(self, taken: list[TokenLogprob], size: int) -> None:
        taken.append(self._waiting.popleft())
        self._shown = self._shown[size:]
        self._is_broken = False


def _is_broken(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return True
    return False


class LegacyLogprobs:
    """The shape of `/v1/completions`: parallel lists, offsets counted in characters of the text."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._lists = _empty()

    def add(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> None:
        tokens, values, tops, offsets = self._lists.values()
        for token_id, entry in zip(token_ids, entries, strict=True):
            tokens.append(token_text(token_id, self._tokenizer, as_ids=self._as_ids))
            values.append(None if entry is None else finite(entry.logprob))
            tops.append(None if entry is None else self._top(entry))
            offsets.append(self._offset)
            data = token_bytes(token_id, self._tokenizer)
            self._offset += len(self._decoder.decode(data))

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        pairs = entry.top or ((entry.token_id, entry.logprob),)
        top: dict[str, float] = {}
        for token_id, value in pairs:  # of tokens with the same text the likeliest counts
            text = token_text(token_id, self._tokenizer, as_ids=self._as_ids)
            top.setdefault(text, finite(value))
        return top

    def take(self) -> dict[str, Any]:
        """What was added since the last call."""
        lists, self._lists = self._lists, _empty()
        return lists


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
