"""The engine: requests in, outputs out, one `step` at a time.

It splits requests into sequences, and wires the core (scheduler, blocks, device) to the output
processor. One thread at a time may call it; `EngineThread` gives it one of its own.

Hot path: yes (`step`).
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from random import SystemRandom
from typing import TYPE_CHECKING

from nvcli.engine.best_of import BestOf
from nvcli.engine.core import EngineCore
from nvcli.engine.output import OutputProcessor
from nvcli.engine.request_checks import RequestChecks
from nvcli.engine.sequence import Sequence
from nvcli.errors import RequestError
from nvcli.text import OutputRouter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nvcli.engine.core import Update
    from nvcli.engine.grammar import Grammar
    from nvcli.engine.step import StepDevice, StepPlan
    from nvcli.text import Tokenizer
    from nvcli.types import RequestOutput, SamplingParams

_MASK_63 = 2**63 - 1


@dataclass(slots=True, kw_only=True)
class Request:
    """One request as the engine takes it. `LLM.request` makes one from text or messages."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    is_chat: bool = False  # the prompt is a rendered chat: thinking and tool calls are split off
    parse_tools: bool = False
    is_streaming: bool = True  # False: one output, at the end
    priority: int = 0  # lower runs first
    cache_salt: str | None = None
    grammar: Grammar | None = None  # what the output must look like
    pools: tuple[int, ...] | None = None  # see `Sequence.pools`; `params.max_tokens` is 0
    arrival: float = field(default_factory=time.monotonic)
    packed: array[int] | None = field(default=None, repr=False)  # prompt as int32, by `validate`


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and counters at one moment; read from any thread, each number on its own."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_blocks: int
    num_free_blocks: int
    num_named_blocks: int  # hold a reusable prefix, whether held or free
    block_size: int
    num_queried_tokens: int  # known tokens of admitted sequences
    num_hit_tokens: int  # of those, found in the prefix cache


