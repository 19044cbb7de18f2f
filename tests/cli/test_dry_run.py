"""A dry run says of a prompt that does not fit what the run says: the same line, the same code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvcli.cli import app
from nvcli.models.resolve import demo_folder
from nvcli.text import Tokenizer
from nvcli.types import Message

pytestmark = pytest.mark.torch
LIMIT = 48


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("NVCLI_ATTACH", "never")
    monkeypatch.chdir(tmp_path)


def prompt_of(size: int) -> str:
    """A question whose prompt has so many tokens."""
    tokenizer = Tokenizer.from_folder(demo_folder())
    for count in range(200):
        text = "dog" + " dog" * count
        if len(tokenizer.encode_chat([Message("user", text)], enable_thinking=True)) == size:
            return text
    raise AssertionError("no number of words gives it")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = app.main([*args])
    out, err = capsys.readouterr()
    return code, out, err


def chat(*args: str) -> list[str]:
    return ["chat", "--no-stdin", "--device", "cpu", "-n", "1", *args]


def test_one_token_decides(capsys: pytest.CaptureFixture[str]) -> None:
    limit = ("--max-model-len", str(LIMIT))
    fits, is_long = prompt_of(LIMIT - 1), prompt_of(LIMIT)
    assert run(capsys, *chat(*limit, fits))[0] == 0
    code, _, err = run(capsys, *chat(*limit, "--dry-run", fits))
    assert (code, err) == (0, f"{LIMIT - 1} tokens\n")

    code, out, said = run(capsys, *chat(*limit, is_long))
    assert (code, out) == (1, "")
    assert "has 48 tokens, the context holds 48 with at least one for the answer" in said
    code, out, err = run(capsys, *chat(*limit, "--dry-run", is_long))
    assert (code, err) == (1, f"{LIMIT} tokens\n{said}")
    assert is_long in out, "what is too long can be looked at"
    code, out, err = run(capsys, *chat(*limit, "--dry-run", "--json", is_long))
    assert (code, err, json.loads(out)["prompt_tokens"]) == (1, said, LIMIT)


def test_a_raw_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    args = chat("--max-model-len", "16", "--raw", "dog" + " dog" * 30)
    code, _, said = run(capsys, *args)
    assert (code, "the context holds 16" in said) == (1, True)
    assert run(capsys, *args, "--dry-run")[::2] == (code, f"{said.split()[4]} tokens\n{said}")


def test_a_context_beyond_the_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    for args in (chat("x"), ["batch", "in.jsonl", "--device", "cpu"]):
        code, out, said = run(capsys, *args, "--max-model-len", "1m")
        assert (code, out) == (2, "")
        assert "--max-model-len 1048576 is more than the model's" in said
        assert run(capsys, *args, "--max-model-len", "1m", "--dry-run") == (2, "", said)


def test_records_of_a_batch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each that the dry run counts as bad fails in the run, for the same reason, and no other."""
    source = tmp_path / "in.jsonl"
    tokenizer = Tokenizer.from_folder(demo_folder())
    ids = tokenizer.encode("dog" + " dog" * LIMIT)
    embedded = {"method": "POST", "url": "/v1/embeddings"}
    records = [
        {"prompt": prompt_of(LIMIT - 1), "max_tokens": 1},
        {"prompt": prompt_of(LIMIT), "max_tokens": 1},
        *(
            {
                "custom_id": f"c{size}{echo}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": ids[:size], "max_tokens": 1 - echo, "echo": bool(echo)},
            }
            for size in (LIMIT - 1, LIMIT, LIMIT + 1)
            for echo in (0, 1)
        ),
        *(
            {**embedded, "custom_id": f"e{size}", "body": {"model": "demo", "input": ids[:size]}}
            for size in (LIMIT, LIMIT + 1)
        ),
    ]
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    args = ["batch", "in.jsonl", "--device", "cpu", "--max-model-len", str(LIMIT)]
    code, out, _ = run(capsys, *args, "-o", "out.jsonl")
    failed = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    said = {
        row["index"] + 1: f"{row['error']['code']}: {row['error']['message']}"
        for row in failed
        if row.get("error")
    }
    dry_code, out, _ = run(capsys, *args, "--dry-run")
    lines = (line.partition(": ") for line in out.splitlines() if line.startswith("line "))
    assert {int(name.removeprefix("line ")): text for name, _, text in lines} == said
    assert code == dry_code == 4
    assert set(said) == {2, 5, 7, 8, 10}
