"""The load client against the stub: the timetable comes back, failures are kept."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nvcli.bench import metrics, precision
from nvcli.bench.children import stub_server
from nvcli.bench.client import (
    Client,
    Endpoint,
    EndpointError,
    EventReader,
    new_record,
    probe,
    served_model,
    take_event,
)
from nvcli.bench.load_run import Load, LoadResult, LoadRun
from nvcli.bench.online import Options, Point, Session
from nvcli.bench.perf_model import Cost, Hardware, PerfModel
from nvcli.bench.record import RequestRecord, Run, read_runs
from nvcli.bench.selftest import Check
from nvcli.bench.shape import Shape
from nvcli.bench.summary import summarize
from nvcli.bench.target import Target, server_flags
from nvcli.bench.traces import read_trace
from nvcli.bench.workload import WARM, Arrival, Lengths, Planned, Workload
from nvcli.errors import UsageError
from tests.bench.runs import closed_loop, own_runs, store
from tests.cli.conftest import Cli
from tests.waiting import PATIENCE_S, until

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


# --- the command ---------------------------------------------------------------------------------


def test_serve_on_a_url(cli: Cli) -> None:
    flags = ["-c", "2", "--duration", "1s", "--in-len", "4", "--out-len", "1"]
    with stub_server(5, 0, 0) as url:
        result = cli("bench", "serve", f"{url}/v1", *flags, "--json")
    assert result.code in (0, 6), result.err
    found = json.loads(result.out, parse_constant=pytest.fail)
    assert found["counts"]["ok"] >= 2  # each place sends, however short a second may be
    assert found["tpot_ms"]["mean"] is None  # one token
    assert found["client"]["ceiling_requests_per_s"] > 0
    assert cli("bench", "report", "last").out


def test_sweep_on_a_url(tmp_path: Path, cli: Cli) -> None:
    flags = ["--concurrencies", "1,2,4", "--duration", "1s", "--in-len", "4", "--out-len", "2"]
    with stub_server(20, 0, 5) as url:
        result = cli("bench", "sweep", url, *flags, "--slo", "e2e=10s", "--json")
    assert result.code in (0, 6), result.err
    found = json.loads(result.out, parse_constant=pytest.fail)
    assert [p["load"] for p in found["points"]] == [f"closed loop, c = {n}" for n in (1, 2, 4)]
    runs = own_runs(tmp_path)
    one, two, four = (most_at_once(run.requests) for run in runs)
    assert one == 1
    assert two <= 2
    assert 1 < four <= 4
    assert found["fit"]["x1"] > 0


@contextmanager
def mortal_server(num_requests: int) -> Iterator[str]:
    """A stub that ends, with all connections, at the request behind so many."""
    code = f"""
import asyncio, os
from nvcli.bench import stub
class Mortal(stub.Stub):
    async def _answer(self, *args):
        if self._num_requests >= {num_requests}:
            os._exit(0)
        await super()._answer(*args)
stub.Stub = Mortal
asyncio.run(stub._main(stub.Timetable(1, 0, 1)))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.mark.parametrize(
    "flags",
    [
        ["serve", "--requests", "60", "-c", "3", "--repeat", "2"],
        ["sweep", "--concurrencies", "1,2,3", "--duration", "1s"],
    ],
    ids=["serve", "sweep"],
)
def test_a_server_that_ends_makes_a_run_unsound(tmp_path: Path, cli: Cli, flags: list[str]) -> None:
    """Without limits on latency, too; and no further load is tried."""
    verb, *load = flags
    with mortal_server(2 + 6) as url:  # two are sent before
        result = cli("bench", verb, url, *load, "--in-len", "4", "--out-len", "2")
    assert result.code == 6, result.err
    assert "the server was gone: " in result.out
    *before, run = own_runs(tmp_path)
    assert not before or verb == "sweep"  # of which a rung may end before
    good = sum(r.status == "ok" for found in (*before, run) for r in found.requests)
    assert 4 <= good <= 6  # those at hand end with it
    assert cli("bench", "report", "last").code == 6


