"""The model runner on the CPU with a tiny Qwen3: steps, log-probabilities, limits and errors."""

from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from nvcli import kernels
from nvcli.config import EngineConfig
from nvcli.engine.device_choice import resolve_device, resolve_dtype
from nvcli.engine.model_runner import ModelRunner
from nvcli.engine.sequence import Sequence
from nvcli.engine.step import BlockWrite, Row, SlotInit, StepDevice, StepPlan, StepResult
from nvcli.errors import DeviceError, EngineClosedError, EngineError, OutOfMemoryError, UsageError
from nvcli.kernels.noise import noise_keys, uniforms
from nvcli.models.config import ModelConfig
from nvcli.parallel import SOLO
from nvcli.types import SamplingParams
from tests.fp8_checkpoint import FP8, write_fp8_checkpoint
from tests.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.torch

VOCAB, TOKENIZER_SIZE, P = 300, 290, 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(path)
    return path


def make_runner(folder: Path, **options: Any) -> ModelRunner:
    options = {"device": "cpu", "block_size": P, "num_blocks": 64, "max_num_seqs": 8} | options
    config = EngineConfig(**options)
    return ModelRunner(folder, ModelConfig.from_hf(folder), config, vocab_size=TOKENIZER_SIZE)


class Driver:
    """A minimal scheduler: sequences with blocks of their own, steps as the test says."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.step_id = 0
        self.next_block = 0
        self.pending = StepPlan(0)
        self.slots: dict[int, Sequence] = {}

    def add(self, slot: int, prompt: list[int], seed: int = 0, **params: Any) -> Sequence:
        seq = Sequence(slot, array("i", prompt), SamplingParams(**params), 100, seed, slot=slot)
        self.admit(seq)
        return seq

    def admit(self, seq: Sequence) -> None:
        """Give it its slot and fresh blocks for 32 tokens."""
        seq.block_table = list(range(self.next_block, self.next_block + 8))
        seq.num_computed_tokens = 0
        self.next_block += 8
        self.slots[seq.slot] = seq
        init = SlotInit(
            seq.slot,
            seq.prompt_token_ids,
            seq.output_token_ids,
            seq.params,
            seq.seed,
            seq.eos_token_ids,
        )
        self.pending.slot_inits.append(init)
        self.pending.block_writes.append(BlockWrite(seq.slot, 0, list(seq.block_table)))

    def step(self, *work: tuple[Sequence, int]) -> StepResult:
        """Compute so many tokens of each sequence; samples where that catches up."""
        plan, self.pending = self.pending, StepPlan(0)
        self.step_id += 1
        plan.step_id = self.step_id
        for seq, n in work:
            start = seq.num_computed_tokens
            samples = start + n == seq.num_tokens
            plan.rows.append(Row(seq, seq.epoch, seq.slot, start, n, samples))
            seq.num_computed_tokens += n
        result = self.runner.collect(self.runner.launch(plan))
        for row, token_id in zip(plan.rows, result.token_ids, strict=True):
            assert (token_id >= 0) == row.samples
            if row.samples:
                row.seq.output_token_ids.append(token_id)
        return result

    def generate(self, count: int, *seqs: Sequence, chunk: int = 100) -> list[list[int]]:
        """Step all sequences together until each has `count` output tokens."""
        while any(len(seq.output_token_ids) < count for seq in seqs):
            self.step(
                *(
                    (seq, min(chunk, seq.num_tokens - seq.num_computed_tokens))
                    for seq in seqs
                    if len(seq.output_token_ids) < count
                )
            )
        return [seq.output_token_ids for seq in seqs]


PROMPT = [7, 250, 3, 99, 120, 5, 61, 288, 14, 14, 30]


def plain_logits(runner: ModelRunner, token_ids: list[int]) -> torch.Tensor:
    """[T, V] of one plain forward pass over all the tokens, in a runner of its own."""
    driver = Driver(runner)
    seq = Sequence(0, array("i", token_ids), SamplingParams(), 1, 0, slot=0)
    driver.admit(seq)
    driver.pending.rows.append(Row(seq, 0, 0, 0, len(token_ids), samples=False))
    with torch.inference_mode():
        inputs = runner.state.prepare(driver.pending, runner.attention)
        assert inputs is not None
        return runner.model.compute_logits(runner.model.forward(inputs.batch)).clone()


def test_it_is_a_step_device_and_says_what_it_loaded(folder: Path) -> None:
    runner = make_runner(folder, max_num_seqs=3, max_model_len=100)
    device: StepDevice = runner
    assert (device.max_num_seqs, device.num_blocks, device.block_size) == (3, 64, P)
    assert device.max_model_len == 100
    report = runner.startup
    assert (report.device, report.dtype, report.attention_backend) == ("cpu", "float32", "torch")
    assert report.attention_reason
    # 2 (K, V) x 2 layers x 2 heads x 32 x 4 bytes, 4 tokens a block, 64 blocks and the dummy
    assert report.pool_bytes == 1024 * 4 * 65
    parameters = runner.model.parameters()  # type: ignore[attr-defined]
    assert report.weights_bytes >= sum(p.numel() * 4 for p in parameters)
    assert set(report.stage_s) == {"weights", "attention", "profile", "kv_cache", "graphs"}
    assert (runner.depth, runner.max_num_batched_tokens) == (0, 1024)


@pytest.mark.parametrize("keeps", [False, True])
def test_the_report_says_what_became_of_fp8_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    monkeypatch.setattr(kernels, "keeps_fp8", lambda device: keeps)
    tensors = write_fp8_checkpoint(tmp_path)
    runner = make_runner(tmp_path)
    fp8 = sum(t.numel() for t in tensors.values() if t.dtype == FP8)
    weights = sum(t.numel() for name, t in tensors.items() if not name.endswith("_scale_inv"))
    report = runner.startup
    assert report.dtype == "float32"
    rotary = sum(b.nbytes for b in runner.model.buffers())  # type: ignore[attr-defined]
    if keeps:
        assert report.weights_dtype == "float8_e4m3fn"
        assert report.weights_bytes == rotary + fp8 + 4 * fp8 // 128**2 + 4 * (weights - fp8)
    else:
        assert report.weights_dtype == "float32 from float8_e4m3fn"
        assert report.weights_bytes == rotary + 4 * weights


def test_greedy_is_the_argmax_of_a_plain_forward(folder: Path) -> None:
    driver = Driver(make_runner(folder))
    (output,) = driver.generate(6, driver.add(0, PROMPT, temperature=0))
    logits = plain_logits(make_runner(folder), PROMPT + output)[:, :TOKENIZER_SIZE]
    assert output == logits[len(PROMPT) - 1 : -1].argmax(1).tolist()


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.5, "top_k": 50}])
@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_chunks_give_the_same_tokens(folder: Path, params: dict[str, Any], chunk: int) -> None:
    """T2."""
    outputs = []
    for size in (100, chunk):
        driver = Driver(make_runner(folder))
        outputs += driver.generate(8, driver.add(0, PROMPT, seed=42, **params), chunk=size)
    assert outputs[0] == outputs[1]


MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.2, "top_p": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0, "logit_bias": {5: 4.0}, "bad_token_ids": (7,), "min_tokens": 3},
]


def test_a_seeded_row_is_the_same_alone_and_in_company(folder: Path) -> None:
    """T10, at the level of steps: alone, with others that start later, and resumed elsewhere."""
    alone = []
    for kind, params in enumerate(MIXED):
        driver = Driver(make_runner(folder))
        alone += driver.generate(9, driver.add(0, PROMPT[kind:], seed=42 + kind, **params))
    driver = Driver(make_runner(folder))
    seqs: list[Sequence] = []
    for kind, params in reversed(list(enumerate(MIXED))):
        seqs.insert(0, driver.add(7 - kind, PROMPT[kind:], seed=42 + kind, **params))
        driver.step(*((seq, seq.num_tokens - seq.num_computed_tokens) for seq in seqs))
    driver.generate(5, *seqs)
    # preemption: other slots, other blocks, everything computed again
    driver.next_block = 0
    for seq in seqs:
        seq.slot = (seq.slot + 3) % 8
        del seq.output_token_ids[5:]
        driver.admit(seq)
    assert driver.generate(9, *seqs, chunk=4) == alone


@pytest.mark.parametrize("max_num_seqs", [3, 12, 20])
def test_every_batch_size_runs(folder: Path, max_num_seqs: int) -> None:
    """T13 without graphs: rows are the same in every batch size, all slots used."""
    driver = Driver(make_runner(folder, max_num_seqs=max_num_seqs, num_blocks=8 * max_num_seqs))
    seqs = [driver.add(i, PROMPT[: 3 + i % 5], temperature=0) for i in range(max_num_seqs)]
    for size in range(1, max_num_seqs + 1):
        rows = seqs[max_num_seqs - size :]
        driver.step(*((seq, seq.num_tokens - seq.num_computed_tokens) for seq in rows))
    for i in (0, max_num_seqs // 2, max_num_seqs - 1):
        alone = Driver(make_runner(folder))
        seq = alone.add(0, list(seqs[i].prompt_token_ids), temperature=0)
        count = len(seqs[i].output_token_ids)
        assert alone.generate(count, seq) == [seqs[i].output_token_ids]


def test_padded_ids_are_never_sampled(folder: Path) -> None:
    """T12: ids 290 to 299 belong to the model and not to the tokenizer."""
    runner = make_runner(folder)
    head = runner.model.lm_head.weight  # type: ignore[attr-defined]
    with torch.inference_mode():
        head[TOKENIZER_SIZE:] *= 100
    driver = Driver(runner)
    kinds = ({"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"presence_penalty": 1.0})
    seqs = [driver.add(i, PROMPT, logprobs=5, **kind) for i, kind in enumerate(kinds)]
    for _ in range(6):
        result = driver.step(*((s, s.num_tokens - s.num_computed_tokens) for s in seqs))
        assert max(result.token_ids) < TOKENIZER_SIZE
        assert all(t < TOKENIZER_SIZE for lp in result.logprobs.values() for t, _ in lp.top)


def test_the_dummy_and_foreign_blocks_are_never_read(folder: Path) -> None:
    outputs = []
    for poison in (False, True):
        runner = make_runner(folder)
        driver = Driver(runner)
        seqs = [driver.add(i, PROMPT[i:], temperature=0) for i in range(3)]
        if poison:
            with torch.inference_mode():
                runner.kv_cache.pool[:, :, driver.next_block :] = torch.nan
        outputs.append(driver.generate(6, *seqs))
    assert outputs[0] == outputs[1]


def test_logprobs_of_samples(folder: Path) -> None:
    driver = Driver(make_runner(folder))
    plain = driver.add(0, PROMPT[2:], temperature=0)
    greedy = driver.add(1, PROMPT, temperature=0, logprobs=3)
    random = driver.add(2, PROMPT, seed=5, temperature=2.0, logprobs=0, logit_bias={9: 8.0})
    result = driver.step((plain, 9), (greedy, 11), (random, 11))
    logits = plain_logits(make_runner(folder), PROMPT)[-1, :TOKENIZER_SIZE]
    expected = logits.log_softmax(0)
    assert set(result.logprobs) == {1, 2}
    for row, seq in ((1, greedy), (2, random)):
        found, token_id = result.logprobs[row], seq.output_token_ids[0]
        assert found.token_id == token_id == result.token_ids[row]
        assert found.logprob == pytest.approx(expected[token_id].item(), abs=1e-5)
        assert found.rank == int((expected > expected[token_id]).sum()) + 1
    best = expected.topk(3)
    assert [token_id for token_id, _ in result.logprobs[1].top] == best.indices.tolist()
    found_best = [logprob for _, logprob in result.logprobs[1].top]
    assert found_best == pytest.approx(best.values.tolist(), abs=1e-5)
    assert result.logprobs[1].rank == 1
    assert result.logprobs[2].top == ()


@pytest.mark.parametrize("chunk", [100, 4, 1])
@pytest.mark.parametrize("piece", [1 << 24, 700])
def test_prompt_logprobs(
    folder: Path, chunk: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T11: equal to a plain forward pass, whatever the chunks and the pieces of the head."""
    monkeypatch.setattr("nvcli.engine.logprobs.MAX_ELEMENTS", piece)
    driver = Driver(make_runner(folder))
    other = driver.add(0, PROMPT[:3], temperature=0, logprobs=1)
    seq = driver.add(1, PROMPT, temperature=0, prompt_logprobs=2)
    found = []
    while not seq.output_token_ids:
        n = min(chunk, seq.num_tokens - seq.num_computed_tokens)
        result = driver.step((other, other.num_tokens - other.num_computed_tokens), (seq, n))
        assert set(result.logprobs) == {0}
        found += result.prompt_logprobs.get(1, [])
    logits = plain_logits(make_runner(folder), PROMPT)[:-1, :TOKENIZER_SIZE]
    expected = logits.log_softmax(1)
    assert [lp.token_id for lp in found] == PROMPT[1:]
    for lp, row in zip(found, expected, strict=True):
        assert lp.logprob == pytest.approx(row[lp.token_id].item(), abs=1e-5)
        assert lp.rank == int((row > row[lp.token_id]).sum()) + 1
        assert [token_id for token_id, _ in lp.top] == row.topk(2).indices.tolist()
    # decoding yields no more of them
    result = driver.step((seq, 1))
    assert result.prompt_logprobs == {}


