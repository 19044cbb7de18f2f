"""The recipes of docs/batch.md run as they stand there, on the built-in model."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from pathlib import Path

import pytest

from tests.waiting import run_command

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "batch.md").read_text("utf-8")

pytestmark = pytest.mark.torch


def recipe(title: str) -> str:
    return PAGE.split(f"## Recipe: {title}\n")[1].split("\n## ")[0]


def run(title: str, folder: Path) -> str:
    """Write the recipe's files, run its scripts; -> what they print."""
    text = recipe(title)
    for name, content in re.findall(r"`([\w.]+)`:\n\n```\w*\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(content)
    (script,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    for name, module in (("nvcli", "-m nvcli "), ("python", "")):
        shim = folder / "bin" / name
        shim.parent.mkdir(exist_ok=True)
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n')
        shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = run_command(
        ["bash", "-euc", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "NVCLI_ATTACH": "never"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_classify_a_csv(tmp_path: Path) -> None:
    rows = [line.split(",") for line in run("classify a CSV", tmp_path).splitlines()]
    assert [row[:2] for row in rows] == [
        ["id", "product"],
        ["1", "kettle"],
        ["2", "kettle"],
        ["3", "lamp"],
    ]
    assert all(row[2] not in ("", "error") for row in rows[1:])


def test_extract_json_with_a_schema(tmp_path: Path) -> None:
    rows = [line.split("\t") for line in run("extract JSON with a schema", tmp_path).splitlines()]
    assert [row[0] for row in rows] == ["m1", "m2"]
    for _, name, count, item in rows:
        assert len(name) <= 24
        assert 1 <= int(count) <= 99
        assert item in ("kettle", "lamp", "other")


def test_embed_a_corpus(tmp_path: Path) -> None:
    from nvcli import LLM

    rows = [line.split("\t") for line in run("embed a corpus", tmp_path).splitlines()]
    corpus = (tmp_path / "corpus.txt").read_text().splitlines()
    assert sorted(text for _, text in rows) == sorted(corpus)
    scores = [float(score) for score, _ in rows]
    assert scores == sorted(scores, reverse=True)
    first = json.loads((tmp_path / "vectors.jsonl").read_text().splitlines()[0])
    with LLM("demo", device="cpu") as llm:
        (expected,) = llm.embed([corpus[0]])
    assert first["embedding"] == pytest.approx(expected, abs=1e-4)


def test_in_the_middle_of_a_pipe(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "questions.txt.gz").write_bytes(gzip.compress(b"Hello\nWho are you?\n"))
    (tmp_path / "bin").mkdir()
    pager = tmp_path / "bin" / "less"
    pager.write_text("#!/bin/sh\nexec cat\n")
    pager.chmod(0o755)
    assert run("in the middle of a pipe", tmp_path).count("\n") == 2
