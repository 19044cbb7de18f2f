"""Device state: what a plan's deltas leave behind, and the inputs that `prepare` builds."""

from __future__ import annotations

from array import array

import pytest
import torch

from nvcli.engine.device_state import DeviceState, F, I, StepInputs
from nvcli.engine.kv_cache import KVCache, KVCacheSpec
from nvcli.engine.sequence import Sequence
from nvcli.engine.step import BlockWrite, Row, SlotInit, StepPlan, TokenWrite
from nvcli.types import SamplingParams

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
SPEC = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype=torch.float32)
DUMMY = 20


def make_state(max_num_seqs: int = 3) -> DeviceState:
    return DeviceState(
        max_num_seqs=max_num_seqs,
        max_model_len=16,
        padded_vocab_size=10,
        kv_cache=KVCache(SPEC, DUMMY, CPU),
        device=CPU,
    )


def start(slot: int, prompt: list[int], output: list[int] | None = None) -> SlotInit:
    return SlotInit(slot, array("i", prompt), output or [], SamplingParams(), 0, frozenset())


def row(
    slot: int,
    start: int,
    n: int,
    blocks: list[int],
    *,
    samples: bool = True,
    is_stored: bool = False,
) -> Row:
    seq = Sequence(slot, array("i", [0]), SamplingParams(), 1, 0, block_table=blocks)
    return Row(seq, 0, slot, start, n, samples, is_stored)


def prepare(state: DeviceState, plan: StepPlan) -> StepInputs:
    inputs = state.prepare(plan, None)  # type: ignore[arg-type]
    assert inputs is not None
    return inputs


def writes(slot: int, blocks: list[int]) -> list[BlockWrite]:
    return [BlockWrite(slot, 0, blocks)]


def test_a_mixed_step() -> None:
    state = make_state()
    plan = StepPlan(
        0,
        rows=[
            row(2, 6, 1, [9, 4]),  # a decode
            row(0, 2, 3, [7, 1], samples=False),  # a chunk in the middle of a prompt
            row(1, 0, 5, [3, 0]),  # a whole prompt
        ],
        slot_inits=[
            start(2, [1, 2, 3, 4, 5, 6], [7]),
            start(0, [1] * 2 + [8, 9, 6, 5]),
            start(1, [4, 3, 2, 1, 0]),
        ],
        block_writes=writes(2, [9, 4]) + writes(0, [7, 1]) + writes(1, [3, 0]),
    )
    inputs = prepare(state, plan)
    batch = inputs.batch
    assert batch.input_ids.tolist() == [7, 8, 9, 6, 4, 3, 2, 1, 0]
    assert batch.positions.tolist() == [6, 2, 3, 4, 0, 1, 2, 3, 4]
    assert batch.slot_mapping.tolist() == [18, 30, 31, 4, 12, 13, 14, 15, 0]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 4, 9]
    assert batch.seq_lens.tolist() == [7, 5, 5]
    assert batch.slots.tolist() == [2, 0, 1]
    assert batch.logits_indices.tolist() == [0, 8]
    assert batch.query_lens == [1, 3, 5]
    assert batch.key_lens == [7, 5, 5]
    assert batch.block_ids == [[9, 4], [7, 1], [3, 0]]
    assert inputs.sample_rows == [0, 2]
    assert inputs.sample_slots.tolist() == [2, 1]
    assert inputs.sample_positions.tolist() == [7, 5]
    dtypes = [batch.input_ids, batch.positions, batch.slot_mapping, batch.slots]
    assert {tensor.dtype for tensor in dtypes} == {torch.int64}
    assert {batch.cu_seqlens_q.dtype, batch.seq_lens.dtype, batch.block_table.dtype} == {
        torch.int32
    }
    assert all(tensor.is_contiguous() for tensor in dtypes)


