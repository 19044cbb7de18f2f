"""Tensor parallelism over gloo ranks on the CPU: it computes what one rank does."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nvcli import kernels
from nvcli.config import EngineConfig
from nvcli.engine.core import EngineCore
from nvcli.engine.model_runner import ModelRunner
from nvcli.engine.plan_record import PlanMirror, encode_plan
from nvcli.engine.sequence import Sequence
from nvcli.engine.step import Row, StepPlan, TokenWrite
from nvcli.errors import UsageError, WeightsError
from nvcli.models.config import ModelConfig
from nvcli.types import FinishReason, SamplingParams
from tests.builders import Log, run
from tests.engine.rank_threads import RankThreads
from tests.engine.short_sums import LibrarySums
from tests.engine.test_model_runner import Driver
from tests.fp8_checkpoint import write_fp8_checkpoint
from tests.tiny import stack_experts, write_tensors, write_tiny_checkpoint

pytestmark = pytest.mark.torch

PROMPT = [7, 250, 3, 99, 120, 5, 61, 65, 40, 41, 42]
MOE: dict[str, Any] = {"architecture": "Qwen3MoeForCausalLM"}
# What of the model is unusual, and over how many ranks it is spread.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "two ranks": (2, {}),
    "four ranks share two KV heads": (4, {}),
    "one KV head": (2, {"kv_heads": 1}),
    "vocabulary of 301": (2, {"vocab": 301}),
    "vocabulary of 301, tied": (2, {"vocab": 301, "tied": True}),
    "vocabulary of 5 over 4": (4, {"vocab": 5}),
    "biases": (2, {"attention_bias": True}),
    "Qwen2": (2, {"architecture": "Qwen2ForCausalLM"}),
    "Llama with biases everywhere": (
        2,
        {"architecture": "LlamaForCausalLM", "attention_bias": True, "mlp_bias": True},
    ),
    "three ranks": (3, {"heads": 6, "kv_heads": 3}),
    "experts": (2, MOE),
    "experts over four": (4, MOE),
    "experts in some layers": (2, MOE | {"extra_config": {"mlp_only_layers": [0]}}),
}
Make = Callable[..., RankThreads]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Ranks over a tiny checkpoint, written as the keywords of `model` say."""
    made: list[RankThreads] = []

    def make(size: int, model: dict[str, Any] | None = None, **options: Any) -> RankThreads:
        folder = tmp_path / "tiny"
        write_tiny_checkpoint(folder, **model or {})
        made.append(RankThreads(size, folder, config_of(**options)))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def config_of(**options: Any) -> EngineConfig:
    given = {"device": "cpu", "block_size": 4, "num_blocks": 200, "max_num_seqs": 8} | options
    return EngineConfig(**given)


def solo(folder: Path, **options: Any) -> ModelRunner:
    return ModelRunner(folder, ModelConfig.from_hf(folder), config_of(**options))


def plan_of(prompts: list[list[int]]) -> StepPlan:
    """All the prompts in one step."""
    driver = Driver.__new__(Driver)
    driver.next_block, driver.slots, driver.pending = 0, {}, StepPlan(0)
    for slot, prompt in enumerate(prompts):
        seq = Sequence(slot, array("i", prompt), SamplingParams(temperature=0), 1, 0, slot=slot)
        driver.admit(seq)
        driver.pending.rows.append(Row(seq, 0, slot, 0, len(prompt), samples=True))
    return driver.pending


