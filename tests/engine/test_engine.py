"""Engine: checks of requests, stop strings, think budgets, n and best_of, with scripted tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from nvcli.engine.engine import Engine, Request
from nvcli.engine.step import StepResult
from nvcli.errors import ContextLengthError, InvalidParameterError, NvcliError, RequestError
from nvcli.text import OutputRouter, Tokenizer
from nvcli.types import FinishReason, RequestOutput, SamplingParams, fold_outputs
from tests.scripted_device import Script, ScriptedDevice, ScriptedTicket
from tests.text.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, vocab_size=290)
    return Tokenizer.from_folder(folder)


def make_engine(
    tokenizer: Tokenizer | None,
    script: Script,
    *,
    depth: int = 0,
    eos_token_ids: Sequence[int] = (),
    **device: object,
) -> Engine:
    return Engine(
        ScriptedDevice(script, **device),  # type: ignore[arg-type]
        tokenizer,
        vocab_size=290,
        eos_token_ids=eos_token_ids,
        max_num_batched_tokens=64,
        depth=depth,
    )


def step(engine: Engine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    engine.step(outputs.extend)
    return outputs


def run(engine: Engine, *requests: Request) -> dict[tuple[str, int], list[RequestOutput]]:
    """Add all, step to the end, and return the deltas by (request id, index)."""
    deltas: dict[tuple[str, int], list[RequestOutput]] = {}
    for request in requests:
        engine.add(request)
    for _ in range(2000):
        for output in step(engine):
            deltas.setdefault((output.request_id, output.index), []).append(output)
        if not engine.has_unfinished:
            return deltas
    raise AssertionError("the engine did not come to an end")


def answer(engine: Engine, request: Request) -> RequestOutput:
    return fold_outputs(run(engine, request)[(request.request_id, 0)])


def says(tokenizer: Tokenizer, text: str) -> Script:
    """Every prompt is answered with `text`, then with dots for ever."""
    token_ids = [*tokenizer.encode(text), *tokenizer.encode("." * 500)]
    return lambda _: token_ids


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_streaming", [True, False])
def test_stop_string_is_cut_and_never_streamed(
    tokenizer: Tokenizer, depth: int, is_streaming: bool
) -> None:
    engine = make_engine(tokenizer, says(tokenizer, "abcDEFGHIJklm"), depth=depth)
    params = SamplingParams(stop=("DEFGHIJ",), max_tokens=40)
    request = Request(
        request_id="a", prompt_token_ids=[1, 2, 3], params=params, is_streaming=is_streaming
    )
    deltas = run(engine, request)[("a", 0)]
    assert "".join(d.text for d in deltas) == "abc"
    assert not any(c in d.text for d in deltas for c in "DEFGHIJ")
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_reason == "DEFGHIJ"


def test_stop_string_in_multi_byte_text(tokenizer: Tokenizer) -> None:
    engine = make_engine(tokenizer, says(tokenizer, "世界、你好。再见"))
    params = SamplingParams(stop=("你好",), max_tokens=60)
    request = Request(request_id="a", prompt_token_ids=[1], params=params)
    deltas = run(engine, request)[("a", 0)]
    assert "".join(d.text for d in deltas) == "世界、"
    assert "\ufffd" not in "".join(d.text for d in deltas)


@pytest.mark.parametrize("depth", [0, 1])
def test_eos_ends_with_exactly_k_tokens(tokenizer: Tokenizer, depth: int) -> None:
    script = [65, 66, 67, 5, 68, 69, 70, 71]
    engine = make_engine(tokenizer, lambda _: script, depth=depth, eos_token_ids=[5])
    output = answer(
        engine,
        Request(request_id="a", prompt_token_ids=[1], params=SamplingParams(max_tokens=8)),
    )
    assert output.token_ids == (65, 66, 67, 5)
    assert output.finish_reason is FinishReason.STOP
    assert output.text == tokenizer.decode([65, 66, 67])


@pytest.mark.parametrize("depth", [0, 1])
def test_ignore_eos_gives_exactly_n_tokens_even_when_the_last_is_eos(
    tokenizer: Tokenizer, depth: int
) -> None:
    engine = make_engine(tokenizer, lambda _: [65, 5, 66, 5, 9, 9], depth=depth, eos_token_ids=[5])
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    output = answer(engine, Request(request_id="a", prompt_token_ids=[1], params=params))
    assert output.token_ids == (65, 5, 66, 5)
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [0, 1, 3, 7])
def test_thinking_is_closed_at_its_budget(tokenizer: Tokenizer, depth: int, budget: int) -> None:
    think = tokenizer.think_id
    assert think is not None
    thoughts = [think, *tokenizer.encode("\nabcdefghijklmnop")]
    script = [*thoughts, *tokenizer.encode("." * 400)]
    engine = make_engine(tokenizer, lambda _: script, depth=depth)
    prompt = tokenizer.encode("<|im_start|>assistant\n")
    params = SamplingParams(max_tokens=40, thinking_budget=budget, logprobs=0)
    request = Request(request_id="a", prompt_token_ids=prompt, params=params, is_chat=True)
    output = answer(engine, request)
    assert output.usage.reasoning_tokens == budget
    assert tokenizer.end_think_id in output.token_ids
    closing = output.token_ids.index(tokenizer.end_think_id)
    assert closing == 1 + budget
    # The script goes on at the position after the forced tokens, as any model would.
    assert len(output.token_ids) == 40
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
    assert output.logprobs[closing].logprob == 0.0  # forced, so certain
    assert len(output.text) > 0
    assert output.finish_reason is FinishReason.LENGTH


def test_budget_that_leaves_no_room_to_close_ends_with_length(tokenizer: Tokenizer) -> None:
    think = tokenizer.think_id
    assert think is not None
    script = [think, *tokenizer.encode("x" * 100)]
    engine = make_engine(tokenizer, lambda _: script)
    prompt = tokenizer.encode("<|im_start|>assistant\n")
    params = SamplingParams(max_tokens=5, thinking_budget=3)
    request = Request(request_id="a", prompt_token_ids=prompt, params=params, is_chat=True)
    output = answer(engine, request)
    assert output.finish_reason is FinishReason.LENGTH
    assert output.text == ""
    assert output.reasoning == "xxx"


def test_n_outputs_have_their_own_index_and_share_the_prompt(tokenizer: Tokenizer) -> None:
    engine = make_engine(tokenizer, says(tokenizer, "hello"))
    params = SamplingParams(n=3, max_tokens=5)
    deltas = run(engine, Request(request_id="a", prompt_token_ids=list(range(9)), params=params))
    outputs = {key: fold_outputs(value) for key, value in deltas.items()}
    assert sorted(outputs) == [("a", 0), ("a", 1), ("a", 2)]
    assert {o.text for o in outputs.values()} == {"hello"}
    assert [outputs[("a", i)].usage.cached_tokens for i in range(3)] == [0, 8, 8]


def test_best_of_keeps_the_best_by_mean_logprob(tokenizer: Tokenizer) -> None:
    engine = make_engine(tokenizer, says(tokenizer, "hello"))
    params = SamplingParams(n=2, best_of=4, max_tokens=5)
    deltas = run(engine, Request(request_id="a", prompt_token_ids=[1], params=params))
    assert sorted(deltas) == [("a", 0), ("a", 1)]
    assert all(len(group) == 1 for group in deltas.values())  # withheld until all are done
    assert all(group[0].logprobs is None for group in deltas.values())
    assert not engine.has_unfinished


def test_lazy_request_gives_one_whole_output_equal_to_the_stream(tokenizer: Tokenizer) -> None:
    text = "The cat 世界 sat."
    params = SamplingParams(max_tokens=len(tokenizer.encode(text)))
    streamed = answer(
        make_engine(tokenizer, says(tokenizer, text)),
        Request(request_id="a", prompt_token_ids=[1], params=params),
    )
    engine = make_engine(tokenizer, says(tokenizer, text))
    request = Request(request_id="a", prompt_token_ids=[1], params=params, is_streaming=False)
    deltas = run(engine, request)[("a", 0)]
    assert len(deltas) == 1
    assert deltas[0].text == streamed.text == text
    assert deltas[0].token_ids == streamed.token_ids
    assert deltas[0].usage == streamed.usage


BAD_REQUESTS: list[tuple[dict[str, object], list[int], type[NvcliError], str]] = [
    ({}, [], RequestError, "the prompt is empty"),
    ({}, [1] * 512, ContextLengthError, "512 tokens"),
    ({}, [295], InvalidParameterError, "prompt holds token id 295"),
    ({}, [-1], InvalidParameterError, "prompt holds token id -1"),
    ({}, [2**31], InvalidParameterError, "prompt holds token id 2147483648"),
    ({"logit_bias": {300: 1.0}}, [1], InvalidParameterError, "logit_bias holds token id 300"),
    ({"allowed_token_ids": (1, 290)}, [1], InvalidParameterError, "allowed_token_ids"),
    ({"bad_token_ids": (2**31,)}, [1], InvalidParameterError, "bad_token_ids"),
    ({"stop_token_ids": (295,)}, [1], InvalidParameterError, "stop_token_ids"),
    ({"bad_words": ((1, 299),)}, [1], InvalidParameterError, "bad_words"),
    (
        {"allowed_token_ids": (4, 5), "bad_token_ids": (3, 4, 5)},
        [1],
        InvalidParameterError,
        "allowed_token_ids leaves no token: all 2",
    ),
    (
        {"allowed_token_ids": (4, 5), "bad_token_ids": (4,), "bad_words": ((5,),)},
        [1],
        InvalidParameterError,
        "allowed_token_ids leaves no token",
    ),
    ({"bad_token_ids": tuple(range(290))}, [1], InvalidParameterError, "forbid all 290 tokens"),
]


@pytest.mark.parametrize(("params", "prompt", "error", "message"), BAD_REQUESTS)
def test_bad_request_is_refused_alone(
    tokenizer: Tokenizer,
    params: dict[str, object],
    prompt: list[int],
    error: type[NvcliError],
    message: str,
) -> None:
    engine = make_engine(tokenizer, says(tokenizer, "fine"))
    good = Request(request_id="good", prompt_token_ids=[1], params=SamplingParams(max_tokens=4))
    engine.add(good)
    bad = SamplingParams(**params)  # type: ignore[arg-type]
    with pytest.raises(error) as caught:
        engine.add(Request(request_id="bad", prompt_token_ids=prompt, params=bad))
    assert message in caught.value.message
    outputs: list[RequestOutput] = []
    while engine.has_unfinished:
        engine.step(outputs.extend)
    assert fold_outputs(outputs).text == "fine"


@pytest.mark.parametrize("bias", [math.nan, math.inf, 101, -101])
def test_bias_out_of_range_is_refused(bias: float) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(logit_bias={1: bias})
    assert caught.value.param == "logit_bias"


def test_request_id_in_use_is_refused(tokenizer: Tokenizer) -> None:
    engine = make_engine(tokenizer, says(tokenizer, "x"))
    request = Request(request_id="a", prompt_token_ids=[1], params=SamplingParams(max_tokens=2))
    engine.add(request)
    with pytest.raises(RequestError, match="in use"):
        engine.add(request)


def test_nothing_is_kept_of_a_request_whose_grammar_cannot_start(tokenizer: Tokenizer) -> None:
    class TooComplex:
        def start(self, router: OutputRouter) -> TooComplex:
            return self

        def mask(self) -> None:
            raise RequestError("the grammar is too complex")

    engine = make_engine(tokenizer, says(tokenizer, "x"))
    params = SamplingParams(max_tokens=2, best_of=2)
    request = Request(request_id="a", prompt_token_ids=[1], params=params)
    request.grammar = TooComplex()  # type: ignore[assignment]
    with pytest.raises(RequestError, match="too complex"):
        engine.add(request)
    assert (engine._live, engine._best_of, engine._processor._states) == ({}, {}, {})


def test_id_outside_the_tokenizer_ends_that_request_only(tokenizer: Tokenizer) -> None:
    def script(prompt: tuple[int, ...]) -> list[int]:
        return [65, 66, 295, 67, 68] if prompt == (1,) else [70] * 5

    engine = make_engine(tokenizer, script)
    params = SamplingParams(max_tokens=5)
    deltas = run(
        engine,
        Request(request_id="bad", prompt_token_ids=[1], params=params),
        Request(request_id="good", prompt_token_ids=[2], params=params),
    )
    bad = fold_outputs(deltas[("bad", 0)])
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error is not None
    assert fold_outputs(deltas[("good", 0)]).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [0, 1])
def test_failing_step_ends_its_requests_and_not_the_engine(
    tokenizer: Tokenizer, depth: int
) -> None:
    fails = [True]

    def fail_when(plan: object) -> bool:
        return fails.pop() if fails else False

    engine = make_engine(tokenizer, says(tokenizer, "fine"), depth=depth, fail_when=fail_when)
    params = SamplingParams(max_tokens=4)
    first = answer(engine, Request(request_id="a", prompt_token_ids=[1, 2, 3, 4, 5], params=params))
    assert first.finish_reason is FinishReason.ERROR
    assert first.error is not None
    assert "told to fail" in first.error
    second = answer(
        engine, Request(request_id="b", prompt_token_ids=[1, 2, 3, 4, 5], params=params)
    )
    assert second.text == "fine"
    assert second.usage.cached_tokens == 0  # the failed step's hashes were taken back


@pytest.mark.parametrize("depth", [0, 1])
def test_abort_at_every_point_gives_one_last_output(tokenizer: Tokenizer, depth: int) -> None:
    for steps in range(8):
        engine = make_engine(tokenizer, says(tokenizer, "abcdefgh"), depth=depth)
        engine.add(
            Request(request_id="a", prompt_token_ids=[1], params=SamplingParams(max_tokens=20))
        )
        outputs: list[RequestOutput] = []
        for _ in range(steps):
            engine.step(outputs.extend)
        assert engine.abort("a")
        assert not engine.abort("unknown")
        for _ in range(4):
            engine.step(outputs.extend)
        assert [o.finish_reason for o in outputs].count(FinishReason.ABORT) == 1
        assert outputs[-1].finish_reason is FinishReason.ABORT
        assert not engine.abort("a")
        assert not engine.has_unfinished
        assert engine.stats().num_free_blocks == 256


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
@pytest.mark.parametrize("budget", [None, 12])
def test_thinking_is_closed_on_demand(
    tokenizer: Tokenizer, depth: int, num_steps: int, budget: int | None
) -> None:
    think = tokenizer.think_id
    assert think is not None
    script = [think, *tokenizer.encode("a" * 20 + "." * 400)]
    engine = make_engine(tokenizer, lambda _: script, depth=depth)
    prompt = tokenizer.encode("<|im_start|>assistant\n")
    params = SamplingParams(max_tokens=40, thinking_budget=budget)
    request = Request(request_id="a", prompt_token_ids=prompt, params=params, is_chat=True)
    engine.add(request)
    outputs = [o for _ in range(num_steps) for o in step(engine)]
    engine.close_thinking("a")
    engine.close_thinking("a")  # again: no difference
    engine.close_thinking("b")  # unknown: nothing
    while engine.has_unfinished:
        engine.step(outputs.extend)
    output = fold_outputs(outputs)
    assert output.usage.reasoning_tokens <= max(num_steps, 1) + depth
    assert output.token_ids.count(tokenizer.end_think_id) == 1
    assert output.text
    assert len(output.token_ids) == 40


@pytest.mark.parametrize("depth", [0, 1])
def test_a_token_is_delivered_before_the_next_step_is_waited_for(depth: int) -> None:
    """Delivered only when `step` returns, every answer would come a whole step late."""
    events: list[str] = []

    class Watched(ScriptedDevice):
        def collect(self, ticket: ScriptedTicket) -> StepResult:
            events.append(f"read {ticket.plan.step_id}")
            return super().collect(ticket)

    device = Watched(lambda prompt: [10, 11, 12, 13])
    engine = Engine(device, None, vocab_size=100, max_num_batched_tokens=64, depth=depth)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add(Request(request_id="a", prompt_token_ids=[1], params=params))
    while engine.has_unfinished:
        engine.step(lambda outputs: events.append(f"token {outputs[0].token_ids[0]}"))
    assert events == [e for i in range(4) for e in (f"read {i}", f"token {10 + i}")]


def test_closing_the_thinking_of_an_answer_changes_nothing(tokenizer: Tokenizer) -> None:
    engine = make_engine(tokenizer, says(tokenizer, "abc"))
    prompt = tokenizer.encode("<|im_start|>assistant\n")
    params = SamplingParams(max_tokens=3)
    engine.add(Request(request_id="a", prompt_token_ids=prompt, params=params, is_chat=True))
    outputs = [*step(engine), *step(engine)]
    engine.close_thinking("a")
    while engine.has_unfinished:
        engine.step(outputs.extend)
    assert fold_outputs(outputs).text == "abc"


# --- many streams --------------------------------------------------------------------------------


def test_more_streams_get_fewer_pieces_each() -> None:
    from nvcli.engine.pacing import MAX_INTERVAL_S, piece_interval

    assert [round(1e3 * piece_interval(n), 3) for n in (17, 64, 128, 256)] == [1.062, 4, 8, 32]
    assert piece_interval(5000) == MAX_INTERVAL_S


@pytest.mark.parametrize("num_streams", [4, 40])
def test_many_streams_get_larger_pieces_and_lose_nothing(
    tokenizer: Tokenizer, num_streams: int
) -> None:
    moments = iter(range(1, 1_000_000))
    texts = [tokenizer.encode(f"no. {i}: naïve 😀 text, and more") for i in range(num_streams)]
    engine = make_engine(
        tokenizer, lambda prompt: texts[prompt[1]], max_num_seqs=64, num_blocks=2000
    )
    engine._core.clock = lambda: next(moments) * 1e-6
    requests = [
        Request(
            request_id=str(i),
            prompt_token_ids=[1, i],
            params=SamplingParams(max_tokens=len(texts[i]), temperature=0),
        )
        for i in range(num_streams)
    ]
    deltas = run(engine, *requests)
    pieces = 0
    for i, text in enumerate(texts):
        found = deltas[(str(i), 0)]
        whole = fold_outputs(found)
        assert whole.token_ids == tuple(text)
        assert whole.text == tokenizer.decode(text)
        assert len(found[0].token_ids) == 1, "the first token does not wait"
        pieces += len(found)
    tokens = sum(map(len, texts))
    assert pieces == tokens if num_streams == 4 else pieces < tokens / 2


def stream_many(
    tokenizer: Tokenizer, count: int, *, num_tokens: int = 40, **params: object
) -> tuple[Engine, list[list[RequestOutput]]]:
    """An engine with so many streams, whose steps take a millisecond each, and what each of its
    first 25 steps gave."""
    engine = make_engine(
        tokenizer,
        lambda prompt: tokenizer.encode("ab" * num_tokens),
        depth=1,
        max_num_seqs=64,
        num_blocks=2000,
    )
    steps: list[list[RequestOutput]] = []
    engine._core.clock = lambda: len(steps) * 1e-3
    for i in range(count):
        options = SamplingParams(max_tokens=num_tokens, **params)  # type: ignore[arg-type]
        engine.add(Request(request_id=str(i), prompt_token_ids=[1], params=options))
    for _ in range(25):
        steps.append(step(engine))
    return engine, steps


@pytest.mark.parametrize("params", [{}, {"logprobs": 0}, {"stop": ("never",)}])
def test_streams_take_turns(tokenizer: Tokenizer, params: dict[str, object]) -> None:
    """Were all of them due in the same step, it would have the work of four."""
    _, steps = stream_many(tokenizer, 64, **params)
    first = next(i for i, outputs in enumerate(steps) if outputs)
    assert len(steps[first]) == 64
    assert {len(outputs) for outputs in steps[first + 1 :]} <= {15, 16, 17}
    turns = [
        [i for i, outputs in enumerate(steps) if any(o.request_id == str(k) for o in outputs)]
        for k in range(64)
    ]
    gaps = {b - a for turn in turns for a, b in itertools.pairwise(turn[1:])}
    assert gaps <= {3, 4, 5}, "each has its turn every 4 ms"


@pytest.mark.parametrize("params", [{}, {"logprobs": 0}, {"stop": ("never",)}])
def test_what_waits_for_its_turn_comes_with_the_end(
    tokenizer: Tokenizer, params: dict[str, object]
) -> None:
    engine, steps = stream_many(tokenizer, 64, **params)
    for k in range(64):
        engine.abort(str(k))
    outputs = [output for outputs in [*steps, step(engine)] for output in outputs]
    assert not engine.has_unfinished
    for k in range(64):
        whole = fold_outputs([output for output in outputs if output.request_id == str(k)])
        assert whole.finish_reason is FinishReason.ABORT
        assert len(whole.token_ids) >= 22
        assert whole.logprobs is None or len(whole.logprobs) == len(whole.token_ids)
        if not params:
            assert len(whole.token_ids) == whole.usage.completion_tokens
        assert whole.text.startswith(tokenizer.decode(whole.token_ids))


def test_a_stop_string_ends_a_stream_before_its_turn(tokenizer: Tokenizer) -> None:
    _, steps = stream_many(tokenizer, 64, stop=("abababab",))
    (end,) = (i for i, outputs in enumerate(steps) if any(o.is_finished for o in outputs))
    assert len(steps[end]) == 64
    first = next(i for i, outputs in enumerate(steps) if outputs)
    assert end - first == len(tokenizer.encode("abababab")) - 1


@pytest.mark.parametrize("logprobs", [None, 0])
def test_thinking_is_closed_on_demand_while_its_text_waits_for_its_turn(
    tokenizer: Tokenizer, logprobs: int | None
) -> None:
    think = tokenizer.think_id
    assert think is not None
    script = [think, *tokenizer.encode("a" * 60)]
    engine = make_engine(tokenizer, lambda _: script, depth=1, max_num_seqs=64, num_blocks=2000)
    engine._core.clock = lambda: 0.0  # nobody's turn comes
    for i in range(20):
        request = Request(
            request_id=str(i),
            prompt_token_ids=tokenizer.encode("<|im_start|>assistant\n"),
            params=SamplingParams(max_tokens=40, logprobs=logprobs),
            is_chat=True,
        )
        engine.add(request)
    outputs = [output for _ in range(10) for output in step(engine)]
    for i in range(20):
        engine.close_thinking(str(i))
    while engine.has_unfinished:
        engine.step(outputs.extend)
    for i in range(20):
        whole = fold_outputs([output for output in outputs if output.request_id == str(i)])
        assert len(whole.token_ids) == 40
        assert whole.token_ids.count(tokenizer.end_think_id) == 1
        assert whole.usage.reasoning_tokens <= 10
        assert whole.reasoning == "a" * whole.usage.reasoning_tokens
    for output in outputs:
        if output.logprobs is not None:
            assert output.content_flags is not None
            assert len(output.logprobs) == len(output.content_flags) == len(output.token_ids)
