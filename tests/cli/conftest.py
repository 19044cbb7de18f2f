"""`cli`: run the command line in this process, with a scripted model and chosen terminals."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, field

import pytest

from nvcli.cli import app, chat
from tests.fakes import FakeLLM


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Input(io.TextIOWrapper):
    is_terminal = False

    def isatty(self) -> bool:
        return self.is_terminal


@dataclass
class Result:
    code: int
    out: str
    err: str


@dataclass
class Cli:
    """`cli("chat", "x", stdin=b"...", terminals=("err",))`; `cli.llm` is the model it gets."""

    monkeypatch: pytest.MonkeyPatch
    llm: FakeLLM = field(default_factory=FakeLLM)
    loads: list[object] = field(default_factory=list)

    def __call__(self, *args: str, stdin: bytes = b"", terminals: tuple[str, ...] = ()) -> Result:
        source = Input(io.BytesIO(stdin))
        source.is_terminal = "in" in terminals
        out = Terminal() if "out" in terminals else io.StringIO()
        err = Terminal() if "err" in terminals else io.StringIO()
        with self.monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", source)
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            patch.setattr(chat, "open_model", self._open)
            code = app.main(list(args))
        return Result(code, out.getvalue(), err.getvalue())

    def _open(self, config: object, screen: object) -> FakeLLM:
        self.loads.append(config)
        return self.llm


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    return Cli(monkeypatch)