def test_prompt_logprobs_without_a_sample(folder: Path) -> None:
    """max_tokens = 0: the row computes its prompt and samples nothing."""
    driver = Driver(make_runner(folder))
    seq = driver.add(0, PROMPT, prompt_logprobs=0, max_tokens=0)
    driver.pending.rows.append(Row(seq, 0, 0, 0, len(PROMPT), samples=False))
    result = driver.runner.collect(driver.runner.launch(driver.pending))
    assert result.token_ids == [-1]
    assert len(result.prompt_logprobs[0]) == len(PROMPT) - 1


def test_launching_ahead_gives_the_same_tokens(folder: Path) -> None:
    """Step t + 1 is launched before step t is read: its input is the sample on the device."""
    driver = Driver(make_runner(folder))
    (expected,) = driver.generate(6, driver.add(0, PROMPT, seed=3))
    runner = make_runner(folder)
    driver = Driver(runner)
    seq = driver.add(0, PROMPT, seed=3)
    plans = [driver.pending, *(StepPlan(t) for t in range(1, 6))]
    plans[0].rows.append(Row(seq, 0, 0, 0, len(PROMPT), samples=True))
    for t in range(1, 6):
        plans[t].rows.append(Row(seq, 0, 0, len(PROMPT) + t - 1, 1, samples=True))
    tickets = [runner.launch(plan) for plan in plans]
    assert [runner.collect(ticket).token_ids[0] for ticket in tickets] == expected


