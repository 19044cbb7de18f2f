"""What the server needs of an engine; `nvcli.llm.LLM` is one, and tests bring a scripted one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from nvcli.config import EngineConfig
    from nvcli.engine.engine import EngineStats, Request
    from nvcli.engine.engine_thread import Sink
    from nvcli.engine.grammar import Grammar, GrammarSpec
    from nvcli.errors import EngineClosedError
    from nvcli.text import Tokenizer
    from nvcli.types import SamplingParams


class ServerEngine(Protocol):
    """Requests in, outputs to a sink that is called from the engine's thread."""

    config: EngineConfig

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def error(self) -> EngineClosedError | None: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def supports_thinking(self) -> bool: ...

    def sampling(self, *, enable_thinking: bool = True, **overrides: Any) -> SamplingParams: ...

    def compile_grammar(self, spec: GrammarSpec) -> Grammar: ...

    def submit(self, request: Request, sink: Sink) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...
