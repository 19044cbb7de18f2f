"""What runs in an actor, without one."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvcli.cluster.replica import Replica
from nvcli.config import EngineConfig
from nvcli.engine.engine import Request
from nvcli.engine.grammar import GrammarSpec
from nvcli.errors import WeightsError
from nvcli.server.wire import unpack_output
from nvcli.types import FinishReason, SamplingParams
from tests.server.scripted_llm import ScriptedLLM, make_tokenizer
from tests.waiting import PATIENCE_S


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[ScriptedLLM]:
    made = ScriptedLLM(make_tokenizer(tmp_path), lambda _: [5, 6], folder=tmp_path)
    yield made
    made.close()


def frame(spec: GrammarSpec | None = None, **fields: Any) -> bytes:
    request = Request(
        request_id="over there",
        prompt_token_ids=[5, 6, 7],
        params=SamplingParams(max_tokens=2),
        is_streaming=False,
        **fields,
    )
    return pickle.dumps((request, spec))


async def outputs_of(replica: Replica, ticket: str) -> list[tuple[Any, ...]]:
    """The next that come, which must be this request's."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            groups, _ = await replica.poll()
            if groups:
                ((found, packed),) = groups
                assert found == ticket
                return packed


def test_the_age_of_a_request_is_taken_for_its_own_clock(llm: ScriptedLLM) -> None:
    async def run() -> None:
        replica = Replica(EngineConfig(model="x"), lambda _: llm)
        assert (await replica.load())[0] == "loaded"
        await replica.submit("t0", frame(arrival=1e12), 100.0, 1)
        await outputs_of(replica, "t0")

    asyncio.run(run())
    (taken,) = llm.requests
    assert taken.request_id == "t0"
    assert 100.0 <= time.monotonic() - taken.arrival < 100.0 + PATIENCE_S


def test_a_slow_grammar_holds_nobody_up(llm: ScriptedLLM, monkeypatch: Any) -> None:
    """And one whose client has left meanwhile never runs."""
    gate = threading.Event()
    monkeypatch.setattr(llm, "compile_grammar", lambda spec: gate.wait(PATIENCE_S) and None)
    spec = GrammarSpec("{}")

    async def run() -> None:
        replica = Replica(EngineConfig(model="x"), lambda _: llm)
        await replica.load()
        slow = asyncio.create_task(replica.submit("slow", frame(spec), 0.0, 1))
        left = asyncio.create_task(replica.submit("left", frame(spec), 0.0, 1))
        await asyncio.sleep(0)
        await replica.submit("quick", frame(), 0.0, 1)
        await outputs_of(replica, "quick")
        await replica.abort("left")
        gate.set()
        await asyncio.gather(slow, left)
        await outputs_of(replica, "slow")

    asyncio.run(run())
    assert [request.request_id for request in llm.requests] == ["quick", "slow"]


def test_whatever_a_grammar_raises_is_told(llm: ScriptedLLM, monkeypatch: Any) -> None:
    def broken(spec: GrammarSpec) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(llm, "compile_grammar", broken)

    async def run() -> list[tuple[Any, ...]]:
        replica = Replica(EngineConfig(model="x"), lambda _: llm)
        await replica.load()
        await replica.submit("t0", frame(GrammarSpec("{}")), 0.0, 1)
        return await outputs_of(replica, "t0")

    (packed,) = asyncio.run(run())
    output = unpack_output("t0", packed)
    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None
    assert "a bug" in output.error


def test_a_request_that_cannot_be_read_is_told(llm: ScriptedLLM) -> None:
    """Ray would keep it to itself, and whoever asked would wait for ever."""

    async def run() -> list[tuple[Any, ...]]:
        replica = Replica(EngineConfig(model="x"), lambda _: llm)
        await replica.load()
        await replica.submit("t0", b"of another version", 0.0, 3)
        return await outputs_of(replica, "t0")

    outputs = [unpack_output("t0", packed) for packed in asyncio.run(run())]
    assert [output.index for output in outputs] == [0, 1, 2]
    assert all(output.error and "could not be added" in output.error for output in outputs)


def test_what_loading_raises_crosses_as_its_name() -> None:
    def load(config: EngineConfig) -> None:
        raise WeightsError("no weights", hint="Look.")

    answer = asyncio.run(Replica(EngineConfig(model="x"), load).load())
    assert answer == ("failed", ("WeightsError", "no weights", "Look."))
