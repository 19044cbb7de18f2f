"""The request slots on the device: tokens, block tables and sampling state of running sequences.

Hot path: yes.

A step's input is `tokens[slot, start : start + n]`, and its sample goes to
`tokens[slot, start + n]`. So the host sends only what changed (the plan's deltas) and one small
record per row; everything that lasts longer than a step lives here, by slot:

    tokens       [S, max_model_len + 1]   prompt, output and forced tokens, at their positions
    block_table  [S, M]                   entries that are not in use name the dummy block
    params_f/_i  [S, 8]                   sampling parameters, columns F and I
    masked_ids   [S, MAX_MASKED]          for the sampling kernel
    by_token     [S, V] each              what penalties and biases need: `token_tables`

S is max_num_seqs + 1: the last slot is a dummy for padding and graph capture. Rows of a table that
only some sequences use are rewritten when a sequence that uses them takes the slot, and read only
for such sequences, so nothing of the previous owner can reach the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nvcli.engine.deltas import Deltas
from nvcli.engine.kv_cache import reserving
from nvcli.engine.slot_features import MAX_MASKED, Features
from nvcli.engine.staging import Staging
from nvcli.engine.token_tables import TokenTables
from nvcli.layers.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from nvcli.engine.kv_cache import KVCache
    from nvcli.engine.staging import Array
    from nvcli.engine.step import SlotInit, StepPlan, TokenWrite
    from nvcli.kernels.attention import AttentionBackend
    from nvcli.types import SamplingParams


class F(IntEnum):
    """Columns of `params_f`."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    PRESENCE = 3
    FREQUENCY = 4
    REPETITION = 5


class I(IntEnum):  # noqa: E742 - the twin of F
    """Columns of `params_i`."""

    TOP_K = 0
    SEED = 1
    MIN_TOKENS = 2
    PROMPT_LEN = 3
    FLAGS = 4  # penalties and bias, where the sampling kernel applies them
    NUM_MASKED = 5  # of `masked_ids`, the same


@dataclass(slots=True)
class SlotInfo:
    """What the host remembers of the sequence in a slot."""

    params: SamplingParams
    features: Features
    length: int  # positions written so far, samples in flight included
    # `features.bad_words` on the device: all tokens but the last [W, L], filled up with -1 on the
    # left, and the last tokens [W]
    bad_words: tuple[Tensor, Tensor] | None


@dataclass(slots=True)
class StepInputs:
    """What `prepare` leaves for the forward pass and the sampler."""

    batch: ForwardBatch | None  # None once the forward pass has run, in a captured step
    sample_rows: list[int]  # rows of the plan that sample, R of them
    sample_slots: Tensor  # [R] int64
    sample_positions: Tensor  # [R] int64, where the samples go
    masks: list[Array | None] | None = None  # [R] grammar masks, where a row has one


def masks_of(plan: StepPlan, sample_rows: list[int]) -> list[Array | None] | None:
    """The grammar masks of rows of a plan; None where no row has a grammar."""
    seqs = [plan.rows[i].seq for i in sample_rows]
    return [seq.mask for seq in seqs] if any(seq.has_grammar for seq in seqs) else None


