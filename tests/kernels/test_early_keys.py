"""Decode attention that plans for itself and asks for keys before its wait, beside the planned one:
source in the interpreter, bfloat16 in captured steps on a GPU.
"""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from nvcli.kernels import reference
from nvcli.kernels.torch_attention import TorchAttention
from tests.kernels.paged_cases import in_fp8, make_strided_case, on_device
from tests.kernels.triton_testing import assert_as_good_as_torch, needs_triton, run_in_interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nvcli.layers.forward_batch import ForwardBatch

# keys of each row, the newest included; 0: padding
CASES: dict[str, list[int]] = {
    "first token": [1],
    "one, split": [600],
    "newest begins a block": [17, 65, 257],
    "newest begins a chunk": [65, 129, 193, 513],
    "newest ends one": [64, 128, 16, 192],
    "ragged": [1, 64, 65, 700, 16, 15, 128, 2],
    "padding": [70, 9, 0, 0],
    "padding alone": [0],
}
# query heads, KV heads, head_dim, block size
HEADS = [(4, 2, 32, 16), (3, 3, 16, 64), (5, 1, 32, 256), (16, 1, 16, 16)]
CUDA_CASES = CASES | {
    "long": [33_000],
    "long and short": [9000, 5, 1, 0],
    "two tiles": [3000],
    "eight": [1024] * 8,
}
CUDA_HEADS = [
    (16, 8, 128, 16),
    (32, 8, 128, 64),
    (64, 8, 128, 256),
    (40, 8, 128, 16),
    (14, 2, 64, 16),
    (4, 2, 32, 32),
]


@contextmanager
def early_keys(is_early: bool) -> Iterator[None]:
    """For all steps that could have it, or for none."""
    from nvcli.kernels import attention_plan, tuned

    usual, most = tuned.attention, attention_plan.MAX_EARLY_ROWS
    tuned.attention = lambda device: dataclasses.replace(usual(device), early_rows=most)
    attention_plan.set_early_keys(is_early)
    try:
        yield
    finally:
        attention_plan.set_early_keys(True)
        tuned.attention = usual


@dataclasses.dataclass
class Case:
    """A captured decode step's attention."""

    q: Tensor  # [B, Hq, D]; NaN in padding
    k: Tensor
    v: Tensor
    batch: ForwardBatch
    scales: Tensor | None
    newest: list[tuple[int, int]]  # block and offset of each row's newest key

    def run(self, *, early: bool, is_repeated: bool = True) -> Tensor:
        """Repeated: what the first run leaves does not change the second, and on a GPU no race is
        seen."""
        from nvcli.kernels import attention_plan
        from nvcli.kernels.triton_attention import TritonAttention

        backend = TritonAttention()
        self.batch.plan = None
        with early_keys(early):
            args = (self.q, self.k, self.v, self.batch, self.q.shape[2] ** -0.5, self.scales)
            got = backend.forward(*args)
            if is_repeated:
                assert torch.equal(got, backend.forward(*args)), "two runs differ"
        assert isinstance(self.batch.plan, attention_plan.RowPlan) == early
        assert not any(counters.any() for counters in backend._counters)
        return got


