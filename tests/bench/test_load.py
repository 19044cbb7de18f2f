"""The load client against the stub: the timetable comes back, failures are kept."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from nvcli.bench import metrics
from nvcli.bench.children import stub_server
from nvcli.bench.client import (
    Client,
    Endpoint,
    EndpointError,
    EventReader,
    new_record,
    probe,
    take_event,
)
from nvcli.bench.load_run import Load, LoadResult, LoadRun
from nvcli.bench.online import Options, Point, Session
from nvcli.bench.perf_model import Cost, Hardware, PerfModel
from nvcli.bench.record import RequestRecord, read_runs
from nvcli.bench.selftest import Check
from nvcli.bench.shape import Shape
from nvcli.bench.summary import summarize
from nvcli.bench.target import Target, server_flags
from nvcli.bench.traces import read_trace
from nvcli.bench.workload import Arrival, Lengths, Planned, Workload
from nvcli.errors import UsageError
from tests.bench.runs import closed_loop, store
from tests.waiting import PATIENCE_S

MS = 1_000_000
SMALL = Workload(in_len=Lengths.parse("8"), out_len=Lengths.parse("3"))


def drive(
    url: str, load: Load, *, timeout_s: float = PATIENCE_S, workload: Workload = SMALL
) -> LoadResult:
    async def run() -> LoadResult:
        async with Client(Endpoint(url, "stub"), timeout_s=timeout_s) as client:
            planned = workload.requests(vocab_size=100)
            return await LoadRun(client, load, planned, lambda record: None).run()

    return asyncio.run(run())


# --- reading -------------------------------------------------------------------------------------


def test_events_come_back_however_the_stream_is_cut() -> None:
    stream = b': ping\n\ndata: {"a":1}\r\n\r\ndata:[DONE]\n\n'
    for cut in range(len(stream)):
        reader = EventReader()
        found = reader.feed(stream[:cut]) + reader.feed(stream[cut:])
        assert found == [b'{"a":1}', b"[DONE]"], cut


def record() -> RequestRecord:
    return new_record(Planned(0, [1], 1, n_in=1), 0)


def test_tokens_are_counted_not_chunks() -> None:
    r = record()
    take_event(r, b'{"choices":[{"text":"","token_ids":[]}]}', 1)
    take_event(r, b'{"choices":[{"text":"ab","token_ids":[1,2]}]}', 2)
    take_event(r, b'{"choices":[{"text":"c"}]}', 3)
    take_event(r, b'{"choices":[{"delta":{"content":"d"}}]}', 3)  # read at the same moment
    take_event(r, b'{"choices":[{"delta":{"role":"assistant"}}]}', 4)
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": None}
    take_event(r, json.dumps({"choices": [], "usage": usage}).encode(), 5)
    take_event(r, b"[DONE]", 6)
    assert r.chunks == [(2, 2), (3, 2)]
    assert (r.n_in, r.n_out, r.cached) == (9, 5, None)


@pytest.mark.parametrize(
    "data",
    [
        b"{not json",
        b"[1, 2]",
        b'{"choices": [null]}',
        b'{"choices": [{"token_ids": 5}]}',
        b'{"usage": {"prompt_tokens": 3}}',
        b'{"usage": {"prompt_tokens": 3, "completion_tokens": "x"}}',
        b'{"usage": {"prompt_tokens": -3, "completion_tokens": 1}}',
    ],
)
def test_an_event_of_another_kind_fails_its_request_and_is_shown(data: bytes) -> None:
    r = record()
    with pytest.raises(EndpointError, match="none of OpenAI's API") as told:
        take_event(r, data, 1)
    assert data.decode() in str(told.value)
    assert (r.n_in, r.n_out, r.chunks) == (1, None, [])


def test_the_pause_after_a_failure_is_no_wait_of_the_next_request() -> None:
    """Nobody was meant to be sent while the client holds back, so s* comes behind the pause."""
    load = Load(concurrency=1, num_requests=8)
    records = drive("http://127.0.0.1:1", load).records
    assert [r.status for r in records] == ["error"] * 8
    for before, after in itertools.pairwise(records):
        assert after.s_star_ns - before.end_ns >= 9 * MS


# --- against the stub ----------------------------------------------------------------------------


def test_open_loop_recovers_the_timetable() -> None:
    """A busy machine may read late, and then several tokens at once, but never early."""
    times = [0.02 * i for i in range(50)]
    with stub_server(10, 0, 50) as url:
        result = drive(url, Load(times=times))
    assert result.num_planned == 50
    assert {r.status for r in result.records} == {"ok"}
    for r in result.records:
        moments = [moment for moment, _ in r.chunks]
        assert r.s_star_ns <= r.s_ns
        assert moments[0] - r.s_ns >= 10 * MS
        assert moments[-1] - r.s_ns >= (10 + 2 * 50) * MS
        assert r.end_ns == moments[-1]
    assert any(len(r.chunks) == 3 for r in result.records)  # each token has its own moment
    assert [r.n_out for r in result.records] == [3] * 50
    stars = sorted(r.s_star_ns for r in result.records)
    assert [b - a for a, b in itertools.pairwise(stars)] == [20_000_000] * 49  # the schedule's


def test_closed_loop_keeps_its_places_busy() -> None:
    with stub_server(20, 0, 0) as url:
        result = drive(url, Load(concurrency=4, num_requests=40))
    assert len(result.records) == result.num_planned == 40
    assert most_at_once(result.records) == 4
    assert sum(r.end_ns - r.s_ns for r in result.records) <= 4 * result.wall_s * 1e9


def most_at_once(records: list[RequestRecord]) -> int:
    events = sorted([(r.s_ns, 1) for r in records] + [(r.end_ns, -1) for r in records])
    return max(itertools.accumulate(change for _, change in events))


def test_places_stay_taken_until_all_that_counts_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends are spread over a quarter of 0.4 s, answers take 0.25 s: at the end all places run."""
    sends: list[str] = []
    real = Client.send

    async def send(self: Client, planned: Planned, record: RequestRecord) -> list[int]:
        sends.append(planned.id)
        return await real(self, planned, record)

    monkeypatch.setattr(Client, "send", send)
    with stub_server(250, 0, 0) as url:
        result = drive(url, Load(concurrency=4, duration_s=0.4, stagger_s=1.0))
        first = min(r.s_star_ns for r in result.records)
        assert {r.status for r in result.records} == {"ok"}
        assert max(r.s_star_ns for r in result.records) < first + 0.4e9
        assert len(result.records) == result.num_planned < len(sends)
        sends.clear()
        result = drive(url, Load(concurrency=4, num_requests=6))
    assert len(result.records) == len(sends) == 6  # a number is that number


