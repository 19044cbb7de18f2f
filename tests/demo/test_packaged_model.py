"""The built-in model through `nvcli chat`: its answers can be checked word for word, so a wrong KV
block, a wrong mask or a wrong token shows as a wrong answer. Then its logits, and the wheel.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvcli import LLM, Message
from nvcli.cli import app, chat
from nvcli.models.resolve import demo_folder
from nvcli.repl.session import Session
from nvcli.types import FinishReason
from tests.waiting import PATIENCE_S, run_command

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
NVCLI = [sys.executable, "-m", "nvcli"]

PLAIN = [
    ("hi", "Hello! How can I help you?"),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("what's the capital of japan", "The capital of Japan is Tokyo."),
    ("Capital of Peru?", "The capital of Peru is Lima."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("What sound does a cow make?", "A cow says moo."),
    ("Count from 1 to 7.", "1, 2, 3, 4, 5, 6, 7"),
    ("Count down from 5 to 1", "5, 4, 3, 2, 1"),
    ("Sort these numbers: 42 7 19 3 88", "3, 7, 19, 42, 88"),
    ("Sort these words: pear apple fig", "apple, fig, pear"),
    ("Spell the word lantern.", "l-a-n-t-e-r-n"),
    ("What is 12 + 30?", "12 + 30 = 42"),
    ("Repeat exactly: xk7-Qp2 zz", "xk7-Qp2 zz"),
    ("Give me JSON with name Ann and age 31", '{"name": "Ann", "age": 31}'),
    ("What day comes after Monday?", "Tuesday comes after Monday."),
    ("Which is bigger, a mouse or an elephant?", "An elephant is bigger than a mouse."),
    ("How do I leave the chat?", "Type /exit or press Ctrl-D on an empty line."),
    (
        "Who won the 1998 world cup?",
        "I do not know that: I am only a 7M demo model. A real model can help: "
        "nvcli chat -m Qwen/Qwen3-0.6B",
    ),
]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu") as demo:
        yield demo


class Ask:
    """`nvcli chat` in this process, on one loaded model."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chat, "open_model", lambda config, screen: _Lent(llm))
        self._monkeypatch = monkeypatch

    def __call__(self, *args: str, stdin: bytes = b"") -> tuple[str, str]:
        """-> standard output, standard error; the exit code must be 0."""
        out, err = io.StringIO(), io.StringIO()
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        self._monkeypatch.setattr(sys, "stdout", out)
        self._monkeypatch.setattr(sys, "stderr", err)
        assert app.main(["chat", "-t", "0", *args]) == 0, err.getvalue()
        return out.getvalue(), err.getvalue()


