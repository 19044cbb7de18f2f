"""`nvcli batch` as users type it: help, dry run, the recipes of the docs, the real engine."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvcli.models.resolve import demo_folder
from tests.batch.support import essences, read_lines, write_lines
from tests.cli.conftest import Cli
from tests.cli.test_app import check
from tests.waiting import run_command

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "batch.md"


def run_python(code: str, *args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return run_command(
        [sys.executable, "-c", code, *args], cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


WITHOUT_TORCH = """
import sys
from nvcli.cli.app import main
code = main(sys.argv[1:])
heavy = [name for name in ("torch", "triton", "transformers", "numpy") if name in sys.modules]
assert not heavy, heavy
sys.exit(code)
"""


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_page(cli: Cli, flag: str) -> None:
    result = cli("batch", flag)
    assert (result.code, result.err) == (0, "")
    check("help-batch", result.out)


def test_help_is_light() -> None:
    """P12"""
    result = run_python(WITHOUT_TORCH, "batch", "--help")
    assert result.returncode == 0, result.stderr


def test_the_other_name_is_hidden(cli: Cli) -> None:
    assert "batch-generate" not in cli("--help").out
    assert cli("batch-generate", "--help").code == 0


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["batch"], "INPUT"),
        (["batch", "no-such-file.jsonl"], "No such file"),
        (["batch", "x", "--shard", "5/2"], "is no shard"),
        (["batch", "x", "--resume"], "-o FILE"),
        (["batch", "x", "--order", "sideways"], "one of input, completion"),
        (["batch", "x", "-t", "3"], "temperature"),
        (["batch", "x", "--resum"], "--resume"),
        (["batch", "x", "--json"], "--dry-run"),
        (["batch", "x", "--dry-run", "--stats-json", "s.json"], "--dry-run and --stats-json"),
        (["batch", "x", "--dry-run", "--window", "9"], "--dry-run and --window"),
        (["batch", "x", "--dry-run", "--order", "input"], "--dry-run and --order"),
        (["batch", "x", "--dry-run", "--max-errors", "9"], "--dry-run and --max-errors"),
        (["batch", "x", "--dry-run", "--progress", "none"], "--dry-run and --progress"),
        (["batch", "x", "--dry-run", "--include-thinking"], "--dry-run and --include-thinking"),
        (["batch", "x", "--dry-run", "--attach", "uds"], "--attach never"),
    ],
)
def test_usage_errors_are_one_line(cli: Cli, args: list[str], part: str) -> None:
    result = cli(*args)
    assert result.code == 2
    assert part in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""


# --- a checkpoint --------------------------------------------------------------------------------


def copy_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder() / name, folder / name)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with the built-in model's tokenizer."""
    from tests.tiny import write_tiny_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint")
    write_tiny_checkpoint(folder, vocab=4200, write_tokenizer=copy_tokenizer)
    return folder


@pytest.mark.torch
def test_dry_run_needs_no_torch(checkpoint: Path, tmp_path: Path) -> None:
    records = [{"prompt": "hello"}, "{bad", {"prompt": "x " * 2000}, {"prompt": [5000]}]
    source = write_lines(tmp_path / "in.jsonl", records)
    args = ["batch", str(source), "--dry-run", "-m", str(checkpoint)]
    result = run_python(WITHOUT_TORCH, *args)
    assert result.returncode == 4, result.stderr
    assert "4 records, 1 good, 3 bad" in result.stdout
    assert "\nline 3: context_length_exceeded: the prompt has " in result.stdout
    found = json.loads(run_python(WITHOUT_TORCH, *args, "--json").stdout)
    assert found["errors"] == {
        "invalid_json": 1,
        "context_length_exceeded": 1,
        "invalid_parameter": 1,
    }
    assert found["estimate_s"] >= 0
    assert run_python(WITHOUT_TORCH, *args, "--strict").returncode == 2