def test_a_plan_without_rows(folder: Path) -> None:
    runner = make_runner(folder)
    assert runner.collect(runner.launch(StepPlan(0))).token_ids == []


# --- devices, limits, errors ---------------------------------------------------------------------


def test_cuda_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(DeviceError, match="--device cpu") as caught:
        resolve_device("cuda")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("name", "device", "checkpoint", "expected"),
    [
        ("auto", "cpu", "bfloat16", torch.float32),
        ("auto", "cuda", "bfloat16", torch.bfloat16),
        ("auto", "cuda", "float16", torch.float16),
        ("auto", "cuda", "float32", torch.bfloat16),
        ("bfloat16", "cpu", "float32", torch.bfloat16),
        ("float32", "cuda", "bfloat16", torch.float32),
    ],
)
def test_dtype(name: str, device: str, checkpoint: str, expected: torch.dtype) -> None:
    assert resolve_dtype(name, torch.device(device), checkpoint) == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_run_on_the_cpu(folder: Path, dtype: str) -> None:
    driver = Driver(make_runner(folder, dtype=dtype))
    assert driver.runner.kv_cache.pool.dtype == getattr(torch, dtype)
    seqs = [driver.add(i, PROMPT, logprobs=2, **kind) for i, kind in enumerate(MIXED)]
    outputs = driver.generate(4, *seqs)
    assert all(0 <= token_id < TOKENIZER_SIZE for output in outputs for token_id in output)


