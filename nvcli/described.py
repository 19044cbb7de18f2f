"""What is known of a loaded model wherever its engine runs: in this process or in another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvcli.engine.default_sampling import make_sampling, recommended_sampling
from nvcli.errors import TokenizerError

if TYPE_CHECKING:
    from nvcli.config import EngineConfig
    from nvcli.engine.grammar import Grammar, GrammarCompiler, GrammarSpec
    from nvcli.text import Tokenizer
    from nvcli.types import SamplingParams


class Described:
    """What needs the model's files but not its weights: text to ids and back, default sampling
    parameters, grammars. Subclasses set the attributes.
    """

    config: EngineConfig
    model_name: str
    model_config: Any  # at least its `sampling_defaults`
    vocab_size: int  # token ids that may be used: the tokenizer's, which a model is padded beyond
    eos_token_ids: frozenset[int]
    _tokenizer: Tokenizer | None
    _grammars: GrammarCompiler | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises `TokenizerError` where the model folder has none (`--load-format dummy`)."""
        if self._tokenizer is None:
            raise TokenizerError(
                f"{self.model_name} has no tokenizer", hint="Give the prompt as token ids."
            )
        return self._tokenizer

    @property
    def supports_thinking(self) -> bool:
        return self._tokenizer is not None and self._tokenizer.end_think_id is not None

    def sampling(self, *, enable_thinking: bool = True, **overrides: Any) -> SamplingParams:
        """Sampling parameters: `overrides` that are not None, over the checkpoint's
        generation_config, over Qwen3's values. A Qwen3 checkpoint whose generation_config holds the
        values for thinking gets those for plain answers when thinking is off.

        Raises `InvalidParameterError` for an unknown name or a value out of range.
        """
        recommended: dict[str, Any] = {}
        if self.config.generation_config == "auto":
            recommended = recommended_sampling(
                self.model_config.sampling_defaults,
                can_think=self.supports_thinking,
                enable_thinking=enable_thinking,
            )
        return make_sampling(recommended, overrides)

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        """A grammar for requests; the last ones are remembered. Raises `GrammarError`."""
        if self._grammars is None:
            from nvcli.engine.grammar import GrammarCompiler

            self._grammars = GrammarCompiler(
                self.tokenizer, vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids
            )
        return self._grammars.compile(spec)
