"""Loading: what is said about it, and to whom."""

from __future__ import annotations

import io

import pytest

import nvcli.repl.chat_llm
from nvcli.cli.chat import open_model
from nvcli.config import EngineConfig
from nvcli.repl.screen import Screen
from tests.fakes import FakeLLM


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*, config: EngineConfig) -> FakeLLM:
        return FakeLLM(model_name=config.model, is_demo=config.model == "demo")

    monkeypatch.setattr(nvcli.repl.chat_llm, "ChatLLM", build)


def load(model: str, **screen: bool) -> str:
    err = io.StringIO()
    open_model(EngineConfig(model=model), Screen(io.StringIO(), err, **screen))
    return err.getvalue()


def test_demo_model_is_named_to_a_terminal_only() -> None:
    notice = load("demo", err_is_terminal=True, is_dumb=True)
    assert notice == (
        "The small built-in demo model. For a real one: nvcli chat -m Qwen/Qwen3-0.6B\n"
    )
    assert load("demo") == ""
    assert load("demo", err_is_terminal=True, is_quiet=True) == ""
    assert load("other", err_is_terminal=True, is_dumb=True) == ""


def test_verbose_tells_how_it_was_loaded() -> None:
    assert load("other", is_verbose=True) == (
        "cpu, float32, attention torch (the only one here)\n"
        "weights 1.00 GiB, KV cache 0.50 GiB for 1 600 tokens\n"
        "weights 0.10 s, KV cache 0.25 s\n"
    )
