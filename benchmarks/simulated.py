"""A GPU that is not there: steps take the time they are said to take, tokens are numbers.

What is left is the host: scheduling, text, queues and the threads' fight for the interpreter. It
answers on a CPU what a batch path costs beside `LLM.generate` when steps are as short as a GPU's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from nvcli.engine.startup import StartupReport
from nvcli.engine.step import StepPlan, StepResult

if TYPE_CHECKING:
    from pathlib import Path

    from nvcli.config import EngineConfig
    from nvcli.models.config import ModelConfig

HOST_S = 1.0e-3  # staging a step, under the interpreter's lock
OP_BYTES = 20_000  # hashing them takes about what launching a kernel does, and frees the lock too
PREFILL_TOKEN_S = 3.0e-6  # 0.6B on one H200
_BUFFER = bytes(OP_BYTES)


@dataclass
class SimulatedTicket:
    plan: StepPlan
    ready: float
    result: StepResult


class SimulatedRunner:
    """Stands where `nvcli.engine.model_runner.ModelRunner` does, with run-ahead."""

    step_s = 6.5e-3
    num_ops = 0  # 0: one graph; else kernels launched one by one

    def __init__(
        self,
        folder: Path,
        model_config: ModelConfig,
        config: EngineConfig,
        *,
        vocab_size: int | None = None,
    ) -> None:
        self.max_num_seqs = config.max_num_seqs or 256
        self.max_num_batched_tokens = config.max_num_batched_tokens or 8192
        self.depth = 1
        self.vocab_size = vocab_size or model_config.vocab_size
        self.block_size = 16
        self.max_model_len = config.max_model_len or model_config.max_position_embeddings
        self.num_blocks = 64_000
        self.startup = StartupReport(
            device=f"simulated, {self.step_s * 1e3:g} ms a step",
            dtype="none",
            weights_dtype="none",
            kv_cache_dtype="none",
            attention_backend="none",
            attention_reason="",
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            pool_bytes=0,
            weights_bytes=0,
        )
        self._idle_at = 0.0
        self.idle_s = 0.0  # how long the device waited for the host between steps
        self.num_steps = 0
        self.num_rows = 0

    def launch(self, plan: StepPlan) -> SimulatedTicket:
        end = time.perf_counter() + HOST_S
        while time.perf_counter() < end:  # holds the interpreter, as staging does
            pass
        for _ in range(self.num_ops):
            sha256(_BUFFER)
        prompt_tokens = sum(row.n for row in plan.rows if row.n > 1)
        now = time.perf_counter()
        if 0 < self._idle_at < now:
            self.idle_s += now - self._idle_at
        self.num_steps += 1
        self.num_rows += len(plan.rows)
        ready = max(now, self._idle_at) + self.step_s + prompt_tokens * PREFILL_TOKEN_S
        self._idle_at = ready
        token_ids = [
            (row.seq.seq_id * 31 + row.start) % 97 + 1 if row.samples else -1 for row in plan.rows
        ]
        return SimulatedTicket(plan, ready, StepResult(token_ids))

    def collect(self, ticket: SimulatedTicket) -> StepResult:
        left = ticket.ready - time.perf_counter()
        if left > 0:
            time.sleep(left)  # without the interpreter, as waiting for an event
        return ticket.result

    def close(self) -> None:
        pass


def install(step_s: float, num_ops: int) -> Any:
    """Every `LLM` of this process runs on the simulated device from now on."""
    from nvcli.engine import model_runner

    SimulatedRunner.step_s = step_s
    SimulatedRunner.num_ops = num_ops
    model_runner.ModelRunner = SimulatedRunner  # type: ignore[misc, assignment]
    return SimulatedRunner