def test_one_broken_connection_of_many_is_a_failure_like_others() -> None:
    records = list(closed_loop(100))
    records.sort(key=lambda r: r.end_ns)
    lost = records[len(records) // 2]
    lost.status, lost.chunks, lost.lost = "error", [], True
    assert not summarize(Run({"warmup": 0}, records)).unsound
    last = records[-1]
    last.status, last.chunks, last.lost = "error", [], True
    (reason,) = summarize(Run({"warmup": 0}, records)).unsound
    assert reason == f"the server was gone: 2 of {len(records)} requests found none, or lost it"


def test_a_sweep_goes_on_until_each_rung_is_precise(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "FIRST_LOOK_S", 0.5)
    flags = ["--concurrencies", "4,8", "--in-len", "4", "--out-len", "4", "--json"]
    with stub_server(10, 0, 2) as url:
        result = cli("bench", "sweep", url, *flags, "--until-ci", "90%")
        assert all(p["precise"] for p in json.loads(result.out)["points"]), result.out
        runs = own_runs(tmp_path)
        assert [run.header["until_ci"] for run in runs] == [0.9, 0.9]
        assert all(run.end["wall_s"] < precision.LONGEST_S for run in runs)
        result = cli("bench", "sweep", url, *flags, "--until-ci", "0.001%", "--duration", "1s")
    assert result.code == 6
    assert not any(p["precise"] for p in json.loads(result.out)["points"])


def test_lengths_beyond_the_context_are_refused_or_told() -> None:
    workload = Workload(in_len=Lengths.parse("60:200"), out_len=Lengths.parse("8"))
    workload.check_fits(None)
    workload.check_fits(68)
    with pytest.raises(
        UsageError, match="60 tokens in and 8 out do not fit the context, 67 tokens"
    ):
        workload.check_fits(67)
    Workload(in_len=Lengths.parse("geometric:5000")).check_fits(100)
    records = list(closed_loop(20))  # 8 in, 4 out
    header = {"model": {"max_model_len": 12}, "warmup": 0}
    found = summarize(Run(header, records)).json["warnings"]
    assert f"{len(records)} of {len(records)} requests fill the context of 12: cut to it" in found
    assert not summarize(Run({"model": {"max_model_len": 13}}, records)).json["warnings"]


def test_the_server_says_what_it_serves_and_how_long_its_context_is() -> None:
    listed = {"data": [{"id": "a", "max_model_len": 64}, {"id": "b", "max_model_len": 8}]}

    class Listing:
        endpoint = Endpoint("http://x", "")

        def __init__(self, body: bytes | None) -> None:
            self._body = body

        async def get(self, path: str) -> bytes | None:
            return self._body

    def ask(body: bytes | None, name: str | None) -> dict[str, Any]:
        return asyncio.run(served_model(Listing(body), name))  # type: ignore[arg-type]

    body = json.dumps(listed).encode()
    assert ask(body, None)["id"] == "a"
    assert ask(body, "b")["max_model_len"] == 8
    for odd in (None, b"<html>", b'{"data": [1]}', body):
        assert ask(odd, "c") == {"id": "c"}
    for odd in (None, b"<html>", b'{"data": []}'):
        with pytest.raises(EndpointError):
            ask(odd, None)


def test_ctrl_c_while_the_report_is_made_tells_where_the_run_is(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvcli.cli import bench_shared

    def show(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_shared, "show", show)
    flags = ["-c", "1", "--requests", "2", "--in-len", "4", "--out-len", "1", "-q"]
    with stub_server(1, 0, 0) as url:
        result = cli("bench", "serve", url, *flags)
    assert (result.code, result.out) == (130, "")
    path = next((tmp_path / "state" / "nvcli" / "bench").glob("*.jsonl"))
    assert result.err == (
        "nvcli: interrupted; what was measured is kept. "
        f"'nvcli bench report {path.stem}' shows it.\n"
    )
    assert len(read_runs(path)[0].requests) == 2


def test_conversations_grow_by_prompt_and_answer() -> None:
    """Two tokens said, three answered (the stub's are all 1), twice more: prompts of 2, 7, 12."""
    workload = Workload(in_len=Lengths.parse("2"), out_len=Lengths.parse("3"), turns=3)
    with stub_server(1, 0, 0) as url:
        result = drive(url, Load(concurrency=1, num_requests=7), workload=workload)
    assert [r.id for r in result.records] == ["r0", "r0.2", "r0.3", "r1", "r1.2", "r1.3", "r2"]
    assert [r.n_in for r in result.records] == [2, 7, 12, 2, 7, 12, 2]
    assert [r.turn for r in result.records] == [1, 2, 3, 1, 2, 3, 1]
    for before, after in itertools.pairwise(result.records):
        assert after.s_star_ns == before.end_ns  # also from conversation to conversation
    with stub_server(1, 0, 0) as url:
        load = Load(concurrency=1, num_requests=4, max_len=8)
        result = drive(url, load, workload=workload)
    assert [r.n_in for r in result.records] == [2, 7, 2, 7]  # the third would not fit


def test_conversations_in_an_open_loop_keep_the_rate_of_requests(tmp_path: Path) -> None:
    workload = Workload(in_len=Lengths.parse("2"), out_len=Lengths.parse("2"), turns=4)
    point = Point(rate=80, arrival=Arrival.parse("constant"), num_requests=20)
    assert point.load(workload, 0.0).times == pytest.approx([0.05 * i for i in range(1, 6)])
    path = tmp_path / "r.jsonl"

    async def run(url: str) -> None:
        async with Session(Target(url), Options(workload), path, "serve") as session:
            await session.measure(point)

    with stub_server(1, 0, 0) as url:
        asyncio.run(run(url))
    (found,) = read_runs(path)
    assert len(found.requests) == found.end["planned"] == 20
    assert sorted(r.turn for r in found.requests) == sorted([1, 2, 3, 4] * 5)
    found.header["warmup"] = 0  # all of it
    rows = summarize(found).json["turns"]
    assert {row["turn"] for row in rows} <= {1, 2, 3, 4}
    assert summarize(found).json["little"]["identity_error"] == 0


def test_warm_prompts_repeat_and_are_sent_before() -> None:
    warm = Workload(in_len=Lengths.parse("4:9"), out_len=Lengths.parse("5"), cache="warm")
    first = list(warm.warm_up(vocab_size=50, salt=3))
    sent = list(itertools.islice(warm.requests(vocab_size=50, salt=3), 130))
    assert len(first) == WARM
    assert all(p.n_out == 1 for p in first)
    assert [p.prompt for p in sent] == [first[i % WARM].prompt for i in range(130)]
    assert all(p.n_out == 5 for p in sent)
    grouped = Workload(
        in_len=Lengths.parse("4"), out_len=Lengths.parse("5"), prefix="6:3", cache="warm"
    )
    first = list(grouped.warm_up(vocab_size=500, salt=3))
    sent = list(itertools.islice(grouped.requests(vocab_size=500, salt=3), 9))
    assert [p.prompt[:6] for p in sent] == [first[i % 3].prompt[:6] for i in range(9)]
    assert len({tuple(p.prompt[6:]) for p in sent}) == 9  # what follows is new
    assert list(Workload(cache="cold").warm_up(vocab_size=50)) == []


def test_until_ci_ends_a_steady_run_and_is_judged(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "FIRST_LOOK_S", 1.0)
    flags = ["-c", "2", "--in-len", "4", "--out-len", "4", "--json"]
    with stub_server(10, 0, 2) as url:
        result = cli("bench", "serve", url, *flags, "--until-ci", "90%")
        found = json.loads(result.out, parse_constant=pytest.fail)
        assert found["until_ci"]["reached"], found["until_ci"]
        assert found["window"]["total_s"] < precision.LONGEST_S
        result = cli("bench", "serve", url, *flags, "--until-ci", "0.001%", "--duration", "2s")
    assert result.code == 6
    found = json.loads(result.out, parse_constant=pytest.fail)
    assert not found["until_ci"]["reached"]
    assert "intervals asked for" in " ".join(found["verdict"]["reasons"])


def test_open_loop_that_diverges_is_ended_at_the_second_look() -> None:
    look = precision.Divergence({})
    assert not look._answer({"window": {"is_overloaded": True}})
    assert not look._answer({"window": {"is_overloaded": False}})
    assert not look._answer({"window": {"is_overloaded": True}})
    assert look._answer({"window": {"is_overloaded": True}})


def test_a_look_ends_the_sending_and_nothing_that_runs() -> None:
    class Always(precision.Look):
        def _answer(self, json: dict[str, Any]) -> bool:
            return True

    look = Always({"load": {"mode": "closed", "concurrency": 40, "text": "c"}})
    look._next = 0.1
    with stub_server(20, 0, 0) as url:
        result = drive(url, Load(concurrency=40, duration_s=3600, looks=[look]))
    assert {r.status for r in result.records} == {"ok"}
    assert len(result.records) == result.num_planned >= precision.MIN_REQUESTS


def test_half_widths_of_intervals() -> None:
    """[90, 110] is 100 within 10 %."""
    json_ = {"throughput": {"output_interval": [90, 110]}, "e2e_ms": {"interval": {"p50": [9, 11]}}}
    assert precision.widths(json_) == pytest.approx({"out_tok_s": 0.1, "e2e.p50": 0.1})
    json_ = {"throughput": {"output_interval": None}, "e2e_ms": {"interval": {"p50": [9, None]}}}
    assert precision.widths(json_) == {"out_tok_s": None, "e2e.p50": None}


def test_requests_that_wait_for_a_place_at_ctrl_c_are_samples() -> None:
    """One place, which is held; three more were due when it ends."""

    async def run(url: str) -> LoadResult:
        async with Client(Endpoint(url, "stub"), timeout_s=1e6) as client:
            planned = SMALL.requests(vocab_size=100)
            load = Load(times=[0.0, 0.01, 0.02, 0.03, 3600.0], cap=1)
            running = LoadRun(client, load, planned, lambda r: None)
            task = asyncio.create_task(running.run())
            while not running._live:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # the others were due within 0.03 s of the one that is sent
            task.cancel()
            return await task

    with stub_server(1e6, 0, 0) as url:
        result = asyncio.run(run(url))
    assert result.was_interrupted
    assert result.num_planned == len(result.records) == 4
    assert {r.status for r in result.records} == {"unfinished"}


BAD = [
    ["serve", "127.0.0.1:8000"],
    ["serve", "http://x", "--dtype", "float32"],
    ["serve", "http://x", "-c", "0"],
    ["serve", "http://x", "--arrival", "constant"],
    ["serve", "http://x", "--rate", "1", "--arrival", "bursty"],
    ["serve", "http://x", "--in-len", "5:1"],
    ["serve", "http://x", "--slo", "ttfb=1s"],
    ["serve", "http://x", "--data", "csv:x"],
    ["serve", "http://x", "--data", "jsonl:/nowhere"],
    ["serve", "http://x", "--cache", "hot"],
    ["serve", "http://x", "--prefix", "0"],
    ["serve", "http://x", "--rate", "nan"],
    ["serve", "http://x", "--rate", "inf"],
    ["serve", "http://x", "-c", "99999999999999999999"],
    ["serve", "http://x", "--rate", "1e9", "--duration", "24h"],
    ["serve", "http://x", "--rate", "1", "--requests", "99999999999"],
    ["sweep", "http://x", "--rates", "1,1e8"],
    ["sweep", "http://x", "--concurrencies", "1,1e8"],
    ["sweep", "http://x", "--concurrencies", "1,1.5"],
    ["sweep", "http://x", "--warmup", "20s"],
    ["serve", "http://x", "--warmup", "3s", "--duration", "3s"],
    ["throughput", "--warmup", "1m", "--duration", "3s"],
    ["sweep", "http://x", "--until-ci", "0.05"],
    ["serve", "http://x", "--in-len", "lognormal:100:nan"],
    ["serve", "http://x", "--in-len", "geometric:1e300"],
    ["serve", "http://x", "--seed", "-1"],
    ["serve", "http://x", "--slo", "ttft=1s,ttft=2s"],
    ["serve", "http://x", "--turns", "0"],
    ["serve", "http://x", "--turns", "2", "--cache", "warm"],
    ["serve", "http://x", "--turns", "2", "--data", "jsonl:/nowhere"],
    ["serve", "http://x", "--trace", "/nowhere", "--turns", "2"],
    ["serve", "http://x", "--until-ci", "0%"],
    ["serve", "http://x", "--until-ci", "narrow"],
    ["throughput", "--repeat", "0"],
    ["serve", "http://x", "--duration", "soon"],
    ["serve", "--served-model-name", "x"],
    ["serve", "http://x", "--speed", "2"],
    ["serve", "http://x", "--trace", "/nowhere"],
    ["serve", "http://x", "--trace", "/nowhere", "--rate", "1"],
    ["-m", "demo", "latency"],
    ["latancy"],
    ["sweep", "http://x", "--rates", "1,-2"],
    ["sweep", "http://x", "--rates", "1", "--concurrencies", "2"],
    ["latency", "--repeat", "0"],
    ["throughput", "--requests", "0"],
    ["plan", "--gpu", "Voodoo2"],
    ["plan", "--rate", "0"],
    ["serve", "http://127.0.0.1:1", "--self-test"],
    ["serve", "--self-test", "-c", "3"],
    ["serve", "--self-test", "--json"],
]


@pytest.mark.parametrize("args", BAD, ids=" ".join)
def test_usage_errors_come_before_any_work(cli: Cli, args: list[str]) -> None:
    result = cli("bench", *args)
    assert (result.code, result.out) == (2, ""), result.err
    assert result.err.count("\n") == 1


def test_trace_on_a_url(tmp_path: Path, cli: Cli) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 100 * i, "input_length": 5, "output_length": 2} for i in range(12)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with stub_server(5, 0, 1) as url:
        result = cli("bench", "serve", url, "--trace", str(trace), "--speed", "2", "--json")
    found = json.loads(result.out, parse_constant=pytest.fail)
    assert found["counts"]["total"] == 12
    assert found["load"]["text"].startswith("Mooncake trace, 21.8/s")
    (run,) = own_runs(tmp_path)
    stars = sorted(r.s_star_ns for r in run.requests)
    assert {round((b - a) / 1e6) for a, b in itertools.pairwise(stars)} == {50}


def test_endpoint_that_is_not_there(cli: Cli) -> None:
    result = cli("bench", "serve", "http://127.0.0.1:9", "--duration", "1s")
    assert result.code == 1
    assert "does not answer" in result.err


def test_kill_9_of_the_parent_leaves_no_child() -> None:
    """S5: the stub sees its input close."""
    code = (
        "import time\nfrom nvcli.bench.children import stub_server\n"
        "with stub_server(0, 0, 0) as url:\n    print(url, flush=True)\n    time.sleep(3600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    port = int(parent.stdout.readline().rsplit(":", 1)[1])
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    listening = f":{port:04X} 00000000:0000 0A"  # another's connection may have the port
    until(lambda: listening not in Path("/proc/net/tcp").read_text(), "the stub has ended")


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    code = (
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from nvcli.cli.app import main\nsys.exit(main(sys.argv[1:]))"
    )
    stored = tmp_path / "state" / "nvcli" / "bench"
    with stub_server(20, 0, 5) as url:
        flags = ["-c", "2", "--duration", "1h", "--in-len", "4", "--out-len", "3"]
        run = subprocess.Popen(
            [sys.executable, "-c", code, "bench", "serve", url, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

        def is_measured() -> bool:
            return any(p.read_text().count('"request"') > 20 for p in stored.glob("*.jsonl"))

        until(lambda: is_measured() or run.poll() is not None, "something is measured")
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 130, err
    assert "interrupted: these are the samples until then" in out
    assert err.count("\n") == 1
    (kept,) = read_runs(next(stored.glob("*.jsonl")))
    assert kept.end["interrupted"] is True
    assert len(kept.requests) >= 20


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
    given = {"model": "m", "memory_utilization": 0.5, "max_num_seqs": None}
    assert server_flags({"enforce_eager": True}) == ["--enforce-eager"]
    assert server_flags(given) == ["--model", "m", "--gpu-memory-utilization", "0.5"]


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
