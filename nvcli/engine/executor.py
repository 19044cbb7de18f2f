"""The engine's device: one runner in this process, or the ranks of a tensor-parallel group.

`TensorParallelDevice` looks like a runner. Rank 0's runner is in this process; each plan is first
sent to the workers, as a record, and then launched here. All ranks compute the same logits and
sample them alike, so workers send no results back. All they ever report is an error, and it ends
the engine: after a step that some ranks have run and others have not, none could be trusted.
"""

from __future__ import annotations

import gc
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nvcli.engine.plan_record import encode_plan
from nvcli.engine.workers import Workers
from nvcli.errors import EngineClosedError, UsageError
from nvcli.paths import check_current_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nvcli.config import EngineConfig
    from nvcli.engine.model_runner import ModelRunner
    from nvcli.engine.step import StepPlan, StepResult
    from nvcli.engine.step_runner import RunnerTicket
    from nvcli.errors import NvcliError
    from nvcli.models.config import ModelConfig

# A step that takes longer hangs: on a GPU it takes seconds at most. On a CPU it may take any time,
# and a rank that waits for another is ended by `parallel.TIMEOUT`.
STEP_S: dict[str, float | None] = {"cuda": 300.0, "cpu": None}


def make_device(
    folder: Path, model_config: ModelConfig, config: EngineConfig, *, vocab_size: int
) -> ModelRunner | TensorParallelDevice:
    """Load the model as the configuration says. Raises what `ModelRunner` raises, and
    `UsageError` for a `tensor_parallel_size` that does not fit the model or the machine.
    """
    check_current_folder()
    if config.tensor_parallel_size > 1:
        return TensorParallelDevice(folder, model_config, config, vocab_size=vocab_size)
    from nvcli.engine.model_runner import ModelRunner

    return ModelRunner(folder, model_config, config, vocab_size=vocab_size)


class TensorParallelDevice:
    """Implements `StepDevice` over all ranks. One thread at a time."""

    def __init__(
        self, folder: Path, model_config: ModelConfig, config: EngineConfig, *, vocab_size: int
    ) -> None:
        import torch

        from nvcli.engine.device_choice import resolve_device
        from nvcli.engine.model_runner import ModelRunner
        from nvcli.parallel import TPGroup, make_store, prepare_environment

        size = config.tensor_parallel_size
        model_config.check_tensor_parallel(size)
        device = resolve_device(config.device)
        _check_gpus(size, device)
        self._is_closed = False
        self._step_s = STEP_S[device.type]
        self._num_threads: int | None = None
        if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            self._num_threads = torch.get_num_threads()
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
        prepare_environment()
        store = make_store(size)

        def orders(rank: int) -> dict[str, Any]:
            index = f":{(device.index or 0) + rank}" if device.type == "cuda" else ""
            return {
                "rank": rank,
                "size": size,
                "port": store.port,
                "device": f"{device.type}{index}",
                "folder": folder,
                "model_config": model_config,
                "config": config,
                "vocab_size": vocab_size,
            }

        self._workers = Workers(size, orders)
        try:
            self._workers.wait_for("started")
            group = self._workers.group = TPGroup.at(store, 0, size, device)
            group.greet(device)
            self._runner = ModelRunner(
                folder, model_config, config, vocab_size=vocab_size, group=group
            )
            self._workers.wait_for("ready")
        except Exception as error:
            reason = self._workers.fail(error)
            self._workers.close()
            raise reason from error
        except BaseException:  # Ctrl-C while loading
            self._workers.close()
            if self._workers.group is not None:
                self._workers.group.stop_waiting()
            raise
        runner = self._runner  # all ranks have settled on the same numbers
        self.startup = runner.startup
        self.max_num_seqs = runner.max_num_seqs
        self.max_num_batched_tokens = runner.max_num_batched_tokens
        self.max_model_len = runner.max_model_len
        self.num_blocks = runner.num_blocks
        self.block_size = runner.block_size
        self.vocab_size = runner.vocab_size
        self.depth = runner.depth

    # --- steps -----------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> RunnerTicket:
        """Enqueue the step on all ranks. Raises `EngineClosedError`, always for good."""
        self._check_open()
        self._workers.send(encode_plan(plan))
        try:
            with self._limited():
                return self._runner.launch(plan)
        except Exception as error:
            raise self._lost(error) from error

    def collect(self, ticket: RunnerTicket) -> StepResult:
        """Wait for the step and read it. Raises `EngineClosedError`, always for good."""
        self._check_open()
        try:
            with self._limited():
                result = self._runner.collect(ticket)
            if self._workers.group is not None:
                self._workers.group.check()
        except Exception as error:
            raise self._lost(error) from error
        self._check_open()  # else it may be what an aborted group left
        return result

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Lets the workers' watcher end a step that hangs: a GPU that is stuck reports nothing, and
        its peers would wait for it for ever.
        """
        self._workers.deadline = None if self._step_s is None else time.monotonic() + self._step_s
        try:
            yield
        finally:
            self._workers.deadline = None

    def abandon(self) -> None:
        """Make a step that waits for another rank return soon, with an error. From any thread."""
        self._workers.abandon()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the engine is closed")
        if self._workers.error is not None:
            raise self._lost(self._workers.error)

    def _lost(self, error: Exception) -> EngineClosedError:
        found = self._workers.fail(error)
        if isinstance(found, EngineClosedError):
            return found
        return EngineClosedError(f"the engine stopped: {found.message}", hint=found.hint)

    def watch(self, on_lost: Callable[[NvcliError], None]) -> None:
        """Call `on_lost` from a thread of its own when a worker ends, whatever runs then."""
        self._workers.on_lost = on_lost
        if self._workers.error is not None:
            on_lost(self._workers.error)

    def close(self) -> None:
        """End the workers and give the memory back. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        import torch

        group = self._workers.group
        self._workers.close()
        if group is not None:
            group.stop_waiting()  # a step may be in flight that the others will not take part in
        self._runner.close()
        gc.collect()  # captured graphs, which hold the group
        if group is not None:
            group.abort()
            group.close()
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)


def _check_gpus(size: int, device: Any) -> None:
    if device.type == "cpu":
        return
    import torch

    num_gpus = torch.cuda.device_count() - (device.index or 0)
    if size > num_gpus:
        noun = "GPU" if num_gpus == 1 else "GPUs"
        raise UsageError(
            f"--tensor-parallel-size {size}: there {'is' if num_gpus == 1 else 'are'} {num_gpus} "
            f"{noun}",
            hint="nvidia-smi lists them; CUDA_VISIBLE_DEVICES may hide some.",
            param="tensor_parallel_size",
        )
