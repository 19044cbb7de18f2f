"""The engine as a conversation needs it: schemas and tools as grammars, an answer by its tokens.

Imported only when a model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from nvcli.engine.output_stream import OutputStream
from nvcli.errors import RequestError
from nvcli.llm import LLM, RequestOptions
from nvcli.protocol.structured import grammar_spec, json_structure
from nvcli.protocol.tools import Tools
from nvcli.text import OutputRouter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nvcli.text.prompts import Prompt
    from nvcli.types import Message, RequestOutput, SamplingParams, TokenLogprob


class ChatLLM(LLM):
    """Implements `nvcli.repl.session.ChatModel`."""

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        schema: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> OutputStream:
        """`schema`: the answer is JSON of this shape, unless it calls one of the `tools`.

        Raises `GrammarError` for a schema that cannot be enforced.
        """
        request = self.request(prompt, params, **options)
        structure = None
        if schema is not None:
            structure = json_structure(dict(schema), "schema", is_lenient=True)
        definitions = tuple(dict(tool) for tool in options.get("tools") or ())
        choice = Tools(definitions, "auto") if definitions else Tools()
        spec = grammar_spec(structure, choice, self._tokenizer)
        if spec is not None:
            request.grammar = self.compile_grammar(spec)
        return OutputStream(self, request)

    def prompt_ids(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        return self.tokenizer.encode_chat(messages, tools=tools, enable_thinking=enable_thinking)

    def extend(
        self, token_ids: Sequence[int], params: SamplingParams, *, parse_tools: bool = False
    ) -> OutputStream:
        """Go on from the middle of an answer: `token_ids` are its prompt and its beginning."""
        request = self.request(list(token_ids), params)
        request.is_chat = True
        request.parse_tools = parse_tools
        return OutputStream(self, request)

    def score(self, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob | None]:
        """Each token's own probability and the best alternatives; the first has none."""
        params = self.sampling(prompt_logprobs=num_top, max_tokens=1, temperature=0.0)
        output: RequestOutput = self.generate([list(token_ids)], params)[0]
        if output.prompt_logprobs is None:
            raise RequestError(output.error or "the engine gave no prompt logprobs")
        return list(output.prompt_logprobs)

    def token_text(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def split_answer(
        self, prompt_ids: Sequence[int], answer_ids: Sequence[int]
    ) -> tuple[str, str | None, list[bool]]:
        """(text, reasoning, which ids belong to the text) of an answer's tokens."""
        router = OutputRouter(self.tokenizer, list(prompt_ids))
        text, reasoning, flags = "", None, []
        for token_id in answer_ids:
            was_reasoning = router.in_reasoning
            delta = router.feed(token_id)
            text += delta.text
            if delta.reasoning is not None:
                reasoning = (reasoning or "") + delta.reasoning
            is_tag = router.hides(token_id) or self.tokenizer.is_special(token_id)
            flags.append(not (was_reasoning or router.in_reasoning or is_tag))
        return text, reasoning, flags

    def is_end(self, token_id: int) -> bool:
        return token_id in self.eos_token_ids