def logits_of(runner: ModelRunner, plan: StepPlan) -> torch.Tensor:
    with torch.inference_mode():
        inputs = runner.state.prepare(plan, runner.attention)
        assert inputs is not None
        assert inputs.batch is not None
        hidden = runner.model.forward(inputs.batch)
        width = runner.model_config.vocab_size
        return runner.model.compute_logits(hidden)[:, :width].clone()


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_one_rank(make: Make, tmp_path: Path, name: str, batch: int) -> None:
    size, model = MODELS[name]
    ranks = make(size, model)
    limit = model.get("vocab", 300)
    prompts = [[(id_ + 13 * i) % limit for id_ in PROMPT[i:]] for i in range(batch)]
    expected = logits_of(solo(tmp_path / "tiny"), plan_of(prompts))
    found = ranks.everywhere(lambda rank: logits_of(ranks.runners[rank], plan_of(prompts)))
    for logits in found:
        assert torch.allclose(logits, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(logits, found[0])  # or ranks could sample differently


@pytest.mark.parametrize("fuses_norm", [True, False])
@pytest.mark.parametrize(
    "name", ["two ranks", "three ranks", "experts", "Llama with biases everywhere"]
)
def test_sums_of_few_rows_are_the_short_ones(
    make: Make, tmp_path: Path, name: str, fuses_norm: bool
) -> None:
    """Of a step of 11 rows, and of none in one of 14: every sum of the layers is one of theirs."""
    size, model = MODELS[name]
    ranks = make(size, model)
    short = [LibrarySums(runner.group, 11, fuses_norm=fuses_norm) for runner in ranks.runners]
    for runner, sums in zip(ranks.runners, short, strict=True):
        runner.group.short = sums
    num_sums = 2 * ranks.runners[0].model_config.num_layers + 1
    for prompts in ([PROMPT], [PROMPT, PROMPT[:3]]):
        expected = logits_of(solo(tmp_path / "tiny"), plan_of(prompts))
        found = ranks.everywhere(lambda rank, p=prompts: logits_of(ranks.runners[rank], plan_of(p)))
        for logits in found:
            assert torch.allclose(logits, expected, atol=1e-4, rtol=1e-4)
            assert torch.equal(logits, found[0])
        for sums in short:
            assert sums.calls == ["norm" if fuses_norm else "sum"] * num_sums


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("size", "load_format"), [(2, "auto"), (4, "auto"), (2, "dummy")])
def test_fp8_weights_are_shared_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, load_format: str, keeps: bool
) -> None:
    """keeps: as on a GPU, where they stay fp8."""
    monkeypatch.setattr(kernels, "keeps_fp8", lambda device: keeps)
    folder = tmp_path / "tiny"
    write_fp8_checkpoint(folder, attention_bias=True)
    config = config_of(load_format=load_format)
    ranks = RankThreads(size, folder, config)
    try:
        plan = plan_of([PROMPT, PROMPT[4:]])
        alone = solo(folder, load_format=load_format)
        expected = logits_of(alone, plan)
        for is_short in (False, True):
            for runner in ranks.runners if is_short else ():
                runner.group.short = LibrarySums(runner.group, 32, fuses_norm=True)
            for logits in ranks.everywhere(lambda rank: logits_of(ranks.runners[rank], plan)):
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        kind = "float8_e4m3fn" if keeps else "float32 from float8_e4m3fn"
        assert {runner.startup.weights_dtype for runner in [alone, *ranks.runners]} == {kind}
    finally:
        ranks.close()


@pytest.mark.parametrize("model", [{"vocab": 301}, MOE], ids=["dense", "moe"])
def test_a_rank_holds_its_share_only(make: Make, tmp_path: Path, model: dict[str, Any]) -> None:
    ranks = make(2, model)
    alone = solo(tmp_path / "tiny")
    for runner in ranks.runners:
        assert 0.5 < runner.startup.weights_bytes / alone.startup.weights_bytes < 0.75
        assert runner.startup.pool_bytes == alone.startup.pool_bytes // 2


