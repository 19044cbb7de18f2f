"""A step plan as bytes, for the ranks that do not schedule: what they lack, and nothing else.

Hot path: yes.

Rank 0 keeps the sequences. The others keep, by slot, what its last `SlotInit` and the block writes
since said (`PlanMirror`), so that a decode step is a few bytes a row. A plan that comes out of the
mirror drives a runner exactly as the one that went in.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from nvcli.engine.sequence import Sequence
from nvcli.engine.step import BlockWrite, Row, SlotInit, StepPlan, TokenWrite


def encode_plan(plan: StepPlan) -> bytes:
    rows = plan.rows
    pools = {row.slot: row.seq.pools for row in rows} if plan.slot_inits else {}
    masks = [
        (index, np.asarray(row.seq.mask, np.int32).tobytes())
        for index, row in enumerate(rows)
        if row.samples and row.seq.mask is not None
    ]
    shares = [(row.slot, row.start, row.n, row.samples, row.is_stored) for row in rows]
    record = (
        plan.step_id,
        np.array(shares, np.int32).tobytes(),
        [(write.slot, write.entry, _pack_ids(write.blocks)) for write in plan.block_writes],
        [_pack_init(init, pools.get(init.slot)) for init in plan.slot_inits],
        [(write.slot, write.start, _pack_ids(write.token_ids)) for write in plan.token_writes],
        masks,
    )
    return pickle.dumps(record, pickle.HIGHEST_PROTOCOL)


def _pack_ids(token_ids: list[int]) -> bytes:
    return np.array(token_ids, np.int32).tobytes()


def _unpack_ids(data: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(data, np.int32).tolist()
    return ids


def _pack_init(init: SlotInit, pools: tuple[int, ...] | None) -> tuple[Any, ...]:
    outputs = _pack_ids(init.output_token_ids)
    return (*init._replace(output_token_ids=[]), outputs, pools)


class PlanMirror:
    """Turns records back into plans, in the order in which they were made."""

    def __init__(self, num_slots: int) -> None:
        self._seqs: list[Sequence | None] = [None] * num_slots

    def decode(self, data: bytes) -> StepPlan:
        step_id, packed, block_writes, inits, token_writes, masks = pickle.loads(data)
        plan = StepPlan(step_id)
        plan.slot_inits = [self._admit(init) for init in inits]
        for slot, entry, ids in block_writes:
            blocks = _unpack_ids(ids)
            plan.block_writes.append(BlockWrite(slot, entry, blocks))
            self._of(slot).block_table[entry : entry + len(blocks)] = blocks
        plan.token_writes = [
            TokenWrite(slot, start, _unpack_ids(ids)) for slot, start, ids in token_writes
        ]
        shares = np.frombuffer(packed, np.int32).reshape(-1, 5)
        for slot, start, n, samples, is_stored in shares.tolist():
            seq = self._of(slot)
            seq.mask = None
            plan.rows.append(Row(seq, 0, slot, start, n, bool(samples), bool(is_stored)))
        for index, mask in masks:
            plan.rows[index].seq.mask = np.frombuffer(mask, np.int32)
        return plan

    def _admit(self, packed: tuple[Any, ...]) -> SlotInit:
        *fields, outputs, pools = packed
        init = SlotInit(*fields)._replace(output_token_ids=_unpack_ids(outputs))
        self._seqs[init.slot] = Sequence(
            seq_id=-1,
            prompt_token_ids=init.prompt_token_ids,
            params=init.params,
            max_output_tokens=0,
            seed=init.seed,
            eos_token_ids=init.eos_token_ids,
            slot=init.slot,
            pools=pools,
            has_grammar=init.has_grammar,
        )
        return init

    def _of(self, slot: int) -> Sequence:
        seq = self._seqs[slot]
        assert seq is not None, f"slot {slot} has no owner"
        return seq
