"""Progress on standard error, and the dry run."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nvcli.batch.dry_run import DryRun, dry_run, estimate, num_parameters
from nvcli.batch.options import BatchOptions, ProgressMode
from nvcli.batch.progress import Counts, Pace, Progress, format_duration
from nvcli.models.config import ModelConfig
from nvcli.models.moe_config import MoeConfig
from tests.batch.fake_llm import ByteTokenizer
from tests.batch.support import write_lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def show(mode: ProgressMode, stream: io.StringIO, seconds: int, *, is_quiet: bool = False) -> str:
    clock = Clock()
    progress = Progress(mode, stream, clock=clock, is_quiet=is_quiet)
    counts = Counts(total=10, num_written=4, num_failed=1, completion_tokens=50)
    for second in range(seconds):
        clock.now = float(second)
        progress.update(counts)
    progress.finish(counts)
    return stream.getvalue()


def test_a_bar_on_a_terminal_only() -> None:
    text = show(ProgressMode.AUTO, Terminal(), 3)
    assert text.count("\r\x1b[K4/10 records (40 %) · 1 failed") == 4  # the last is the end
    assert re.search(r" in \d+ s\n\Z", text)
    assert show(ProgressMode.AUTO, Terminal(), 3, is_quiet=True) == ""


def test_a_short_run_in_a_pipe_says_nothing_and_a_long_one_little() -> None:
    assert show(ProgressMode.AUTO, io.StringIO(), 25) == ""
    assert show(ProgressMode.AUTO, io.StringIO(), 200).count("\n") == 3


def test_a_dumb_terminal_gets_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in show(ProgressMode.AUTO, Terminal(), 200)


@pytest.mark.parametrize("first_wave_s", [0.0, 5.0, 20.0])
def test_the_time_left_forgets_the_first_wave(first_wave_s: float) -> None:
    """Ten records a second after a time in which none ends, as with answers of equal length."""
    total, took = 1000, 100 + first_wave_s
    pace = Pace()
    for tick in range(1, round(10 * took)):
        elapsed = tick / 10
        ended = max(0, round(10 * (elapsed - first_wave_s)))
        pace.note(elapsed, ended)
        if elapsed >= max(2, 3 * first_wave_s):
            left = (total - ended) / pace.per_s(elapsed, ended)
            assert abs((elapsed + left) / took - 1) < 0.25
        if elapsed >= max(2, 5 * first_wave_s):
            assert abs((elapsed + left) / took - 1) < 0.03


def test_held_records_count_as_ended() -> None:
    """One long answer at the head of the order holds back hundreds that are done."""
    counts = Counts(total=400, num_held=200, started=time.monotonic() - 10)
    before, found, after = counts.elapsed_s, counts.eta_s, counts.elapsed_s
    assert found is not None
    assert before <= found <= after  # half are done
    assert Counts(total=400).eta_s is None
    assert Counts(num_written=5).eta_s is None
    assert Counts(total=400, num_written=5, num_running=100).eta_s is None  # too early to tell


def test_plain_and_json_and_none() -> None:
    plain = show(ProgressMode.PLAIN, io.StringIO(), 21)
    assert plain.count("4/10 records") == 4
    lines = [json.loads(line) for line in show(ProgressMode.JSON, io.StringIO(), 2).splitlines()]
    assert [line["event"] for line in lines] == ["progress", "progress", "done"]
    assert lines[0]["records"] == 4
    assert show(ProgressMode.NONE, io.StringIO(), 100) == ""
    stopped = io.StringIO()
    Progress(ProgressMode.JSON, stopped).finish(Counts(total=3, num_written=1), is_whole=False)
    assert json.loads(stopped.getvalue())["event"] == "stopped"


def test_a_broken_stderr_does_not_end_the_run() -> None:
    stream = io.StringIO()
    progress = Progress(ProgressMode.PLAIN, stream)
    stream.close()
    progress.note("x")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (61, "1 min 01 s"), (7500, "2 h 05 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


# --- dry run -------------------------------------------------------------------------------------

MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    hidden_size=1024,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151936,
    max_position_embeddings=40960,
)


def look(tmp_path: Path, records: list[object], length: int = 100) -> DryRun:
    source = write_lines(tmp_path / "in.jsonl", records)
    return dry_run(BatchOptions(input=str(source)), MODEL, ByteTokenizer(), length)  # type: ignore[arg-type]


def test_dry_run_counts_everything(tmp_path: Path) -> None:
    records = [
        {"id": "a", "prompt": "x", "max_tokens": 10, "n": 2},
        {"messages": [{"role": "user", "content": "x" * 30}]},
        {"prompt": "x" * 200},
        "{bad",
        {"id": "a", "prompt": "y"},
        {"prompt": [1, 2, 3], "max_tokens": 5},
    ]
    found = look(tmp_path, records)
    assert (found.num_records, found.num_good) == (6, 3)
    codes = {"context_length_exceeded": 1, "invalid_json": 1, "duplicate_id": 1}
    assert dict(found.codes) == codes
    assert [failure.line for failure in found.bad] == [3, 4, 5]
    assert found.bad[2].message == "id 'a' is that of line 1"  # as a run says
    assert found.prompt_tokens == 8 + 37 + 3
    assert found.max_prompt_tokens == 37
    assert found.output_tokens == 20 + (100 - 37) + 5
    assert dict(found.histogram) == {8: 1, 64: 1, 4: 1}
    assert found.as_json()["bad"] == 3
    assert all("\n" not in line for line in found.lines("in.jsonl"))


def test_dry_run_expects_no_answer_of_an_embedding(tmp_path: Path) -> None:
    asked = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings"}
    found = look(tmp_path, [{**asked, "body": {"model": "m", "input": [1] * 100}}])
    assert (found.num_good, found.prompt_tokens) == (1, 100)
    assert (found.output_tokens, found.num_unlimited) == (0, 0)


@pytest.mark.parametrize("ids", [[-1], [3, -5, 9], [1, 10**9]])
def test_dry_run_finds_token_ids_out_of_range(tmp_path: Path, ids: list[int]) -> None:
    found = look(tmp_path, [{"prompt": [1, 2]}, {"prompt": ids}])
    assert (found.num_good, dict(found.codes)) == (1, {"invalid_parameter": 1})
    assert f"token id {min(ids) if min(ids) < 0 else max(ids)}" in found.bad[0].message


def test_the_estimate_is_of_the_right_size() -> None:
    """nano-vllm's workload A on one H200 at 0.6B runs at about 25,000 to 30,000 tokens a second."""
    found = DryRun(prompt_tokens=256 * 562, output_tokens=256 * 562, num_sequences=256)
    assert 3 < estimate(found, MODEL) < 10
    assert abs(num_parameters(MODEL) / 596e6 - 1) < 0.01
    assert estimate(DryRun(), MODEL) == 0


def test_fp8_weights_are_half_the_bytes() -> None:
    model = replace(MODEL, hidden_size=4096, num_layers=36, num_heads=32, intermediate_size=12_288)
    found = DryRun(prompt_tokens=1, output_tokens=1000, num_sequences=1)
    dense, fp8 = (estimate(found, replace(model, is_fp8=is_fp8)) for is_fp8 in (False, True))
    # 6.95 GB less a step, at 3.6 TB/s
    assert dense - fp8 == pytest.approx(1.93, abs=0.01)


def test_of_experts_a_step_reads_what_it_hits() -> None:
    """For one sequence the few it goes to, for many nearly all: 6 and 60 GB at 4 TB/s or so."""
    moe = MoeConfig(num_experts=128, num_experts_per_tok=8, intermediate_size=768)
    model = replace(MODEL, hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4, moe=moe)
    assert abs(num_parameters(model) / 3.04e9 - 1) < 0.01
    one = estimate(DryRun(prompt_tokens=1, output_tokens=1000, num_sequences=1), model) / 1000
    many = estimate(DryRun(prompt_tokens=256, output_tokens=256_000, num_sequences=256), model)
    assert 1e-3 < one < 3e-3
    assert 12e-3 < many / 1000 < 25e-3
