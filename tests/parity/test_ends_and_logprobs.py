"""Where outputs end, which ids may be sampled, and what logprobs say (T7, T8, T11, T12)."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nvcli.llm import LLM
from nvcli.types import FinishReason, SamplingParams
from tests.parity.conftest import VOCAB, set_eos

pytestmark = pytest.mark.torch

MakeLLM = Callable[..., LLM]


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_t7_nothing_after_eos(
    make_llm: MakeLLM, checkpoint: Path, tmp_path: Path, run_ahead: bool
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20)
    ids = prompt(3, 7)
    free = make_llm().generate(ids, greedy)[0].token_ids
    eos = free[5]
    end = free.index(eos) + 1
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    set_eos(folder, [eos])
    llm = make_llm(folder, run_ahead=run_ahead)
    stopped = llm.generate(ids, greedy)[0]
    assert stopped.token_ids == free[:end]
    assert stopped.finish_reason is FinishReason.STOP
    ignored = llm.generate(ids, greedy.replace(ignore_eos=True))[0]
    assert ignored.token_ids == free
    assert ignored.finish_reason is FinishReason.LENGTH
    last = llm.generate(ids, greedy.replace(ignore_eos=True, max_tokens=end))[0]
    assert last.token_ids == free[:end]
    assert last.finish_reason is FinishReason.LENGTH


def test_t8_eos_sources(make_llm: MakeLLM, checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    set_eos(folder, [5, 9])
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer_config["eos_token"] = "<|im_end|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    llm = make_llm(folder)
    own = llm.tokenizer.id_of("<|im_end|>")
    assert own is not None
    assert llm.tokenizer.eos_token_ids == (own,)
    for token_id in (5, own, 9, 11):
        params = SamplingParams(
            temperature=0, logit_bias={token_id: 100}, stop_token_ids=(11,), max_tokens=3
        )
        stopped = llm.generate(prompt(1, 4), params)[0]
        assert stopped.token_ids == (token_id,)
        assert stopped.finish_reason is FinishReason.STOP
        assert stopped.stop_reason == (11 if token_id == 11 else None)
        ignoring = llm.generate(prompt(1, 4), params.replace(ignore_eos=True))[0]
        assert len(ignoring.token_ids) == (1 if token_id == 11 else 3)


def test_min_tokens_masks_every_end(make_llm: MakeLLM, checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    set_eos(folder, [5, 9])
    llm = make_llm(folder)
    params = SamplingParams(
        temperature=0,
        logit_bias={5: 100, 9: 99, 11: 98},
        stop_token_ids=(11,),
        min_tokens=4,
        max_tokens=10,
    )
    output = llm.generate(prompt(1, 4), params)[0]
    assert len(output.token_ids) == 5
    assert output.token_ids[4] == 5
    assert not {5, 9, 11} & set(output.token_ids[:4])


def test_t11_prompt_logprobs_equal_one_plain_forward(make_llm: MakeLLM, checkpoint: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    ids = prompt(11, 22)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].float()
    expected = logits[:, :VOCAB].log_softmax(-1)  # padded ids are no part of the distribution
    llm = make_llm(max_num_batched_tokens=8)
    llm.generate(ids, SamplingParams(max_tokens=1))  # its blocks are in the prefix cache now
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5, logprobs=5)
    output = llm.generate(ids, params)[0]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(ids)
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry is not None
        row = expected[position - 1]
        assert entry.token_id == ids[position]
        assert entry.logprob == pytest.approx(float(row[ids[position]]), abs=1e-4)
        assert entry.rank == int((row > row[ids[position]]).sum()) + 1
        values, indices = row.topk(5)
        assert [i for i, _ in entry.top] == indices.tolist()
        assert [lp for _, lp in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert output.logprobs is not None
    assert output.logprobs[0].logprob == pytest.approx(float(expected[-1].max()), abs=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=2.0, max_tokens=200, seed=1),
        SamplingParams(temperature=2.0, max_tokens=200, seed=1, top_k=290),
        SamplingParams(temperature=2.0, max_tokens=200, seed=1, min_p=0.0, top_p=0.9999),
        SamplingParams(temperature=2.0, max_tokens=200, seed=1, logprobs=20),
    ],
)
def test_t12_padded_ids_are_never_sampled(make_llm: MakeLLM, params: SamplingParams) -> None:
    output = make_llm().generate(prompt(1, 3), params)[0]
    assert len(output.token_ids) == 200
    assert max(output.token_ids) < VOCAB
    for entry in output.logprobs or ():
        assert all(i < VOCAB for i, _ in entry.top)


BAD = [(SamplingParams(logit_bias={i: 1.0}), None, "logit_bias") for i in (295, 300, 2**31)] + [
    (SamplingParams(allowed_token_ids=(295,)), None, "allowed_token_ids"),
    (SamplingParams(bad_token_ids=(300,)), None, "bad_token_ids"),
    (SamplingParams(stop_token_ids=(2**31,)), None, "stop_token_ids"),
    (SamplingParams(bad_words=((3, 295),)), None, "bad_words"),
    (SamplingParams(), [-1], "prompt"),
    (SamplingParams(), [295], "prompt"),
    (SamplingParams(), [2**31], "prompt"),
]


@pytest.mark.parametrize(("params", "ids", "name"), BAD)
def test_t12_bad_ids_are_refused_alone(
    make_llm: MakeLLM, params: SamplingParams, ids: list[int] | None, name: str
) -> None:
    good = SamplingParams(temperature=0, max_tokens=4)
    bad, fine = make_llm().generate([ids or [1, 2], [1, 2]], [params, good])
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error is not None
    assert name in bad.error
    assert fine.finish_reason is FinishReason.LENGTH


def test_bad_words_are_never_completed(make_llm: MakeLLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    ids = prompt(9, 5)
    llm = make_llm()
    free = llm.generate(ids, greedy)[0].token_ids
    banned = (free[3], free[4])
    output = llm.generate(ids, greedy.replace(bad_words=(banned,)))[0].token_ids
    assert output[:4] == free[:4]
    assert banned not in list(itertools.pairwise(output))


def test_allowed_ids_are_the_only_ones(make_llm: MakeLLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=30, seed=3, allowed_token_ids=(4, 8, 15))
    assert set(make_llm().generate(prompt(1, 3), params)[0].token_ids) <= {4, 8, 15}
