"""An fp8 checkpoint gives the tokens of a dense one with the same numbers, in steps of all sizes.

In float32, on the CPU by default; `NVCLI_TEST_DEVICE=cuda` runs the same on a GPU, where weights
stay fp8 (but with `--deterministic`, which takes no float32 there), and a test of its own compares
two ways of multiplying them in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvcli.llm import LLM
from nvcli.types import RequestOutput, SamplingParams
from tests.fp8_checkpoint import write_dense_twin, write_fp8_checkpoint
from tests.parity.conftest import DEVICE, VOCAB, set_eos
from tests.parity.test_equal_runs import prompt
from tests.text.tiny_tokenizer import write_tokenizer

pytestmark = pytest.mark.torch

MakeLLM = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1)
WAYS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "one at a time": {"max_num_seqs": 1},
    "eager": {"enforce_eager": True},
    "deterministic": {"deterministic": True},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
}
IS_KEPT = {"cpu": "float32 from float8_e4m3fn", "cuda": "float8_e4m3fn"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(in fp8, its dense twin)"""
    folder = tmp_path_factory.mktemp("checkpoints")
    tensors = write_fp8_checkpoint(folder / "fp8")
    write_tokenizer(folder / "fp8", vocab_size=VOCAB)
    set_eos(folder / "fp8", [])
    return folder / "fp8", write_dense_twin(folder / "fp8", folder / "twin", tensors)


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    entries = [e for o in outputs for e in [*(o.prompt_logprobs or ()), *(o.logprobs or ())]]
    return [entry.logprob for entry in entries if entry is not None]


@pytest.mark.parametrize("way", [way for way in WAYS if (DEVICE, way) != ("cuda", "deterministic")])
def test_tokens_are_those_of_the_dense_twin(
    make_llm: MakeLLM, folders: tuple[Path, Path], way: str
) -> None:
    prompts = [prompt(i, 3 + 5 * i) for i in range(11)]
    llm, twin = (make_llm(folder, **WAYS[way]) for folder in folders)
    assert (llm.startup.weights_dtype, twin.startup.weights_dtype) == (IS_KEPT[DEVICE], "float32")
    for some in (prompts[:1], prompts):
        ours, theirs = llm.generate(some, GREEDY), twin.generate(some, GREEDY)
        assert [o.token_ids for o in ours] == [o.token_ids for o in theirs]
        tolerance = 2e-3 if way == "fp8 cache" else 1e-4
        assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=tolerance)


@pytest.mark.gpu
def test_multiplied_as_stored_or_by_the_library(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built-in model in fp8 and bfloat16: what it makes of prompts, alone and together."""
    from benchmarks.make_fp8 import write_fp8
    from nvcli.kernels import tuned
    from nvcli.models.resolve import demo_folder

    write_fp8(demo_folder(), tmp_path / "fp8")
    questions = [f"What is {a} plus {b}?" for a in (3, 12, 40, 77) for b in (5, 28)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found: dict[tuple[str, str], list[torch.Tensor]] = {}
    for dtype, limit in (("float32", ""), ("bfloat16", "0"), ("bfloat16", "")):
        monkeypatch.setenv("NVCLI_SKINNY_ROWS", limit)
        tuned.forget()
        llm = make_llm(tmp_path / "fp8", device="cuda", dtype=dtype, block_size=16)
        assert llm.startup.weights_dtype == "float8_e4m3fn"
        prompts = [llm.tokenizer.encode(question) for question in questions]
        found[dtype, limit] = [
            torch.tensor(logprobs(llm.generate(some, params))) for some in (prompts[:1], prompts)
        ]
    tuned.forget()
    for exact, library, stored in zip(*found.values(), strict=True):
        # the library multiplies by weights that were rounded to bfloat16
        error, others = ((x - exact).abs().mean() for x in (stored, library))
        assert error < 2 * others + 0.01
