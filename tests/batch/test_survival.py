"""Runs that are killed, interrupted, cut short or refused a disk: nothing lost, nothing twice."""

from __future__ import annotations

import errno
import json
import os
import pty
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rows import write_row
from nvcli.batch.existing import repair_tail
from nvcli.batch.options import BatchOptions, OnDuplicate, Order, Shard
from nvcli.batch.sink import LineSink, OutputError, OutputLock
from nvcli.errors import UsageError
from tests.batch.support import (
    command,
    essences,
    mixed_records,
    quiet_environment,
    read_lines,
    run_here,
    run_process,
    source_and_output,
    start_process,
    write_lines,
)
from tests.waiting import PATIENCE_S, until

SLOW = {"delay_s": 0.003, "max_num_seqs": 4}


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    def are_there() -> bool:
        assert process.poll() is None, process.communicate()
        return path.exists() and path.read_bytes().count(b"\n") >= count

    until(are_there, f"{count} lines", pause_s=0.005)


def clean_run(tmp_path: Path, source: Path, **options: Any) -> list[tuple[Any, ...]]:
    run_here(source, tmp_path / "clean.jsonl", seed=7, **options)
    return essences(tmp_path / "clean.jsonl")


def kill_and_resume(tmp_path: Path, source: Path, num_kills: int, *flags: str, seed: int) -> Path:
    """Kill -9 at random moments, then run to the end. Returns the output."""
    print(f"kill seed {seed}")
    rng = random.Random(seed)
    out = tmp_path / "out.jsonl"
    args = [source, "-o", out, "--resume", "--seed", "7", "--window", "16", *flags]
    for _ in range(num_kills):
        process = start_process(*args, fake=SLOW)
        seen = out.read_bytes().count(b"\n") if out.exists() else 0
        target = seen + rng.randrange(0, 12)
        while process.poll() is None:
            if out.exists() and out.read_bytes().count(b"\n") >= target:
                break
            time.sleep(0.002)
        time.sleep(rng.random() * 0.02)
        process.kill()
        process.communicate()
        if rng.random() < 0.5 and out.exists() and out.stat().st_size > 20:
            os.truncate(out, out.stat().st_size - rng.randrange(1, 20))  # torn in mid-write
    last = run_process(*args, fake=SLOW)
    assert last.returncode == 4, last.stderr
    return out


@pytest.mark.parametrize("order", ["input", "completion"])
def test_killed_runs_end_as_one_clean_run(tmp_path: Path, order: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", mixed_records(80))
    out = kill_and_resume(tmp_path, source, 3, "--order", order, seed=11)
    clean = clean_run(tmp_path, source)
    found = essences(out)
    assert len(found) == 80
    assert (found if order == "input" else sorted(found)) == clean


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_fifty_kills(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    source = write_lines(tmp_path / "in.jsonl", mixed_records(2000))
    out = kill_and_resume(tmp_path, source, 50, seed=seed)
    assert essences(out) == clean_run(tmp_path, source)
    metrics = {"records": 2000, "kills": 50, "lost": 0, "twice": 0}
    write_row("batch_soak", metrics=metrics, config={"campaign": "kills", "seed": seed})


def test_torn_tail_is_cut_and_finished_records_are_not_run_again(tmp_path: Path) -> None:
    """B9"""
    source, out = source_and_output(tmp_path, [{"id": str(i), "prompt": "x"} for i in range(6)])
    run_here(source, out, seed=1)
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:4]) + lines[4][:30])
    ran = run_here(source, out, resume=True)
    assert ran.engine.engine.admitted == ["batch-0-0", "batch-1-0"]
    assert [line["id"] for line in read_lines(out)] == [str(i) for i in range(6)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"a":1}\n{"b":', b'{"a":1}\n'),
        (b'{"a":1}\n{"b":2}', b'{"a":1}\n{"b":2}\n'),  # whole, only its LF is missing
        (b'{"b":', b""),
        (b'{"a":1}\n', b'{"a":1}\n'),
        (b"", b""),
    ],
)
def test_repair_tail(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "out"
    path.write_bytes(before)
    repair_tail(path)
    assert path.read_bytes() == after


# --- resuming ------------------------------------------------------------------------------------


def test_resume_without_a_seed_draws_the_same_numbers(tmp_path: Path) -> None:
    source, out = source_and_output(tmp_path, mixed_records(30))
    run_here(source, out)
    whole = essences(out)
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:9]))
    run_here(source, out, resume=True)
    assert essences(out) == whole


