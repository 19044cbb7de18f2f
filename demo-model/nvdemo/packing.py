"""Rows of packed samples for training, made by worker processes.

A block holds ``ROWS`` rows of 2,048 tokens. A row holds whole samples one after the other; ``docs``
numbers them, so that attention stays inside a sample and positions start again. ``where`` and
``target`` list the places with a loss: the tokens that the assistant's last turn is made of.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer

from nvdemo.mix import conversation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.queues import Queue
    from pathlib import Path

ROWS = 64
LENGTH = 2048
LOSSES = ROWS * LENGTH * 3 // 8  # room for places with a loss; a block holds about 28 %
_CHUNK = 256
_OPEN_ROWS = 24

Block = dict[str, np.ndarray[Any, Any]]


@dataclass
class Row:
    docs: list[tuple[list[int], int]] = field(
        default_factory=list
    )  # (tokens, length of the prompt)
    used: int = 0


def encode_samples(
    tokenizer: Tokenizer, seed: int, start: int, count: int
) -> list[tuple[list[int], int]]:
    """Samples as tokens, with the length of the prompt; the ones that do not fit are left out."""
    texts: list[str] = []
    for index in range(start, start + count):
        sample = conversation(seed, index)
        texts += [sample.prompt(), sample.completion()]
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    pairs = [(encoded[i].ids, encoded[i + 1].ids) for i in range(0, len(texts), 2)]
    return [
        (prompt + answer, len(prompt))
        for prompt, answer in pairs
        if len(prompt) + len(answer) <= LENGTH
    ]


def build_block(rows: list[Row]) -> Block:
    """The last token of a sample is only a target, never an input."""
    tokens = np.zeros((len(rows), LENGTH), dtype=np.int16)
    docs = np.zeros((len(rows), LENGTH), dtype=np.int16)
    where: list[np.ndarray[Any, Any]] = []
    target: list[np.ndarray[Any, Any]] = []
    for r, row in enumerate(rows):
        at = 0
        for number, (ids, prompt) in enumerate(row.docs):
            size = len(ids) - 1
            tokens[r, at : at + size] = ids[:-1]
            docs[r, at : at + size] = number
            where.append(
                np.arange(r * LENGTH + at + prompt - 1, r * LENGTH + at + size, dtype=np.int32)
            )
            target.append(np.asarray(ids[prompt:], dtype=np.int16))
            at += size
        docs[r, at:] = len(row.docs)
    room = LOSSES * len(rows) // ROWS
    places, answers = np.concatenate(where)[:room], np.concatenate(target)[:room]
    pad = room - len(places)
    return {
        "tokens": tokens,
        "docs": docs,
        "where": np.pad(places, (0, pad)),
        "target": np.pad(answers, (0, pad), constant_values=-1),
    }


def blocks(
    tokenizer: Tokenizer, seed: int, worker: int, workers: int, rows: int = ROWS
) -> Iterator[Block]:
    """This worker's share of the stream of samples, packed; never ends."""
    waiting = [Row() for _ in range(_OPEN_ROWS)]
    full: list[Row] = []
    chunk = worker
    while True:
        for ids, prompt in encode_samples(tokenizer, seed, chunk * _CHUNK, _CHUNK):
            size = len(ids) - 1
            fitting = [row for row in waiting if row.used + size <= LENGTH]
            if not fitting:
                fullest = max(waiting, key=lambda row: row.used)
                waiting.remove(fullest)
                full.append(fullest)
                fitting = [Row()]
                waiting.append(fitting[0])
            row = fitting[0]
            row.docs.append((ids, prompt))
            row.used += size
        chunk += workers
        while len(full) >= rows:
            yield build_block(full[:rows])
            del full[:rows]


def _work(path: str, seed: int, worker: int, workers: int, rows: int, out: Queue[Block]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(path)
    for block in blocks(tokenizer, seed, worker, workers, rows):
        out.put(block)


class Feed:
    """Blocks on the device, fetched ahead. Build it before CUDA is used: it forks."""

    def __init__(self, folder: Path, seed: int, workers: int, rows: int) -> None:
        context = multiprocessing.get_context("fork")
        self._blocks: Queue[Block] = context.Queue(maxsize=300)
        self._ready: queue.Queue[dict[str, torch.Tensor]] = queue.Queue(maxsize=6)
        path = str(folder / "tokenizer.json")
        self._workers = [
            context.Process(
                target=_work, args=(path, seed, i, workers, rows, self._blocks), daemon=True
            )
            for i in range(workers)
        ]
        for process in self._workers:
            process.start()

    def start(self, device: torch.device) -> None:
        threading.Thread(target=self._fetch, args=(device,), daemon=True).start()

    def _fetch(self, device: torch.device) -> None:
        while True:
            try:
                block = {
                    name: torch.from_numpy(array) for name, array in self._blocks.get().items()
                }
            except (EOFError, OSError):  # the queue was closed: training is over
                return
            if device.type == "cuda":
                block = {
                    name: t.pin_memory().to(device, non_blocking=True) for name, t in block.items()
                }
            self._ready.put(block)

    def next(self) -> dict[str, torch.Tensor]:
        return self._ready.get()

    def waiting(self) -> int:
        """Blocks made ahead; near zero means that the workers are too slow."""
        return self._blocks.qsize()

    def close(self) -> None:
        for process in self._workers:
            process.terminate()
