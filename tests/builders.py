"""Keyword builders with defaults, so that a test names only what it is about."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvcli.engine.block_manager import BlockManager
from nvcli.engine.core import EngineCore, Update
from nvcli.engine.scheduler import Scheduler
from nvcli.engine.sequence import Sequence
from nvcli.types import SamplingParams
from tests.engine.simulated_device import EOS, SimulatedDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_seq_ids = itertools.count()


def make_sequence(
    tokens: Iterable[int] = range(4),
    *,
    max_tokens: int = 4,
    ignore_eos: bool = True,
    seq_id: int | None = None,
    seed: int = 0,
    priority: int = 0,
    arrival: float | None = None,
    cache_salt: str | None = None,
    gate: int | None = None,
    **params: Any,
) -> Sequence:
    """A sequence; those built later arrive later."""
    seq_id = next(_seq_ids) if seq_id is None else seq_id
    return Sequence(
        seq_id=seq_id,
        prompt_token_ids=array("i", tokens),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **params),
        max_output_tokens=max_tokens,
        seed=seed,
        request_id=f"request-{seq_id}",
        eos_token_ids=frozenset() if ignore_eos else frozenset([EOS]),
        priority=priority,
        arrival=float(seq_id) if arrival is None else arrival,
        cache_salt=cache_salt,
        gate=gate,
    )


# What the tests of `tests/engine` built, for the integrity check at their end.
schedulers: list[Scheduler] = []
holders: list[tuple[BlockManager, list[Sequence]]] = []


def make_block_manager(
    num_blocks: int = 10, block_size: int = 4, enable_prefix_caching: bool = True
) -> BlockManager:
    manager = BlockManager(num_blocks, block_size, enable_prefix_caching)
    holders.append((manager, []))
    return manager


def allocate(
    manager: BlockManager, tokens: Iterable[int], cache_salt: str | None = None
) -> Sequence:
    """A sequence that holds blocks for these tokens, shared where a prefix is found."""
    seq = make_sequence(tokens, cache_salt=cache_salt)
    manager.share(seq, manager.match_prefix(seq))
    assert manager.grow(seq, seq.num_tokens)
    next(sequences for known, sequences in holders if known is manager).append(seq)
    return seq


def compute(
    manager: BlockManager, tokens: Iterable[int], cache_salt: str | None = None
) -> Sequence:
    """As `allocate`, and a step computed the tokens."""
    seq = allocate(manager, tokens, cache_salt)
    manager.publish(seq, seq.num_tokens)
    return seq


def make_scheduler(
    *,
    num_blocks: int = 10,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 64,
    enable_prefix_caching: bool = True,
    watermark: float = 0.01,
) -> Scheduler:
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size, enable_prefix_caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        watermark=watermark,
    )
    schedulers.append(scheduler)
    return scheduler


class FakeClock:
    """A clock that moves a second each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@dataclass
class Log:
    """A consumer that keeps what it is told, by sequence."""

    updates: list[Update] = field(default_factory=list)
    on_update: Callable[[Update], None] = lambda _: None

    def __call__(self, updates: list[Update]) -> None:
        assert len({id(update.seq) for update in updates}) == len(updates), "two updates of one"
        self.updates += updates
        for update in updates:
            self.on_update(update)

    def of(self, seq: Sequence) -> list[Update]:
        return [update for update in self.updates if update.seq is seq]

    def tokens(self, seq: Sequence) -> list[int]:
        return [token_id for update in self.of(seq) for token_id in update.token_ids]


def make_core(
    *,
    budget: int = 64,
    depth: int = 1,
    enable_prefix_caching: bool = True,
    watermark: float = 0.01,
    **device: Any,
) -> tuple[EngineCore, SimulatedDevice, Log]:
    """An engine core over a simulated device (its keywords), and the log of its updates."""
    simulated = SimulatedDevice(**device)
    log = Log()
    core = EngineCore(
        simulated,
        log,
        max_num_batched_tokens=budget,
        depth=depth,
        enable_prefix_caching=enable_prefix_caching,
        watermark=watermark,
        clock=FakeClock(),
    )
    simulated.blocks = core.scheduler.blocks
    schedulers.append(core.scheduler)
    return core, simulated, log


def run(core: EngineCore, max_steps: int = 2000) -> int:
    """Step until nothing is left, checking every invariant after each; returns the steps."""
    for num_steps in range(max_steps):
        if not core.has_unfinished:
            return num_steps
        core.step()
        core.scheduler.check()
    raise AssertionError(f"still busy after {max_steps} steps: a livelock")
