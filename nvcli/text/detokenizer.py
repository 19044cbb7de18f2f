"""From token ids to text, one token at a time, without ever showing half of anything.

A token of a byte-level vocabulary is a run of bytes, not of characters, so an emoji may be spread
over four tokens. `IncrementalDetokenizer` holds the bytes of an unfinished character back;
`StopMatcher` does the same, one level up, for text that may become a stop string. Both are exact:
the pieces, joined, are what the whole input would have given, however it was cut.
"""

from __future__ import annotations

import codecs
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Vocabulary(Protocol):
    """What the text layer needs to know about a tokenizer; tests pass a scripted one."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this id stands for; raises `RequestError` for an id that is not there."""
        ...

    def run_bytes(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> bytes:
        """`token_bytes` of each, joined, but of special ids nothing where they are skipped."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` hides this id."""
        ...

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name, None where the vocabulary lacks it."""
        ...

    def encode(self, text: str) -> list[int]: ...


class IncrementalDetokenizer:
    """Decodes a stream of ids; joined, the pieces equal `Tokenizer.decode` of all of them.

    Bytes that no longer can become a character turn into U+FFFD as in a full decode. Bytes that
    still can are held, and `finish` gives one U+FFFD for them.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that became certain with this id. Raises `RequestError` for an unknown id and
        is then as before the call."""
        data = self._vocabulary.token_bytes(token_id)
        if self._skip_special_tokens and self._vocabulary.is_special(token_id):
            return ""
        return self._decoder.decode(data)

    def feed_run(self, token_ids: Sequence[int]) -> str:
        """The text of `feed` of each, joined. Raises `RequestError` for an unknown id and is then
        as before the call."""
        skips = self._skip_special_tokens
        return self._decoder.decode(
            self._vocabulary.run_bytes(token_ids, skip_special_tokens=skips)
        )

    def finish(self) -> str:
        """The held tail, and a fresh start."""
        tail = self._decoder.decode(b"", True)
        self._decoder.reset()
        return tail


@dataclass(frozen=True, slots=True)
class StopPiece:
    """Text that may be shown, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


@dataclass(slots=True)
class _Node:
    """A state of the automaton: the longest end of the text that begins some stop string."""

    depth: int
    children: dict[str, _Node]
    fallback: _Node | None = None
    stop: str | None = None  # the longest stop string that ends here


class StopMatcher:
    """Cuts text at the first stop string and holds back every ending that may become one.

    The first match is the one that is complete first, as the reader of a stream would see it; of
    several complete at the same character the longest counts. The automaton is Aho and Corasick's,
    so a character costs the same however many stop strings there are.
    """

    def __init__(self, stops: Iterable[str], *, include: bool = False) -> None:
        self._root = _build(tuple(stops))
        self._include = include
        self._state = self._root
        self._held = ""  # always the last `_state.depth` characters of the text so far
        self._stopped = False

    @property
    def has_stops(self) -> bool:
        return bool(self._root.children)

    def feed(self, text: str) -> StopPiece:
        """What of `text`, and of what was held before it, may be shown now."""
        if self._stopped:
            return StopPiece("")
        if not self._root.children:
            return StopPiece(text)
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            self._state = _advance(self._root, self._state, buffer[end - 1])
            stop = self._state.stop
            if stop is not None:
                self._stopped = True
                self._held = ""
                return StopPiece(buffer[: end if self._include else end - len(stop)], stop)
        shown = len(buffer) - self._state.depth
        self._held = buffer[shown:]
        return StopPiece(buffer[:shown])

    def flush(self) -> str:
        """The held text, now that nothing can complete it; matching starts afresh."""
        held, self._held, self._state = self._held, "", self._root
        return held


def _advance(root: _Node, state: _Node, character: str) -> _Node:
    node: _Node | None = state
    while node is not None:
        child = node.children.get(character)
        if child is not None:
            return child
        node = node.fallback
    return root


def _build(stops: Sequence[str]) -> _Node:
    root = _Node(0, {})
    for stop in stops:
        node = root
        for character in stop:
            node = node.children.setdefault(character, _Node(node.depth + 1, {}))
        if stop:
            node.stop = stop
    queue = deque([root])
    while queue:  # breadth first: a fallback is shallower, so it is complete when it is needed
        node = queue.popleft()
        for character, child in node.children.items():
            if node.fallback is None:
                child.fallback = root
            else:
                child.fallback = _advance(root, node.fallback, character)
            if child.stop is None:
                child.stop = child.fallback.stop
            queue.append(child)
    return root
