"""The conversation without a terminal."""

from __future__ import annotations

import re
import time

import pytest

from nvcli.errors import ContextLengthError, InvalidParameterError, UsageError
from nvcli.repl.numbers import emptiness, ended_now, short_count, spaced, statistics_line
from nvcli.repl.session import Session
from nvcli.types import FinishReason, Message, RequestOutput, RequestTimes, Usage
from tests.fakes import FakeLLM, Reply


def ask(session: Session, text: str, **overrides: object) -> str:
    return "".join(delta.text for delta in session.turn(text, **overrides))


def test_each_prompt_holds_the_answered_turns() -> None:
    llm = FakeLLM(["one", Reply("two", reasoning="Hm."), "three"])
    session = Session(llm, system="Be brief.")
    for question in ("a", "b", "c"):
        ask(session, question)
    assert llm.requests[-1].prompt == [
        Message("system", "Be brief."),
        Message("user", "a"),
        Message("assistant", "one"),
        Message("user", "b"),
        Message("assistant", "two", reasoning="Hm."),
        Message("user", "c"),
    ]


def test_closing_a_turn_keeps_the_partial_answer() -> None:
    llm = FakeLLM([Reply("one two three"), "next"])
    session = Session(llm)
    turn = session.turn("a")
    next(turn)
    turn.close()
    assert llm.requests[0].was_closed_early
    assert session.turns[0].is_interrupted
    assert session.turns[0].output is not None
    assert session.turns[0].output.text == "one "
    ask(session, "b")
    assert [m.content for m in llm.requests[1].prompt] == ["a", "one ", "b"]


def test_a_turn_without_an_answer_is_not_sent_again() -> None:
    llm = FakeLLM([Reply("never", reasoning="Hm hm."), "fine"])
    session = Session(llm)
    turn = session.turn("a")
    next(turn)
    turn.close()
    ask(session, "b")
    assert [m.content for m in llm.requests[1].prompt] == ["b"]
    assert len(session.turns) == 2


def test_a_refused_turn_is_not_kept() -> None:
    llm = FakeLLM([Reply(error=ContextLengthError("too long")), "fine"])
    session = Session(llm)
    with pytest.raises(ContextLengthError):
        ask(session, "a")
    assert session.turns == []
    assert ask(session, "a") == "fine"


def test_undo_and_retry_reuse_the_prefix() -> None:
    llm = FakeLLM(["one", "two", "two again", "three"])
    session = Session(llm)
    ask(session, "first question")
    ask(session, "second question")
    whole = session.turns[-1].output
    assert whole is not None
    again = list(session.retry(temperature=0.1))[-1]
    assert again.usage.cached_tokens == again.usage.prompt_tokens  # nothing to prefill
    assert llm.requests[-1].params.temperature == 0.1
    assert llm.requests[-2].text == llm.requests[-1].text
    assert [turn.user for turn in session.undo(2)] == ["first question", "second question"]
    assert session.messages() == []


def test_retry_that_never_starts_brings_the_old_answer_back() -> None:
    llm = FakeLLM(["one", Reply(error=ContextLengthError("too long")), "x"])
    session = Session(llm)
    with pytest.raises(UsageError, match="nothing to retry"):
        list(session.retry())
    ask(session, "a")
    with pytest.raises(ContextLengthError):
        list(session.retry())
    assert [t.output.text for t in session.turns if t.output] == ["one"]
    session.retry().close()  # not started at all
    assert len(session.turns) == 1


@pytest.mark.parametrize("count", [0, 2, -1])
def test_undo_checks_its_count(count: int) -> None:
    session = Session(FakeLLM())
    ask(session, "a")
    with pytest.raises(UsageError, match="has 1 turn"):
        session.undo(count)


