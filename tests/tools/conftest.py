"""Processes of tools may take as long to start as the machine needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nvcli.tools import functions, mcp
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="session", autouse=True)
def patient_starts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "_START_TIMEOUT_S", PATIENCE_S)
        patch.setattr(mcp, "START_TIMEOUT_S", PATIENCE_S)
        yield
