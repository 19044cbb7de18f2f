"""What is known of an engine that runs in another process: its side of the server's interface that
needs no device. Requests are checked and rendered here, so a bad one is refused at once.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nvcli.described import Described
from nvcli.engine.engine import EngineStats
from nvcli.engine.request_checks import RequestChecks
from nvcli.text import load_tokenizer

if TYPE_CHECKING:
    from nvcli.config import EngineConfig


class DescribedEngine(Described):
    """`info` is what `engine_worker.describe` told over there."""

    def __init__(self, config: EngineConfig, info: dict[str, Any]) -> None:
        self.config = config
        self.model_name = info["model_name"]
        self.max_model_len: int = info["max_model_len"]
        self._max_num_seqs: int = info["max_num_seqs"]
        self.vocab_size = info["vocab_size"]
        self.hidden_size: int = info["hidden_size"]
        self.eos_token_ids = frozenset(info["eos_token_ids"])
        self._stats = EngineStats(*info["stats"])
        is_optional = config.load_format == "dummy"
        self._tokenizer = load_tokenizer(info["folder"], is_optional=is_optional)
        self.model_config = SimpleNamespace(sampling_defaults=info["sampling_defaults"])
        self.startup = info["startup"]
        self._checks = RequestChecks(
            max_model_len=info["max_model_len"],
            num_pool_tokens=self._stats.num_blocks * self._stats.block_size,
            vocab_size=self.vocab_size,
            has_tokenizer=self._tokenizer is not None,
        )

    @property
    def max_num_seqs(self) -> int:
        return self._max_num_seqs
