"""LLM: the engine for Python code and for the terminal, blocking and in the process.

    with LLM("Qwen/Qwen3-0.6B") as llm:
        print(llm.chat("What is the capital of France?").text)

The engine runs in a thread of its own; the calls here wait for it, so that Ctrl-C interrupts the
wait and never a step. Leaving an output iterator early aborts its request.
"""

from __future__ import annotations

import itertools
import queue
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack, cast

from nvcli.config import DEFAULT_MODEL, EngineConfig
from nvcli.described import Described
from nvcli.engine.default_sampling import check_params
from nvcli.engine.embedding import ended, unit_vector
from nvcli.engine.output_stream import OutputStream
from nvcli.errors import EngineClosedError, InvalidParameterError, RequestError, UsageError
from nvcli.heap import frozen_heap
from nvcli.text.prompts import Prompt, are_messages, as_batch, as_token_ids
from nvcli.types import Message, RequestOutput, SamplingParams, fold_outputs

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

    from nvcli.engine.engine import EngineStats, Request
    from nvcli.engine.engine_thread import EngineThread, Sink
    from nvcli.engine.startup import StartupReport
    from nvcli.engine.step import StepPlan
    from nvcli.models.config import ModelConfig

# Prompts of `generate` that reach the engine at once. One by one, the first steps would hold few of
# them; all at once, the engine would idle until the last prompt is tokenized.
SUBMITTED_TOGETHER = 64


class RequestOptions(TypedDict, total=False):
    """What becomes of a prompt: keywords of `LLM.stream` and `LLM.request`, all optional."""

    enable_thinking: bool  # False: ask a model that can think to answer at once
    tools: Sequence[Mapping[str, Any]] | None  # functions it may call, as in OpenAI's API
    raw: bool  # True: a `str` is text to continue, not what a user said
    priority: int  # lower runs first; 0 where nothing is said
    cache_salt: str | None  # cached prefixes are shared only by requests with the same one


