"""`--attach`: a running server answers the records, over HTTP.

Records go out as the bodies of OpenAI's API that they were checked as, with what the run's flags
add; the answers come back as the outputs that the engine in this process would give, so all that
reads, orders and writes is the same. What the server cannot take at once waits here.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from nvcli.batch.attached_outputs import HttpRequest, failed_outputs, read_outputs
from nvcli.batch.endpoints import CHAT_URL
from nvcli.batch.identity import record_seed
from nvcli.batch.records import Kind
from nvcli.client import ServerError
from nvcli.errors import EngineClosedError, NvcliError, TokenizerError, UsageError
from nvcli.protocol import ChatRequest, CompletionRequest
from nvcli.protocol.pooling import EmbeddingRequest

if TYPE_CHECKING:
    import httpx

    from nvcli.batch.options import BatchOptions
    from nvcli.batch.records import Record
    from nvcli.client import ServerModel
    from nvcli.config import EngineConfig
    from nvcli.engine.engine_thread import Sink
    from nvcli.engine.grammar import Grammar, GrammarSpec
    from nvcli.text import Tokenizer
    from nvcli.types import SamplingParams

logger = logging.getLogger("nvcli")

RETRIES = 4  # of a connection that fails, half a second after the first and then twice as long
PATIENCE_S = 300.0  # with a server that says it is busy
_PRIORITY = 1000  # behind requests that somebody waits for


class HttpEngine:
    """A `BatchEngine` over HTTP. The requests it takes are those of its `prepare`."""

    startup = None
    hidden_size = 0  # the server checks

    def __init__(self, found: ServerModel, config: EngineConfig) -> None:
        self.config = config.replace(max_num_seqs=found.max_num_seqs)
        self.max_model_len = found.max_model_len
        self.model_name = found.model_name
        self._server = found
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="nvcli-attached", daemon=True)
        self._ready = threading.Event()
        self._is_closed = False
        self._thread.start()
        self._ready.wait()

    @property
    def tokenizer(self) -> Tokenizer:
        raise TokenizerError("the server has the tokenizer")

    def sampling(self, *, enable_thinking: bool = True, **overrides: Any) -> SamplingParams:
        return self._server.sampling(enable_thinking=enable_thinking, **overrides)

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        raise NotImplementedError("the server compiles")

    def stats(self) -> None:
        """A server's engine is its own."""

    def check_response_format(self, response_format: dict[str, Any]) -> None:
        """Raises `UsageError` when the server refuses the shape."""
        body = {
            "model": self.model_name,
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 1,
            "response_format": response_format,
        }
        request = HttpRequest("check", CHAT_URL, body, 1)
        posted = asyncio.run_coroutine_threadsafe(self._post(request), self._loop)
        status, value = posted.result()
        if status == 400:
            (output,) = read_outputs(request, status, value, 0.0)
            raise UsageError(f"--schema: {output.error}")

    def prepare(
        self, record: Record, request_id: str, options: BatchOptions, seed: int
    ) -> HttpRequest:
        """What a record asks the server."""
        body = request_body(record, options, seed)
        body["model"] = self.model_name
        if record.kind is not Kind.OPENAI:  # this endpoint's default is 16
            body.setdefault("max_tokens", self.max_model_len)
        return HttpRequest(request_id, record.url, body, _num_outputs(record))

    # --- requests ---------------------------------------------------------------------------------

    def submit(self, request: Any, sink: Sink) -> None:
        assert isinstance(request, HttpRequest)
        if self._is_closed:
            raise EngineClosedError("the connection was closed")
        self._loop.call_soon_threadsafe(self._start, request, sink)

    def abort(self, request_id: str) -> None:
        """The server sees the closed connection."""

        def cancel() -> None:
            task = self._tasks.get(request_id)
            if task is not None:
                task.cancel()

        if not self._is_closed:
            self._loop.call_soon_threadsafe(cancel)

    def close(self) -> None:
        """Give up what runs. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._server.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._room = asyncio.Semaphore(self.config.max_num_seqs or 1)
        self._http: httpx.AsyncClient = self._server.async_client()
        self._loop.call_soon(self._ready.set)
        self._loop.run_forever()
        self._loop.run_until_complete(self._finish())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())  # cut streams let go
        self._loop.close()

    async def _finish(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()
        await asyncio.sleep(0)  # the connections' own last calls

    def _start(self, request: HttpRequest, sink: Sink) -> None:
        task = self._loop.create_task(self._answer(request, sink))
        self._tasks[request.request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request.request_id, None))

    async def _answer(self, request: HttpRequest, sink: Sink) -> None:
        began = time.monotonic()
        try:
            async with self._room:
                status, value = await self._post(request)
            outputs = read_outputs(request, status, value, began)
        except NvcliError as error:
            outputs = failed_outputs(request, error)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            reason = f"the server answered what is none of OpenAI's shapes: {error!r}"
            outputs = failed_outputs(request, ServerError(reason))
        except Exception as error:
            logger.debug("request %s", request.request_id, exc_info=error)
            reason = f"the connection to the server broke: {type(error).__name__}: {error}"
            outputs = failed_outputs(request, EngineClosedError(reason))
        sink(list[Any](outputs))

    async def _post(self, request: HttpRequest) -> tuple[int, Any]:
        """-> the status and the JSON. Raises `EngineClosedError` when the server is gone, asks for
        another key, or stays busy: that ends the run, and costs no record."""
        import httpx

        num_failed = 0
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                response = await self._http.post(request.url, json=request.body)
            except httpx.TransportError as error:
                num_failed += 1
                if num_failed > RETRIES:
                    reason = " ".join(str(error).split()) or type(error).__name__
                    raise EngineClosedError(f"cannot reach the server: {reason}") from error
                await asyncio.sleep(0.25 * 2**num_failed)
                continue
            if response.status_code in (401, 403):
                raise EngineClosedError("the server wants another key", hint="Set NVCLI_API_KEY.")
            if response.status_code not in (429, 503):
                return response.status_code, _json(response)
            if time.monotonic() > deadline:
                raise EngineClosedError(f"the server has been busy for {PATIENCE_S:.0f} s")
            await asyncio.sleep(_wait_s(response.headers.get("retry-after")))


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _wait_s(retry_after: str | None) -> float:
    try:
        return min(max(float(retry_after or 1), 0.1), 30)
    except ValueError:
        return 1.0


def request_body(record: Record, options: BatchOptions, seed: int) -> dict[str, Any]:
    """The record's body with the flags below what it says itself."""
    body = dict(record.body)
    body.pop("stream", None)
    body.pop("stream_options", None)
    request = record.request
    if isinstance(request, EmbeddingRequest):
        return body
    own = request.sampling
    for name, value in options.sampling.items():
        if name not in own and name in record.sampling:
            is_limit = name == "max_tokens" and record.responses is not None
            key = "max_output_tokens" if is_limit else name
            body[key] = list(value) if isinstance(value, tuple) else value
    if "seed" not in own:
        body["seed"] = record_seed(seed, record.index)
    is_open = isinstance(request, ChatRequest) and request.thinking.enabled is None
    if options.think is not None and is_open:
        variables = body.get("chat_template_kwargs") or {}
        body["chat_template_kwargs"] = {**variables, "enable_thinking": options.think}
    if record.responses is not None:
        body["store"] = False
    body.setdefault("priority", _PRIORITY)
    return body


def _num_outputs(record: Record) -> int:
    request = record.request
    if isinstance(request, EmbeddingRequest):
        return max(1, len(request.inputs))
    n = int(record.sampling.get("n") or 1)
    return n * len(request.prompts) if isinstance(request, CompletionRequest) else n
