"""docs/cli.md and the tables of docs/repl.md are what the program says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from nvcli.repl.commands import COMMANDS

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_is_generated(script: ModuleType) -> None:
    text = (DOCS / "cli.md").read_text("utf-8")
    assert text == script.reference(), "run python docs/make_reference.py"


def test_repl_page_is_filled(script: ModuleType) -> None:
    text = (DOCS / "repl.md").read_text("utf-8")
    assert text == script.repl_page(text), "run python docs/make_reference.py"
    assert all(f"`/{command.name}`" in text for command in COMMANDS)


def test_the_recorded_session_is_of_this_program() -> None:
    picture = (DOCS / "session.svg").read_text("utf-8")
    for words in ("nvcli", "demo", "capital", "Paris", "tok/s", "/probs"):
        assert words in picture
    assert "docs/session.svg" in (DOCS.parent / "README.md").read_text("utf-8")