class Engine:
    """Requests in by `add`, outputs out by `step`, which serves all of them at once.

    A request that cannot be served raises from `add`. Whatever goes wrong with it later is its last
    output, with `finish_reason` ERROR: `step` raises only what ends the engine.
    """

    def __init__(
        self,
        device: StepDevice,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        max_num_batched_tokens: int,
        depth: int = 0,
        enable_prefix_caching: bool = True,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            tokenizer: None: requests and outputs are token ids, without text.
            vocab_size: token ids a request may use, 0 .. vocab_size - 1.
            eos_token_ids: end a sequence, unless it has `ignore_eos`.
            max_num_batched_tokens: token budget of a step.
            depth: 1: launch the next step before the last one is read; 0: do not.
            seed: seeds requests without a seed of their own; None: fresh entropy.
        """
        self._device = device
        self._tokenizer = tokenizer
        self._checks = RequestChecks(
            max_model_len=device.max_model_len,
            num_pool_tokens=device.num_blocks * device.block_size,
            vocab_size=vocab_size,
            has_tokenizer=tokenizer is not None,
        )
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._random = SystemRandom() if seed is None else None
        self._base_seed = seed or 0
        self._num_requests = 0
        self._num_sequences = 0
        self._live: dict[str, dict[int, Sequence]] = {}  # request id -> index -> sequence
        self._best_of: dict[str, BestOf] = {}
        self._deliver: Callable[[list[RequestOutput]], None] = _drop  # of the step that runs
        self._processor = OutputProcessor()
        self._core = EngineCore(
            device,
            self._consume,
            max_num_batched_tokens=max_num_batched_tokens,
            depth=depth,
            enable_prefix_caching=enable_prefix_caching,
            vocab_size=vocab_size,
            clock=clock,
        )
        self._processor.attach(self._core)

    @property
    def max_model_len(self) -> int:
        return self._device.max_model_len

    @property
    def has_unfinished(self) -> bool:
        return self._core.has_unfinished

    def watch_steps(self, callback: Callable[[StepPlan, float, float], None] | None) -> None:
        """Call `callback(plan, start, end)` after each collected step, from the engine's thread;
        None: no more. What it costs is part of the next step's time.
        """
        self._core.on_step = callback

    def stats(self) -> EngineStats:
        scheduler, blocks = self._core.scheduler, self._core.scheduler.blocks
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_preemptions=scheduler.num_preemptions,
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free,
            num_named_blocks=blocks.num_named,
            block_size=blocks.block_size,
            num_queried_tokens=blocks.num_queried_tokens,
            num_hit_tokens=blocks.num_hit_tokens,
        )

    def validate(self, request: Request) -> None:
        """Raises what `RequestChecks.validate` raises; may be called from any thread."""
        self._checks.validate(request)

    def add(self, request: Request, *, is_valid: bool = False) -> None:
        """Queue a request. Raises what `validate` raises, unless that has let it through and
        `is_valid` says so, and `RequestError` for an id in use.
        """
        if not is_valid:
            self.validate(request)
        if request.request_id in self._live:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        params = request.params
        best_of = None  # collects what is withheld until all answers are there
        if params.num_sequences > params.n:
            keeps_logprobs = params.logprobs is not None
            best_of = BestOf(params.n, params.num_sequences, keeps_logprobs=keeps_logprobs)
            params = params.replace(logprobs=params.logprobs or 0)
        seed = self._seed_of(params)
        room = self.max_model_len - len(request.prompt_token_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        packed = request.packed or array("i", request.prompt_token_ids)
        sequences = []
        for index in range(params.num_sequences):
            seq = Sequence(
                seq_id=self._num_sequences,
                prompt_token_ids=packed,
                params=params,
                max_output_tokens=limit,
                seed=_seed_of_index(seed, index),
                request_id=request.request_id,
                index=index,
                eos_token_ids=frozenset() if params.ignore_eos else self._eos_token_ids,
                priority=request.priority,
                cache_salt=request.cache_salt,
                pools=request.pools,
                arrival=request.arrival,
            )
            self._num_sequences += 1
            self._processor.add(
                seq,
                self._router(request),
                is_streaming=request.is_streaming and best_of is None,
                grammar=request.grammar,
            )
            sequences.append(seq)
        self._live[request.request_id] = {seq.index: seq for seq in sequences}
        if best_of is not None:
            self._best_of[request.request_id] = best_of
        for seq in sequences:
            self._core.add(seq)

    def _seed_of(self, params: SamplingParams) -> int:
        """The request's seed: its own, the next of the engine's, or fresh entropy."""
        self._num_requests += 1
        if params.seed is not None:
            return params.seed
        if self._random is not None:
            return self._random.getrandbits(63)
        return _seed_of_index(self._base_seed, self._num_requests)

    def _router(self, request: Request) -> OutputRouter | None:
        if self._tokenizer is None:
            return None
        params = request.params
        return OutputRouter(
            self._tokenizer,
            request.prompt_token_ids,
            parse_reasoning=request.is_chat,
            parse_tools=request.parse_tools,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def abort(self, request_id: str) -> bool:
        """End a request with reason `abort`; its last output comes from the next `step`.

        Returns False for an id that is unknown or already finished.
        """
        sequences = self._live.get(request_id, {})
        running = [seq for seq in sequences.values() if not seq.is_finished]
        for seq in running:
            self._core.abort(seq)
        return bool(running)

    def close_thinking(self, request_id: str) -> None:
        """End the reasoning of a request now and let it answer; one that answers is left alone."""
        for seq in self._live.get(request_id, {}).values():
            if not seq.is_finished:
                self._processor.close_thinking(seq)

    def step(self, deliver: Callable[[list[RequestOutput]], None]) -> None:
        """Advance every running sequence once, and hand what is new to `deliver`.

        With run-ahead that is what the step before gave: it is delivered after this step was
        launched, while the device computes it.
        """
        self._deliver = deliver
        self._core.step()

    def _consume(self, updates: list[Update]) -> None:
        outputs: list[RequestOutput] = []
        for output in self._processor.consume(updates):
            collector = self._best_of.get(output.request_id)
            outputs.extend([output] if collector is None else collector.add(output))
            if output.is_finished:
                self._forget(output.request_id, output.index)
        if outputs:
            self._deliver(outputs)

    def _forget(self, request_id: str, index: int) -> None:
        live = self._live[request_id]
        del live[index]
        if not live:
            del self._live[request_id]
            self._best_of.pop(request_id, None)


def _drop(outputs: list[RequestOutput]) -> None:
    raise AssertionError("outputs come about in `step` only")


def _seed_of_index(seed: int, index: int) -> int:
    """Seed of the index-th output of a request: its own for the first, then splitmix64 of it.

    Constants and mixing: Steele, Lea, Flood, "Fast splittable pseudorandom number generators".
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) & _MASK_63