def test_resume_of_a_finished_run_loads_nothing(tmp_path: Path) -> None:
    source, out = source_and_output(tmp_path, [{"prompt": "a"}, {"prompt": "a"}])
    run_here(source, out)
    before = out.read_bytes()
    assert run_here(source, out, resume=True).engines == []
    assert out.read_bytes() == before


def test_resume_refuses_other_options_and_names_them(tmp_path: Path) -> None:
    source, out = source_and_output(tmp_path, [{"prompt": "a"}])
    run_here(source, out, seed=1)
    with pytest.raises(UsageError, match="sampling, seed changed"):
        run_here(source, out, seed=2, sampling={"temperature": 0.1}, resume=True)
    ran = run_here(source, out, seed=2, sampling={"temperature": 0.1}, force_resume=True)
    assert ran.code == 0


def test_resume_notices_another_model(tmp_path: Path) -> None:
    models = [tmp_path / "one", tmp_path / "two"]
    for number, folder in enumerate(models):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"hidden_size": number}))
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    run_here(source, tmp_path / "out.jsonl", models[0])
    with pytest.raises(UsageError, match="model changed"):
        run_here(source, tmp_path / "out.jsonl", models[1], resume=True)


def test_resume_without_a_description_needs_force(tmp_path: Path) -> None:
    source, out = source_and_output(tmp_path, [{"prompt": "a"}])
    run_here(source, out)
    (tmp_path / "out.jsonl.meta.json").unlink()
    with pytest.raises(UsageError, match="--force-resume"):
        run_here(source, out, resume=True)
    assert run_here(source, out, force_resume=True).code == 0


