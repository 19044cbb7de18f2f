"""EngineThread and AsyncEngine: hand-over, abort, failure and the end."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

import pytest

from nvcli.engine.async_engine import AsyncEngine
from nvcli.engine.engine import Engine, Request
from nvcli.engine.engine_thread import EngineThread
from nvcli.errors import EngineClosedError, InvalidParameterError, RequestError
from nvcli.types import FinishReason, RequestOutput, SamplingParams, fold_outputs
from tests.scripted_device import ScriptedDevice
from tests.waiting import PATIENCE_S


def make_engine(**device: object) -> Engine:
    return Engine(
        ScriptedDevice(lambda prompt: list(range(10, 500)), **device),  # type: ignore[arg-type]
        None,
        vocab_size=1000,
        max_num_batched_tokens=64,
    )


def make_request(request_id: str = "a", max_tokens: int = 5, n: int = 1) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        params=SamplingParams(max_tokens=max_tokens, n=n),
    )


def drain(outputs: queue.SimpleQueue[list[RequestOutput]], num_open: int = 1) -> RequestOutput:
    deltas: list[RequestOutput] = []
    while num_open:
        for output in outputs.get(timeout=PATIENCE_S):
            deltas.append(output)
            num_open -= output.is_finished
    return fold_outputs(deltas)


def test_outputs_arrive_in_order() -> None:
    thread = EngineThread(make_engine())
    outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    thread.submit(make_request(), outputs.put)
    assert drain(outputs).token_ids == (10, 11, 12, 13, 14)
    thread.close()


def test_what_is_submitted_together_begins_in_one_step() -> None:
    engine = make_engine()
    thread = EngineThread(engine)
    outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    sizes: list[int] = []
    engine.watch_steps(lambda plan, begin, end: sizes.append(len(plan.rows)))
    thread.submit_together([make_request(name, max_tokens=2) for name in "abcdef"], outputs.put)
    drain(outputs, num_open=6)
    thread.close()
    assert sizes[0] == 6


def test_a_step_does_not_wait_until_nobody_asks_for_anything() -> None:
    engine = make_engine()
    thread = EngineThread(engine)
    outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    asked, first_step = 0, threading.Event()
    engine.watch_steps(lambda plan, begin, end: first_step.set())

    def ask_again() -> None:
        nonlocal asked
        asked += 1
        if not first_step.is_set() and asked < 10_000:
            thread.abort("somebody else's")
            thread._post(ask_again)

    thread._post(ask_again)
    thread.submit(make_request(max_tokens=2), outputs.put)
    assert drain(outputs).token_ids == (10, 11)
    thread.close()
    assert asked < 10_000


def test_invalid_request_raises_in_the_caller() -> None:
    thread = EngineThread(make_engine())
    request = Request(request_id="a", prompt_token_ids=[], params=SamplingParams())
    with pytest.raises(RequestError, match="empty"):
        thread.submit(request, print)
    thread.close()


def test_request_id_in_use_ends_the_second_with_an_error_for_each_of_n(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(max_model_len=100_000, num_blocks=100_000)
    both_are_there = threading.Event()
    step = engine.step

    def held_step(deliver: Callable[[list[RequestOutput]], None]) -> None:
        assert both_are_there.wait(PATIENCE_S)
        step(deliver)

    monkeypatch.setattr(engine, "step", held_step)
    thread = EngineThread(engine)
    first: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    second: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    thread.submit(make_request(max_tokens=400), first.put)
    thread.submit(make_request(n=3), second.put)
    both_are_there.set()
    errors = second.get(timeout=PATIENCE_S)
    assert [(o.index, o.finish_reason) for o in errors] == [
        (0, FinishReason.ERROR),
        (1, FinishReason.ERROR),
        (2, FinishReason.ERROR),
    ]
    assert drain(first).finish_reason is FinishReason.LENGTH
    thread.close()


def test_requests_that_share_a_sink_share_its_call_of_a_step() -> None:
    thread = EngineThread(make_engine())
    held, shared = threading.Event(), queue.SimpleQueue[list[RequestOutput]]()
    alone: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    thread._post(lambda: held.wait(PATIENCE_S) and None)
    for request_id in ("a", "b"):
        thread.submit(make_request(request_id, max_tokens=3), shared.put)
    thread.submit(make_request("c", max_tokens=3), alone.put)
    held.set()
    groups = [shared.get(timeout=PATIENCE_S) for _ in range(3)]
    assert [[output.request_id for output in group] for group in groups] == 3 * [["a", "b"]]
    assert drain(alone).token_ids == (10, 11, 12)
    thread.close()


def test_abort_ends_a_running_request() -> None:
    thread = EngineThread(make_engine())
    outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    thread.submit(make_request(max_tokens=400), outputs.put)
    outputs.get(timeout=PATIENCE_S)
    thread.abort("a")
    assert drain(outputs).finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
    thread.abort("a")
    thread.abort("unknown")
    thread.close()


def test_close_ends_open_requests_and_refuses_new_ones() -> None:
    thread = EngineThread(make_engine())
    seen = threading.Event()
    outputs: list[RequestOutput] = []

    def sink(group: list[RequestOutput]) -> None:
        outputs.extend(group)
        seen.set()

    thread.submit(make_request(max_tokens=400), sink)
    assert seen.wait(PATIENCE_S)
    thread.close()
    thread.close()
    assert outputs[-1].is_finished
    with pytest.raises(EngineClosedError, match="closed"):
        thread.submit(make_request("b"), sink)


def test_a_dead_engine_tells_everybody_why(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def broken_step(deliver: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(engine, "step", broken_step)
    thread = EngineThread(engine)
    outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    thread.submit(make_request(), outputs.put)
    last = drain(outputs)
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert "ZeroDivisionError: planted" in last.error
    thread.close()
    with pytest.raises(EngineClosedError, match="planted"):
        thread.submit(make_request("b"), outputs.put)


def test_an_engine_that_dies_while_adding_tells_that_request_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()

    def broken_add(request: Request, *, is_valid: bool) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(engine, "add", broken_add)
    thread = EngineThread(engine)
    outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    thread.submit(make_request(n=2), outputs.put)
    errors = outputs.get(timeout=PATIENCE_S)
    assert [(o.index, o.finish_reason) for o in errors] == [
        (0, FinishReason.ERROR),
        (1, FinishReason.ERROR),
    ]
    thread.close()
    with pytest.raises(EngineClosedError, match="planted"):
        thread.submit(make_request("b"), outputs.put)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", "high"),
        ("priority", None),
        ("priority", float("nan")),
        ("priority", True),
        ("cache_salt", b"x"),
        ("cache_salt", 3),
        ("cache_salt", ["x"]),
    ],
)
def test_values_of_the_wrong_kind_are_refused_before_they_reach_the_thread(
    name: str, value: object
) -> None:
    thread = EngineThread(make_engine())
    request = make_request()
    setattr(request, name, value)
    with pytest.raises(InvalidParameterError) as caught:
        thread.submit(request, print)
    assert caught.value.param == name
    assert thread.is_alive
    thread.close()


def test_a_lone_surrogate_salts_like_any_text() -> None:
    thread = EngineThread(make_engine())
    outputs: queue.SimpleQueue[list[RequestOutput]] = queue.SimpleQueue()
    request = make_request()
    request.prompt_token_ids = list(range(12))
    request.cache_salt = "\ud800"
    thread.submit(request, outputs.put)
    assert drain(outputs).finish_reason is FinishReason.LENGTH
    thread.close()


def test_async_streams_side_by_side() -> None:
    async def read(engine: AsyncEngine, request: Request) -> RequestOutput:
        return fold_outputs([output async for output in engine.stream(request)])

    async def main() -> None:
        engine = AsyncEngine(thread)
        requests = [make_request(str(i), max_tokens=3 + i) for i in range(6)]
        results = await asyncio.gather(*(read(engine, r) for r in requests))
        assert [len(r.token_ids) for r in results] == [3, 4, 5, 6, 7, 8]

    thread = EngineThread(make_engine())
    asyncio.run(main())
    thread.close()


def test_leaving_an_async_stream_aborts_the_request() -> None:
    async def main() -> int:
        stream = AsyncEngine(thread).stream(make_request(max_tokens=400))
        await anext(stream)
        await stream.aclose()
        while engine.has_unfinished:
            await asyncio.sleep(0.01)
        return engine.stats().num_free_blocks

    engine = make_engine()
    thread = EngineThread(engine)
    assert asyncio.run(main()) == 256
    thread.close()