def make(
    keys: list[int],
    heads: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    has_fp8: bool = False,
) -> Case:
    block_size = heads[3]
    real = [n for n in keys if n]
    q, k, v, batch = make_strided_case(
        [(1, n) for n in real or [1]], heads, torch.float32 if has_fp8 else dtype
    )
    q = torch.cat([q[: len(real)], q.new_full((len(keys) - len(real), *q.shape[1:]), float("nan"))])
    starts = [max(n - 1, 0) for n in keys]
    slots = [min(i, len(real)) if n else 0 for i, n in enumerate(keys)]
    rows = [[slot, at, int(n > 0), 1] for slot, at, n in zip(slots, starts, keys, strict=True)]
    tables = batch.block_table.tolist()
    newest = [
        (tables[slot][at // block_size], at % block_size)
        for slot, at, n in zip(slots, starts, keys, strict=True)
        if n
    ]
    scales = None
    if has_fp8:
        k, v, scales = in_fp8(k, v)
    batch = dataclasses.replace(
        batch,
        cu_seqlens_q=torch.arange(len(keys) + 1, dtype=torch.int32),
        seq_lens=torch.tensor(keys, dtype=torch.int32),
        slots=torch.tensor(slots),
        rows=torch.tensor(rows, dtype=torch.int32),
        query_lens=[],
        key_lens=[],
        block_ids=[],
        is_padded=True,
        is_decode=True,
    )
    return Case(*on_device(device, q.to(dtype), k, v, batch, scales), newest)


# --- in the interpreter --------------------------------------------------------------------------


@contextmanager
def waits(before: Any, after: Any) -> Iterator[list[int]]:
    """Kernels believe in dependent launch: `before` is called when a program begins, `after` when
    it waits. Yields how often each program waited.
    """
    import triton.language as tl

    from nvcli.kernels import decode_attention

    counts: list[int] = []

    def begin() -> None:
        counts.append(0)
        before()

    def wait() -> None:
        counts[-1] += 1
        after()

    cuda, options = tl.extra.cuda, decode_attention.launch_options
    usual = cuda.gdc_launch_dependents, cuda.gdc_wait
    cuda.gdc_launch_dependents, cuda.gdc_wait = begin, wait
    decode_attention.launch_options = lambda device, **more: options(device, **more) | {"PDL": True}
    try:
        yield counts
    finally:
        cuda.gdc_launch_dependents, cuda.gdc_wait = usual
        decode_attention.launch_options = options


def check_what_is_read_before_the_wait(
    keys: list[int], heads: tuple[int, int, int, int], *, is_flagged: bool = False
) -> None:
    """All that the step itself writes is garbage until a program waits: the queries, the newest
    keys and values, every tensor but the rows; of a row that may read what another row writes, all
    keys and values; and the table's entry of a block that a row brings.
    """
    from nvcli.kernels.prepare import BLOCK_SHIFT, READS_NEW

    case = make(keys, heads)
    want = case.run(early=False, is_repeated=False)
    rows, table, block_size = case.batch.rows, case.batch.block_table, heads[3]
    assert rows is not None
    if is_flagged:
        rows[:, 3] |= READS_NEW
    right_table = table.clone()
    brings = rows[(rows[:, 2] > 0) & (rows[:, 1] % block_size == 0)]  # else its block is there
    brought = (brings[:, 0].long(), brings[:, 1].long() // block_size)
    for row in rows:
        if row[2] > 0 and row[1] % block_size == 0 and not is_flagged:
            row[3] |= (table[row[0], row[1] // block_size] + 1) << BLOCK_SHIFT
    tensors = [case.q, case.batch.seq_lens, case.batch.slots, case.batch.cu_seqlens_q]
    right = [tensor.clone() for tensor in tensors]
    k, v = case.k.clone(), case.v.clone()

    def spoil() -> None:
        for tensor in tensors:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -(1 << 20))
        table[brought] = -(1 << 20)
        for block, offset in [] if is_flagged else case.newest:
            case.k[block, offset] = case.v[block, offset] = float("nan")
        if is_flagged:
            case.k.fill_(float("nan"))
            case.v.fill_(float("nan"))

    def mend() -> None:
        for tensor, value in zip(tensors, right, strict=True):
            tensor.copy_(value)
        case.k.copy_(k)
        case.v.copy_(v)
        table.copy_(right_table)

    with waits(spoil, mend) as counts:
        got = case.run(early=True, is_repeated=False)
    assert torch.equal(got, want)
    # Programs without work end before the wait; one of them that waits is enough.
    assert set(counts) <= {0, 2 if is_flagged else 1}
    assert any(counts)


def check_equal_to_planned(
    name: str, heads: tuple[int, int, int, int], *, has_fp8: bool = False
) -> None:
    case = make(CASES[name], heads, has_fp8=has_fp8)
    is_repeated = name == "ragged"  # programs run one after the other here
    early, planned = (
        case.run(early=is_early, is_repeated=is_repeated) for is_early in (True, False)
    )
    assert torch.equal(early, planned)


def check_all_in_the_interpreter() -> None:
    for name in CASES:  # the others of either on a GPU
        check_equal_to_planned(name, HEADS[0])
    for heads in HEADS[1:]:
        for name in ("ragged", "newest begins a block"):
            check_equal_to_planned(name, heads)
    for name in ("ragged", "newest begins a block", "padding"):
        for heads in HEADS[:2]:
            check_equal_to_planned(name, heads, has_fp8=True)
    for name in ("ragged", "padding", "newest begins a chunk"):
        check_what_is_read_before_the_wait(CASES[name], HEADS[0])
        check_what_is_read_before_the_wait(CASES[name], HEADS[0], is_flagged=True)


@needs_triton
@pytest.mark.interpret
def test_results_are_those_of_the_planned_kernel() -> None:
    run_in_interpreter("tests.kernels.test_early_keys", "check_all_in_the_interpreter")


@needs_triton
@pytest.mark.interpret
def test_steps_one_after_the_other() -> None:
    run_in_interpreter("tests.kernels.test_early_keys", "check_steps_in_the_interpreter")


@needs_triton
@pytest.mark.torch
def test_steps_that_need_lists_get_them() -> None:
    from nvcli.kernels.attention_plan import MAX_EARLY_ROWS, row_plan

    def plan(num_rows: int) -> object:
        rows = torch.zeros(num_rows, 4, dtype=torch.int32)
        return row_plan(rows, num_kv_heads=8, num_sms=132)

    assert plan(1) is not None
    assert plan(MAX_EARLY_ROWS) is not None
    assert plan(MAX_EARLY_ROWS + 1) is None


# --- on a GPU ------------------------------------------------------------------------------------


def check(
    keys: list[int],
    heads: tuple[int, int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    *,
    has_fp8: bool = False,
) -> None:
    case = make(keys, heads, dtype, "cuda", has_fp8=has_fp8)
    got = case.run(early=True)
    real = torch.tensor([n > 0 for n in keys], device="cuda")
    assert not got[~real].any()
    if not real.any():
        return
    scale = case.q.shape[2] ** -0.5
    batch = dataclasses.replace(
        case.batch,
        cu_seqlens_q=torch.arange(int(real.sum()) + 1, dtype=torch.int32, device="cuda"),
        seq_lens=case.batch.seq_lens[real],
        slots=case.batch.slots[real],
        query_lens=[1] * int(real.sum()),
        key_lens=[n for n in keys if n],
        block_ids=[
            row[: -(-n // heads[3])]
            for row, n in zip(
                case.batch.block_table[case.batch.slots[real]].tolist(),
                [n for n in keys if n],
                strict=True,
            )
        ],
        is_padded=False,
        is_decode=False,
        plan=None,
    )
    plain = TorchAttention().forward(case.q[real], case.k, case.v, batch, scale, case.scales)
    tables = batch.gather_block_tables()
    k, v = (case.k, case.v) if has_fp8 else (case.k.float(), case.v.float())
    exact = reference.paged_attention(
        case.q[real].float(), k, v, batch.cu_seqlens_q, batch.seq_lens, tables, scale, case.scales
    )
    assert_as_good_as_torch(got[real], plain, exact)


def check_steps(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int, int],
    num_steps: int,
    *,
    has_fp8: bool = False,
    num_layers: int = 4,
) -> float:
    """Some layers, token after token: each layer's keys and values are written by the kernel right
    before its attention, on CUDA in a captured step. Row 1 begins with row 0's first block, and is
    admitted by the step that fills it; rows 2 and 3 are padding. Every result is that of planned
    steps without dependent launch, but for the order of sums. -> the share of bits that differ
    """
    from nvcli.kernels import launch, rotary_store
    from nvcli.kernels.attention_plan import AttentionPlan, RowPlan
    from nvcli.kernels.prepare import BLOCK_SHIFT, READS_NEW, StepTensors, prepare
    from nvcli.kernels.triton_attention import TritonAttention
    from nvcli.layers.forward_batch import ForwardBatch

    num_heads, kv_heads, head_dim, block = heads
    width = -(-num_steps // block) + 1
    generator = torch.Generator(device).manual_seed(0)
    step = StepTensors.allocate(4, 4, device)
    tokens = torch.zeros(3, block * width, dtype=torch.int32, device=device)
    blocks = torch.arange(3 * width, dtype=torch.int32, device=device).view(3, width)
    blocks[1, 0] = blocks[0, 0]
    table = blocks[2:, :1].expand(3, width).contiguous()  # of a block that nobody reads
    table[1, :2] = blocks[1, :2]
    scales = torch.ones(2, kv_heads, device=device) if has_fp8 else None
    weight = torch.ones(num_heads + kv_heads, head_dim, device=device, dtype=dtype)
    qkv_of = torch.zeros(
        (num_layers, 4, num_heads + 2 * kv_heads, head_dim), device=device, dtype=dtype
    )
    angles = torch.zeros(4, head_dim, device=device)

    def body(backend: TritonAttention, pool: Tensor, results: Tensor) -> None:
        prepare(step, tokens, table, block, is_decode=True)
        batch = ForwardBatch(
            *(step.input_ids, step.positions, step.slot_mapping, step.cu_seqlens_q),
            *(step.seq_lens, step.slots, table, step.logits_indices, [], backend, [], [], []),
            is_padded=True,
            is_decode=True,
            rows=step.rows,
        )
        for layer, qkv, result in zip(pool, qkv_of, results, strict=True):
            k, v = layer.transpose(2, 3)
            q = rotary_store.rope_norm_store(
                *(qkv, weight, angles + 1, angles, 1e-6, k, v, step.slot_mapping, scales)
            )
            result.copy_(backend.forward(q, k, v, batch, head_dim**-0.5, scales))
        kinds.add(type(batch.plan))

    pools, outs, replays = [], [], []
    kinds: set[type] = set()
    for is_early in (True, False):
        shape = (num_layers, 2, 3 * width, kv_heads, block, head_dim)
        pool = torch.zeros(shape, device=device, dtype=torch.float8_e4m3fn if has_fp8 else dtype)
        results = torch.zeros(num_layers, 4, num_heads, head_dim, device=device, dtype=dtype)
        replay = partial(body, TritonAttention(), pool, results)
        launch.set_pdl(is_early)
        if device.type == "cuda":
            with early_keys(is_early):
                replay()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    replay()
            replay = partial(lambda graph, kept: graph.replay(), graph, replay)
        pools.append(pool)
        outs.append(results)
        replays.append(replay)
    launch.set_pdl(True)
    different = 0.0
    for at in range(num_steps):
        qkv_of.normal_(generator=generator)
        rows = [[0, at, 1, 1], *[[2, 0, 0, 0]] * 3]
        if at >= block - 1:
            rows[1] = [1, at + 1, 1, 1 | READS_NEW if at == block - 1 else 1]
        for row in rows[:2]:
            if row[1] % block == 0 and row[2] and row[3] == 1:
                row[3] |= int(blocks[row[0], row[1] // block] + 1) << BLOCK_SHIFT
        step.rows.copy_(torch.tensor(rows, dtype=torch.int32))
        for is_early, replay in zip((True, False), replays, strict=True):
            with early_keys(is_early):
                replay()
        early, planned = outs
        assert planned[:, : 2 if at >= block - 1 else 1].any()
        assert not early[:, 2:].any()
        torch.testing.assert_close(early, planned, atol=2e-2, rtol=2e-2, msg=f"step {at}")
        different += (early != planned).float().mean().item() / num_steps
    assert kinds == {RowPlan, AttentionPlan}
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(*pools, strict=True))
    return different


def check_steps_in_the_interpreter() -> None:
    cpu = torch.device("cpu")
    assert check_steps(cpu, torch.float32, (4, 2, 32, 16), 20, num_layers=1) == 0


def check_captured_steps(*, has_fp8: bool = False) -> None:
    """A key that is missed would change most of what it is part of."""
    args = (torch.device("cuda"), torch.bfloat16, (16, 8, 128, 16), 300)
    assert check_steps(*args, has_fp8=has_fp8) < 0.02


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("heads", CUDA_HEADS, ids=str)
@pytest.mark.parametrize("keys", CUDA_CASES.values(), ids=list(CUDA_CASES))
@pytest.mark.parametrize("has_fp8", [False, True])
def test_on_cuda(keys: list[int], heads: tuple[int, int, int, int], has_fp8: bool) -> None:
    check(keys, heads, has_fp8=has_fp8)


@needs_triton
@pytest.mark.gpu
@pytest.mark.captures
@pytest.mark.parametrize("has_fp8", [False, True])
def test_captured_steps_on_cuda(has_fp8: bool) -> None:
    with torch.inference_mode():
        check_captured_steps(has_fp8=has_fp8)