class LLM(Described):
    """A loaded model and its running engine.

    `chat`, `generate` and `embed` wait for whole answers; `stream` iterates over an answer while it
    is made; `submit` takes a prepared `request` and hands its outputs to a callback. All of them
    may be called from any thread. Close it, or use it in a `with` block: that frees the memory.

    Loading raises `ModelError` or `UsageError`, the calls raise `RequestError` or `UsageError`, and
    `EngineClosedError` once the engine has ended.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        """Load a model; fetch it first where it is a Hugging Face id that is not in the cache.

        Args:
            model: a local folder, a Hugging Face id, or `demo`; None: `config.model`.
            config: everything else about the engine; None: the defaults.
            options: fields of `EngineConfig` by name, for example `max_model_len=4096`. They win
                over `config`; those that are None count as not given.
        """
        from nvcli.engine.engine import Engine
        from nvcli.engine.engine_thread import EngineThread
        from nvcli.engine.executor import TensorParallelDevice, make_device
        from nvcli.models.config import ModelConfig
        from nvcli.models.resolve import resolve_model
        from nvcli.text import load_tokenizer

        if model is not None:
            options["model"] = model
        given = EngineConfig.from_options(**options)
        if config is not None:
            given = config.replace(**{k: v for k, v in options.items() if v is not None})
        self.config = given
        self.model_name = given.model
        folder = resolve_model(given.model)
        self.folder = folder
        self.model_config: ModelConfig = ModelConfig.from_hf(folder)
        self._tokenizer = load_tokenizer(folder, is_optional=given.load_format == "dummy")
        vocab_size = self.model_config.vocab_size
        eos_token_ids = frozenset(self.model_config.eos_token_ids)
        if self._tokenizer is not None:
            vocab_size = min(vocab_size, self._tokenizer.size)
            eos_token_ids |= frozenset(self._tokenizer.eos_token_ids)
        self.vocab_size, self.eos_token_ids = vocab_size, eos_token_ids
        self._runner = make_device(folder, self.model_config, given, vocab_size=vocab_size)
        engine = Engine(
            self._runner,
            self._tokenizer,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            max_num_batched_tokens=self._runner.max_num_batched_tokens,
            depth=self._runner.depth,
            enable_prefix_caching=given.enable_prefix_caching,
            seed=given.seed,
        )
        self._engine = engine
        self.is_demo = given.model == DEFAULT_MODEL
        self.max_model_len = self._runner.max_model_len
        self.max_num_seqs = self._runner.max_num_seqs
        self.hidden_size = self.model_config.hidden_size
        self.startup: StartupReport = self._runner.startup
        if isinstance(self._runner, TensorParallelDevice):
            self._thread: EngineThread = EngineThread(engine, self._runner.abandon)
            self._runner.watch(self._thread.fail)
        else:
            self._thread = EngineThread(engine)
        self._request_ids = itertools.count()

    # --- how it is doing --------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """False once the engine was closed or its thread has died."""
        return self._thread.is_alive

    @property
    def error(self) -> EngineClosedError | None:
        """What ended the engine; None while it is alive."""
        return self._thread.error

    def watch_steps(self, callback: Callable[[StepPlan, float, float], None] | None) -> None:
        """Call `callback(plan, start, end)` after each step, on the engine's thread; None: stop."""
        self._engine.watch_steps(callback)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    # --- text and parameters ----------------------------------------------------------------------

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def render(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The exact text the model reads for `messages`. Raises `TemplateError`."""
        return self.tokenizer.render(messages, tools=tools, enable_thinking=enable_thinking)

    # --- generation -------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> OutputStream:
        """Iterate over what is new after each step, for each of the request's n outputs.

        The request is checked and queued at once. Raises what `request` and `submit` raise.
        """
        return OutputStream(self, self.request(prompt, params, **options))

    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        enable_thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> RequestOutput:
        """Answer a conversation. Raises `InvalidParameterError` when `params.n` is not 1."""
        check_params(params)
        if params is not None and params.n != 1:
            raise InvalidParameterError(
                f"chat gives one answer, n is {params.n}", hint="Use stream.", param="n"
            )
        deltas = self.stream(messages, params, enable_thinking=enable_thinking, tools=tools)
        return fold_outputs(list(deltas))

    @frozen_heap()
    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue texts or token ids, all in one batch.

        Returns the outputs in order: `n` for the first prompt, then for the next. A prompt that
        cannot be served gives an output with `finish_reason` ERROR; the others go on.

        Raises `InvalidParameterError` when there are not as many `params` as prompts.
        """
        from nvcli.engine.engine_thread import error_outputs

        batch = as_batch(prompts)
        each = [params] * len(batch) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(batch):
            raise InvalidParameterError(
                f"there are {len(batch)} prompts and {len(each)} params", param="params"
            )
        for prompt_params in each:
            check_params(prompt_params)
        results: dict[str, list[RequestOutput]] = {}  # by request, in the order of the prompts

        def requests() -> Iterator[Request]:
            for prompt, prompt_params in zip(batch, each, strict=True):
                try:
                    request = self.request(prompt, prompt_params, raw=True, is_streaming=False)
                    self._engine.validate(request)
                except (RequestError, UsageError) as error:
                    indices = set(range(1 if prompt_params is None else prompt_params.n))
                    request_id = self.next_request_id()
                    results[request_id] = error_outputs(request_id, indices, error)
                else:
                    results[request.request_id] = []
                    yield request

        self._run(requests(), results)
        return [o for outputs in results.values() for o in sorted(outputs, key=lambda o: o.index)]

    def embed(
        self, prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
    ) -> list[tuple[float, ...]]:
        """One vector of unit length for each prompt: the last token's hidden state.

        Texts get `<|endoftext|>` behind them, as Qwen3-Embedding wants it; token ids are taken as
        they are. Raises `RequestError` or `UsageError` for a prompt that cannot be served; then
        none is.
        """
        from nvcli.engine.engine import Request

        requests = [
            Request(
                request_id=self.next_request_id(),
                prompt_token_ids=(
                    ended(self.tokenizer.encode(prompt, parse_special=False), self.tokenizer)
                    if isinstance(prompt, str)
                    else as_token_ids(prompt)
                ),
                params=SamplingParams(max_tokens=0),
                is_streaming=False,
                pools=(),
            )
            for prompt in as_batch(prompts)
        ]
        results: dict[str, list[RequestOutput]] = {}
        for request in requests:
            self._engine.validate(request)
            results[request.request_id] = []
        self._run(iter(requests), results)
        vectors = []
        for (output,) in results.values():
            if output.pooled is None:
                raise RequestError(output.error or "the engine gave no hidden state")
            vectors.append(unit_vector(output.pooled))
        return vectors

    def _run(self, requests: Iterator[Request], results: dict[str, list[RequestOutput]]) -> None:
        """Submit valid requests and wait for all outputs of all of them, which are put into
        `results` by request id. Whoever interrupts the wait ends what is still running.
        """
        outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
        num_open = 0
        try:
            while together := list(itertools.islice(requests, SUBMITTED_TOGETHER)):
                num_open += sum(request.params.n for request in together)
                self._thread.submit_together(together, outputs.put)
            while num_open > 0:
                for output in outputs.get():
                    results[output.request_id].append(output)
                    num_open -= 1
        finally:
            if num_open > 0:
                for request_id in results:
                    self.abort(request_id)

    # --- one request at a time, without waiting ---------------------------------------------------

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        enable_thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        raw: bool = False,
        is_streaming: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        """Turn a prompt into a request for `submit`: rendered, tokenized, with default sampling.

        A `str` is one user message, or with `raw` a text to continue; token ids are continued as
        they are; messages may be `Message`s or OpenAI's dicts. `RequestOptions` explains the
        keywords; without `is_streaming` the request has one output, at its end.

        Raises `TemplateError` for messages that cannot be rendered, `InvalidParameterError` for a
        prompt that is neither text, messages nor token ids.
        """
        from nvcli.engine.engine import Request

        check_params(params)
        if isinstance(tools, str) or not all(isinstance(tool, Mapping) for tool in tools or ()):
            raise InvalidParameterError("tools must be a list of mappings", param="tools")
        is_chat = False
        if isinstance(prompt, str) and raw:
            token_ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, str) or are_messages(prompt):
            messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
            token_ids = self.tokenizer.encode_chat(
                cast("Sequence[Message]", messages), tools=tools, enable_thinking=enable_thinking
            )
            is_chat = True
        else:
            token_ids = as_token_ids(prompt)
        return Request(
            request_id=self.next_request_id(),
            prompt_token_ids=token_ids,
            params=params or self.sampling(enable_thinking=enable_thinking),
            is_chat=is_chat,
            parse_tools=bool(tools),
            is_streaming=is_streaming,
            priority=priority,
            cache_salt=cache_salt,
        )

    def next_request_id(self) -> str:
        return f"req-{next(self._request_ids)}"

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; its outputs go to `sink`, called from the engine's thread.

        Raises `RequestError` or `UsageError` when it cannot be served.
        """
        self._thread.submit(request, sink)

    def abort(self, request_id: str) -> None:
        """End a request within one step; does nothing for an id that is unknown or finished."""
        self._thread.abort(request_id)

    def close_thinking(self, request_id: str) -> None:
        """Let a request that is reasoning answer now; does nothing for one that is not."""
        self._thread.close_thinking(request_id)

    # --- end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the engine and free its memory. Safe to call twice."""
        self._thread.close()
        self._runner.close()

    def __del__(self) -> None:
        if hasattr(self, "_thread") and not sys.is_finalizing():
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
