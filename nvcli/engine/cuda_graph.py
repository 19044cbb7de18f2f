"""Whole steps as CUDA graphs: inputs, model, head, sampler and the update of the slots.

Hot path: yes (`run`).

A captured step reads `rows [B, 4]` from a fixed address and everything else from tables that stay
where they are, so replaying it costs the host one small copy and one launch. Two kinds of buckets:

    decode   B rows of one token: 1, 2, 4, 8, by 8 up to 256, then by 16; always max_num_seqs
    tokens   T tokens of any rows (prompts, chunks, decoding rows mixed): 16 to 4,096, for large
             models to 512

Both exist once more, of fewer sizes, for steps whose rows share keys (`shared_steps`). A step takes
the smallest bucket that holds it. Rows and tokens beyond it are padding: they belong to the dummy
slot, have no keys, store nothing and sample nothing. Larger steps run eagerly, as do those of which
more hidden states are read: they are long enough to hide the host.

All graphs share one memory pool, and replay in stream order; so the logits of a step stay valid
for eager kernels (log-probabilities, samplers that the kernel does not know) until the next step.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nvcli.engine.buckets import Buckets, smallest
from nvcli.engine.shared_steps import MIN_SHARED_TOKENS, shared_decode_buckets
from nvcli.engine.staging import STAGING_RING
from nvcli.kernels.prepare import (
    BLOCK_SHIFT,
    IS_STORED,
    READS_NEW,
    SAMPLES,
    StepTensors,
    hand_over,
    prepare,
)
from nvcli.layers.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvcli.engine.device_state import DeviceState
    from nvcli.engine.shared_steps import SharedSteps
    from nvcli.engine.step import StepPlan
    from nvcli.engine.step_runner import Model
    from nvcli.engine.step_sampler import StepSampler
    from nvcli.kernels.attention import AttentionBackend

BYTES_PER_GRAPH = 4 << 20  # an upper bound for what the driver keeps of one


class Capture:
    """Captures functions as CUDA graphs in one memory pool. Tests put a stand-in in its place.

    Every function runs once on the stream of the captures before it is captured: that compiles and
    loads what is new. `torch.cuda.graph` would collect garbage and empty the allocator's cache each
    time, which takes longer than the capture.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, body: Callable[[], None]) -> Any:
        """-> an object whose `replay` enqueues what `body` enqueued."""
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            body()
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool)
            try:
                body()
            finally:
                graph.capture_end()
        return graph


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A captured step of at most `rows` rows and `tokens` tokens."""

    graph: Any
    rows: int
    tokens: int


@dataclass(slots=True)
class BucketKind:
    """Buckets of one kind of step, by their tokens."""

    sizes: list[int]  # to capture, rising
    captured: dict[int, _Bucket] = field(default_factory=dict)

    def smallest(self, num_tokens: int) -> _Bucket | None:
        """The bucket that holds so many tokens."""
        size = smallest(self.sizes, num_tokens)
        return None if size is None else self.captured[size]


@dataclass(slots=True)
class _Staging:
    host: Any  # numpy view of the pinned buffer, [1 + Bmax, 4] int32
    pinned: Tensor
    event: Any


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a captured step gives, of the plan's B rows; but for `on_host` until the next step."""

    logits: Tensor  # [B, V]
    samples: Tensor  # [B] int32, -1 where a row does not sample
    # [B] int32, the same in the host's memory once the step is done, for STAGING_RING - 1 steps
    # more; None where they were changed after the captured step
    on_host: Tensor | None


