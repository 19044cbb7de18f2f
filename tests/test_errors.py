"""What is said of names that are none."""

from __future__ import annotations

import pytest

from nvcli.errors import meant, nearest

NAMES = ("temperature", "top-p", "max-model-len", "max-num-seqs", "turns", "set", "sessions")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("temprature", "temperature"),
        ("max", "max-num-seqs"),  # the shortest that begins so
        ("sess", "sessions"),
        ("se", "set"),
        ("url", None),  # not turns
        ("t", None),  # one letter begins too many
        ("", None),
    ],
)
def test_the_name_that_was_meant(name: str, near: str | None) -> None:
    assert nearest(name, NAMES) == near
    assert meant(name, iter(NAMES)) == (near and f"Did you mean {near!r}?")
