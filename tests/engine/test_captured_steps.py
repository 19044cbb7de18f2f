"""Captured steps against the eager loop, on the CPU: our kernels interpreted, and in place of a
CUDA graph a stand-in that repeats the captured body. It checks what a real graph would not: that
nothing the step reads has moved, and that no value left by another step is needed.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.triton_testing import needs_triton, run_in_interpreter

VOCAB, TOKENIZER_SIZE, P = 300, 290, 4
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.9, "top_p": 0.8},  # the eager sampler's
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "min_p": 0.1, "logprobs": 2},
    {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (5,)},
    {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
    {"temperature": 0.9, "allowed_token_ids": (65,), "bad_words": ((65, 65),), "logprobs": 1},
]
STUCK = len(PARAMS) - 1  # nothing may follow its first token
NUM_SEQS = len(PARAMS)  # every way to sample
FEW_SEQS = 6  # where models differ, sampling does not


class RepeatedBody:
    """Replays by running the body again, with the step's tensors poisoned before."""

    def __init__(self, body: Callable[[], None], runner: Any) -> None:
        self.body = body
        self.runner = runner
        self.addresses = self._addresses()
        self.num_replays = 0

    def _addresses(self) -> list[int]:
        state, graphs = self.runner.state, self.runner.graphs
        tensors = [state.tokens, state.block_table, state.params_f, state.params_i]
        tensors += [graphs.logits, graphs.out, graphs.step.sent, graphs._host_out]
        return [tensor.data_ptr() for tensor in tensors]

    def replay(self) -> None:
        assert self._addresses() == self.addresses, "a captured address has changed"
        step = self.runner.graphs.step
        for name in step.__slots__:
            if name not in ("sent", "head", "rows"):  # what the host sends
                getattr(step, name).fill_(-12345)
        self.runner.graphs.logits.fill_(float("nan"))
        self.runner.graphs.out.fill_(-7)
        self.runner.graphs._host_out.fill_(-8)
        self.num_replays += 1
        self.body()


def make_runner(
    folder: Path,
    *,
    captured: bool,
    max_num_seqs: int,
    shares: bool = False,
    buckets: tuple[int, ...] = (16, 32),
    **options: Any,
) -> Any:
    """shares: with the graphs of steps whose rows share keys, too."""
    from nvcli.config import EngineConfig
    from nvcli.engine import buckets as engine_buckets
    from nvcli.engine import cuda_graph
    from nvcli.engine.model_runner import ModelRunner
    from nvcli.engine.step_sampler import StepSampler
    from nvcli.kernels.triton_attention import TritonAttention
    from nvcli.models.config import ModelConfig

    config = EngineConfig(
        device="cpu",
        block_size=P,
        max_num_seqs=max_num_seqs,
        run_ahead=True,
        **{"num_blocks": 120, **options},
    )
    attention = TritonAttention() if captured else None
    runner = ModelRunner(
        folder, ModelConfig.from_hf(folder), config, vocab_size=TOKENIZER_SIZE, attention=attention
    )
    if captured:
        runner._step_sampler = StepSampler(runner.state, runner.sampler, runner.vocab_size)
        engine_buckets.TOKEN_BUCKETS = buckets  # type: ignore[assignment]
        graphs = cuda_graph.GraphRunner(
            runner.model,
            runner.state,
            runner._step_sampler,
            runner.attention,
            max_num_batched_tokens=64,
            dtype=torch.float32,
            shared=runner._make_shared_steps() if shares else None,
        )
        runner.graphs = graphs
        graphs.capture(lambda body: RepeatedBody(body, runner))
        assert graphs.num_graphs == sum(len(kind.sizes) for kind in graphs.kinds.values())
    return runner


