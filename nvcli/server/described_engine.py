"""What is known of an engine that runs in another process: its side of the server's interface that
needs no device. Requests are checked and rendered here, so a bad one is refused at once.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from nvcli.engine.engine import Engine, EngineStats
from nvcli.engine.grammar import GrammarCompiler
from nvcli.errors import TokenizerError
from nvcli.llm import LLM
from nvcli.text import Tokenizer

if TYPE_CHECKING:
    from nvcli.config import EngineConfig
    from nvcli.engine.grammar import Grammar, GrammarSpec
    from nvcli.engine.step import StepDevice
    from nvcli.types import SamplingParams


class DescribedEngine:
    """`info` is what `engine_worker.describe` told over there."""

    def __init__(self, config: EngineConfig, info: dict[str, Any]) -> None:
        self.config = config
        self.model_name: str = info["model_name"]
        self.max_model_len: int = info["max_model_len"]
        self._max_num_seqs: int = info["max_num_seqs"]
        self.vocab_size: int = info["vocab_size"]
        self.hidden_size: int = info["hidden_size"]
        self._eos_token_ids = frozenset(info["eos_token_ids"])
        self._stats = EngineStats(*info["stats"])
        self._tokenizer: Tokenizer | None = None
        try:
            self._tokenizer = Tokenizer.from_folder(info["folder"])
        except TokenizerError:
            if config.load_format != "dummy":
                raise
        self.model_config = SimpleNamespace(sampling_defaults=info["sampling_defaults"])
        self.startup = SimpleNamespace(stage_s=info["stage_s"], device=info["device"])
        self._compiler: GrammarCompiler | None = None
        self._checks = RequestChecks(info, self._stats, self._tokenizer)

    @property
    def max_num_seqs(self) -> int:
        return self._max_num_seqs

    @property
    def supports_thinking(self) -> bool:
        return self._tokenizer is not None and self._tokenizer.end_think_id is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises `TokenizerError` where the model folder has none (`--load-format dummy`)."""
        if self._tokenizer is None:
            raise TokenizerError(
                f"{self.model_name} has no tokenizer", hint="Give the prompt as token ids."
            )
        return self._tokenizer

    def sampling(self, *, enable_thinking: bool = True, **overrides: Any) -> SamplingParams:
        return LLM.sampling(cast("LLM", self), enable_thinking=enable_thinking, **overrides)

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        if self._compiler is None:
            self._compiler = GrammarCompiler(
                self.tokenizer, vocab_size=self.vocab_size, eos_token_ids=self._eos_token_ids
            )
        return self._compiler.compile(spec)


class RequestChecks(Engine):
    """Only `validate` of an engine: what a request must keep to."""

    def __init__(
        self, info: dict[str, Any], stats: EngineStats, tokenizer: Tokenizer | None
    ) -> None:
        self._device = cast(
            "StepDevice",
            SimpleNamespace(
                max_model_len=info["max_model_len"],
                max_num_seqs=info["max_num_seqs"],
                num_blocks=stats.num_blocks,
                block_size=stats.block_size,
            ),
        )
        self._vocab_size = info["vocab_size"]
        self._eos_token_ids = frozenset(info["eos_token_ids"])
        self._tokenizer = tokenizer