def test_resume_refuses_a_file_of_something_else(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    out = write_lines(tmp_path / "out.jsonl", [{"foo": 1}])
    with pytest.raises(UsageError, match=r"line 1 of .* is no output record"):
        run_here(source, out, force_resume=True)
    assert out.read_text() == '{"foo": 1}\n'


def test_resume_takes_records_that_were_added(tmp_path: Path) -> None:
    records = [{"prompt": f"p{i}"} for i in range(5)]
    source, out = source_and_output(tmp_path, records[:3])
    run_here(source, out)
    write_lines(source, records)
    ran = run_here(source, out, resume=True)
    assert len(ran.engine.engine.admitted) == 2
    assert [line["index"] for line in read_lines(out)] == [0, 1, 2, 3, 4]


def test_a_resumed_shard_is_not_taken_for_the_other(tmp_path: Path) -> None:
    source, out = source_and_output(tmp_path, [{"prompt": f"p{i}"} for i in range(6)])
    run_here(source, out, shard=Shard(1, 2), seed=7)
    run_here(source, out, shard=Shard(2, 2), seed=7, resume=True)
    assert essences(out) == clean_run(tmp_path, source)


def test_retry_errors_replaces_the_failed_lines(tmp_path: Path) -> None:
    records = [
        {"id": "a", "prompt": "x"},
        {"id": "b", "prompt": [1, 300]},
        {"id": "c", "prompt": "z"},
    ]
    source, out = source_and_output(tmp_path, records)
    assert run_here(source, out).code == 4
    records[1]["prompt"] = "now good"
    write_lines(source, records)
    ran = run_here(source, out, retry_errors=True)
    assert ran.code == 0
    assert len(ran.engine.engine.admitted) == 1
    lines = read_lines(out)
    assert [line["id"] for line in lines] == ["a", "b", "c"]  # in input order again
    assert [line["error"] for line in lines] == [None, None, None]


@pytest.mark.parametrize("scope", [{"limit": 4}, {"skip": 5}, {"shard": Shard(2, 3)}])
def test_retry_errors_leaves_what_is_out_of_scope(tmp_path: Path, scope: dict[str, Any]) -> None:
    records = [{"id": str(i), "prompt": "FAIL" if i % 2 else "x"} for i in range(12)]
    source, out = source_and_output(tmp_path, records)
    run_here(source, out, seed=7)
    before = essences(out)
    ran = run_here(source, out, retry_errors=True, **scope)
    assert essences(out) == before
    covered = [i for i in range(12) if BatchOptions(input="x", **scope).takes(i)]
    assert len(ran.engine.engine.admitted) == sum(i % 2 for i in covered)


@pytest.mark.parametrize("scope", [{}, {"limit": 4}, {"skip": 5, "limit": 3}, {"skip": 7}])
@pytest.mark.parametrize("shard", [Shard(1, 1), Shard(1, 3), Shard(3, 4)])
def test_skip_then_shard_then_limit(scope: dict[str, Any], shard: Shard) -> None:
    options = BatchOptions(input="x", shard=shard, **scope)
    left = list(range(40))[options.skip :]
    wanted = [i for i in left if i % shard.count == shard.number - 1][: options.limit]
    assert [i for i in range(40) if options.takes(i)] == wanted
    ends = [i for i in range(40) if options.ends_at(i)]
    assert ends == ([] if options.limit is None else list(range(wanted[-1], 40)))


def test_completion_order_resumed_in_input_order_is_sorted(tmp_path: Path) -> None:
    source, out = source_and_output(tmp_path, mixed_records(40))
    run_here(source, out, order=Order.COMPLETION, seed=7)
    shuffled = out.read_bytes().splitlines(keepends=True)
    random.Random(1).shuffle(shuffled)
    out.write_bytes(b"".join(shuffled[:25]))
    run_here(source, out, resume=True, seed=7)
    assert essences(out) == clean_run(tmp_path, source)


@pytest.mark.parametrize("mode", list(OnDuplicate))
def test_duplicates_resume(tmp_path: Path, mode: OnDuplicate) -> None:
    """From a pipe, where a duplicate is found on arrival."""
    records = [{"id": i, "prompt": f"{n}"} for n, i in enumerate(["a", "b", "a", "a#2", "a"])]
    source = write_lines(tmp_path / "in.jsonl", records)
    flags = ["--on-duplicate", str(mode), "--seed", "1"]
    out = tmp_path / "out.jsonl"
    with source.open("rb") as file:
        whole = run_process("-", "-o", out, *flags, stdin=file)
    expected = essences(out)
    assert len(expected) == 5
    assert whole.returncode == (4 if mode is OnDuplicate.ERROR else 0)
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:3]))
    with source.open("rb") as file:
        run_process("-", "-o", out, *flags, "--resume", stdin=file)
    assert essences(out) == expected


# --- an output that is there ---------------------------------------------------------------------


def test_output_that_is_there_is_refused_and_untouched(tmp_path: Path) -> None:
    """B15"""
    source, out = source_and_output(tmp_path, [{"prompt": "a"}])
    out.write_text("precious")
    done = run_process(source, "-o", out)
    assert done.returncode == 2
    for flag in (b"--resume", b"--force", b"--append"):
        assert flag in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert out.read_text() == "precious"
    assert not (tmp_path / "out.jsonl.lock").exists()


def test_force_replaces_and_append_writes_behind(tmp_path: Path) -> None:
    source, out = source_and_output(tmp_path, [{"prompt": "a"}])
    out.write_text('{"old":1}\n{"torn":')
    run_here(source, out, append=True)
    assert [sorted(line)[0] for line in read_lines(out)] == ["old", "error"]
    run_here(source, out, force=True)
    assert len(read_lines(out)) == 1