def generate(runner: Any, depth: int, num_seqs: int) -> list[tuple[list[int], list[Any]]]:
    """A day of an engine: arrivals while others decode, chunks, ends, one preemption by recompute.

    -> token ids and log-probabilities of every sequence.
    """
    from nvcli.engine.core import EngineCore
    from nvcli.engine.sequence import Sequence
    from nvcli.types import SamplingParams

    rng = random.Random(4)
    found: dict[int, tuple[list[int], list[Any]]] = {}

    def consume(updates: list[Any]) -> None:
        for update in updates:
            ids, logprobs = found.setdefault(update.seq.seq_id, ([], []))
            ids += update.token_ids
            logprobs += update.logprobs
            is_stuck = update.seq.seq_id % len(PARAMS) == STUCK
            assert (update.error is None) != (is_stuck and not update.token_ids)

    core = EngineCore(runner, consume, max_num_batched_tokens=24, depth=depth)
    shared = [rng.randrange(TOKENIZER_SIZE) for _ in range(9)]
    for i in range(num_seqs):
        params = SamplingParams(**PARAMS[i % len(PARAMS)])
        prompt = (shared if i % 3 == 0 else []) + [
            rng.randrange(TOKENIZER_SIZE) for _ in range(rng.randrange(1, num_seqs))
        ]
        count = rng.randrange(3, 3 + num_seqs // 2)
        core.add(Sequence(i, array("i", prompt), params, count, seed=100 + i))
        for _ in range(rng.randrange(2)):
            core.step()
    while core.has_unfinished:
        core.step()
    return [found[i] for i in sorted(found)]


def captured_buckets(runner: Any, *shares: bool) -> list[Any]:
    """Of steps that share keys, of those that do not, or of both."""
    return [
        bucket
        for key, kind in runner.graphs.kinds.items()
        if not shares or key[1] in shares
        for bucket in kind.captured.values()
    ]


def used_buckets(runner: Any, *, shares: bool = False) -> list[tuple[int, int]]:
    """Rows and tokens of the captured steps that were replayed."""
    buckets = captured_buckets(runner, shares)
    return [(b.rows, b.tokens) for b in buckets if b.graph.num_replays > 0]


def check_equal_to_eager(
    num_seqs: int = NUM_SEQS,
    max_num_seqs: int = 5,
    tolerance: float = 1e-4,
    model: dict[str, Any] | None = None,
    write: Callable[..., object] | None = None,
    **options: Any,
) -> None:
    import tempfile

    from nvcli import kernels
    from nvcli.kernels import sampling
    from tests.tiny import write_tiny_checkpoint

    folder = Path(tempfile.mkdtemp())
    (write or write_tiny_checkpoint)(folder, **model or {})
    eager = make_runner(folder, captured=False, max_num_seqs=max_num_seqs, **options)
    plain = generate(eager, 0, num_seqs)
    kernels._use_triton = lambda x: True
    sampling.CHUNK = 512  # the interpreter is slow at ordering wide chunks
    buckets = (16, 32) if max_num_seqs > 16 else (16,)
    runner = make_runner(
        folder, captured=True, max_num_seqs=max_num_seqs, buckets=buckets, **options
    )
    results = [generate(runner, 1, num_seqs)]
    used = used_buckets(runner)
    assert len(used) >= min(5, num_seqs // 3), used
    if max_num_seqs > 16:
        runner.graphs = None  # the same kernels, launched one by one
        results.append(generate(runner, 0, num_seqs))
    for result in results:
        for i, (got, want) in enumerate(zip(result, plain, strict=True)):
            assert got[0] == want[0], (i, got[0], want[0])
            for ours, theirs in zip(got[1], want[1], strict=True):
                assert ours.token_id == theirs.token_id
                assert abs(ours.logprob - theirs.logprob) < tolerance


@needs_triton
@pytest.mark.interpret
def test_captured_steps_equal_the_eager_loop() -> None:
    run_in_interpreter("tests.engine.test_captured_steps", "check_equal_to_eager")


def check_with_an_fp8_cache() -> None:
    # A key that lands on the other side of a tie moves a log-probability.
    check_equal_to_eager(FEW_SEQS, tolerance=5e-3, kv_cache_dtype="fp8")


@needs_triton
@pytest.mark.interpret
def test_captured_steps_with_an_fp8_cache_equal_the_eager_loop() -> None:
    run_in_interpreter("tests.engine.test_captured_steps", "check_with_an_fp8_cache")


def check_with_products_in_tiles() -> None:
    """Of all rows, and in splits where the next norm adds them up."""
    from dataclasses import replace

    from nvcli.kernels import cuts, tuned

    whole = cuts.Tiles(rows=16, outputs=64, columns=32, held=1, splits=1, warps=4, stages=1)
    ops = set()

    def choose(op: str, *args: Any) -> Any:
        ops.add(op)
        return replace(whole, splits=2) if op == "addends" else whole

    tuned.choose = choose
    check_equal_to_eager(FEW_SEQS)
    assert ops == set(tuned.OPS)


@needs_triton
@pytest.mark.interpret
def test_captured_steps_with_products_in_tiles_equal_the_eager_loop() -> None:
    run_in_interpreter("tests.engine.test_captured_steps", "check_with_products_in_tiles")


def check_with_experts() -> None:
    check_equal_to_eager(FEW_SEQS, model={"architecture": "Qwen3MoeForCausalLM"})


@needs_triton
@pytest.mark.interpret
def test_captured_steps_with_experts_equal_the_eager_loop() -> None:
    run_in_interpreter("tests.engine.test_captured_steps", "check_with_experts")


def check_with_fp8_weights() -> None:
    from nvcli import kernels
    from nvcli.kernels import cuts, fp8_gemm
    from tests.fp8_checkpoint import write_fp8_checkpoint

    calls = dict.fromkeys(("linear", "linear_addends", "swiglu", "dequantise"), 0)

    def counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return run(*args, **kwargs)

        return call

    for name in calls:
        setattr(fp8_gemm, name, counted(name, getattr(fp8_gemm, name)))
    kernels.keeps_fp8 = lambda device: True
    cuts.FP8_FLOAT32_ROWS = 8  # so that the bucket of 16 tokens takes the other way
    check_equal_to_eager(FEW_SEQS, write=write_fp8_checkpoint, model={"layers": 1})
    assert all(calls.values()), calls


@needs_triton
@pytest.mark.interpret
@pytest.mark.timeout(600)
def test_captured_steps_with_fp8_weights_equal_the_eager_loop() -> None:
    run_in_interpreter("tests.engine.test_captured_steps", "check_with_fp8_weights")


def check_a_long_day() -> None:
    check_equal_to_eager(num_seqs=14, max_num_seqs=20)


@needs_triton
@pytest.mark.soak
def test_captured_steps_equal_the_eager_loop_over_a_long_day() -> None:
    run_in_interpreter("tests.engine.test_captured_steps", "check_a_long_day")


@pytest.mark.torch
def test_a_start_runs_every_kind_of_bucket_to_find_its_kernels() -> None:
    from types import SimpleNamespace

    from nvcli.engine.buckets import decode_buckets
    from nvcli.engine.cuda_graph import BucketKind, GraphRunner
    from nvcli.engine.shared_steps import shared_decode_buckets

    ran = []
    graphs = SimpleNamespace(
        kinds={
            (True, False): BucketKind(decode_buckets(100)),
            (False, False): BucketKind([16, 32]),
            (True, True): BucketKind(shared_decode_buckets(100)),
            (False, True): BucketKind([64]),
        },
        _body=lambda size, is_decode, shares: ran.append((size, is_decode, shares)),
    )
    GraphRunner.run_each_kind(graphs)  # type: ignore[arg-type]
    decode = [(size, True, False) for size in (1, 2, 4, 8, 16, 32, 64, 100)]
    shared = [(size, True, True) for size in (8, 16, 32, 64, 100)]
    assert ran == [*decode, (16, False, False), *shared, (64, False, True)]


@pytest.mark.torch
@pytest.mark.parametrize("is_cached", [True, False])
def test_rows_that_may_read_what_the_step_writes_are_flagged(is_cached: bool) -> None:
    """A plan names the block that it fills, and admits a sequence that begins with it: then keys
    before the new row's start are written by the other row, in the same step.
    """
    from types import SimpleNamespace

    from nvcli.engine.cuda_graph import GraphRunner
    from nvcli.kernels.prepare import READS_NEW
    from tests.builders import make_scheduler, make_sequence

    scheduler = make_scheduler(block_size=P, budget=P - 1, enable_prefix_caching=is_cached)
    first = make_sequence(range(P), seq_id=1)
    second = make_sequence(range(P + 1), seq_id=2)
    scheduler.add(first)
    scheduler.schedule(now=0.0)
    scheduler.add(second)
    plans = [scheduler.schedule(now=0.0), scheduler.schedule(now=0.0)]
    size = 1 if is_cached else P - 2
    assert [(row.start, row.n) for row in plans[0].rows] == [(P - 1, 1), (P * is_cached, size)]
    assert (second.block_table[0] == first.block_table[0]) == is_cached
    graphs: Any = SimpleNamespace(_turn=0, _padding=[8, 0, 0, 0], step=SimpleNamespace())
    flags = []
    for plan in plans:
        staged = torch.zeros(4, 4, dtype=torch.int32)
        graphs.step.sent = torch.zeros(4, 4, dtype=torch.int32)
        graphs._next_staging = lambda staged=staged: SimpleNamespace(
            host=staged.numpy(), pinned=staged, event=None
        )
        GraphRunner._upload_rows(graphs, plan, 3, {})
        flags.append([bool(at & READS_NEW) for at in graphs.step.sent[1:, 3].tolist()])
    assert flags == [[False, True, False], [False, False, False]]


@pytest.mark.torch
def test_buckets_always_hold_the_largest_batch() -> None:
    from nvcli.engine.buckets import decode_buckets, token_buckets
    from nvcli.engine.shared_steps import shared_decode_buckets

    assert decode_buckets(3) == [1, 2, 3]
    assert decode_buckets(20) == [1, 2, 4, 8, 16, 20]
    assert decode_buckets(256)[:6] == [1, 2, 4, 8, 16, 24]
    assert decode_buckets(300)[-4:] == [256, 272, 288, 300]
    for size in range(1, 600):
        assert decode_buckets(size)[-1] == size
        assert shared_decode_buckets(size)[-1:] == ([size] if size >= 4 else [])
    assert shared_decode_buckets(256) == [8, 16, *range(32, 257, 32)]
    assert shared_decode_buckets(400) == [8, 16, *range(32, 257, 32), 320, 384, 400]
    assert token_buckets(100, 1) == [16, 32, 64]
    assert token_buckets(16_384, 440_000_000)[-1] == 4096  # Qwen3-0.6B
    assert token_buckets(16_384, 8_000_000_000)[-1] == 512


def test_what_a_step_is_padded_to_is_the_bucket_it_takes() -> None:
    """`nvcli bench` asks `Buckets`, the captured steps ask their kinds."""
    from nvcli.engine.buckets import Buckets
    from nvcli.engine.cuda_graph import BucketKind

    buckets = Buckets.of(20, 100, 1)
    assert buckets == Buckets((1, 2, 4, 8, 16, 20), (16, 32, 64))
    decode, tokens = BucketKind(list(buckets.decode)), BucketKind(list(buckets.tokens))
    for kind in (decode, tokens):
        kind.captured = {n: (n, buckets.rows_of(n)) for n in kind.sizes}  # type: ignore[misc]
    for n in range(1, 70):
        assert buckets.padded(n, 0) == decode.smallest(n)
        assert buckets.padded(0, n) == tokens.smallest(n)
        assert buckets.padded(3, n) == tokens.smallest(n + 3)
    assert buckets.padded(0, 33) == (64, 20)  # no more rows than slots
    assert buckets.padded(0, 65) is None


def test_decoding_rows_bring_their_blocks_unless_more_changes() -> None:
    from types import SimpleNamespace

    from nvcli.engine.cuda_graph import _brought_blocks
    from nvcli.engine.step import BlockWrite, Row, StepPlan, TokenWrite

    seq: Any = SimpleNamespace(epoch=0)
    rows = [Row(seq, 0, slot, start, 1, samples=True) for slot, start in ((3, 16), (0, 5), (2, 64))]

    def brought(*writes: tuple[int, int, list[int]], **more: Any) -> dict[int, int] | None:
        plan = StepPlan(0, rows=rows, block_writes=[BlockWrite(*w) for w in writes], **more)
        return _brought_blocks(plan, block_size=16)

    assert brought() == {}
    assert brought((3, 1, [40]), (2, 4, [0])) == {3: 40, 2: 0}
    assert brought((3, 2, [40])) is None, "not where the row's token goes"
    assert brought((3, 1, [40]), (1, 0, [7])) is None, "of a slot that has no row"
    assert brought((3, 1, [40, 41])) is None, "two of one row"
    assert brought(token_writes=[TokenWrite(0, 5, [1])]) is None