def test_capped_open_loop_counts_the_wait_for_a_place() -> None:
    with stub_server(100, 0, 0) as url:
        result = drive(url, Load(times=[0.0, 0.001, 0.002], cap=1))
    late = sorted(metrics.latencies(r).late for r in result.records)
    assert late[2] > 0.18


def test_timeout_is_a_record() -> None:
    with stub_server(1e6, 0, 0) as url:
        result = drive(url, Load(concurrency=1, num_requests=1), timeout_s=0.05)
    assert [(r.status, r.chunks) for r in result.records] == [("timeout", [])]


class Metrics:
    """A server that tells `body` of itself."""

    def __init__(self, body: bytes | None) -> None:
        self._body = body

    async def get(self, path: str) -> bytes | None:
        return self._body


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (OSError(errno.ECONNRESET, "reset"), True),
        (OSError(errno.EMFILE, "too many open files"), False),
        (OSError(errno.EADDRNOTAVAIL, "no port is left"), False),
        (ValueError("no JSON"), False),
    ],
)
def test_what_this_machine_lacks_is_no_server_that_was_gone(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_lost: bool
) -> None:
    async def broken(*args: object) -> None:
        raise error

    async def send() -> RequestRecord:
        planned = Planned(0, [1], 1, n_in=1)
        record = new_record(planned, 0)
        async with Client(Endpoint("http://x", "m"), timeout_s=PATIENCE_S) as client:
            monkeypatch.setattr(client, "_exchange", broken)
            await client.send(planned, record)
        return record

    record = asyncio.run(send())
    assert (record.status, record.lost) == ("error", is_lost)


def test_gauges_that_are_no_numbers_are_no_samples(tmp_path: Path) -> None:
    """A sample that was stored can be read again."""
    body = b"""# HELP nvcli:num_requests_running now
nvcli:num_requests_running{model="m"} 3
vllm:num_requests_waiting -1.5e-3
nvcli:kv_cache_usage_perc NaN
nvcli:kv_blocks 1.2.3
vllm:num_preemptions_total 1e999
vllm:num_requests_waiting 1e19
"""
    session = Session(Target("http://x"), Options(SMALL), tmp_path / "r.jsonl", "serve")
    session._client = cast("Client", Metrics(body))
    assert asyncio.run(session._gauges()) == {"running": 3.0}


