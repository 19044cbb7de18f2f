"""Grammars: what an output must look like, token by token. The adapter of llguidance. No torch.

    GrammarSpec --GrammarCompiler.compile--> Grammar --start--> Constraint (one per sequence)

A constraint follows a sequence's tokens and gives the mask of the next one. It composes with
thinking: while the router is in a think block the grammar waits, and it is armed behind
`</think>`, where it also forces the newlines that the model writes there. A sequence with a
constraint has `gate = 0`: each of its tokens is read before the next is sampled.

    UNDECIDED: what the grammar begins with, or <think>
    REASONING: anything; with a grammar that must be fulfilled neither the end nor a tool call
    armed:     what the grammar allows; the end of the sequence where it may end
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvcli.errors import InvalidParameterError, RequestError
from nvcli.text import RouterState

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt

    from nvcli.text import OutputRouter, Tokenizer

    Mask = npt.NDArray[np.int32]  # one bit per token id, the lowest id in the lowest bit

MAX_CACHED = 256
MAX_SOURCE = 512 * 1024  # characters of a grammar, the schemas in it included
_BEFORE_CONTENT = (RouterState.UNDECIDED, RouterState.REASONING)


class GrammarError(InvalidParameterError):
    """A schema, regex or grammar that cannot be used; the message has the reason."""

    code = "invalid_grammar"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """`source` is llguidance's grammar as JSON. `is_required`: the output must fulfil it, so that
    thinking cannot end the answer; False for text in which a tool may be called or not. `param`
    is the request field it came from."""

    source: str
    is_required: bool = True
    param: str = "response_format"


class Grammar:
    """A compiled grammar; `start` gives as many constraints as there are sequences."""

    def __init__(self, compiler: GrammarCompiler, matcher: Any, spec: GrammarSpec) -> None:
        self.compiler = compiler
        self.spec = spec
        self._matcher = matcher

    def start(self, router: OutputRouter) -> Constraint:
        return Constraint(self, self._matcher.deep_copy(), router)


class GrammarCompiler:
    """Compiles for one vocabulary and remembers the last grammars. May be used by many threads."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        import llguidance

        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        self.eos_token_ids = tuple(sorted(i for i in eos_token_ids if i < vocab_size))
        if not self.eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token, which grammars need")
        self._library = llguidance
        self._vocabulary = llguidance.LLTokenizer(
            tokenizer.to_json(), n_vocab=vocab_size, eos_token=list(self.eos_token_ids)
        )
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._lock = threading.Lock()
        self._cache: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._while_reasoning: dict[tuple[int, ...], Mask] = {}

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises `GrammarError` with the reason. Takes from milliseconds to a second."""
        with self._lock:
            found = self._cache.get(spec)
            if found is not None:
                self._cache.move_to_end(spec)
                return found
        if len(spec.source) > MAX_SOURCE:
            raise GrammarError(
                f"the grammar has {len(spec.source):,} characters, at most {MAX_SOURCE:,}",
                param=spec.param,
            )
        matcher = self._library.LLMatcher(
            self._vocabulary, spec.source, log_level=0, limits=self._limits
        )
        if not matcher.is_error():
            # The first mask may take a second. The copies that sequences get find it made, and what
            # nothing can match is known by it.
            _next_mask(matcher, self.num_words)
        if matcher.is_error():
            raise GrammarError(f"{spec.param}: {_reason(matcher)}", param=spec.param)
        grammar = Grammar(self, matcher, spec)
        with self._lock:
            self._cache[spec] = grammar
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return grammar

    def mask_without(self, token_ids: tuple[int, ...]) -> Mask:
        """Everything but these."""
        import numpy as np

        found = self._while_reasoning.get(token_ids)
        if found is None:
            found = np.full(self.num_words, -1, np.int32)
            for token_id in token_ids:
                found[token_id // 32] &= ~_bit(token_id)
            self._while_reasoning[token_ids] = found
        return found


class Constraint:
    """One sequence's way through a grammar."""

    def __init__(self, grammar: Grammar, matcher: Any, router: OutputRouter) -> None:
        self._compiler = grammar.compiler
        self._is_required = grammar.spec.is_required
        self._matcher = matcher
        self._router = router
        self._is_armed = router.state not in _BEFORE_CONTENT
        self._newlines: list[int] = []  # still to come behind `</think>`

    @property
    def forced_token_ids(self) -> list[int]:
        """What must come next, whatever the model wants."""
        return self._newlines.copy()

    @property
    def is_finished(self) -> bool:
        """Whether nothing can follow but the end of the sequence."""
        return self._is_armed and not self._newlines and bool(self._matcher.is_stopped())

    def follow(self, token_id: int, before: RouterState) -> None:
        """A token was routed. Raises `RequestError` when the grammar does not allow it, which is
        so only when other restrictions of the request left nothing that it allows, and when the
        grammar is too much for llguidance from here on."""
        if not self._is_armed:
            if self._router.state in _BEFORE_CONTENT:
                return
            self._is_armed = True
            close, *newlines = self._router.think_close_token_ids or (-1,)
            if before is RouterState.REASONING and token_id == close:
                self._newlines = newlines
                return
        if self._newlines:
            if token_id == self._newlines[0]:
                del self._newlines[0]
                return
            self._newlines.clear()
        if not self._matcher.consume_token(token_id):
            if "too many" in _reason(self._matcher).lower():  # of llguidance's limits
                raise self._too_complex()
            raise RequestError(
                "the grammar and the other restrictions of the request leave no token",
                param="response_format",
            )

    def mask(self) -> Mask | None:
        """The ids that may come next; None for any."""
        state = self._router.state
        if self._is_armed:
            return self._grammar_mask()
        if state is RouterState.UNDECIDED:
            mask = self._grammar_mask()
            think_id = self._router.think_id
            if think_id is not None:
                mask[think_id // 32] |= _bit(think_id)
            return mask
        if not self._is_required:
            return None
        tool_id = self._router.call_start_id
        forbidden = (*self._compiler.eos_token_ids, *([] if tool_id is None else [tool_id]))
        return self._compiler.mask_without(forbidden)

    def _grammar_mask(self) -> Mask:
        mask = _next_mask(self._matcher, self._compiler.num_words)
        if self._matcher.is_error():
            raise self._too_complex()
        return mask

    def _too_complex(self) -> RequestError:
        return RequestError(f"the grammar is too complex: {_reason(self._matcher)}")


def _next_mask(matcher: Any, num_words: int) -> Mask:
    """The ids that the grammar allows next; none, and an error in the matcher, where it fails."""
    import numpy as np
    from llguidance.numpy import fill_next_token_bitmask

    mask = np.zeros(num_words, np.int32)
    fill_next_token_bitmask(matcher, mask.reshape(1, -1), 0)
    return mask


def _reason(matcher: Any) -> str:
    """What llguidance says of its error, on one line."""
    reason = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    if reason == "NoExtensionBias":
        return "nothing can match it"
    return reason[:500] or "it cannot be compiled"


def _bit(token_id: int) -> int:
    """As a signed 32-bit integer."""
    bit = 1 << (token_id % 32)
    return bit - (1 << 32) if bit == 1 << 31 else bit
