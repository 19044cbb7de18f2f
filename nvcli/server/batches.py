"""`/v1/batches`: files of requests, answered in the background by the code of `nvcli batch`.

    validating -> in_progress -> finalizing -> completed
         |             |--> cancelling -> cancelled
         +-> failed    +--> expired

One thread takes the batches in order. Their state is on the disk, so a restarted server goes on
where the last one ended: finished lines are kept, the others run again.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from nvcli.batch.endpoints import URLS
from nvcli.batch.job import run_job
from nvcli.batch.options import BatchOptions, InputFormat, Order, OutputFormat
from nvcli.errors import NvcliError
from nvcli.server.batch_engine import SharedEngine
from nvcli.server.batch_files import batch_error, split_output, validate
from nvcli.server.files import FileStore, read_objects, write_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nvcli.batch.progress import Counts
    from nvcli.server.engine import ServerEngine

logger = logging.getLogger("nvcli")

ENDPOINTS = URLS
WINDOW_S = 24 * 3600
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")
_MOMENTS = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)

Batch = dict[str, Any]


class BatchManager:
    """Owns the batches folder and the thread that works through it."""

    def __init__(self, storage: Path, files: FileStore) -> None:
        self.folder = storage / "batches"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._files = files
        self._lock = threading.RLock()
        self._batches: dict[str, Batch] = {b["id"]: b for b in read_objects(self.folder)}
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._running: tuple[str, SharedEngine] | None = None
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    def start(self, llm: ServerEngine, model_names: tuple[str, ...]) -> None:
        """Begin to work, first on what an earlier server left."""
        self._llm = llm
        self._model_names = model_names
        for batch in self.all():
            if batch["status"] in _OPEN:
                self._queue.put(batch["id"])
        self._thread = threading.Thread(target=self._work, name="nvcli-batches", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave off; what is not finished stays for the next server."""
        with self._lock:
            self._is_stopping = True
            if self._running is not None:
                self._running[1].stop()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(10)

    # --- what endpoints ask -----------------------------------------------------------------------

    def create(self, file_id: str, endpoint: str, window: str, metadata: dict[str, str]) -> Batch:
        now = int(time.time())
        batch: Batch = {
            "id": f"batch_{secrets.token_hex(12)}",
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": file_id,
            "completion_window": window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + WINDOW_S,
            **dict.fromkeys(_MOMENTS),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        made = _shown(batch)  # as it begins, even where it has failed by the time of the reply
        with self._lock:
            self._batches[batch["id"]] = batch
            self._save(batch)
        self._queue.put(batch["id"])
        return made

    def get(self, batch_id: str) -> Batch | None:
        with self._lock:
            batch = self._batches.get(batch_id)
            return None if batch is None else _shown(batch)

    def all(self) -> list[Batch]:
        with self._lock:
            return [_shown(batch) for batch in self._batches.values()]

    def reader_of(self, file_id: str) -> str | None:
        """The id of an open batch that this file is the input of."""
        with self._lock:
            for batch in self._batches.values():
                if batch["input_file_id"] == file_id and batch["status"] in _OPEN:
                    return str(batch["id"])
        return None

    def cancel(self, batch_id: str) -> Batch:
        """Ends it when it is still open; does nothing otherwise."""
        with self._lock:
            batch = self._batches[batch_id]
            if batch["status"] in ("validating", "in_progress"):
                self._move(batch, "cancelling")
                if self._running is not None and self._running[0] == batch_id:
                    self._running[1].stop()
            return _shown(batch)

    # --- the work ---------------------------------------------------------------------------------

    def _work(self) -> None:
        while (batch_id := self._queue.get()) is not None and not self._is_stopping:
            batch = self._batches[batch_id]
            try:
                self._run(batch)
            except Exception as error:
                is_ours = not isinstance(error, NvcliError)
                logger.error("batch %s failed: %s", batch_id, error, exc_info=is_ours)
                message = type(error).__name__ if is_ours else str(error)
                self._refuse(batch, [batch_error("batch_failed", message)])

    def _run(self, batch: Batch) -> None:
        output = self.folder / f"{batch['id']}.out.jsonl"
        path = self._files.path(batch["input_file_id"])
        if batch["status"] in ("validating", "in_progress") and not path.exists():
            self._refuse(batch, [batch_error("invalid_input_file", "the input file is gone")])
            return
        if batch["status"] == "validating":
            total, errors = validate(path, batch["endpoint"], self._model_names)
            if errors:
                self._refuse(batch, errors)
                return
            with self._lock:
                batch["request_counts"]["total"] = total
                if batch["status"] == "validating":
                    self._move(batch, "in_progress")
        if batch["status"] == "in_progress":
            self._answer(batch, output)
        if self._is_stopping and batch["status"] == "in_progress":
            return
        self._finish(batch, output)

    def _answer(self, batch: Batch, output: Path) -> None:
        engine = SharedEngine(self._llm, batch["id"], self._model_names[0])
        with self._lock:
            self._running = (batch["id"], engine)
            if self._is_stopping or batch["status"] != "in_progress":
                engine.stop()
        timer = threading.Timer(max(0.0, batch["expires_at"] - time.time()), engine.stop)
        timer.daemon = True
        timer.start()
        options = BatchOptions(
            input=str(self._files.path(batch["input_file_id"])),
            output=output,
            input_format=InputFormat.JSONL,
            output_format=OutputFormat.OPENAI,
            order=Order.COMPLETION,
            resume=True,
            force_resume=True,
            window=max(1, self._llm.max_num_seqs // 2),  # the rest is for those who wait
        )
        try:
            run_job(
                options,
                engine.config,
                find_model=lambda: self.folder,  # a changed model is no reason not to go on
                load=lambda: engine,
                progress=_Progress(lambda counts: self._count(batch, counts)),  # type: ignore[arg-type]
            )
        except NvcliError as error:
            is_ours = self._is_stopping or batch["status"] == "cancelling"
            if not is_ours and time.time() < batch["expires_at"]:
                raise
            logger.debug("batch %s was stopped: %s", batch["id"], error)
        finally:
            timer.cancel()
            with self._lock:
                self._running = None

    def _count(self, batch: Batch, counts: Counts) -> None:
        done = counts.num_before + counts.num_written
        with self._lock:
            numbers = batch["request_counts"]
            numbers["failed"] = counts.num_failed
            numbers["completed"] = done - counts.num_failed

    def _finish(self, batch: Batch, output: Path) -> None:
        """Part the lines into two files and say how it ended."""
        was = batch["status"]
        if was == "in_progress":
            with self._lock:
                self._move(batch, "finalizing")
        good, bad = (self.folder / f"{batch['id']}.{kind}.jsonl" for kind in ("good", "bad"))
        numbers = split_output(output, good, bad)
        with self._lock:
            for path, key in ((good, "output_file_id"), (bad, "error_file_id")):
                if path.stat().st_size:
                    name = f"{batch['id']}_{key.partition('_')[0]}.jsonl"
                    batch[key] = self._files.add(path, name, "batch_output")["id"]
                else:
                    path.unlink()
            counts = batch["request_counts"]
            counts["completed"], counts["failed"] = numbers
            is_whole = sum(numbers) >= counts["total"]
            ended = "cancelled" if was == "cancelling" else "completed" if is_whole else "expired"
            self._move(batch, ended)
        for path in self.folder.glob(f"{batch['id']}.out.jsonl*"):
            path.unlink(missing_ok=True)

    def _refuse(self, batch: Batch, errors: list[dict[str, Any]]) -> None:
        with self._lock:
            batch["errors"] = {"object": "list", "data": errors}
            self._move(batch, "failed")

    def _move(self, batch: Batch, status: str) -> None:
        batch["status"] = status
        batch[f"{status}_at"] = int(time.time())
        self._save(batch)

    def _save(self, batch: Batch) -> None:
        write_json(self.folder / f"{batch['id']}.json", batch)


def _shown(batch: Batch) -> Batch:
    """As OpenAI's description has it: what is not there yet is left out, never null."""
    return {key: value for key, value in batch.items() if value is not None}


class _Progress:
    """Takes the place of the command line's progress."""

    def __init__(self, count: Callable[[Counts], None]) -> None:
        self._count = count

    def update(self, counts: Counts) -> None:
        self._count(counts)

    def finish(self, counts: Counts) -> None:
        self._count(counts)

    def status(self, counts: Counts) -> None:
        pass

    def note(self, text: str) -> None:
        logger.debug("%s", text)
