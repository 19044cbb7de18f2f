"""Every block manager that a test builds is checked when the test ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import builders

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _check_integrity() -> Iterator[None]:
    builders.schedulers.clear()
    builders.holders.clear()
    yield
    for scheduler in builders.schedulers:
        scheduler.check()
    for manager, sequences in builders.holders:
        manager.check(sequences)