def test_max_model_len_beyond_the_model(folder: Path) -> None:
    with pytest.raises(UsageError, match="513 is more than the model's 512"):
        make_runner(folder, max_model_len=513)


def test_pool_follows_the_share_of_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def runner(memory: int, **options: Any) -> ModelRunner:
        monkeypatch.setattr("nvcli.engine.model_runner.available_memory", lambda: memory)
        return make_runner(folder, num_blocks=None, **options)

    plenty = runner(1 << 34, max_num_seqs=3)
    assert plenty.num_blocks == 3 * 512 // P  # as much as three full sequences can use
    assert plenty.max_model_len == 512
    weights = plenty.startup.weights_bytes
    block = 1024 * P
    small = runner(2 * (weights + 11 * block))
    assert (small.num_blocks, small.max_model_len) == (10, 10 * P)
    shared = runner(4 * (weights + 11 * block), memory_utilization=0.25)
    assert (shared.num_blocks, shared.startup.pool_bytes) == (10, 11 * block)
    with pytest.raises(OutOfMemoryError, match="--max-model-len 41 needs"):
        runner(2 * (weights + 11 * block), max_model_len=41)
    with pytest.raises(OutOfMemoryError, match="left for the KV cache"):
        runner(2 * weights)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 10**9},
        {"vocab_size": 2**40},
        {"head_dim": 2**40},
        {"max_position_embeddings": 2**62},
    ],
)
def test_a_model_that_no_memory_holds(folder: Path, changes: dict[str, int]) -> None:
    """What a config.json says may be anything; it was built until the system killed us."""
    model_config = dataclasses.replace(ModelConfig.from_hf(folder), **changes)
    with pytest.raises(
        OutOfMemoryError, match=r"the weights need .* or more, and .* are available"
    ):
        ModelRunner(folder, model_config, EngineConfig(device="cpu"))


