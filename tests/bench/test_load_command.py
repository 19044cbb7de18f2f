"""`bench serve`, `sweep` and their kin against the stub, as commands."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nvcli.bench import precision
from nvcli.bench.children import stub_server
from nvcli.bench.client import (
    Client,
    Endpoint,
    EndpointError,
    served_model,
)
from nvcli.bench.load_run import Load, LoadResult, LoadRun
from nvcli.bench.online import Options, Point, Session
from nvcli.bench.record import Run, read_runs
from nvcli.bench.summary import summarize
from nvcli.bench.target import Target
from nvcli.bench.workload import WARM, Arrival, Lengths, Workload
from nvcli.errors import UsageError
from tests.bench.runs import closed_loop, own_runs
from tests.bench.test_load import SMALL, drive, most_at_once
from tests.cli.conftest import Cli
from tests.waiting import PATIENCE_S, until


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
