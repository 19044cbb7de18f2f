"""The command line in this process, as its own tests run it; what the client can do is measured in
a moment."""

from __future__ import annotations

from functools import partial

import pytest

from nvcli.bench import ceiling
from tests.cli.conftest import cli

__all__ = ["cli"]


@pytest.fixture(autouse=True)
def short_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = partial(ceiling.client_ceiling, duration_s=0.2)
    monkeypatch.setattr(ceiling, "client_ceiling", measure)
