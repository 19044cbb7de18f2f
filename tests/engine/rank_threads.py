"""A tensor-parallel device whose ranks are threads of the test's own process.

Groups are no state of the process, so any number of gloo ranks may stand in one. Every rank but the
first gets its plans as records, as worker processes do, and after every step all must hold the same
slot tables, bit by bit.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from nvcli.config import EngineConfig
from nvcli.engine.model_runner import ModelRunner
from nvcli.engine.plan_record import PlanMirror, encode_plan
from nvcli.engine.step import StepPlan, StepResult
from nvcli.models.config import ModelConfig
from nvcli.parallel import TPGroup, find_store, make_store
from tests.waiting import PATIENCE_S

CPU = torch.device("cpu")


class RankThreads:
    """Implements `StepDevice`; `runners` are open to the test."""

    def __init__(
        self, size: int, folder: Path, config: EngineConfig, *, vocab_size: int | None = None
    ) -> None:
        store = make_store(size)
        self._pools = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(size)]

        def make(rank: int) -> ModelRunner:
            own = store if rank == 0 else find_store(store.port, size)
            group = TPGroup.at(own, rank, size, CPU)
            model_config = ModelConfig.from_hf(folder)
            return ModelRunner(folder, model_config, config, vocab_size=vocab_size, group=group)

        self.runners: list[ModelRunner] = self.everywhere(make)
        self.mirrors = [PlanMirror(runner.max_num_seqs) for runner in self.runners]
        self.num_steps = 0

    def everywhere(self, work: Callable[[int], Any]) -> list[Any]:
        """Run it on all ranks at once; their results."""
        futures: list[Future[Any]] = [p.submit(work, i) for i, p in enumerate(self._pools)]
        return [future.result(timeout=PATIENCE_S) for future in futures]

    @property
    def max_num_seqs(self) -> int:
        return self.runners[0].max_num_seqs

    @property
    def num_blocks(self) -> int:
        return self.runners[0].num_blocks

    @property
    def block_size(self) -> int:
        return self.runners[0].block_size

    @property
    def max_model_len(self) -> int:
        return self.runners[0].max_model_len

    def launch(self, plan: StepPlan) -> Any:
        record = encode_plan(plan)

        def run(rank: int) -> Any:
            runner = self.runners[rank]
            return runner.launch(plan if rank == 0 else self.mirrors[rank].decode(record))

        tickets = self.everywhere(run)
        self.check_slots()
        self.num_steps += 1
        return tickets[0]

    def collect(self, ticket: Any) -> StepResult:
        return self.runners[0].collect(ticket)

    def check_slots(self) -> None:
        """All ranks hold the same slots; the dummy's may differ, nobody reads it."""
        first, *others = (runner.state for runner in self.runners)
        names = ("tokens", "block_table", "params_f", "params_i")
        for name in (*names, "by_token.counts", "by_token.prompt_seen", "by_token.logit_bias"):
            value_of = operator.attrgetter(name)
            expected = value_of(first)
            for other in others:
                value = value_of(other)
                assert (value is None) == (expected is None), name
                if value is not None:
                    assert torch.equal(value, expected), name

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=False)
        assert threading.active_count() > 0