class DeviceState:
    """Owned by one `ModelRunner`; every method enqueues and none waits for the device."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        padded_vocab_size: int,
        kv_cache: KVCache,
        device: torch.device,
    ) -> None:
        self.device = device
        self.block_size = kv_cache.spec.block_size
        self.dummy_block = kv_cache.dummy_block
        self.dummy_slot = max_num_seqs
        self.kv_cache = kv_cache
        self.padded_vocab_size = padded_vocab_size  # V: the width of the logits
        num_slots = max_num_seqs + 1  # S
        width = kv_cache.spec.blocks_for(max_model_len)  # M
        per_slot = 4 * (max_model_len + 1 + width + MAX_MASKED)
        per_slot += 16 * 8 + 12 + 8  # with _iota and `slots`
        with reserving(
            num_slots * per_slot,
            f"the tables of {max_num_seqs} sequences of up to {max_model_len} tokens",
            device,
            hint="Lower --max-num-seqs or --max-model-len.",
        ):
            self._allocate(num_slots, max_model_len + 1, width)
        self.by_token = TokenTables(num_slots, padded_vocab_size, device)
        self.penalty_slots: set[int] = set()
        self.version = 0  # changes whenever a slot gets a new owner
        self.staging = Staging(device)

    def _allocate(self, num_slots: int, num_positions: int, width: int) -> None:
        device = self.device
        self.tokens = torch.zeros((num_slots, num_positions), dtype=torch.int32, device=device)
        self.block_table = torch.full(
            (num_slots, width), self.dummy_block, dtype=torch.int32, device=device
        )
        self.params_f = torch.zeros((num_slots, 8), dtype=torch.float64, device=device)
        self.params_i = torch.zeros((num_slots, 8), dtype=torch.int64, device=device)
        self.masked_ids = torch.zeros((num_slots, MAX_MASKED), dtype=torch.int32, device=device)
        self.slots: list[SlotInfo | None] = [None] * num_slots
        self._iota = torch.arange(max(1024, num_slots + 1), device=device)  # int64
        self._iota_i32 = self._iota[: num_slots + 1].to(torch.int32)

    # --- a step's inputs -------------------------------------------------------------------------

    def prepare(self, plan: StepPlan, attention: AttentionBackend) -> StepInputs | None:
        """Apply the plan's deltas and build the forward batch; None for a plan without rows."""
        rows = plan.rows
        deltas = Deltas.of(plan)
        num_rows = len(rows)  # B
        record = deltas.add(
            np.array([[r.slot, r.start, r.n, r.is_stored] for r in rows], np.int64)
            .reshape(num_rows, 4)
            .T.copy()
        )
        sample_rows = [i for i, row in enumerate(rows) if row.samples]
        sampling = deltas.add(np.array(sample_rows, np.int64))
        uploaded = self.staging.upload(deltas.arrays)
        self._apply_deltas(plan, deltas, uploaded)
        if not rows:
            return None
        slots, starts, counts, stored = uploaded[record].unbind(0)  # [B] each

        num_tokens = plan.num_tokens  # T
        if num_tokens == num_rows:  # every row is one token
            positions, token_slots, row_of_token = starts, slots, None
            cu_seqlens = self._iota_i32[: num_rows + 1]
            seq_lens = (starts + 1).to(torch.int32)
            last = self._arange(num_rows)
        else:
            ends = counts.cumsum(0)  # [B]
            row_of_token = torch.repeat_interleave(
                self._arange(num_rows), counts, output_size=num_tokens
            )  # [T]
            positions = self._arange(num_tokens) + (starts + counts - ends)[row_of_token]
            token_slots = slots[row_of_token]
            cu_seqlens = torch.zeros(num_rows + 1, dtype=torch.int32, device=self.device)
            cu_seqlens[1:] = ends
            seq_lens = (starts + counts).to(torch.int32)
            last = ends - 1
        blocks = self.block_table[token_slots, positions // self.block_size]
        slot_mapping = blocks * self.block_size + positions % self.block_size  # [T] int64
        if any(row.is_stored for row in rows):
            is_stored = stored if row_of_token is None else stored[row_of_token]
            slot_mapping.masked_fill_(is_stored.bool(), -1)

        sample_positions = starts + counts
        if len(sample_rows) < num_rows:
            index = uploaded[sampling]
            last, sample_positions = last[index], sample_positions[index]
            sample_slots = slots[index]
        else:
            sample_slots = slots
        key_lens = [row.start + row.n for row in rows]
        batch = ForwardBatch(
            input_ids=self.tokens[token_slots, positions].long(),
            positions=positions,
            slot_mapping=slot_mapping,
            cu_seqlens_q=cu_seqlens,
            seq_lens=seq_lens,
            slots=slots,
            block_table=self.block_table,
            logits_indices=last,
            kv_caches=self.kv_cache.layers,
            attention=attention,
            query_lens=[row.n for row in rows],
            key_lens=key_lens,
            block_ids=[
                row.seq.block_table[: -(-key_len // self.block_size)]
                for row, key_len in zip(rows, key_lens, strict=True)
            ],
            kv_scales=self.kv_cache.scales,
        )
        masks = masks_of(plan, sample_rows)
        return StepInputs(batch, sample_rows, sample_slots, sample_positions, masks)

    def _arange(self, size: int) -> Tensor:
        if size > self._iota.numel():
            self._iota = torch.arange(1 << size.bit_length(), device=self.device)
        return self._iota[:size]

    # --- deltas ----------------------------------------------------------------------------------

    def apply_deltas(self, plan: StepPlan) -> None:
        """The plan's deltas alone, for a captured step, which makes its inputs itself."""
        deltas = Deltas.of(plan)
        if deltas.arrays:
            self._apply_deltas(plan, deltas, self.staging.upload(deltas.arrays))

    def _apply_deltas(self, plan: StepPlan, deltas: Deltas, uploaded: list[Tensor]) -> None:
        token_ids = torch.empty(0) if deltas.token_ids is None else uploaded[deltas.token_ids]
        offset = 0
        if deltas.inits is not None:
            slots, floats, ints, masked = uploaded[deltas.inits : deltas.inits + 4]
            self.params_f[slots] = floats
            self.params_i[slots] = ints
            self.masked_ids[slots] = masked
            # Assigning a number by an index tensor would copy it there and wait.
            self.block_table.index_fill_(0, slots, self.dummy_block)
            for init in plan.slot_inits:
                size = len(init.prompt_token_ids) + len(init.output_token_ids)
                self._init_slot(init, token_ids[offset : offset + size])
                offset += size
            self.version += 1
        if deltas.block_writes is not None:
            slots, entries, blocks = uploaded[deltas.block_writes].unbind(0)
            self.block_table[slots, entries] = blocks.to(torch.int32)
        for write in plan.token_writes:
            size = len(write.token_ids)
            self._force_tokens(write, token_ids[offset : offset + size])
            offset += size

    def _init_slot(self, init: SlotInit, history: Tensor) -> None:
        """`history`: prompt and output, [prompt_len + outputs] int32."""
        slot, features = init.slot, Features.of(init)
        self.tokens[slot, : history.numel()] = history
        bad_words = self._pack_bad_words(features.bad_words)
        self.slots[slot] = SlotInfo(init.params, features, history.numel(), bad_words)
        self.penalty_slots.discard(slot)
        if features.has_penalties:
            self.penalty_slots.add(slot)
            self.by_token.begin_counts(slot, history.long(), len(init.prompt_token_ids))
        if features.has_bias:
            row = self.by_token.bias_row(init.params, features.bad_tokens)
            self.by_token.bias_table()[slot] = self.staging.upload_once(row)

    def _pack_bad_words(self, words: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor] | None:
        if not words:
            return None
        width = max(len(word) for word in words) - 1
        prefixes = np.full((len(words), width), -1, np.int32)
        for i, word in enumerate(words):
            prefixes[i, width - len(word) + 1 :] = word[:-1]
        last = np.array([word[-1] for word in words], np.int64)
        return self.staging.upload_once(prefixes), self.staging.upload_once(last)

    # --- tokens and counts -----------------------------------------------------------------------

    def uncount(self, slot: int, start: int, end: int) -> None:
        """Take the sampled tokens at start .. end - 1, which are about to be replaced, out of the
        counts for penalties.
        """
        info = self.slots[slot]
        assert info is not None, f"slot {slot} has no owner"
        end = min(end, info.length)
        if info.features.has_penalties and start < end:
            self.by_token.count(slot, self.tokens[slot, start:end].long(), -1)

    def _force_tokens(self, write: TokenWrite, token_ids: Tensor) -> None:
        slot, start, end = write.slot, write.start, write.start + token_ids.numel()
        info = self.slots[slot]
        assert info is not None, f"slot {slot} has no owner"
        self.uncount(slot, start, end)
        self.tokens[slot, start:end] = token_ids
        if info.features.has_penalties:
            self.by_token.count(slot, token_ids.long(), 1)
        info.length = max(info.length, end)

    def store_samples(self, plan: StepPlan, inputs: StepInputs, sampled: Tensor) -> None:
        """Write the samples to their positions and count them.  sampled: [R] int64.

        Where nothing could be sampled (-1), id 0 is written, so that a step already launched reads
        an id of the vocabulary, and nothing is counted.
        """
        penalised: list[int] = []
        for i, index in enumerate(inputs.sample_rows):
            row = plan.rows[index]
            info = self.slots[row.slot]
            assert info is not None, f"slot {row.slot} has no owner"
            position = row.start + row.n
            if info.features.has_penalties:
                penalised.append(i)
                self.uncount(row.slot, position, position + 1)
            info.length = max(info.length, position + 1)
        if penalised:
            counts, _ = self.by_token.count_tables()
            slots, ids = inputs.sample_slots, sampled
            if len(penalised) < len(inputs.sample_rows):
                index_of = self.staging.upload_index(penalised)
                slots, ids = slots[index_of], ids[index_of]
            counts.index_put_((slots, ids.clamp(min=0)), (ids >= 0).to(torch.int32), True)
        self.tokens[inputs.sample_slots, inputs.sample_positions] = sampled.clamp(min=0).int()