def test_append_cuts_nothing_that_is_not_ours(tmp_path: Path) -> None:
    source, out = source_and_output(tmp_path, [{"prompt": "a"}])
    out.write_text("notes without an end")
    run_here(source, out, append=True)
    assert out.read_text().startswith('notes without an end\n{"index":0,')


def test_a_link_stands_for_its_file(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "FAIL"}, {"prompt": "x"}])
    (tmp_path / "data").mkdir()
    link = tmp_path / "out.jsonl"
    link.symlink_to(tmp_path / "data" / "real.jsonl")
    assert run_process(source, "-o", link).returncode == 4
    assert run_process(source, "-o", link, "--retry-errors").returncode == 4
    assert link.is_symlink()
    assert len(read_lines(tmp_path / "data" / "real.jsonl")) == 2
    with OutputLock(tmp_path / "data" / "real.jsonl"):
        assert b"another run writes" in run_process(source, "-o", link, "--resume").stderr


def test_a_link_to_a_pipe_is_written_to(tmp_path: Path) -> None:
    """As `-o >(command)` gives one, which leads in /proc to a name that nothing has."""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    done = subprocess.run(
        command(source, "-o", "/dev/fd/1"), capture_output=True, check=False, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert [json.loads(line)["index"] for line in done.stdout.splitlines()] == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_the_statistics_file_is_looked_at_first(tmp_path: Path) -> None:
    source, out = source_and_output(tmp_path, [{"prompt": "a"}])
    for stats in (tmp_path / "none" / "s.json", tmp_path):
        with pytest.raises(OutputError, match=str(stats)):
            run_here(source, out, stats_json=stats, engine_bug="never loaded")
    assert source.read_text() == '{"prompt": "a"}\n'
    assert not out.exists()


def test_second_writer_is_refused(tmp_path: Path) -> None:
    source, out = source_and_output(tmp_path, [{"prompt": f"p{i}"} for i in range(9000)])
    first = start_process(source, "-o", out, fake=SLOW)
    try:
        wait_for_lines(out, 1, first)
        second = run_process(source, "-o", out, "--resume")
        assert second.returncode == 2
        assert f"process {first.pid}".encode() in second.stderr
    finally:
        first.kill()
        first.communicate()
    with OutputLock(out):  # the dead writer's lock is gone with it
        pass
    assert not (tmp_path / "out.jsonl.lock").exists()


# --- the disk and the pipe -----------------------------------------------------------------------


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))


def test_full_disk_leaves_whole_lines_and_says_how_many(tmp_path: Path) -> None:
    source, out = source_and_output(tmp_path, mixed_records(60))
    args = [source, "-o", out, "--seed", "7"]
    done = run_process(*args, preexec_fn=limit_file_size)
    assert done.returncode == 1
    safe = len(read_lines(out))
    assert safe > 3
    line = done.stderr.decode()
    assert line.count("\n") == 1
    assert f"{safe} records are safe" in line
    assert "--resume" in line
    assert run_process(*args, "--resume").returncode == 4
    assert essences(out) == clean_run(tmp_path, source)


def test_a_disk_that_is_still_full_says_what_is_safe(tmp_path: Path) -> None:
    source, out = source_and_output(tmp_path, mixed_records(60))
    args = [source, "-o", out, "--seed", "7"]
    run_process(*args, preexec_fn=limit_file_size)
    safe = len(read_lines(out))
    done = run_process(*args, "--resume", preexec_fn=limit_file_size)
    assert done.returncode == 1
    assert f"{safe} records are safe" in done.stderr.decode()
    assert len(read_lines(out)) == safe