@pytest.mark.parametrize(
    ("error", "is_refusal"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("a bug"), False),
    ],
)
def test_weights_that_the_device_refuses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_refusal: bool
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("nvcli.models.load_model", refuse)
    with pytest.raises(OutOfMemoryError if is_refusal else RuntimeError) as caught:
        make_runner(folder)
    if is_refusal:
        assert "the weights need" in str(caught.value)
        assert "and the device refused it" in str(caught.value)
    else:
        assert caught.value is error


@pytest.mark.parametrize("max_num_seqs", [10_000_000, 2**31 - 1])
def test_tables_that_do_not_fit(folder: Path, max_num_seqs: int) -> None:
    with pytest.raises(OutOfMemoryError, match=f"tables of {max_num_seqs} sequences") as caught:
        make_runner(folder, max_num_seqs=max_num_seqs)
    assert "--max-num-seqs" in (caught.value.hint or "")


def test_a_cache_that_does_not_fit(folder: Path) -> None:
    with pytest.raises(OutOfMemoryError, match="the KV cache of 2147483647 blocks needs"):
        make_runner(folder, num_blocks=2**31 - 1)


@pytest.mark.parametrize(
    "name",
    ["max_model_len", "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "seed"],
)
def test_numbers_that_no_table_can_hold(name: str) -> None:
    high = 2**63 - 1 if name == "seed" else 2**31 - 1
    EngineConfig(**{name: high})  # type: ignore[arg-type]
    for value in (high + 1, 99999999999999999999):
        with pytest.raises(UsageError, match=f"{name} must be at most {high}, got {value}"):
            EngineConfig(**{name: value})  # type: ignore[arg-type]


def test_tables_of_penalties_that_do_not_fit_end_that_step_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(make_runner(folder))
    monkeypatch.setattr("nvcli.engine.kv_cache.available_memory", lambda: 1000)
    seq = driver.add(0, PROMPT, presence_penalty=1)
    with pytest.raises(OutOfMemoryError, match="penalties or biases of 8 sequences"):
        driver.step((seq, len(PROMPT)))
    driver.pending = StepPlan(0)
    assert driver.step((driver.add(1, PROMPT), len(PROMPT))).token_ids[0] >= 0


def test_out_of_memory_in_a_step_ends_that_plan_only(folder: Path) -> None:
    runner = make_runner(folder)
    driver = Driver(runner)
    seq = driver.add(0, PROMPT, temperature=0)
    forward = runner.model.forward

    def fail(batch: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no")

    runner.model.forward = fail  # type: ignore[method-assign]
    plan = dataclasses.replace(driver.pending, rows=[Row(seq, 0, 0, 0, len(PROMPT), True)])
    with pytest.raises(EngineError, match="11 tokens ran out of device memory"):
        runner.launch(plan)
    runner.model.forward = forward  # type: ignore[method-assign]
    expected = Driver(make_runner(folder))
    want = expected.generate(3, expected.add(0, PROMPT, temperature=0))
    assert driver.generate(3, seq) == want


def test_close_gives_everything_back(folder: Path) -> None:
    runner = make_runner(folder)
    runner.close()
    runner.close()
    assert not hasattr(runner, "model")
    assert not hasattr(runner, "kv_cache")
    with pytest.raises(EngineClosedError):
        runner.launch(StepPlan(0))


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cuda_gives_the_tokens_of_the_cpu(folder: Path) -> None:
    """float32 on both: all kinds of rows, chunks, forced order and launching ahead."""
    outputs = []
    for device in ("cpu", "cuda"):
        runner = make_runner(folder, device=device, dtype="float32", attention_backend="torch")
        driver = Driver(runner)
        seqs = [driver.add(i, PROMPT[i:], seed=i, **kind) for i, kind in enumerate(MIXED)]
        outputs.append(driver.generate(12, *seqs, chunk=4))
        runner.close()
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
def test_cuda_stages_without_mixing_steps_up(folder: Path) -> None:
    """Many launches before the first collect: each upload and each result stays its own."""
    outputs = []
    for ahead in (1, 12):
        runner = make_runner(folder, device="cuda", dtype="float32", attention_backend="torch")
        driver = Driver(runner)
        seqs = [driver.add(i, PROMPT[i:], seed=i, logprobs=2) for i in range(4)]
        plans = [driver.pending, *(StepPlan(t) for t in range(1, 12))]
        for t, plan in enumerate(plans):
            for seq in seqs:
                n = seq.num_prompt_tokens
                start, size = (0, n) if t == 0 else (n + t - 1, 1)
                plan.rows.append(Row(seq, 0, seq.slot, start, size, samples=True))
        results = []
        for i in range(0, len(plans), ahead):
            tickets = [runner.launch(plan) for plan in plans[i : i + ahead]]
            results += [runner.collect(ticket) for ticket in tickets]
        outputs.append([(r.token_ids, r.logprobs) for r in results])
        runner.close()
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
def test_cuda_prompt_logprobs(folder: Path) -> None:
    found = []
    for device in ("cpu", "cuda"):
        runner = make_runner(folder, device=device, dtype="float32", attention_backend="torch")
        driver = Driver(runner)
        seq = driver.add(0, PROMPT, temperature=0, prompt_logprobs=2)
        found.append(driver.step((seq, len(PROMPT))).prompt_logprobs[0])
        runner.close()
    for cpu, cuda in zip(*found, strict=True):
        assert (cpu.token_id, cpu.rank) == (cuda.token_id, cuda.rank)
        assert cpu.logprob == pytest.approx(cuda.logprob, abs=1e-4)


@pytest.mark.gpu
def test_cuda_pool_is_profiled_and_given_back(folder: Path) -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = 0.02 + (total - free) / total
    runner = make_runner(
        folder,
        device="cuda",
        num_blocks=None,
        max_num_seqs=None,
        attention_backend="torch",
        memory_utilization=share,
        max_num_batched_tokens=2048,
    )
    assert (runner.depth, runner.max_num_seqs) == (1, 256)
    assert runner.num_blocks == 256 * 512 // P
    assert (total - torch.cuda.mem_get_info()[0]) < share * total
    assert runner.kv_cache.layers[0][0].shape == (runner.num_blocks + 1, P, 2, 32)
    assert runner.kv_cache.layers[0][0].transpose(1, 2).is_contiguous()  # [N, Hk, P, D]
    runner.close()
    assert torch.cuda.memory_allocated() < 1 << 26  # cuBLAS keeps 32 MiB of workspace
    with pytest.raises(OutOfMemoryError):
        make_runner(folder, device="cuda", num_blocks=(1 << 31) - 1, attention_backend="torch")


@pytest.mark.gpu
def test_cuda_uniforms_are_those_of_the_cpu() -> None:
    seeds, positions = torch.arange(-8, 8) << 40, torch.arange(16)
    ids = torch.arange(151_936)
    expected = uniforms(noise_keys(seeds, positions), ids)
    found = uniforms(noise_keys(seeds.cuda(), positions.cuda()), ids.cuda())
    assert torch.equal(expected, found.cpu())


def test_the_last_layer_ends_early_unless_more_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many hidden states each step computes, by what its rows ask."""
    runner = make_runner(folder)
    forward, counts = runner.model.forward, []

    def counted(batch: Any) -> torch.Tensor:
        hidden = forward(batch)
        counts.append(hidden.shape[0])
        return hidden

    monkeypatch.setattr(runner.model, "forward", counted)
    driver = Driver(runner)
    first, second = driver.add(0, [1, 2, 3, 4, 5]), driver.add(1, [6, 7, 8])
    driver.step((first, 5), (second, 2))  # one samples
    driver.step((first, 1), (second, 1))  # both do
    driver.step((driver.add(2, [9, 10, 11, 12]), 2))  # none does
    scored = driver.add(3, [1, 2, 3, 4], prompt_logprobs=0)
    driver.step((scored, 2))
    driver.step((scored, 2))
    assert counts == [1, 2, 2, 2, 2]
    driver.step((scored, 1), (driver.add(6, [1, 2, 3]), 3))  # its prompt is behind it
    assert counts.pop() == 2
    pools = driver.add(4, [5, 6, 7])
    pools.pools = ()
    result = driver.step((driver.add(5, [1, 2, 3, 4]), 4), (pools, 3))
    assert counts.pop() == 7
    assert set(result.pooled) == {1}


def test_the_profile_measures_steps_of_which_all_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later step keeps more hidden states, or samples more rows."""
    runner = make_runner(folder, max_num_seqs=3, max_num_batched_tokens=20, max_model_len=16)
    forward, found = runner.model.forward, []

    def counted(batch: Any) -> torch.Tensor:
        hidden = forward(batch)
        found.append((hidden.shape[0], len(batch.logits_indices)))
        return hidden

    runner._allocate(0)
    monkeypatch.setattr(runner.model, "forward", counted)
    for plan in runner._profile_plans():
        runner.collect(runner.launch(plan))
    assert found == [(3, 3), (30, 2)]


@pytest.mark.parametrize("max_model_len", [1, 2, 15, 16])
@pytest.mark.parametrize("budget", [1, 7, 40])
def test_the_profile_runs_whatever_the_limits(
    folder: Path, max_model_len: int, budget: int
) -> None:
    limits = {"max_num_batched_tokens": budget, "max_model_len": max_model_len}
    runner = make_runner(folder, max_num_seqs=3, **limits)
    plans = list(runner._profile_plans())
    assert len(plans[0].rows) == min(3, budget)
    for plan in plans:
        ids = runner.collect(runner.launch(plan)).token_ids
        assert all(0 <= token_id < runner.vocab_size for token_id in ids)


@pytest.mark.parametrize(
    ("device", "has_triton", "deterministic", "is_folded"),
    [
        ("cuda", True, False, True),
        ("cpu", True, False, False),
        ("cuda", False, False, False),
        ("cuda", True, True, False),
    ],
)
def test_norms_come_late_where_our_kernels_run_and_rows_may_depend_on_one_another(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    has_triton: bool,
    deterministic: bool,
    is_folded: bool,
) -> None:
    from types import SimpleNamespace

    folded = []
    model = SimpleNamespace(fold_norms=lambda: folded.append(torch.is_inference_mode_enabled()))
    monkeypatch.setattr("nvcli.models.load_model", lambda *args, **options: model)
    monkeypatch.setattr(kernels, "uses_triton", lambda: has_triton)
    runner: Any = SimpleNamespace(
        device=torch.device(device),
        dtype=torch.bfloat16,
        config=EngineConfig(deterministic=deterministic),
        model_config=SimpleNamespace(is_fp8=False, least_params=1),
        group=SOLO,
    )
    assert ModelRunner._load_model(runner, Path()) is model
    assert folded == [True] * is_folded