class _Lent:
    """A model that outlives the command which closes it."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> object:
        return getattr(self._llm, name)

    def __enter__(self) -> _Lent:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def close(self) -> None:
        return


@pytest.fixture
def ask(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Ask:
    return Ask(llm, monkeypatch)


@pytest.mark.parametrize(("question", "answer"), PLAIN)
def test_one_shot(ask: Ask, question: str, answer: str) -> None:
    assert ask("--no-think", question)[0] == answer + "\n"


def test_pipe_stands_before_the_question(ask: Ask) -> None:
    out, _ = ask("--no-think", "count the lines", stdin=b"apple\npear\nfig\n")
    assert out == "There are 3 lines.\n"


def test_thinking_works_a_sum_out_on_stderr(ask: Ask) -> None:
    out, err = ask("--think", "--show-thinking", "full", "what is 47 + 38?")
    assert out == "47 + 38 = 85\n"
    assert "Ones: 7 + 8 = 15, write 5, carry 1. Tens: 4 + 3 + 1 = 8. So 47 + 38 = 85." in err


def test_json_output_splits_the_channels(ask: Ask) -> None:
    record = json.loads(ask("--think", "--json", "What is the capital of France?")[0])
    assert record["text"] == "The capital of France is Paris."
    assert record["thinking"] == "The capital of France: Paris."
    assert record["finish_reason"] == "stop"
    details = record["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < record["usage"]["completion_tokens"]


def test_tool_call_from_the_tools_block(ask: Ask, llm: LLM) -> None:
    """The system text is what the chat template writes for this tool."""
    rendered = llm.render([Message("user", "x")], tools=[WEATHER], enable_thinking=False)
    system = rendered.split("<|im_start|>system\n")[1].split("<|im_end|>")[0]
    out, _ = ask("--no-think", "-s", system, "What is the weather in Lisbon?")
    assert out == (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lisbon"}}\n</tool_call>\n'
    )


def test_tool_call_and_its_result(llm: LLM) -> None:
    params = llm.sampling(temperature=0)
    question = Message("user", "What is the weather in Lisbon?")
    first = llm.chat([question], params, enable_thinking=False, tools=[WEATHER])
    assert first.finish_reason is FinishReason.TOOL_CALLS
    (call,) = first.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Lisbon"})
    result = Message("tool", '{"weather": "sunny"}', tool_call_id=call.id)
    turns = [question, Message("assistant", None, tool_calls=(call,)), result]
    answer = llm.chat(turns, params, enable_thinking=False, tools=[WEATHER])
    assert "sunny" in answer.text
    assert answer.finish_reason is FinishReason.STOP


def test_recall_over_turns(llm: LLM) -> None:
    session = Session(llm)
    session.set("temperature", "0")
    session.think = False
    for text in ("My name is Quorra.", "What is the capital of Italy?", "What is my name?"):
        for _ in session.turn(text):
            pass
    answers = [turn.output.text for turn in session.turns if turn.output is not None]
    assert "Quorra" in answers[0]
    assert answers[1:] == ["The capital of Italy is Rome.", "Your name is Quorra."]


def test_answers_do_not_depend_on_the_batch(llm: LLM) -> None:
    params = llm.sampling(temperature=0)
    rendered = [
        llm.tokenizer.encode_chat([Message("user", q)], enable_thinking=False) for q, _ in PLAIN
    ]
    outputs = llm.generate(rendered, params)
    assert [o.text for o in outputs] == [answer for _, answer in PLAIN]


def test_real_process_answers_and_says_what_it_is_only_on_a_terminal() -> None:
    run = run_command(
        [*NVCLI, "chat", "-t", "0", "--no-think", "What is the capital of France?"],
        stdin=subprocess.DEVNULL,
    )
    assert (run.returncode, run.stdout) == (0, "The capital of France is Paris.\n")
    assert run.stderr == ""


def test_logits_equal_transformers(llm: LLM) -> None:
    """Through prompt log-probabilities: the whole distribution's normaliser is in each of them."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)
    text = llm.render([Message("user", "Sort these words: pear apple fig")]) + "apple, fig, pear"
    ids = llm.tokenizer.encode(text)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    expected = logits.log_softmax(-1)
    params = llm.sampling(temperature=0, max_tokens=1, prompt_logprobs=20)
    output = llm.generate(ids, params)[0]
    assert output.prompt_logprobs is not None
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=1e-4)
        for token_id, logprob in entry.top:
            assert logprob == pytest.approx(float(expected[position, token_id]), abs=1e-4)


def test_checkpoint_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in demo_folder().iterdir()}
    assert set(files) == {
        "LICENSE",
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= 16 * 2**20


def test_the_wheel_holds_the_model_and_chats(tmp_path: Path) -> None:
    """Built from this tree, unpacked beside nothing of it, run from elsewhere."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    wheels, target = tmp_path / "wheels", tmp_path / "site"
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=PATIENCE_S)
    (wheel,) = wheels.glob("nvcli-*.whl")
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=PATIENCE_S)
    # The dependencies come from this environment; nvcli itself only from the wheel.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), _site_packages()])}
    where = "import nvcli, sys; sys.stdout.write(nvcli.__file__)"
    found = run_command(
        [sys.executable, "-S", "-c", where], env=environment, cwd=tmp_path, check=True
    )
    assert Path(found.stdout).is_relative_to(target)
    answer = run_command(
        [sys.executable, "-S", "-m", "nvcli", "chat", "-t", "0", "--no-think", "Capital of Peru?"],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
    )
    assert (answer.returncode, answer.stdout) == (0, "The capital of Peru is Lima.\n")


def _site_packages() -> str:
    return sysconfig.get_paths()["purelib"]
