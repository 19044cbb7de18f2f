"""LLM: what it takes for a prompt, and how a program that forgets to close it ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

import nvcli
from nvcli import LLM, AsyncEngine, Message, RequestOutput
from nvcli.config import EngineConfig
from nvcli.errors import InvalidParameterError, UsageError
from nvcli.types import FinishReason, SamplingParams, fold_outputs
from tests.waiting import run_command

pytestmark = pytest.mark.torch

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu") as demo:
        yield demo


def test_messages_may_be_openai_dicts(llm: LLM) -> None:
    text = "What is the capital of France?"
    params = llm.sampling(temperature=0)
    plain = llm.chat([Message("user", text)], params, enable_thinking=False)
    dicts = llm.chat([{"role": "user", "content": text}], params, enable_thinking=False)
    assert plain.text == dicts.text == "The capital of France is Paris."


def test_an_llm_streams_inside_an_event_loop(llm: LLM) -> None:
    async def read(engine: AsyncEngine, prompt: str) -> RequestOutput:
        request = llm.request(prompt, GREEDY, raw=True)
        return fold_outputs([output async for output in engine.stream(request)])

    async def main() -> list[RequestOutput]:
        engine = AsyncEngine(llm)
        return await asyncio.gather(*(read(engine, prompt) for prompt in ("Once", "The")))

    expected = llm.generate(["Once", "The"], GREEDY)
    assert [o.text for o in asyncio.run(main())] == [o.text for o in expected]


def test_prompts_of_every_kind_of_sequence(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Once there was")
    expected = llm.generate(ids, GREEDY)[0].token_ids
    for prompt in (tuple(ids), numpy.array(ids), iter(ids)):
        assert llm.generate(prompt, GREEDY)[0].token_ids == expected  # type: ignore[arg-type]
    several = llm.generate((p for p in ("Once there was", ids)), GREEDY)  # type: ignore[arg-type]
    assert [o.token_ids for o in several] == [expected, expected]


def test_a_model_may_be_a_path() -> None:
    folder = Path(nvcli.__file__).parent / "demo"
    assert EngineConfig(model=folder).model == str(folder)  # type: ignore[arg-type]
    with LLM(folder, device="cpu") as demo:
        assert demo.model_name == str(folder)


def test_params_that_are_none_are_refused(llm: LLM) -> None:
    wrong: Any = {"temperature": 0}
    for call in (llm.chat, llm.stream, llm.generate):
        with pytest.raises(InvalidParameterError, match=r"params must be SamplingParams, got dict"):
            call("hi", wrong)  # type: ignore[operator]
    with pytest.raises(InvalidParameterError, match="SamplingParams"):
        llm.generate(["a", "b"], [GREEDY, wrong])


def test_misspelt_names_are_told(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        llm.sampling(temprature=1)
    assert caught.value.hint == "Did you mean 'temperature'?"
    with pytest.raises(UsageError) as told:
        LLM("demo", max_model_length=64)
    assert told.value.hint == "Did you mean 'max_model_len'?"


@pytest.mark.parametrize("prompt", [5, None, [1.0, 2.0], [None], object()])
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: object) -> None:
    with pytest.raises(InvalidParameterError, match="prompt"):
        llm.stream(prompt, GREEDY)  # type: ignore[arg-type]


@pytest.mark.parametrize("tools", ["abc", [1]])
def test_tools_that_are_none_are_refused(llm: LLM, tools: object) -> None:
    with pytest.raises(InvalidParameterError, match="tools must be"):
        llm.chat("hi", GREEDY, tools=tools)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_prefix_caching", "no"),
        ("run_ahead", "off"),
        ("enforce_eager", 1),
        ("memory_utilization", "a"),
        ("memory_utilization", 1.5),
        ("seed", "x"),
        ("max_num_seqs", 2**31),
        ("block_size", 0),
    ],
)
def test_wrong_options_are_refused_before_anything_loads(name: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        EngineConfig(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name


def test_one_bad_prompt_of_a_batch_fails_alone(llm: LLM) -> None:
    outputs = llm.generate(["Once", [1.5], [], [10**9], "Once"], GREEDY)  # type: ignore[list-item]
    reasons = [o.finish_reason for o in outputs]
    assert reasons[1:4] == [FinishReason.ERROR] * 3
    assert outputs[0].token_ids == outputs[4].token_ids != ()


def test_embed_takes_one_prompt_or_many_and_all_or_none(llm: LLM) -> None:
    (one,) = llm.embed("hello")
    assert [one] == llm.embed(["hello"])
    ids = llm.tokenizer.encode("hello")
    assert llm.embed(ids) == llm.embed([ids]) != [one]  # nothing is put behind ids
    assert llm.embed([]) == []
    with pytest.raises(InvalidParameterError, match="token id 1000000000"):
        llm.embed([ids, [10**9]])
    assert not llm.stats().num_running + llm.stats().num_waiting  # nor was the first one begun
    with pytest.raises(InvalidParameterError, match="prompts must be"):
        llm.embed(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, 1])
def test_as_many_params_as_prompts(llm: LLM, n: int) -> None:
    with pytest.raises(InvalidParameterError, match="2 prompts"):
        llm.generate(["a", "b"], [GREEDY] * n)


FORGETFUL = {
    "ends while it streams": ("for _ in stream: break", 0),
    "exits while it streams": ("next(stream); sys.exit(3)", 3),
    "raises while it streams": ("next(stream); raise SystemExit(4)", 4),
    "drops it while it streams": ("next(stream); del llm, stream; gc.collect()", 0),
}


@pytest.mark.parametrize(("end", "code"), FORGETFUL.values(), ids=list(FORGETFUL))
def test_a_program_may_end_without_closing(end: str, code: int) -> None:
    program = (
        "import gc, sys\n"
        "from nvcli import LLM, SamplingParams\n"
        "llm = LLM('demo', device='cpu')\n"
        "stream = llm.stream('Tell me a story.', SamplingParams(ignore_eos=True))\n"
        f"{end}\n"
    )
    run = run_command([sys.executable, "-c", program])
    assert (run.returncode, run.stderr) == (code, "")


def test_a_dropped_llm_ends_its_thread() -> None:
    import gc
    import threading

    def engine_threads() -> int:
        return sum(thread.name == "nvcli-engine" for thread in threading.enumerate())

    gc.collect()  # those that other tests have dropped
    before = engine_threads()
    llm = LLM("demo", device="cpu")
    assert engine_threads() == before + 1
    del llm
    gc.collect()
    assert engine_threads() == before
