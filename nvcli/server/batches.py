"""`/v1/batches`: files of requests, answered in the background by the code of `nvcli batch`.

    validating -> in_progress -> finalizing -> completed
         |             |--> cancelling -> cancelled
         +-> failed    |--> expired
                       +--> failed, where the engine or the storage did

Whatever the end of one that has begun, what was answered is in its output file, and every other
request in its error file, with the reason.

One thread takes the batches in order. Their state is on the disk, so a restarted server goes on
where the last one ended: finished lines are kept, the others run again. A storage folder is one
server's: another would run the same batches, and delete what the first one reads.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from nvcli.batch.endpoints import URLS
from nvcli.batch.job import run_job
from nvcli.batch.options import BatchOptions, InputFormat, Order, OutputFormat
from nvcli.batch.sink import OutputLock
from nvcli.errors import NvcliError, UsageError
from nvcli.server.batch_engine import RunProgress, SharedEngine
from nvcli.server.batch_files import add_unanswered, split_output, validate
from nvcli.server.batch_object import OPEN, Batch, batch_error, new_batch, reason_of, shown
from nvcli.server.errors import InUseError, NotReadyError
from nvcli.server.files import FileStore, make_folder, read_objects, write_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nvcli.batch.progress import Counts
    from nvcli.server.engine import ServerEngine

logger = logging.getLogger("nvcli")

ENDPOINTS = URLS
UNANSWERED = {  # by how the batch ended, what is told of a request that had no answer by then
    "expired": "the completion window ended before this request was executed",
    "cancelled": "the batch was cancelled before this request was executed",
    "failed": "the batch failed before this request was executed; its errors say why",
}


class BatchManager:
    """Owns the batches folder and the thread that works through it.

    Raises `UsageError` where another server has the storage, `OutputError` where it cannot be
    written.
    """

    def __init__(self, storage: Path, files: FileStore) -> None:
        self.folder = make_folder(storage, "batches")
        self._held = ExitStack()  # until the thread has ended
        try:
            self._held.enter_context(OutputLock(self.folder))
        except UsageError as error:
            raise UsageError(
                f"another server has {storage}", hint="Give each its own.", param="storage"
            ) from error
        self._files = files
        self._lock = threading.RLock()
        self._batches: dict[str, Batch] = {b["id"]: b for b in read_objects(self.folder)}
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._taken: set[str] = set()  # batches that a thread is at
        self._running: tuple[str, SharedEngine] | None = None
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    def start(self, llm: ServerEngine, model_names: tuple[str, ...]) -> None:
        """Begin to work, first on what an earlier server left."""
        self._llm = llm
        self._model_names = model_names
        for batch in self.all():
            if batch["status"] in OPEN:
                self._queue.put(batch["id"])
        self._thread = threading.Thread(target=self._work, name="nvcli-batches", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave off; what is not finished stays for the next server, and the folder is its."""
        with self._lock:
            self._is_stopping = True
            if self._running is not None:
                self._running[1].stop()
        self._queue.put(None)
        if self._thread is None:
            self._held.close()
        else:
            self._thread.join(10)

    # --- what endpoints ask -----------------------------------------------------------------------

    def create(self, file_id: str, endpoint: str, window: str, metadata: dict[str, str]) -> Batch:
        """Raises `NotFoundError` for a file that is not there, `NotReadyError` after `stop`."""
        batch = new_batch(file_id, endpoint, window, metadata)
        made = shown(batch)  # as it begins, even where it has failed by the time of the reply
        with self._lock:
            self._check_open()
            self._files.get(file_id, "input_file_id")  # until here it could be deleted
            self._save(batch)  # before it is known: what cannot be kept is not there
            self._batches[batch["id"]] = batch
        self._queue.put(batch["id"])
        return made

    def get(self, batch_id: str) -> Batch | None:
        with self._lock:
            batch = self._batches.get(batch_id)
            return None if batch is None else shown(batch)

    def all(self) -> list[Batch]:
        with self._lock:
            return [shown(batch) for batch in self._batches.values()]

    def delete_file(self, file_id: str) -> None:
        """Raises `InUseError` for the input of a batch that is not over, `NotFoundError`, and
        `NotReadyError` after `stop`."""
        with self._lock:
            self._check_open()
            for batch in self._batches.values():
                if batch["input_file_id"] == file_id and batch["status"] in OPEN:
                    raise InUseError(
                        f"the file is the input of {batch['id']}, which is not over",
                        hint="Cancel it, or wait for its end.",
                    )
            self._files.delete(file_id)

    def cancel(self, batch_id: str) -> Batch:
        """Ends it when it is still open; does nothing otherwise. One that waits for its turn ends
        now: it holds its input, and the batches before it may take hours. Raises `NotReadyError`
        after `stop`."""
        with self._lock:
            self._check_open()
            batch = self._batches[batch_id]
            if batch["status"] in ("validating", "in_progress"):
                self._move(batch, "cancelling")
                if self._running is not None and self._running[0] == batch_id:
                    self._running[1].stop()
        self._work_on(batch_id, self._finish)
        return shown(batch)

    def _check_open(self) -> None:
        if self._is_stopping:
            raise NotReadyError("the server is shutting down", hint="Try the next one.")

    # --- the work ---------------------------------------------------------------------------------

    def _work(self) -> None:
        while (batch_id := self._queue.get()) is not None:
            if self._is_stopping or not self._llm.is_alive:
                break  # it is the next server's
            self._work_on(batch_id, self._run)
        with self._lock:
            self._is_stopping = True
        self._held.close()

    def _work_on(self, batch_id: str, work: Callable[[Batch], None]) -> None:
        """Nothing where it is over, or another thread is at it, which then ends it."""
        batch = self._batches[batch_id]
        with self._lock:
            if batch["status"] not in OPEN or batch_id in self._taken:
                return
            self._taken.add(batch_id)
        try:
            work(batch)
        except Exception as error:  # noqa: BLE001 - it is told there
            self._fail(batch, error)
        finally:
            with self._lock:
                self._taken.discard(batch_id)

    def _fail(self, batch: Batch, error: Exception) -> None:
        is_bug = not isinstance(error, NvcliError | OSError)
        logger.error("batch %s failed: %s", batch["id"], error, exc_info=is_bug)
        reason = reason_of(error, hidden=(self.folder, self._files.folder))
        try:
            self._refuse(batch, [batch_error("batch_failed", reason)])
        except Exception as worse:  # noqa: BLE001 - the batches behind it are not to suffer
            logger.error("batch %s: what it has answered cannot be kept: %s", batch["id"], worse)
            try:
                self._move(batch, "failed")
            except OSError as worst:  # it is over all the same, until the next server takes it up
                logger.error("batch %s: its end cannot be written: %s", batch["id"], worst)

    def _run(self, batch: Batch) -> None:
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
            self._answer(batch)
        if self._is_stopping and batch["status"] == "in_progress":
            return
        self._finish(batch)

    def _output(self, batch: Batch) -> Path:
        return self.folder / f"{batch['id']}.out.jsonl"

    def _answer(self, batch: Batch) -> None:
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
            output=self._output(batch),
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
                progress=RunProgress(lambda counts: self._count(batch, counts)),
                tells_safe=False,  # its client has nothing to resume
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

    def _finish(self, batch: Batch) -> None:
        """Part the lines into two files and say how it ended."""
        was = batch["status"]
        if was == "in_progress":
            with self._lock:
                self._move(batch, "finalizing")
        self._end(batch, "cancelled" if was == "cancelling" else None)

    def _end(self, batch: Batch, ended: str | None) -> None:
        """ended: None finds out whether it is completed or expired."""
        good, bad = (self.folder / f"{batch['id']}.{kind}.jsonl" for kind in ("good", "bad"))
        num_good, num_bad, ids = split_output(self._output(batch), good, bad)
        total = batch["request_counts"]["total"]  # 0 where it was not looked at yet
        if ended is None:
            ended = "completed" if num_good + num_bad >= total else "expired"
        if ended != "completed" and total:
            source = self._files.path(batch["input_file_id"])
            code = f"batch_{ended}"
            num_bad += add_unanswered(bad, source, ids, code, UNANSWERED[ended])
        with self._lock:
            for path, key in ((good, "output_file_id"), (bad, "error_file_id")):
                if path.stat().st_size:
                    name = f"{batch['id']}_{key.partition('_')[0]}.jsonl"
                    batch[key] = self._files.add(path, name, "batch_output")["id"]
                else:
                    path.unlink()
            counts = batch["request_counts"]
            counts["completed"], counts["failed"] = num_good, num_bad
            self._move(batch, ended)
        for path in self.folder.glob(f"{batch['id']}.out.jsonl*"):
            path.unlink(missing_ok=True)

    def _refuse(self, batch: Batch, errors: list[dict[str, Any]]) -> None:
        with self._lock:
            batch["errors"] = {"object": "list", "data": errors}
            if batch["status"] != "in_progress":
                self._move(batch, "failed")
                return
        self._end(batch, "failed")

    def _move(self, batch: Batch, status: str) -> None:
        batch["status"] = status
        batch[f"{status}_at"] = int(time.time())
        self._save(batch)

    def _save(self, batch: Batch) -> None:
        write_json(self.folder / f"{batch['id']}.json", batch)