class GraphRunner:
    """Owns the captured steps and their buffers. Every method but `capture` only enqueues."""

    def __init__(
        self,
        model: Model,
        state: DeviceState,
        sampler: StepSampler,
        attention: AttentionBackend,
        *,
        max_num_batched_tokens: int,
        dtype: torch.dtype,
        shared: SharedSteps | None = None,
    ) -> None:
        """shared: captures buckets for steps whose rows share keys, too."""
        self.model = model
        self.state = state
        self.sampler = sampler
        self.attention = attention
        max_num_seqs = state.dummy_slot
        parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
        num_params = max(1, sum(p.numel() for p in parameters))
        self.buckets = Buckets.of(max_num_seqs, max_num_batched_tokens, num_params)
        token_sizes = list(self.buckets.tokens)
        self.shared = shared
        self.kinds = {  # by whether all rows decode, and whether some share keys
            (True, False): BucketKind(list(self.buckets.decode)),
            (False, False): BucketKind(token_sizes),
        }
        if shared is not None:
            self.kinds[True, True] = BucketKind(shared_decode_buckets(max_num_seqs))
            self.kinds[False, True] = BucketKind([n for n in token_sizes if n >= MIN_SHARED_TOKENS])
        device = state.device
        num_tokens = max([max_num_seqs, *token_sizes])
        self.step = StepTensors.allocate(max_num_seqs, num_tokens, device)
        self._padding = np.array([state.dummy_slot, 0, 0, 0], np.int32)
        self.step.rows.copy_(torch.from_numpy(self._padding))
        self.logits = torch.zeros(
            (max_num_seqs, state.padded_vocab_size), dtype=dtype, device=device
        )
        self.out = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=device)
        is_cuda = device.type == "cuda"
        self._host_out = torch.full(
            (STAGING_RING, max_num_seqs), -1, dtype=torch.int32, pin_memory=is_cuda
        )
        self._ring: list[_Staging] = []
        self._turn = -1  # of the ring and of `_host_out`

    # --- capture ---------------------------------------------------------------------------------

    @property
    def num_graphs(self) -> int:
        return sum(len(kind.captured) for kind in self.kinds.values())

    def capture(
        self, capture: Callable[[Callable[[], None]], Any], limit: int | None = None
    ) -> None:
        """Capture every bucket, the largest first, so that the smaller ones reuse its memory.

        limit: so many of each kind, to measure what they take.
        """
        gc.collect()
        for (is_decode, shares), kind in self.kinds.items():
            for size in kind.sizes[::-1][:limit]:
                graph = capture(partial(self._body, size, is_decode=is_decode, shares=shares))
                kind.captured[size] = _Bucket(graph, self.buckets.rows_of(size), size)

    def run_each_kind(self) -> None:
        """Run a body of every kind once, uncaptured: what a step launches changes at powers of two
        of its rows, and with prompts in it.
        """
        for (is_decode, shares), kind in self.kinds.items():
            for size in kind.sizes if is_decode else kind.sizes[:1]:
                if not is_decode or size & (size - 1) == 0 or size == kind.sizes[-1]:
                    self._body(size, is_decode=is_decode, shares=shares)

    @property
    def buffer_bytes(self) -> int:
        """Of the logits, which is all that counts of what stands outside the graphs."""
        return self.logits.nbytes

    def bytes_beyond(self, only_largest: int) -> int:
        """Bound on the memory of all graphs, given what one of each kind took."""
        num_graphs = sum(len(kind.sizes) for kind in self.kinds.values())
        return only_largest + num_graphs * BYTES_PER_GRAPH

    def _body(self, num_tokens: int, *, is_decode: bool, shares: bool) -> None:
        """One step from its rows, all on the device."""
        state = self.state
        num_rows = self.buckets.rows_of(num_tokens)
        step = self.step.cut(num_rows, num_tokens)
        prepare(step, state.tokens, state.block_table, state.block_size, is_decode=is_decode)
        batch = ForwardBatch(
            input_ids=step.input_ids,
            positions=step.positions,
            slot_mapping=step.slot_mapping,
            cu_seqlens_q=step.cu_seqlens_q,
            seq_lens=step.seq_lens,
            slots=step.slots,
            block_table=state.block_table,
            logits_indices=step.logits_indices,
            kv_caches=state.kv_cache.layers,
            attention=self.attention,
            query_lens=[],
            key_lens=[],
            block_ids=[],
            is_padded=True,
            is_decode=is_decode,
            rows=step.rows if is_decode else None,
            kv_scales=state.kv_cache.scales,
            shared=self.shared.work(num_rows) if shares and self.shared is not None else None,
            ends_early=not is_decode,
        )
        hidden = self.model.forward(batch)  # [B, E]
        logits = self.model.compute_logits(hidden, out=self.logits[:num_rows])
        self.sampler.run_kernel(
            logits, step.sample_slots, step.sample_positions, self.out[:num_rows]
        )
        hand_over(self.out[:num_rows], step.head, self._host_out)

    # --- a step ----------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> Replayed | None:
        """Replay the step; None, and nothing done, where no bucket holds it."""
        num_tokens = plan.num_tokens
        is_decode = num_tokens == len(plan.rows)
        bucket = self.kinds[is_decode, False].smallest(num_tokens)
        if bucket is None or not plan.rows or plan.reads_hidden_states:
            return None
        state, num_rows = self.state, len(plan.rows)
        brought = _brought_blocks(plan, state.block_size) if is_decode else None
        if brought is None:
            state.apply_deltas(plan)
        if self.shared is not None and self.shared.update(plan, state.version):
            bucket = self.kinds[is_decode, True].smallest(num_tokens) or bucket
        self.sampler.admit(plan)
        self._upload_rows(plan, bucket.rows, brought or {})
        bucket.graph.replay()
        logits, out = self.logits[:num_rows], self.out[:num_rows]
        is_changed = self.sampler.finish(
            plan,
            list(range(num_rows)),
            logits,
            self.step.slots[:num_rows],
            self.step.sample_positions[:num_rows],
            out,
        )
        on_host = None if is_changed else self._host_out[self._turn, :num_rows]
        return Replayed(logits, out, on_host)

    def _upload_rows(self, plan: StepPlan, num_rows: int, brought: dict[int, int]) -> None:
        """The plan's rows, then padding up to the bucket, as one copy that does not wait.

        brought: slot -> a block that its row brings
        """
        staging = self._next_staging()
        host = staging.host
        count = len(plan.rows)
        host[0, 0] = self._turn
        host[1 : 1 + count] = [
            (row.slot, row.start, row.n, row.samples * SAMPLES | row.is_stored * IS_STORED)
            for row in plan.rows
        ]
        if plan.slot_inits:
            # A block is named as soon as a plan fills it, so a sequence that the same plan admits
            # may begin with a block whose last key another of its rows is about to write.
            admitted = {init.slot for init in plan.slot_inits}
            flagged = [1 + i for i, row in enumerate(plan.rows) if row.slot in admitted]
            host[flagged, 3] |= READS_NEW
        if brought:
            blocks = [brought.get(row.slot, -1) + 1 for row in plan.rows]
            host[1 : 1 + count, 3] |= np.array(blocks, np.int32) << BLOCK_SHIFT
        host[1 + count : 1 + num_rows] = self._padding
        self.step.sent[: 1 + num_rows].copy_(staging.pinned[: 1 + num_rows], non_blocking=True)
        if staging.event is not None:
            staging.event.record()

    def _next_staging(self) -> _Staging:
        self._turn = (self._turn + 1) % STAGING_RING
        if self._turn >= len(self._ring):
            is_cuda = self.state.device.type == "cuda"
            pinned = torch.zeros(self.step.sent.shape, dtype=torch.int32, pin_memory=is_cuda)
            event = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
            self._ring.append(_Staging(pinned.numpy(), pinned, event))
            return self._ring[-1]
        staging = self._ring[self._turn]
        if staging.event is not None:
            staging.event.synchronize()  # STAGING_RING steps old: done long ago
        return staging


def _brought_blocks(plan: StepPlan, block_size: int) -> dict[int, int] | None:
    """slot -> block, where all that a decode plan changes is a block that a row's token begins;
    None where it changes more.
    """
    if plan.slot_inits or plan.token_writes:
        return None
    if not plan.block_writes:
        return {}
    entries = {row.slot: row.start // block_size for row in plan.rows}
    found: dict[int, int] = {}
    for slot, entry, blocks in plan.block_writes:
        if len(blocks) > 1 or entries.get(slot) != entry:
            return None
        found[slot] = blocks[0]
    return found