def test_settings() -> None:
    session = Session(FakeLLM())
    session.set("temperature", "0.3")
    session.set("top-k", "5")
    session.set("think_budget", "100")
    params = session.sampling()
    assert (params.temperature, params.top_k, params.thinking_budget) == (0.3, 5, 100)
    session.set("temperature", "default")
    assert session.sampling().temperature == 0.6
    with pytest.raises(UsageError, match="no setting 'warmth'"):
        session.set("warmth", "1")
    with pytest.raises(InvalidParameterError, match="top_k must be a whole number"):
        session.set("top_k", "1.5")
    with pytest.raises(InvalidParameterError, match="temperature must be from 0 to 2"):
        session.set("temperature", "9")
    assert session.overrides == {"top_k": 5, "thinking_budget": 100}


def test_thinking_off_changes_request_and_defaults() -> None:
    llm = FakeLLM([Reply("x", reasoning="Hm.")])
    session = Session(llm, think=False)
    ask(session, "a")
    assert not llm.requests[0].enable_thinking
    assert llm.requests[0].params.temperature == 0.7


def test_typed_surrogates_are_repaired() -> None:
    llm = FakeLLM()
    ask(Session(llm), "caf\udce9")
    assert llm.requests[0].prompt[-1] == Message("user", "caf�")


def test_r15_reasoning_of_earlier_turns_is_not_in_the_prompt() -> None:
    llm = FakeLLM([Reply("one", reasoning="SECRET"), Reply("two", reasoning="SECRET"), "three"])
    session = Session(llm)
    for question in ("a", "b", "c"):
        ask(session, question)
    assert "SECRET" not in session.prompt_text()
    assert "one" in session.prompt_text()


def test_context() -> None:
    session = Session(FakeLLM(["one two"]))
    assert session.context().used == 0
    ask(session, "a b")
    use = session.context()
    assert (use.used, use.limit, use.cached_blocks, use.num_blocks) == (6, 32768, 40, 100)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (1023, "1023"), (1024, "1k"), (2150, "2.1k"), (10239, "10k"), (32768, "32k")],
)
def test_short_count(count: int, text: str) -> None:
    assert short_count(count) == text


def test_statistics_line() -> None:
    output = RequestOutput(
        request_id="r",
        finish_reason=FinishReason.STOP,
        usage=Usage(1738, 412, cached_tokens=1830),
        times=RequestTimes(0.0, 0.0, 0.038, 0.038 + 411 / 96.1),
    )
    assert statistics_line(output, 32768) == (
        "412 tok · 96.1 tok/s · TTFT 38 ms · ctx 2.1k/32k (7 %) · cached 1 830 tok · stop"
    )
    assert statistics_line(RequestOutput(request_id="r"), 100, is_interrupted=True) == (
        "0 tok · ctx 0/100 (0 %) · interrupted"
    )
    assert spaced(1234567) == "1 234 567"


def test_an_interrupted_answer_has_a_speed() -> None:
    now = time.monotonic()
    output = RequestOutput(
        request_id="r", times=RequestTimes(now - 3, now - 3, now - 2), usage=Usage(4, 21)
    )
    assert "tok/s" not in statistics_line(output, 100, is_interrupted=True)
    assert re.search(r"21 tok · \d+\.\d tok/s", statistics_line(ended_now(output), 100))


def test_an_empty_answer_is_told_with_its_reason() -> None:
    def answer(**more: object) -> str | None:
        return emptiness(RequestOutput(request_id="r", **more))  # type: ignore[arg-type]

    thought = {"reasoning": "Hm.", "finish_reason": FinishReason.LENGTH}
    assert answer(**thought) == (
        "the answer is empty: the token limit came while the model thought"
    )
    assert answer(reasoning="Hm.", finish_reason=FinishReason.STOP) == "the answer is empty"
    assert answer(text=" \n", finish_reason=FinishReason.STOP) == "the answer is empty"
    assert answer(text="4", finish_reason=FinishReason.LENGTH) is None
    assert answer(error="x", finish_reason=FinishReason.ERROR) is None
