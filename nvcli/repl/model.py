"""What a conversation needs of a model: `nvcli.repl.chat_llm` in this process, `nvcli.client`
behind a server, a scripted one in tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nvcli.engine.startup import StartupReport
    from nvcli.types import Message, RequestOutput, SamplingParams, TokenLogprob


class ChatModel(Protocol):
    """What a conversation needs of `nvcli.llm.LLM`."""

    @property
    def model_name(self) -> str: ...
    @property
    def is_demo(self) -> bool: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def supports_thinking(self) -> bool: ...
    @property
    def startup(self) -> StartupReport | None: ...  # None: it runs elsewhere
    def sampling(self, *, enable_thinking: bool = True, **overrides: Any) -> SamplingParams: ...
    def render(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str: ...
    def count_tokens(self, text: str) -> int: ...
    def stream(
        self,
        prompt: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        enable_thinking: bool = True,
        raw: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]: ...
    def stats(self) -> Any: ...
    def close(self) -> None: ...


@runtime_checkable
class TokenModel(Protocol):
    """What `/probs`, `/branch` and `/continue` need beside: the answer's tokens. A model behind
    HTTP does not have it."""

    def prompt_ids(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]: ...
    def extend(
        self, token_ids: Sequence[int], params: SamplingParams, *, parse_tools: bool = False
    ) -> Iterator[RequestOutput]: ...
    def score(self, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob | None]: ...
    def token_text(self, token_id: int) -> str: ...
    def split_answer(
        self, prompt_ids: Sequence[int], answer_ids: Sequence[int]
    ) -> tuple[str, str | None, list[bool]]: ...
    def is_end(self, token_id: int) -> bool: ...