@pytest.mark.parametrize("model", [{}, MOE], ids=["dense", "moe"])
def test_dummy_weights_are_a_share_of_the_same_numbers(
    make: Make, tmp_path: Path, model: dict[str, Any]
) -> None:
    ranks = make(2, model | {"vocab": 301, "kv_heads": 1}, load_format="dummy")
    plan = plan_of([PROMPT])
    expected = logits_of(solo(tmp_path / "tiny", load_format="dummy"), plan)
    for logits in ranks.everywhere(lambda rank: logits_of(ranks.runners[rank], plan)):
        assert torch.allclose(logits, expected, atol=1e-4, rtol=1e-4)


def test_experts_of_one_tensor_are_shared_alike(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tensors = write_tiny_checkpoint(folder, **MOE)
    one_by_one = RankThreads(2, folder, config_of())
    write_tensors(folder, stack_experts(tensors))
    stacked = RankThreads(2, folder, config_of())
    for left, right in zip(one_by_one.runners, stacked.runners, strict=True):
        for (name, a), (_, b) in zip(
            left.model.named_parameters(), right.model.named_parameters(), strict=True
        ):
            assert torch.equal(a, b), name
    one_by_one.close()
    stacked.close()


def test_the_smallest_cache_of_all_ranks_counts(make: Make) -> None:
    ranks = make(2, num_blocks=None, max_num_seqs=4)
    assert len({(r.num_blocks, r.max_model_len) for r in ranks.runners}) == 1


@pytest.mark.parametrize("size", [3, 8])
def test_a_size_that_does_not_divide_is_refused(tmp_path: Path, size: int) -> None:
    write_tiny_checkpoint(tmp_path / "tiny")
    config = ModelConfig.from_hf(tmp_path / "tiny")
    with pytest.raises(UsageError, match=f"--tensor-parallel-size {size}: .*4 heads") as caught:
        config.check_tensor_parallel(size)
    assert caught.value.hint == "It can be 1, 2, 4."


def test_an_inner_size_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    def error_of(**changes: Any) -> str:
        extra = {"moe_intermediate_size": 42, "num_experts": 2} | changes
        write_tiny_checkpoint(tmp_path, **MOE, intermediate=98, extra_config=extra)
        with pytest.raises(UsageError) as caught:
            ModelConfig.from_hf(tmp_path).check_tensor_parallel(4)
        return str(caught.value)

    start = "--tensor-parallel-size 4: the model's"
    fits = "cannot be shared equally. It can be 1, 2."
    assert error_of() == f"{start} experts of 42 {fits}"
    assert error_of(mlp_only_layers=[1]) == f"{start} MLP of 98 {fits}"


def test_a_tensor_of_another_shape_is_told_as_ever(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tensors = write_tiny_checkpoint(folder)
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = tensors[name][:, :-2].contiguous()
    write_tensors(folder, tensors)
    with pytest.raises(WeightsError, match=r"o_proj.weight has shape \[64, 126\]"):
        RankThreads(2, folder, config_of())


# --- whole runs ----------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "bias and log-probabilities": {
        "temperature": 0.0,
        "logit_bias": {5: 2.0, 9: -3.0},
        "logprobs": 3,
        "prompt_logprobs": 2,
    },
    "bad words": {"temperature": 0.0, "bad_words": ((65, 66), (7,)), "min_tokens": 3},
}


def sequences(**params: Any) -> list[Sequence]:
    """Six, of two common prefixes."""
    return [
        Sequence(
            i, array("i", PROMPT[i % 2 :] + [i] * (i % 3)), SamplingParams(**params), 12, 40 + i
        )
        for i in range(6)
    ]


def outputs(
    device: Any, seqs: list[Sequence], **options: Any
) -> tuple[list[list[int]], EngineCore]:
    log = Log()
    core = EngineCore(device, log, **{"max_num_batched_tokens": 16, "depth": 0} | options)
    for seq in seqs:
        core.add(seq)
    run(core)
    return [log.tokens(seq) for seq in seqs], core


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_runs_equal_those_of_one_rank(make: Make, tmp_path: Path, way: str, depth: int) -> None:
    """In chunks, mixed batches and with prefix hits."""
    ranks = make(2, {"vocab": 301})
    expected, _ = outputs(solo(tmp_path / "tiny"), sequences(**WAYS[way]))
    found, core = outputs(ranks, sequences(**WAYS[way]), depth=depth)
    assert found == expected
    assert (core.scheduler.blocks.num_hit_tokens > 0) == ("prompt_logprobs" not in WAYS[way])


