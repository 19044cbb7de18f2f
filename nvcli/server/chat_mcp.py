"""Chat completions with MCP tools: the calls of servers are made here, between turns, and the
client sees one answer, without the calls; `/v1/responses` shows every one.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool

from nvcli.protocol import AnswerHead, prepare_chat
from nvcli.protocol.response_events import ResponseEvents
from nvcli.protocol.response_items import to_messages
from nvcli.protocol.responses import ResponsesRequest
from nvcli.server.errors import TimeoutExceededError
from nvcli.server.generate import start, turn_request
from nvcli.server.response_mcp import McpSession
from nvcli.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

    from nvcli.engine.engine import Request
    from nvcli.protocol import ChatRequest
    from nvcli.server.state import ServerState
    from nvcli.types import Message, RequestOutput, ToolCall


async def answer(
    state: ServerState, chat: ChatRequest, engine: Request
) -> AsyncGenerator[RequestOutput, None]:
    """The deltas of one output, as if the model had spoken once. `engine` has its parameters.

    Raises `McpServerError` where a server cannot be used, and what the engine raises.
    """
    turns = _Turns(state, chat, engine)
    timeout = state.config.request_timeout
    loop = asyncio.get_running_loop()
    deadline = None if timeout is None else loop.time() + timeout
    try:
        async with asyncio.timeout_at(deadline):
            await turns.session.open()
        while True:
            async with contextlib.aclosing(turns.turn()) as outputs:
                async for output in outputs:
                    yield output
            if turns.is_over:
                return
            async with asyncio.timeout_at(deadline):
                await turns.session.run_pending()
    except TimeoutError:
        raise TimeoutExceededError(timeout) from None
    finally:
        turns.session.close()


def _exhaust(events: Iterable[Any]) -> None:
    for _ in events:
        pass


class _Turns:
    def __init__(self, state: ServerState, chat: ChatRequest, engine: Request) -> None:
        self._state = state
        self._chat = chat
        self._indices: dict[int, int] = {}  # of the client's calls in this turn
        self._messages: tuple[Message, ...] = chat.messages
        self.is_over = False
        request = ResponsesRequest(chat=chat, input=None, mcp=chat.mcp, allowed=chat.allowed)
        self._events = ResponseEvents(  # keeps the turns, their calls and the sum of their usage
            request, AnswerHead("", 0, ""), params=engine.params, tokenizer=None, encrypt=str
        )
        self.session = McpSession(state.mcp, request, (), self._events, _exhaust)

    async def turn(self) -> AsyncGenerator[RequestOutput, None]:
        """One turn of the model, without the calls of servers; the last one ends."""
        tools = self.session.next_tools()
        output_items = self._events.response["output"]
        said = to_messages(output_items, instructions=None, decrypt=str, names=self.session.names)
        chat = replace(self._chat, tools=tools, messages=(*self._messages, *said))
        engine = await run_in_threadpool(self._engine_request, chat)
        self._events.begin_turn()
        self._indices.clear()
        with contextlib.closing(start(self._state, [engine], is_admitted=True)) as groups:
            async for _, output in groups.outputs():
                _exhaust(self._events.feed(output))
                yield self._shown(output)

    def _engine_request(self, chat: ChatRequest) -> Request:
        state = self._state
        limit = state.llm.max_model_len
        prompt = prepare_chat(
            chat, state.tokenizer, enable_thinking=state.config.enable_thinking, max_model_len=limit
        )
        return turn_request(state, chat, prompt, self._events.num_output_tokens)

    def _shown(self, output: RequestOutput) -> RequestOutput:
        calls = tuple(filter(None, map(self._client_call, output.tool_calls)))
        changes: dict[str, Any] = {"tool_calls": calls}
        if output.is_finished:
            limit = self._chat.sampling.get("max_tokens")
            is_spent = limit is not None and self._events.num_output_tokens >= limit
            self.is_over = not self._events.pending or bool(self._indices) or is_spent
            changes["usage"] = self._events.usage
            if not self.is_over:
                changes["finish_reason"] = None
            elif self._events.pending and not self._indices:
                changes["finish_reason"] = FinishReason.LENGTH
        return replace(output, **changes)

    def _client_call(self, call: ToolCall) -> ToolCall | None:
        """A call that is the client's, numbered among those; None for one of a server."""
        if call.name and call.name not in self._events.functions:
            self._indices[call.index] = len(self._indices)
        if call.index not in self._indices:
            return None
        return replace(call, index=self._indices[call.index])
