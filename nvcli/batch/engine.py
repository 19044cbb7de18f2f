"""What a batch run needs of an engine; `nvcli.llm.LLM` is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from nvcli.config import MAX_NUM_SEQS

if TYPE_CHECKING:
    from nvcli.config import EngineConfig
    from nvcli.engine.engine import Request
    from nvcli.engine.engine_thread import Sink
    from nvcli.engine.grammar import Grammar, GrammarSpec
    from nvcli.text import Tokenizer
    from nvcli.types import SamplingParams


class BatchEngine(Protocol):
    """Requests in, outputs to a sink that is called from another thread."""

    config: EngineConfig

    @property
    def model_name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def startup(self) -> Any: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    def sampling(self, *, enable_thinking: bool = True, **overrides: Any) -> SamplingParams: ...
    def compile_grammar(self, spec: GrammarSpec) -> Grammar: ...
    def submit(self, request: Request, sink: Sink) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def stats(self) -> Any: ...
    def close(self) -> None: ...


def max_num_seqs(engine: BatchEngine) -> int:
    """How many sequences the engine runs at once; several replicas of one have so many each."""
    count: int = getattr(engine, "num_replicas", 1)
    if engine.config.max_num_seqs is not None:
        return count * engine.config.max_num_seqs
    device = str(engine.startup.device).partition(":")[0]
    return count * MAX_NUM_SEQS.get(device, 256)
