"""The feeding thread: reads, checks and tokenizes records ahead of the engine, within the window.

It stops reading when as many records are on their way as the window holds, and goes on when one is
written: memory does not depend on the input. What it finds goes to the run's queue in input order.
"""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvcli.batch.attached import HttpEngine
from nvcli.batch.identity import record_seed
from nvcli.batch.prescan import Duplicate, can_prescan
from nvcli.batch.records import Failure, Record, failed, failure_of
from nvcli.batch.spelling import Teller
from nvcli.batch.walk import walk
from nvcli.errors import NvcliError, UsageError
from nvcli.protocol import (
    ChatRequest,
    PreparedPrompt,
    engine_request,
    prepare_chat,
    prepare_completion,
)
from nvcli.protocol.pooling import EmbeddingRequest, check_dimensions, embedding_prompts
from nvcli.protocol.prepare import pooling_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nvcli.batch.engine import BatchEngine
    from nvcli.batch.existing import ExistingOutput
    from nvcli.batch.options import BatchOptions
    from nvcli.engine.engine import Request
    from nvcli.text import Tokenizer

logger = logging.getLogger("nvcli")


@dataclass(slots=True)
class Prepared:
    """A record ready for the engine: one request for each of its prompts."""

    position: int  # among the records of this run
    record: Record
    prompts: list[PreparedPrompt]
    requests: list[Request]


@dataclass(slots=True)
class Failed:
    position: int
    failure: Failure


@dataclass(slots=True)
class Warned:
    """What the user should know of a record that is run all the same."""

    text: str


@dataclass(slots=True)
class FeedEnd:
    """The input is read, or cannot be read on."""

    error: NvcliError | None = None
    num_records: int = 0


Fed = Prepared | Failed | Warned | FeedEnd


class Preparer:
    """From a row to a prepared record or a failure. Needs the engine only for its parameters."""

    def __init__(
        self, options: BatchOptions, engine: BatchEngine, tokenizer: Tokenizer | None, seed: int
    ) -> None:
        self._options = options
        self._engine = engine
        self._tokenizer = tokenizer
        self._seed = seed

    def prepare(self, record: Record, position: int) -> Prepared | Failed:
        try:
            return self._prepare(record, position)
        except NvcliError as error:
            return Failed(position, failure_of(record, error))
        except Exception as error:
            logger.debug("record at line %d", record.line, exc_info=error)
            reason = NvcliError(f"the record cannot be prepared: {type(error).__name__}: {error}")
            return Failed(position, failure_of(record, reason))

    def _prepare(self, record: Record, position: int) -> Prepared:
        if isinstance(self._engine, HttpEngine):
            request_id = f"batch-{position}-0"
            request: Any = self._engine.prepare(record, request_id, self._options, self._seed)
            return Prepared(position, record, [], [request])
        prompts = prepare_prompts(record, self._tokenizer, self._engine.max_model_len)
        asked = record.request
        if isinstance(asked, EmbeddingRequest):
            check_dimensions(asked, self._engine.hidden_size)
            reads = [
                pooling_request(f"batch-{position}-{number}", prompt.token_ids)
                for number, prompt in enumerate(prompts)
            ]
            return Prepared(position, record, prompts, reads)
        requests = []
        has_seed = "seed" in asked.sampling
        for number, prompt in enumerate(prompts):
            sampling: dict[str, Any] = record.sampling
            if not has_seed or number > 0:
                base = record.sampling["seed"] if has_seed else self._seed
                sampling = {**sampling, "seed": record_seed(base, record.index, number)}
            requests.append(
                engine_request(
                    self._engine,
                    prompt,
                    asked,
                    request_id=f"batch-{position}-{number}",
                    is_streaming=False,
                    sampling=sampling,
                )
            )
        return Prepared(position, record, prompts, requests)


def prepare_prompts(
    record: Record, tokenizer: Tokenizer | None, max_model_len: int | None
) -> list[PreparedPrompt]:
    """Tokenize a record. Raises `NvcliError`s of the record's own making."""
    request = record.request
    if not isinstance(request, ChatRequest | EmbeddingRequest):
        return prepare_completion(request, tokenizer, max_model_len=max_model_len)
    if tokenizer is None:
        raise UsageError("the model has no tokenizer", hint="Give prompts as token ids.")
    if isinstance(request, EmbeddingRequest):
        limit = sys.maxsize if max_model_len is None else max_model_len
        ids = embedding_prompts(request, tokenizer, max_model_len=limit)
        return [PreparedPrompt(token_ids=each) for each in ids]
    prompt = prepare_chat(
        request, tokenizer, enable_thinking=record.enable_thinking, max_model_len=max_model_len
    )
    return [prompt]


class Feed:
    """Raises nothing: what goes wrong is in the `FeedEnd`."""

    def __init__(
        self,
        options: BatchOptions,
        existing: ExistingOutput | None,
        preparer: Preparer,
        put: Callable[[Fed], object],
        window: int,
    ) -> None:
        self._options = options
        self._existing = existing
        self._preparer = preparer
        self._put = put
        self._teller = None  # where the pre-scan has told
        if not can_prescan(options.input):
            self._teller = Teller(lambda text: put(Warned(text)))
        self._slots = threading.Semaphore(window)
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="nvcli-batch-feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def release(self, count: int) -> None:
        """So many records are written: as many more may be read."""
        self._slots.release(count)

    def stop(self) -> None:
        """Read no more. The thread may hang in a read; it is left behind at exit."""
        self._is_stopped = True
        self._slots.release()

    def _run(self) -> None:
        end = FeedEnd()
        try:
            for item in self._items(end):
                self._put(item)
        except NvcliError as error:
            end.error = error
        except Exception as error:
            logger.debug("the feeding thread ended", exc_info=error)
            end.error = NvcliError(f"the input cannot be read on: {error}")
        self._put(end)

    def _items(self, end: FeedEnd) -> Iterator[Prepared | Failed]:
        position = 0
        for item in walk(self._options, self._existing):
            end.num_records += 1
            if item.is_wanted and not item.is_finished:
                self._slots.acquire()
                if self._is_stopped:
                    return
                checked, first_line = item.parse(), item.assigned.first_line
                if first_line is not None:
                    twice = Duplicate(checked.id, first_line, checked.line)
                    checked = failed(checked, "duplicate_id", twice.message)
                if isinstance(checked, Failure):
                    if self._options.is_strict:
                        raise UsageError(f"line {checked.line}: {checked.message}")
                    yield Failed(position, checked)
                else:
                    if self._teller is not None:
                        self._teller.add(checked.line, checked.doubts)
                    yield self._preparer.prepare(checked, position)
                position += 1
            if self._is_stopped:
                return
