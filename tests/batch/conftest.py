"""No test of these meets a server, a configuration or an option of the developer's."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("NVCLI_") or name == "XDG_RUNTIME_DIR":
            monkeypatch.delenv(name)