def test_preemption_changes_nothing(make: Make, tmp_path: Path) -> None:
    ranks = make(2, num_blocks=14)
    expected, _ = outputs(solo(tmp_path / "tiny"), sequences(temperature=0.8))
    found, core = outputs(ranks, sequences(temperature=0.8), depth=1)
    assert core.scheduler.num_preemptions > 0
    assert found == expected


def test_the_prefix_cache_may_be_off(make: Make) -> None:
    ranks = make(2)
    cached, _ = outputs(ranks, sequences(temperature=0.0))
    plain, core = outputs(ranks, sequences(temperature=0.0), enable_prefix_caching=False)
    assert plain == cached
    assert core.scheduler.blocks.num_hit_tokens == 0


@pytest.mark.parametrize("after", range(5))
def test_an_abort_leaves_the_ranks_alike(make: Make, tmp_path: Path, after: int) -> None:
    ranks = make(2)
    log, seqs = Log(), sequences(temperature=0.0)
    core = EngineCore(ranks, log, max_num_batched_tokens=16, depth=1)
    for seq in seqs[:4]:
        core.add(seq)
    for _ in range(after):
        core.step()
    core.abort(seqs[1])
    for seq in seqs[4:]:  # one of them takes its slot
        core.add(seq)
    run(core)
    expected, _ = outputs(solo(tmp_path / "tiny"), sequences(temperature=0.0))
    for i in (0, 2, 3, 4, 5):
        assert log.tokens(seqs[i]) == expected[i]
    assert log.of(seqs[1])[-1].finish_reason is FinishReason.ABORT


def test_masks_and_forced_tokens_travel() -> None:
    plan = plan_of([PROMPT, PROMPT[2:]])
    plan.rows[1].seq.has_grammar = True
    plan.rows[1].seq.mask = np.arange(10, dtype=np.int32)
    plan.slot_inits[1] = plan.slot_inits[1]._replace(has_grammar=True)
    plan.token_writes.append(TokenWrite(0, 3, [8, 9]))
    copy = PlanMirror(8).decode(encode_plan(plan))
    assert [row.seq.has_grammar for row in copy.rows] == [False, True]
    assert copy.rows[0].seq.mask is None
    assert copy.rows[1].seq.mask.tolist() == list(range(10))
    assert (copy.token_writes, copy.slot_inits) == (plan.token_writes, plan.slot_inits)
    assert copy.block_writes == plan.block_writes
    for row, original in zip(copy.rows, plan.rows, strict=True):
        assert (row.slot, row.start, row.n) == (original.slot, original.start, original.n)
        assert row.seq.block_table == original.seq.block_table
        assert row.seq.num_prompt_tokens == original.seq.num_prompt_tokens


def test_what_is_pooled_is_the_same(make: Make, tmp_path: Path) -> None:
    def pooled(device: Any, pools: tuple[int, ...]) -> torch.Tensor:
        log = Log()
        core = EngineCore(device, log, max_num_batched_tokens=8)
        seq = Sequence(0, array("i", PROMPT), SamplingParams(max_tokens=0), 0, 0, pools=pools)
        core.add(seq)
        run(core)
        found = next(update.pooled for update in log.of(seq) if update.pooled is not None)
        return torch.frombuffer(bytearray(found), dtype=torch.float32)

    ranks = make(2, {"vocab": 301})
    for pools in ((), (3, 150, 300)):
        expected = pooled(solo(tmp_path / "tiny"), pools)
        assert torch.allclose(pooled(ranks, pools), expected, atol=1e-4)