@pytest.mark.torch
def test_a_dry_run_looks_at_the_output(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    """As the run would that it stands for, and changes nothing."""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "hello"}, {"prompt": "you"}])
    out = tmp_path / "out.jsonl"
    run = ["batch", str(source), "-m", str(checkpoint), "-o", str(out)]
    assert cli(*run, "--dry-run").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
    assert cli(*run, "--limit", "1", "-n", "2", "--attach", "never").code == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    told = cli(*run, "--dry-run")
    assert (told.code, told.err.count("\n")) == (2, 1)
    assert f"{out} is there already" in told.err
    found = json.loads(cli(*run, "-n", "2", "--resume", "--dry-run", "--json").out)
    assert (found["records"], found["good"], found["resumed"]) == (2, 1, 1)
    assert "in the output already: 1\n" in cli(*run, "-n", "2", "--resume", "--dry-run").out
    assert "sampling changed" in cli(*run, "-n", "3", "--resume", "--dry-run").err
    nowhere = cli(*run[:-1], str(tmp_path / "none" / "o.jsonl"), "--dry-run")
    assert (nowhere.code, "there is no folder" in nowhere.err) == (1, True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.torch
def test_a_dry_run_finds_what_the_run_would(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    """And says it in the same words, also of a record that is wrong in several ways."""
    outside, long = [1, 5000], [5000] * 3000

    def asked(url: str, **body: object) -> object:
        return {"custom_id": f"{url} {body}"[:99], "url": f"/v1/{url}", "body": body}

    records = [
        {"prompt": "hello"},
        {"prompt": outside},
        {"prompt": long},
        {"prompt": "x " * 2000, "stop_token_ids": [5000]},
        {"prompt": "a", "stop_token_ids": [2, 5000], "logit_bias": {"6000": 1}},
        {"prompt": "a", "allowed_token_ids": [5000], "stop_token_ids": [7000]},
        {"prompt": outside, "logit_bias": {"6000": 1}},
        {"prompt": "a", "min_tokens": 9},
        asked("completions", prompt=[outside, long]),
        asked("completions", prompt=[[1], [2] * 3000, outside]),
        asked("embeddings", input=outside),
        asked("embeddings", input=[outside, long]),
        asked("embeddings", input=outside, dimensions=4096),
        asked("embeddings", input=[3, 4]),
    ]
    source = write_lines(tmp_path / "in.jsonl", records)
    out = tmp_path / "out.jsonl"
    args = ["batch", str(source), "-m", str(checkpoint), "--max-tokens", "4"]
    told = cli(*args, "--dry-run")
    assert (told.code, told.err) == (4, "")
    assert cli(*args, "-o", str(out), "--attach", "never").code == 4
    errors = [line["error"] for line in read_lines(out)]
    said = [f"line {e['line']}: {e['code']}: {e['message']}" for e in errors if e is not None]
    assert [line for line in told.out.split("\n") if line.startswith("line ")] == said
    assert len(said) == len(records) - 2


def nvcli(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "nvcli", *map(str, args)]


KILLED = """
import os, signal, sys
from nvcli.batch.sink import LineSink
from nvcli.cli.app import main
write, written = LineSink.write, []

def counted(sink, line):
    write(sink, line)
    written.append(line)
    if len(written) == 5:
        os.kill(os.getpid(), signal.SIGKILL)

LineSink.write = counted
main(sys.argv[1:])
"""


@pytest.mark.torch
def test_the_real_engine_resumes_to_the_same_text(checkpoint: Path, tmp_path: Path) -> None:
    shared = "You are a helpful assistant who answers in one word. "
    records: list[object] = []
    for number in range(40):
        text = f"{shared}Question {number % 7}"
        records.append({"prompt": text, "max_tokens": 5 + number % 40, "temperature": 1.2})
    records[7] = {"prompt": "x " * 2000}
    records[9] = b'{"prompt": "\\ud800 [/INST] \\u001b[2J", "max_tokens": 5}'
    source = write_lines(tmp_path / "in.jsonl", records)
    base = ["batch", source, "-m", checkpoint, "--device", "cpu", "--seed", "3"]
    whole = tmp_path / "whole.jsonl"
    done = subprocess.run(nvcli(*base, "-o", whole), cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 4, done.stderr
    lines = read_lines(whole)
    codes = {i: line["error"]["code"] for i, line in enumerate(lines) if line["error"]}
    assert codes == {7: "context_length_exceeded"}
    usages = [line["usage"] for line in lines if line["error"] is None]
    assert any(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    out = tmp_path / "out.jsonl"
    options = ["--window", "6", "--max-num-seqs", "3", "--order", "completion"]
    killed = run_python(KILLED, *map(str, base), *options, "-o", str(out))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert out.read_bytes().count(b"\n") == 5
    done = subprocess.run(
        nvcli(*base, "-o", out, "--resume"), cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 4, done.stderr
    assert essences(out) == essences(whole)


# --- the docs ------------------------------------------------------------------------------------


def blocks(recipe: str) -> list[tuple[str, str]]:
    """The (language, text) of each code block of a recipe."""
    text = DOCS.read_text(encoding="utf-8").split(f"## Recipe: {recipe}\n")[1].split("\n## ")[0]
    return re.findall(r"```(\w+)\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.torch
def test_recipe_classify_a_csv(checkpoint: Path, tmp_path: Path) -> None:
    model = "demo" if (demo_folder() / "config.json").exists() else str(checkpoint)
    (_, table), (_, system), (_, script) = blocks("classify a CSV")
    (tmp_path / "reviews.csv").write_text(table)
    (tmp_path / "classify.txt").write_text(system)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    starter = bin_folder / "nvcli"
    starter.write_text(f'#!/bin/sh\nexec {sys.executable} -m nvcli "$@"\n')
    starter.chmod(0o755)
    done = run_command(
        ["bash", "-euc", script],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "NVCLI_MODEL": model,
            "NVCLI_BATCH_PROGRESS": "none",  # it is told where a run takes half a minute
        },
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = list(csv.reader(done.stdout.splitlines()))
    assert rows[0] == ["id", "product", "label"]
    lines = read_lines(tmp_path / "labels.jsonl")
    assert [line["id"] for line in lines] == ["1", "2", "3"]
    assert [line["input"]["product"] for line in lines] == ["kettle", "kettle", "lamp"]
    assert all(line["error"] is None for line in lines)


def test_the_docs_name_every_flag(cli: Cli) -> None:
    """The flags of batch's own that need an explanation are in the docs."""
    text = DOCS.read_text(encoding="utf-8")
    flags = set(re.findall(r"(--[a-z-]+)", cli("batch", "--help").out.split("Model:")[0]))
    flags |= {"--skip", "--limit", "--shard", "--strict", "--on-duplicate", "--window", "--order"}
    flags |= {"--resume", "--retry-errors", "--force-resume", "--force", "--append", "--dry-run"}
    assert {flag for flag in flags if flag not in text} <= {"--output"}


def test_a_dry_run_on_a_narrow_terminal(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken between words, and nothing that steers the terminal; a pipe gets the same words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "44")
    name = "a\x1b[31m.jsonl"
    write_lines(tmp_path / name, [{"prompt": "Hi"}, {"prompt": "Hi", "temperature": -1}])
    narrow = cli("batch", name, "--dry-run", terminals=("out",))
    piped = cli("batch", name, "--dry-run")
    assert narrow.code == piped.code == 4
    assert narrow.out.split() == piped.out.split()
    assert max(map(len, piped.out.splitlines())) > 44 >= max(map(len, narrow.out.splitlines()))
    assert "\x1b" not in narrow.out
    assert "\x1b" not in piped.out