def test_full_device(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    done = run_process(source, "-o", "/dev/full")
    assert done.returncode == 1
    assert b"No space left on device; 0 records are safe" in done.stderr
    assert b"--resume" not in done.stderr  # it keeps nothing


def test_a_failed_write_is_cut_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = LineSink.append_to(tmp_path / "out")
    sink.write(b"one\n")
    real = os.write
    calls = iter([3, OSError(errno.ENOSPC, "No space left on device")])

    def write(fd: int, data: bytes) -> int:
        step = next(calls)
        if isinstance(step, OSError):
            raise step
        return real(fd, data[:step])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OutputError):
        sink.write(b"second line\n")
    monkeypatch.undo()
    assert (tmp_path / "out").read_bytes() == b"one\n"
    sink.write(b"two\n")
    sink.close()
    assert (tmp_path / "out").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("buffering", ["", "-u"])
def test_closed_pipe_is_silent_and_141(tmp_path: Path, buffering: str) -> None:
    """P5"""
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(3000)])
    stats = tmp_path / "stats.json"
    call = command(source, "--stats-json", stats, fake={"delay_s": 0.001})
    if buffering:
        call.insert(1, buffering)
    process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert json.loads(process.stdout.readline())["index"] == 0
    process.stdout.close()
    assert process.wait(PATIENCE_S) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
    assert 1 <= json.loads(stats.read_text())["records"]["written"] < 3000


# --- signals -------------------------------------------------------------------------------------

SLOWER = {"delay_s": 0.1}  # a minute for 500 records: a signal does not come behind the end


def test_one_interrupt_finishes_what_runs(tmp_path: Path) -> None:
    """B13"""
    source, out = source_and_output(tmp_path, [{"prompt": f"p{i}"} for i in range(500)])
    process = start_process(source, "-o", out, "--seed", "7", fake=SLOWER)
    wait_for_lines(out, 3, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    lines = read_lines(out)
    assert 3 <= len(lines) < 500
    assert f"{len(lines)} records are safe in {out}" in err.decode()
    assert "--resume" in err.decode()
    run_process(source, "-o", out, "--seed", "7", "--resume")
    assert essences(out) == clean_run(tmp_path, source)


def test_two_interrupts_stop_now(tmp_path: Path) -> None:
    source, out = source_and_output(tmp_path, [{"prompt": f"p{i}"} for i in range(50)])
    fake = {"delay_s": 0.3, "length": 200, "max_num_seqs": 2}
    args = [source, "-o", out, "--seed", "7", "--progress", "json"]
    process = start_process(*args, fake=fake)
    assert process.stderr is not None
    for line in process.stderr:
        if b'"running": 4' in line:
            break
    process.send_signal(signal.SIGINT)
    for line in process.stderr:
        if b"interrupt again" in line:
            break
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert b"interrupt again" not in err
    read_lines(out)


@pytest.mark.parametrize(
    ("number", "codes"), [(signal.SIGTERM, {143, 129}), (signal.SIGHUP, {129})]
)
def test_an_end_by_a_signal_flushes(tmp_path: Path, number: int, codes: set[int]) -> None:
    """Of two that are there when Python looks, it takes the lower number first."""
    source, out = source_and_output(tmp_path, [{"prompt": f"p{i}"} for i in range(500)])
    process = start_process(source, "-o", out, fake=SLOWER)
    wait_for_lines(out, 3, process)
    process.send_signal(number)
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGHUP)  # the shell sends one, the kernel another; also systemd
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode in codes
    word = {143: "terminated", 129: "hung up"}[process.returncode]
    num_lines = len(read_lines(out))
    assert num_lines >= 3
    message = f"nvcli: {word}; {num_lines} records are safe in {out}. Run it again with --resume"
    assert message in err.decode()


def test_under_nohup_the_run_goes_on(tmp_path: Path) -> None:
    source, out = source_and_output(tmp_path, [{"prompt": f"p{i}"} for i in range(20)])
    fake = {"delay_s": 0.05, "max_num_seqs": 2}
    call = ["nohup", *command(source, "-o", out, "--seed", "7", fake=fake)]
    process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_lines(out, 3, process)
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert essences(out) == clean_run(tmp_path, source)


