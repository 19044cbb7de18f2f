"""Fixtures of the text layer: the small tokenizer always, Qwen3's real one where it is at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvcli.text import Tokenizer
from tests.text.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab_size=290)


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_folder)


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    folder = os.environ.get("NVCLI_QWEN3_TOKENIZER")
    if not folder:
        pytest.skip("set NVCLI_QWEN3_TOKENIZER to a folder with Qwen3's tokenizer")
    return Path(folder)


@pytest.fixture(scope="session", params=["tiny", "qwen3"])
def any_folder(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    return folder


@pytest.fixture(scope="session")
def any_tokenizer(any_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(any_folder)