def test_a_trace_of_one_moment_has_no_rate(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": 8, "output_length": 3, "hash_ids": [1]}
    file.write_text((json.dumps(row) + "\n") * 3)
    trace = read_trace(file)
    load = Point(trace=trace).as_json()
    assert (load["rate"], load["text"]) == (None, "Mooncake trace, all at once")
    (run,) = read_runs(store(tmp_path / "r.jsonl", closed_loop(3), load=load))
    hardware = Hardware("h", 1e10, 1e11)
    shape = Shape(64, 2, 4, 2, 16, 128, 1000, is_tied=True)
    run.header["perf_model"] = PerfModel(shape, Cost.from_datasheet(shape, hardware)).as_json(
        hardware
    )
    assert summarize(run).json["model_rows"] == []


def test_dead_server_gives_errors_not_exceptions() -> None:
    result = drive("http://127.0.0.1:9", Load(concurrency=2, num_requests=4))
    assert [r.status for r in result.records] == ["error"] * 4
    assert all(r.error for r in result.records)


def test_session_stores_what_report_reads(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"

    async def run(url: str) -> None:
        async with Session(Target(url), Options(SMALL), path, "serve") as session:
            await session.measure(Point(concurrency=4, duration_s=1.0))
            await session.measure(Point(rate=50, num_requests=30))

    with stub_server(5, 0, 1) as url:
        asyncio.run(run(url))
    closed, opened = (summarize(r) for r in read_runs(path))
    assert closed.json["counts"]["failed"] == 0
    assert closed.json["little"]["identity_error"] == 0
    assert closed.json["load"]["text"] == "closed loop, c = 4"
    assert opened.json["counts"]["total"] == 30


def test_strict_endpoint_gets_openai_s_fields_only() -> None:
    endpoint = Endpoint("http://x", "m")
    planned = Planned(0, [1, 2], 5)
    assert endpoint.body(planned)[1]["ignore_eos"] is True
    endpoint.is_strict = True
    path, body = endpoint.body(planned)
    assert path == "/v1/completions"
    assert not {"ignore_eos", "min_tokens", "return_token_ids"} & set(body)
    chat = Planned(0, [{"role": "user", "content": "hi"}], 5)
    assert endpoint.body(chat)[0] == "/v1/chat/completions"

    async def run(url: str) -> float:
        async with Client(Endpoint(url, "stub"), timeout_s=PATIENCE_S) as client:
            return await probe(client, planned)

    with stub_server(0, 0, 0) as url:
        assert asyncio.run(run(url)) > 0


# --- the schedule --------------------------------------------------------------------------------


def test_schedule_is_fixed_by_the_seed_and_the_rate_changes_no_prompt() -> None:
    workload = Workload(in_len=Lengths.parse("4:9"), out_len=Lengths.parse("geometric:5"), seed=3)
    first = list(itertools.islice(workload.requests(vocab_size=50), 20))
    assert first == list(itertools.islice(workload.requests(vocab_size=50), 20))
    assert all(4 <= len(p.prompt) <= 9 and p.n_out >= 1 for p in first)
    poisson = Arrival.parse("poisson")
    assert list(workload.schedule(5, poisson, 10)) == list(workload.schedule(5, poisson, 10))


def test_salt_changes_content_and_not_lengths() -> None:
    workload = Workload(in_len=Lengths.parse("4:99"))
    a, b = (list(itertools.islice(workload.requests(vocab_size=50, salt=s), 9)) for s in (1, 2))
    assert [p.n_in for p in a] == [p.n_in for p in b]
    assert a[0].prompt != b[0].prompt
    keep = Workload(cache="keep")
    assert next(keep.requests(vocab_size=9, salt=1)) == next(keep.requests(vocab_size=9, salt=2))


def test_arrivals_have_their_mean_and_spread() -> None:
    for text, cv in (("constant", 0.0), ("poisson", 1.0), ("gamma:2", 2.0)):
        times = list(Workload().schedule(100, Arrival.parse(text), 200))
        gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
        mean = sum(gaps) / len(gaps)
        spread = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
        assert mean == pytest.approx(0.01, rel=0.1)
        assert spread / mean == pytest.approx(cv, abs=0.1)


def test_lengths() -> None:
    assert Lengths.parse("128:2048").mean == 1088
    for bad in ("0", "x", "5:1", "1:2:3", "geometric", "lognormal:5", "geometric:0.5"):
        with pytest.raises(UsageError):
            Lengths.parse(bad)
    workload = Workload(in_len=Lengths.parse("50"), out_len=Lengths.parse("50"))
    cut = next(workload.requests(vocab_size=9, max_len=60))
    assert (cut.n_in, cut.n_out) == (50, 10)
    prefixed = Workload(in_len=Lengths.parse("2"), prefix="3:2").requests(vocab_size=99)
    a, b, c = (p.prompt for p in itertools.islice(prefixed, 3))
    assert a[:3] == c[:3] != b[:3]


def test_files_of_prompts(tmp_path: Path) -> None:
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    found = Workload(data=f"jsonl:{lines}").requests(vocab_size=9)
    assert [p.prompt for p in itertools.islice(found, 3)][::2] == ["a", "a"]
    lines.write_text('{"prompt": "a"}\n{"prompt": "a", "messages": [{}]}\n')
    with pytest.raises(UsageError, match=r"line 2: the record has both messages and prompt"):
        next(Workload(data=f"jsonl:{lines}").requests(vocab_size=9))
    lines.write_text('{"url": "/v1/completions", "body": {"prompt": "p"}, "prompt": "x"}\n')
    with pytest.raises(UsageError, match=r"line 1: the record has both body and prompt"):
        next(Workload(data=f"jsonl:{lines}").requests(vocab_size=9))
    lines.write_text('{"messages": null, "prompt": "hi"}\n')
    assert next(Workload(data=f"jsonl:{lines}").requests(vocab_size=9)).prompt == "hi"
    shared = tmp_path / "s.json"
    shared.write_text(json.dumps([{"conversations": [{"from": "human", "value": "hi"}]}]))
    (message,) = next(Workload(data=f"sharegpt:{shared}").requests(vocab_size=9)).prompt
    assert message == {"role": "user", "content": "hi"}


def test_check_allows_the_machine_s_own_lateness() -> None:
    assert Check("x", 50, 53).passes
    assert not Check("x", 50, 54).passes
    assert Check("x", 50, 54, noise_ms=2).passes
    assert not Check("x", 50, None).passes


def test_server_flags() -> None:
    from nvcli.cli.app import command_line

    given = {"model": "m", "memory_utilization": 0.5, "max_num_seqs": None}
    assert server_flags({"enforce_eager": True}) == ["--enforce-eager"]
    assert server_flags(given) == ["--model", "m", "--gpu-memory-utilization", "0.5"]
    given = {"run_ahead": False, "attention_backend": "fa2", "block_size": 256}
    flags = ["--no-run-ahead", "--attention-backend", "fa2", "--block-size", "256"]
    assert server_flags(given) == flags
    assert server_flags({"run_ahead": True}) == ["--run-ahead"]
    serve = command_line().commands["serve"]
    known = {name for p in serve.params for name in (*p.opts, *p.secondary_opts)}
    assert {flag for flag in flags if flag.startswith("--")} <= known


def test_engine_options_beside_a_url_are_named_as_they_were_typed() -> None:
    from nvcli.cli.bench_target import target_of
    from nvcli.cli.engine_options import EngineOptions

    given = EngineOptions(gpu_memory_utilization=0.5, run_ahead=False, deterministic=True)
    with pytest.raises(UsageError) as caught, target_of("http://x", None, given, None):  # type: ignore[arg-type]
        pass
    told = caught.value.message.split(":")[0].split(", ")
    assert sorted(told) == ["--deterministic", "--gpu-memory-utilization", "--no-run-ahead"]


def test_own_server_says_why_nothing_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvcli.cli import bench_target
    from nvcli.cli.engine_options import EngineOptions

    notes: list[str] = []

    @contextmanager
    def own_server(flags: list[str]) -> Iterator[str]:
        yield "http://127.0.0.1:1"

    screen = SimpleNamespace(note=notes.append)
    monkeypatch.setattr("nvcli.bench.children.own_server", own_server)
    for found, count in ((None, 1), (SimpleNamespace(depth=0, slots=8), 0)):
        notes.clear()
        monkeypatch.setattr("nvcli.bench.calibrate.find", lambda *_, found=found: found)
        with bench_target.target_of(None, None, EngineOptions(), screen):  # type: ignore[arg-type]
            pass
        assert sum("`nvcli bench latency`" in note for note in notes) == count
