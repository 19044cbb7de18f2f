"""`/probs`, `/branch`, `/continue` and Ctrl+T on the built-in model."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import pytest

from nvcli.config import EngineConfig
from nvcli.repl.chat_llm import ChatLLM
from nvcli.repl.screen import Screen
from nvcli.repl.session import Session
from nvcli.repl.shell import Shell
from nvcli.types import FinishReason, RequestOutput, fold_outputs
from tests.repl.test_commands import run_line as run

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def llm() -> Iterator[ChatLLM]:
    model = ChatLLM(config=EngineConfig(device="cpu", max_num_seqs=2))
    yield model
    model.close()


@pytest.fixture
def shell(llm: ChatLLM) -> Shell:
    out = io.StringIO()
    session = Session(llm, overrides={"temperature": 0.0})
    return Shell(session, Screen(out, out))


def last(shell: Shell) -> RequestOutput:
    output = shell.session.turns[-1].output
    assert output is not None
    return output


@pytest.mark.parametrize("think", [True, False])
def test_probs_of_a_greedy_answer_are_the_best(shell: Shell, think: bool) -> None:
    shell.session.think = think
    run(shell, "What is the capital of France?")
    rows = re.findall(r"^ *(\d+) +([\d.]+) %  (\S.*?)  ", run(shell, "/probs"), re.MULTILINE)
    assert "".join(eval(text.strip()) for _, _, text in rows).strip() == last(shell).text
    page = run(shell, f"/probs {rows[1][0]}")
    assert page.startswith("  *  ")
    assert "rank 1" in page
    assert len(page.splitlines()) >= 5


def test_branch_goes_on_from_another_token_with_the_prefix_cached(shell: Shell) -> None:
    run(shell, "What is the capital of France?")
    before = last(shell)
    tokens = [shell.session.llm.token_text(i) for i in before.token_ids]
    position = max(i for i, text in enumerate(tokens) if "Par" in text) + 1
    run(shell, f"/branch {position}")
    after = last(shell)
    assert after.text != before.text
    assert after.reasoning == before.reasoning
    assert after.token_ids[: position - 1] == before.token_ids[: position - 1]
    assert after.token_ids[position - 1] != before.token_ids[position - 1]
    assert after.usage.cached_tokens >= 16
    assert len(shell.session.turns) == 1
    run(shell, "And of Italy?")  # the branch is what the model remembers
    assert after.text in shell.session.prompt_text()


def test_continue_equals_the_answer_that_was_not_cut(shell: Shell) -> None:
    run(shell, "What is the capital of France?")
    whole = last(shell)
    shell.session.turns.clear()
    shell.session.overrides["max_tokens"] = 14
    run(shell, "What is the capital of France?")
    cut = last(shell)
    assert cut.finish_reason is FinishReason.LENGTH
    del shell.session.overrides["max_tokens"]
    run(shell, "/continue")
    assert last(shell).text == whole.text
    assert last(shell).reasoning == whole.reasoning
    assert last(shell).finish_reason is FinishReason.STOP


def test_what_cannot_be_done_is_said(shell: Shell) -> None:
    from nvcli.errors import UsageError

    for line, words in [
        ("/probs", "no answer"),
        ("/branch 1", "no answer"),
        ("/branch x", "takes"),
    ]:
        with pytest.raises(UsageError, match=words):
            run(shell, line)
    run(shell, "Hi")
    for line, words in [
        ("/continue", "is complete"),
        ("/probs 999", "has tokens 1 to"),
        ("/branch 999", "has tokens 1 to"),
        ("/branch 1 99", "has alternatives 1 to"),
    ]:
        with pytest.raises(UsageError, match=words):
            run(shell, line)
    assert len(shell.session.turns) == 1


def test_answer_now_on_the_real_engine(shell: Shell) -> None:
    turn = shell.session.turn("What is the capital of France?")
    deltas = [next(turn)]
    assert shell.session.answer_now()
    deltas += list(turn)
    output = fold_outputs(deltas)
    assert output.usage.reasoning_tokens < 9
    assert output.text
    assert output.finish_reason is FinishReason.STOP
