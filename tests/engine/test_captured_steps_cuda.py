"""Captured steps on a GPU, with the built-in trained model in bfloat16."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from nvcli import LLM, Message, SamplingParams
from tests.kernels.triton_testing import needs_triton
from tests.text.tiny_tokenizer import write_tokenizer
from tests.tiny import write_tiny_checkpoint

pytestmark = [pytest.mark.gpu, needs_triton, pytest.mark.timeout(600)]

QUESTIONS = [f"What is {a} plus {b}?" for a in (3, 12, 40, 77) for b in (5, 28)]
QUESTIONS += ["What is the capital of France?", "Tell me a story about a fox.", "Hello!"]
WAYS: dict[str, dict[str, Any]] = {
    "run-ahead off": {"run_ahead": False},
    "graphs off": {"enforce_eager": True},
    "both off": {"enforce_eager": True, "run_ahead": False},
    "blocks of 64": {"block_size": 64},
    "chunks of 40": {"max_num_batched_tokens": 40},
    "three at once": {"max_num_seqs": 3},
    "torch attention": {"attention_backend": "torch"},
}


def generate(**options: Any) -> list[list[int]]:
    with LLM("demo", device="cuda", num_blocks=2000, **options) as llm:
        prompts = [llm.tokenizer.encode_chat([Message("user", q)]) for q in QUESTIONS]
        found = []
        for temperature, top_k in ((0.0, 0), (0.7, 0), (0.7, 20)):
            params = SamplingParams(temperature=temperature, top_k=top_k, max_tokens=64, seed=7)
            found += [list(output.token_ids) for output in llm.generate(prompts, params)]
        return found


@pytest.fixture(scope="module")
def usual() -> list[list[int]]:
    return generate()


def gap_at(prompt: list[int], text: list[int], other: int) -> float:
    """How much less likely `other` is than the last token of `text`, in float32 on the CPU."""
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
    with LLM("demo", device="cpu", dtype="float32") as llm:
        scores = []
        for last in (text[-1], other):
            (output,) = llm.generate([[*prompt, *text[:-1], last]], params)
            assert output.prompt_logprobs is not None
            scores.append(output.prompt_logprobs[-1].logprob)
    return abs(scores[0] - scores[1])


@pytest.mark.parametrize("way", WAYS)
def test_text_is_the_same_however_it_is_computed(way: str, usual: list[list[int]]) -> None:
    """*Equal* in bfloat16: the same ids up to the first near tie of the top two logits."""
    found = generate(**WAYS[way])
    assert_equal_text(found, usual)
    if way in ("run-ahead off", "graphs off", "both off"):
        # the same kernels on the same batches: more than equal up to rounding
        same = sum(a == b for a, b in zip(found, usual, strict=True))
        assert same >= 0.9 * len(usual)


@pytest.mark.parametrize("rows", ["0", "1"], ids=["norms never late", "norms always late"])
def test_text_is_the_same_wherever_norms_come_late(
    rows: str, usual: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCLI_LATE_NORM_ROWS", rows)
    assert_equal_text(generate(), usual)


def assert_equal_text(found: list[list[int]], usual: list[list[int]]) -> None:
    with LLM("demo", device="cpu") as llm:
        prompts = [llm.tokenizer.encode_chat([Message("user", q)]) for q in QUESTIONS]
    parted = 0
    for prompt, ours, theirs in zip(prompts, found, usual, strict=False):  # the greedy ones
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if at is not None:
            parted += 1
            assert gap_at(prompt, ours[: at + 1], theirs[at]) < 0.1
    assert parted <= len(QUESTIONS) // 4


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("moe")
    extra = {"num_experts": 16, "num_experts_per_tok": 4}
    write_tiny_checkpoint(folder, architecture="Qwen3MoeForCausalLM", extra_config=extra)
    write_tokenizer(folder, vocab_size=290)
    return str(folder)


def test_text_of_experts_is_the_same_however_it_is_computed(moe_folder: str) -> None:
    """With `--deterministic` to the id: captured, padded to other buckets, eager, alone."""
    prompts = [[(7 * i + 13 * j) % 250 for j in range(1 + 3 * i)] for i in range(13)]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)
    found = {}
    for name, way in (WAYS | {"usual": {}}).items():
        if name == "torch attention":
            continue  # refused with --deterministic
        options = {"dtype": "bfloat16", "deterministic": True, "num_blocks": 2000} | way
        with LLM(moe_folder, device="cuda", **options) as llm:
            found[name] = [output.token_ids for output in llm.generate(prompts, params)]
    for name, texts in found.items():
        assert texts == found["usual"], name


@pytest.mark.parametrize("model", ["demo", "moe"])
def test_launching_never_waits_for_the_device(moe_folder: str, model: str) -> None:
    folder = moe_folder if model == "moe" else model
    with LLM(folder, device="cuda", num_blocks=2000) as llm:
        prompts = [llm.tokenizer.encode(q) for q in QUESTIONS]
        params = SamplingParams(temperature=0.8, top_k=20, max_tokens=8, seed=1)
        llm.generate(prompts, params)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode warns that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            outputs = llm.generate(prompts, params)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [output.error for output in outputs if output.error] == []


def test_start_tells_about_the_graphs_and_keeps_room_for_them() -> None:
    with LLM("demo", device="cuda", max_num_seqs=20) as llm:
        startup = llm.startup
        assert startup.attention_backend == "triton"
        assert 10 <= startup.num_kernels <= 40
        # 1, 2, 4, 8, 16, 20 rows; 16 to 4,096 tokens; where rows share keys 8, 16, 20; 64 to 4,096
        assert startup.num_graphs == 6 + 18 + 3 + 16
        assert 0 < startup.graph_bytes < 1 << 30
        assert startup.stage_s["graphs"] < 30
        free, total = torch.cuda.mem_get_info()
        assert (total - free) / total < 0.92