def test_a_terminal_that_closes_ends_the_run_in_order(tmp_path: Path) -> None:
    """Nothing can be said there any more; what is finished is written, whole."""
    source, out = source_and_output(tmp_path, [{"prompt": f"p{i}"} for i in range(500)])
    pid, terminal = pty.fork()
    if pid == 0:
        call = command(source, "-o", out, "--seed", "7", fake=SLOWER)
        os.execve(call[0], call, quiet_environment())

    def are_there() -> bool:
        with suppress(BlockingIOError):
            os.read(terminal, 1 << 16)  # else a full terminal would hold the run up
        return out.exists() and out.read_bytes().count(b"\n") >= 3

    os.set_blocking(terminal, False)
    try:
        until(are_there, "3 lines")
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert 3 <= len(read_lines(out)) < 500
    run_process(source, "-o", out, "--seed", "7", "--resume")
    assert essences(out) == clean_run(tmp_path, source)


def test_status_signal_prints_one_line(tmp_path: Path) -> None:
    source, out = source_and_output(tmp_path, [{"prompt": f"p{i}"} for i in range(300)])
    process = start_process(source, "-o", out, fake=SLOWER)
    wait_for_lines(out, 3, process)
    process.send_signal(signal.SIGUSR1)
    assert process.stderr is not None
    line = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130  # it did not end it
    assert (line + err).decode().count("/300 records") == 1


def test_interrupt_outranks_failed_records(tmp_path: Path) -> None:
    records = [{"prompt": "FAIL"}, *({"prompt": f"p{i}"} for i in range(500))]
    source, out = source_and_output(tmp_path, records)
    process = start_process(source, "-o", out, fake=SLOWER)
    wait_for_lines(out, 2, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130


# --- streams -------------------------------------------------------------------------------------


def memory_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "count", [20_000, pytest.param(1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])]
)
def test_memory_is_flat_over_a_long_pipe(count: int) -> None:
    """B12: and the first line is out long before the last is in."""
    fake = {"length": 1, "max_num_seqs": 64, "keeps_log": False}
    process = start_process("-", "--order", "input", stdin=subprocess.PIPE, fake=fake)
    assert process.stdin is not None
    assert process.stdout is not None
    sizes: list[int] = []
    num_sent_at_first = 0
    num_sent = 0

    def send() -> None:
        nonlocal num_sent
        assert process.stdin is not None
        for number in range(count):
            process.stdin.write(b'{"id":"%d","prompt":"short %d"}\n' % (number, number % 97))
            num_sent = number + 1
            if number % 500 == 0:
                process.stdin.flush()
        process.stdin.close()

    sender = threading.Thread(target=send)
    sender.start()
    num_lines = 0
    for line in process.stdout:
        if num_lines == 0:
            num_sent_at_first = num_sent
        if num_lines % (count // 20) == 0:
            sizes.append(memory_kb(process.pid))
        assert json.loads(line)["index"] == num_lines
        num_lines += 1
    sender.join()
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    assert process.wait(PATIENCE_S) == 0, errors
    assert num_lines == count
    assert num_sent_at_first < count / 2
    allowed_kb = 6_000 + 3 * 16 * count / 1024  # the digest table doubles as it grows
    assert sizes[-1] - sizes[2] < allowed_kb, sizes
    if count >= 1_000_000:
        metrics = {"records": count, "rss_kb": sizes, "sent_at_first_line": num_sent_at_first}
        write_row("batch_soak", metrics=metrics, config={"campaign": "long pipe"})


def test_answers_come_while_the_pipe_stays_open() -> None:
    process = subprocess.Popen(
        command("-"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=quiet_environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for number in range(3):
        process.stdin.write(b'{"prompt":"x"}\n')
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["index"] == number
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