def test_a_decode_step_reads_the_sample_of_the_step_before() -> None:
    state = make_state()
    plan = StepPlan(0, [row(1, 0, 2, [5])], [start(1, [3, 4])], block_writes=writes(1, [5, 6]))
    inputs = prepare(state, plan)
    state.store_samples(plan, inputs, torch.tensor([8]))
    inputs = prepare(state, StepPlan(1, [row(1, 2, 1, [5])]))
    batch = inputs.batch
    assert batch.input_ids.tolist() == [8]
    assert batch.positions.tolist() == [2]
    assert batch.slot_mapping.tolist() == [22]
    assert batch.cu_seqlens_q.tolist() == [0, 1]
    assert batch.seq_lens.tolist() == [3]
    assert batch.gather_block_tables().tolist() == [[5, 6, DUMMY, DUMMY]]


def test_stored_rows_are_not_written() -> None:
    state = make_state()
    plan = StepPlan(
        0,
        [row(0, 3, 1, [2], is_stored=True), row(1, 0, 1, [3])],
        [start(0, [1, 2, 3, 4]), start(1, [5])],
        block_writes=writes(0, [2]) + writes(1, [3]),
    )
    assert prepare(state, plan).batch.slot_mapping.tolist() == [-1, 12]
    plan = StepPlan(1, [row(0, 2, 2, [2], is_stored=True), row(1, 0, 1, [3])])
    assert prepare(state, plan).batch.slot_mapping.tolist() == [-1, -1, 12]


def test_forced_tokens_become_the_input() -> None:
    state = make_state()
    plan = StepPlan(
        0,
        [row(0, 2, 3, [2, 3])],
        [start(0, [1, 2])],
        writes(0, [2, 3]),
        [TokenWrite(0, 2, [7, 8, 9])],
    )
    assert prepare(state, plan).batch.input_ids.tolist() == [7, 8, 9]


def test_a_new_owner_gets_a_clean_slot() -> None:
    state = make_state()
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, min_tokens=2)
    init = SlotInit(1, array("i", [1, 2, 3, 4, 5]), [], params, -9, frozenset())
    state.prepare(StepPlan(0, slot_inits=[init], block_writes=writes(1, [3, 4])), None)  # type: ignore[arg-type]
    assert state.params_f[1, : F.MIN_P + 1].tolist() == [0.5, 0.25, 0.125]
    assert state.params_i[1, : I.PROMPT_LEN + 1].tolist() == [7, -9, 2, 5]
    version = state.version
    plan = StepPlan(1, slot_inits=[start(1, [6])], block_writes=writes(1, [8]))
    assert state.prepare(plan, None) is None  # type: ignore[arg-type]
    assert state.block_table[1].tolist() == [8, DUMMY, DUMMY, DUMMY]
    assert state.params_i[1, : I.PROMPT_LEN + 1].tolist() == [0, 0, 0, 1]
    assert state.version != version


def test_seeds_of_64_bits_wrap() -> None:
    state = make_state()
    init = SlotInit(0, array("i", [1]), [], SamplingParams(), 2**64 - 1, frozenset())
    state.prepare(StepPlan(0, slot_inits=[init]), None)  # type: ignore[arg-type]
    assert state.params_i[0, I.SEED].item() == -1


def test_blocks_are_written_from_any_entry_on() -> None:
    state = make_state()
    block_writes = [BlockWrite(2, 1, [3, 4]), BlockWrite(0, 3, [6]), BlockWrite(1, 0, [7, 8, 9])]
    state.prepare(StepPlan(0, block_writes=block_writes), None)  # type: ignore[arg-type]
    assert state.block_table.tolist() == [
        [DUMMY, DUMMY, DUMMY, 6],
        [7, 8, 9, DUMMY],
        [DUMMY, 3, 4, DUMMY],
        [DUMMY] * 4,
    ]


def test_many_tokens_in_one_step() -> None:
    state = DeviceState(
        max_num_seqs=2,
        max_model_len=5000,
        padded_vocab_size=10,
        kv_cache=KVCache(SPEC, 2000, CPU),
        device=CPU,
    )
    blocks = list(range(1000))
    plan = StepPlan(0, [row(0, 0, 4000, blocks)], [start(0, [1] * 4000)], writes(0, blocks))
    batch = prepare(state, plan).batch
    assert batch.positions.tolist() == list(range(4000))
    assert batch.slot_mapping.tolist() == list(range(4000))
