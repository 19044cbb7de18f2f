"""`bench report`: every number again from the stored samples, in every format, never NaN."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from nvcli.bench.record import RequestRecord, RunWriter, StepRecord, read_runs
from nvcli.bench.summary import Summary, summarize
from nvcli.errors import NvcliError, UsageError
from tests.bench.runs import HEADER, MS, closed_loop, store
from tests.cli.conftest import Cli


def summary(path: Path) -> Summary:
    (run,) = read_runs(path)
    return summarize(run)


def test_numbers_of_a_steady_closed_loop(tmp_path: Path) -> None:
    """4 clients, 50 ms a request of 4 tokens: 80 req/s, 320 tok/s, L = 4, ttft 20, tpot 10."""
    found = summary(store(tmp_path / "r.jsonl", closed_loop()))
    j = found.json
    assert j["ttft_ms"]["mean"] == pytest.approx(20)
    assert j["ttft_ms"]["p99"] == pytest.approx(20)
    assert j["ttft_ms"]["p999"] is None  # 400 samples
    assert j["tpot_ms"]["p50"] == pytest.approx(10)
    assert j["itl_ms"]["count"] == 3 * 400
    assert j["e2e_ms"]["max"] == pytest.approx(50)
    assert j["throughput"]["requests_per_s"] == pytest.approx(80, rel=0.01)
    assert j["throughput"]["output_tokens_per_s"] == pytest.approx(320, rel=0.01)
    assert j["throughput"]["total_tokens_per_s"] == pytest.approx(80 * 12, rel=0.01)
    assert j["concurrency"]["peak"] == 4
    assert j["little"]["L"] == pytest.approx(4, rel=0.02)
    assert abs(j["little"]["residual"]) < 0.03
    assert j["little"]["identity_error"] == 0
    assert j["counts"] == {
        "total": 400,
        "sent": 400,
        "ok": 400,
        "failed": 0,
        "timeout": 0,
        "unfinished": 0,
        "planned": 400,
    }
    assert j["goodput"]["share_of_sent"] == 1
    assert j["breakdown_ms"] == pytest.approx(
        {"client_late": 0, "queue_and_prefill": 20, "decode": 30}
    )
    assert j["tail"]["chance_above_itl_p99"] == pytest.approx(1 - 0.99**4)
    assert (found.unsound, found.missed) == ([], [])


def test_failures_are_infinite_and_in_the_denominator(tmp_path: Path) -> None:
    records = closed_loop()
    for r in records[::50]:
        r.status, r.chunks, r.end_ns = "timeout", [], r.s_ns + 50 * MS
    found = summary(store(tmp_path / "r.jsonl", records, slo={"ttft": 0.03}))
    j = found.json
    assert (j["counts"]["ok"], j["counts"]["timeout"]) == (392, 8)
    assert j["e2e_ms"]["p99"] == math.inf
    assert j["e2e_ms"]["mean"] == pytest.approx(50)
    assert j["goodput"]["share_of_sent"] == pytest.approx(0.98)
    assert found.missed == ["392 of 400 requests met the limits"]


def test_warm_up_is_cut(tmp_path: Path) -> None:
    records = closed_loop()
    shift = 0
    for r in records[:20]:  # the first client's first second is ten times slower
        slow = [(r.s_ns + 10 * (t - r.s_ns), k) for t, k in r.chunks]
        r.s_ns = r.s_star_ns = r.s_ns + shift
        r.chunks = [(t + shift, k) for t, k in slow]
        shift += r.chunks[-1][0] - r.s_ns - 50 * MS
        r.end_ns = r.chunks[-1][0]
    for r in records[20:100]:
        r.s_star_ns += shift
        r.s_ns += shift
        r.end_ns += shift
        r.chunks = [(t + shift, k) for t, k in r.chunks]
    j = summary(store(tmp_path / "r.jsonl", records, warmup="auto")).json
    assert j["window"]["start_s"] > 0
    assert j["window"]["start_s"] <= j["window"]["end_s"] / 2 + 0.01


def test_a_loop_that_emptied_is_told(tmp_path: Path) -> None:
    """Four places, twenty requests each: three or four of eighty end behind the last send."""
    for num_each, is_told in ((10, True), (100, False)):
        (run,) = read_runs(store(tmp_path / f"{num_each}.jsonl", closed_loop(num_each)))
        run.end["drained"] = True
        assert is_told == any("emptied" in w for w in summarize(run).json["warnings"])
        run.end["drained"] = False
        assert not any("emptied" in w for w in summarize(run).json["warnings"])


def test_why_requests_failed_is_told(tmp_path: Path) -> None:
    records = closed_loop()
    for index, r in enumerate(records[:5]):
        r.status, r.error = "error", "HTTP 503: busy" if index else "cut"
    (run,) = read_runs(store(tmp_path / "r.jsonl", records))
    told = "5 requests failed; 4 of them: HTTP 503: busy"
    assert told in summarize(run).json["warnings"]


def test_power_that_nobody_tells_is_told(tmp_path: Path) -> None:
    (run,) = read_runs(store(tmp_path / "r.jsonl", closed_loop(), gpu_metrics=True))
    told = "--gpu-metrics: NVML tells nothing here, so there is no energy"
    assert told in summarize(run).json["warnings"]
    run.gauges = [{"t_ns": i * 10**8, "power_w": 300.0} for i in range(20)]
    assert told not in summarize(run).json["warnings"]
    assert summarize(run).json["energy"]["power_w"] == 300


def test_what_comes_before_the_last_place_is_taken_is_cut(tmp_path: Path) -> None:
    """Four places are taken one after the other, 12.5 ms apart."""
    (run,) = read_runs(store(tmp_path / "r.jsonl", closed_loop(5), warmup="auto"))
    sends = sorted(r.s_star_ns for r in run.requests)
    assert summarize(run).json["window"]["start_s"] >= (sends[3] - sends[0]) / 1e9
    few = closed_loop(1)  # every request is one of the first
    (run,) = read_runs(store(tmp_path / "few.jsonl", few, warmup="auto"))
    assert summarize(run).json["window"]["start_s"] == 0


def test_late_client_is_unsound_in_an_open_loop(tmp_path: Path) -> None:
    records = closed_loop()
    for r in records:
        r.s_star_ns -= 30 * MS
    load = {"mode": "open", "rate": 80.0, "text": "open"}
    found = summary(store(tmp_path / "r.jsonl", records, load=load))
    assert any("late" in reason for reason in found.unsound)
    assert found.json["ttft_ms"]["p50"] == pytest.approx(50)
    assert found.json["ttft_service_ms"]["p50"] == pytest.approx(20)


def test_overloaded_open_loop_is_told(tmp_path: Path) -> None:
    records = []
    for i in range(400):  # sent every 10 ms, answered every 12 ms
        end = 12 * (i + 1) * MS
        records.append(RequestRecord(f"r{i}", 10 * i * MS, 10 * i * MS, end, chunks=[(end, 1)]))
    load = {"mode": "open", "rate": 100.0, "text": "open"}
    found = summary(store(tmp_path / "r.jsonl", records, load=load, warmup="auto"))
    assert any("overloaded" in reason for reason in found.unsound)


def test_lost_request_is_unsound(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with RunWriter(path, HEADER) as run:
        for record in closed_loop()[:-1]:
            run.request(record)
        run.finish(planned=400, interrupted=False)
    assert any("399 are on record" in reason for reason in summary(path).unsound)


def test_mixed_clock_is_unsound(tmp_path: Path) -> None:
    records = closed_loop()
    records[5].end_ns = records[5].s_star_ns - 1
    found = summary(store(tmp_path / "r.jsonl", records))
    assert any("does not add up" in reason for reason in found.unsound)


# --- odd runs: nothing prints NaN ----------------------------------------------------------------


def one(n: int = 1, **more: Any) -> list[RequestRecord]:
    record = closed_loop(1, clients=1, n=n)[0]
    for name, value in more.items():
        setattr(record, name, value)
    return [record]


ODD: dict[str, list[RequestRecord]] = {
    "none": [],
    "one token": one(1),
    "two tokens": one(2),
    "failed": one(1, status="error", chunks=[], end_ns=5 * MS),
    "unfinished": one(1, status="unfinished", chunks=[]),
    "no time": one(1, chunks=[(0, 1)], end_ns=0),
    "no chunk": one(1, chunks=[]),
    "same moment": closed_loop(1, clients=2, ttft_ms=0, gap_ms=0),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_runs_in_every_format(tmp_path: Path, cli: Cli, name: str) -> None:
    path = store(tmp_path / "r.jsonl", ODD[name], slo={"ttft": 0.1, "tpot": 0.01})
    files = [tmp_path / f"out{s}" for s in (".json", ".jsonl", ".csv", ".md", ".html", ".png")]
    result = cli("bench", "report", str(path), *(a for f in files for a in ("--out", str(f))))
    assert result.code in (0, 5, 6), result.err
    assert result.err == ""
    texts = [result.out] + [f.read_text() for f in files if f.suffix != ".png"]
    texts.append(cli("bench", "report", str(path), "--json").out)
    for text in texts:
        assert "nan" not in text.lower().replace("nanosec", "")
        assert "None" not in text
    json.loads(texts[-1])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out.jsonl").read_bytes() == path.read_bytes()


def test_json_is_one_strict_object_with_the_stable_names(tmp_path: Path, cli: Cli) -> None:
    path = store(tmp_path / "r.jsonl", [*closed_loop(10), *one(1, status="error", chunks=[])])
    result = cli("bench", "report", str(path), "--json")
    found = json.loads(result.out, parse_constant=pytest.fail)
    for name in ("ttft", "ttft_service", "tpot", "itl", "stall", "e2e", "e2e_service", "late"):
        assert {"mean", "p50", "p90", "p95", "p99", "p999", "max"} <= set(found[f"{name}_ms"])
    assert {"L", "lambda", "W", "residual"} <= set(found["little"])
    assert {"mean", "peak"} <= set(found["concurrency"])
    assert {"requests_per_s", "share_of_sent"} <= set(found["goodput"])
    assert {"start_s", "end_s"} <= set(found["window"])
    assert found["e2e_ms"]["max"] == "inf"
    assert found["e2e_ms"]["p99"] is None


def test_hgrm_agrees_with_the_nearest_rank(tmp_path: Path, cli: Cli) -> None:
    records = closed_loop(200)
    for i, r in enumerate(records):
        r.chunks[-1] = (r.chunks[-1][0] + i * MS // 10, 1)
        r.end_ns = r.chunks[-1][0]
    path = store(tmp_path / "r.jsonl", records)
    out = tmp_path / "e2e.hgrm"
    assert cli("bench", "report", str(path), "--out", str(out)).err == ""
    rows = [line.split() for line in out.read_text().splitlines() if line[:1] == " "]
    p99 = summary(path).json["e2e_ms"]["p99"]
    at = next(float(v) for v, p, *_ in rows if p[0].isdigit() and float(p) >= 0.99)
    assert at == pytest.approx(p99, rel=0.01)
    spread = statistics.pstdev((r.end_ns - r.s_star_ns) / MS for r in records)
    told = re.search(r"StdDeviation = +([\d.]+)\]", out.read_text())
    assert told is not None
    assert float(told[1]) == pytest.approx(spread, rel=0.01)  # milliseconds, as all in the file


def test_half_a_last_line_is_dropped_and_a_bad_one_is_named(tmp_path: Path) -> None:
    path = store(tmp_path / "r.jsonl", closed_loop(10))
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b'"kind": "request"') + 60])
    (run,) = read_runs(path)
    assert len(run.requests) == 39
    assert summarize(run).json["interrupted"]
    path.write_bytes(whole.replace(b'"kind": "request"', b'"kind": "reqest"', 1))
    with pytest.raises(UsageError, match="line 2"):
        read_runs(path)
    path.write_bytes(b'{"a": 1}\n')
    with pytest.raises(UsageError, match="line 1"):
        read_runs(path)
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="no benchmark run"):
        read_runs(path)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("run", {"load": "closed"}),
    ("run", {"load": {"concurrency": "four"}}),
    ("run", {"workload": [1]}),
    ("run", {"workload": {"hash": 1}}),
    ("run", {"slo": {"ttft": "fast"}}),
    ("run", {"environment": {"cpus": "two"}}),
    ("run", {"clock": {"name": "c"}}),
    ("run", {"resources": {"slots": 3}}),
    ("run", {"slo": {"speed": 1}}),
    ("run", {"perf_model": {"shape": {}}}),
    ("run", {"warmup": []}),
    ("request", {"chunks": [[5, -3]]}),
    ("request", {"chunks": [[5, 10**12]]}),
    ("request", {"chunks": [["5", 1]]}),
    ("request", {"n_out": "x"}),
    ("request", {"n_in": -1}),
    ("request", {"end_ns": 10**30}),
    ("request", {"server": {"sched": "nan"}}),
    ("request", {"server": None}),
    ("step", {"t_ns": 5, "dt_s": None, "b": 0, "S": 0, "p": 0, "c": 0}),
    ("gauge", {"running": 1}),
    ("gauge", {"t_ns": 5, "running": []}),
    ("point", {"name": None, "t_s": [1.0]}),
    ("point", {"name": "p", "t_s": ["nan"]}),
    ("end", {"wall_s": "long"}),
]


@pytest.mark.parametrize(("kind", "wrong"), WRONG)
def test_a_line_of_other_kinds_is_a_usage_error_and_no_bug(
    tmp_path: Path, cli: Cli, kind: str, wrong: dict[str, Any]
) -> None:
    path = store(tmp_path / "r.jsonl", closed_loop(2))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    at = next((i for i, line in enumerate(lines) if line["kind"] == kind), None)
    if at is None:
        lines.insert(at := 1, {"kind": kind})
    lines[at] |= wrong
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = cli("bench", "report", str(path))
    assert (result.code, result.out) == (2, "")
    assert f"line {at + 1} is no line of a benchmark run" in result.err
    assert len(result.err.splitlines()) == 1
    assert "Error)" not in result.err, "no name of a class"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"run": {}}', "it has no 'kind'"),
        ('{"kind": "gauge", "t_ns": 5}', "no run begins before it"),
        ("text", "it is not JSON"),
        ("\xff", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[1]", "its fields are others"),
        ('"x"', "its fields are others"),
    ],
)
def test_a_file_of_something_else_is_told_why(
    tmp_path: Path, cli: Cli, text: str, why: str
) -> None:
    path = tmp_path / "r.json"
    path.write_text(text + "\n", encoding="latin-1")
    result = cli("bench", "report", str(path))
    assert (result.code, result.out) == (2, "")
    said = f"nvcli: {path}: line 1 is no line of a benchmark run ({why})"
    assert result.err.startswith(said)


def test_a_step_across_the_window_s_edge_counts_by_its_part(tmp_path: Path) -> None:
    """Steps of 400 ms that hold four requests, over a window that cuts the first and the last."""
    (run,) = read_runs(store(tmp_path / "r.jsonl", closed_loop(20), warmup=0.1))
    for i in range(1, 5):
        fields = {"b": 4, "S": 40, "p": 0, "c": 0, "running": 4}
        run.steps.append(StepRecord(t_ns=400 * i * MS, dt_s=0.4, **fields))
    found = summarize(run).json["little"]
    assert found["L"] == pytest.approx(4, rel=0.02)
    assert found["server_L"] == pytest.approx(4)
    assert found["mean_batch"] == pytest.approx(4)


def test_a_gauge_of_running_requests_alone_is_no_load(tmp_path: Path) -> None:
    (run,) = read_runs(store(tmp_path / "r.jsonl", closed_loop(20)))
    run.gauges = [{"t_ns": i * 10 * MS, "running": 4.0} for i in range(90)]
    assert summarize(run).json["little"]["server_L"] is None


def test_define_explains_and_a_run_is_needed(cli: Cli) -> None:
    assert "nearest rank" in cli("bench", "report", "--define").out
    assert cli("bench", "report").code == 2
    assert cli("bench", "report", "/nowhere.jsonl").code == 2


def test_out_names_are_checked_first(tmp_path: Path, cli: Cli) -> None:
    path = store(tmp_path / "r.jsonl", closed_loop(2))
    result = cli("bench", "report", str(path), "--out", "x.pdf")
    assert (result.code, result.out) == (2, "")
    assert ".hgrm" in result.err


def test_out_places_are_checked_before_anything_is_measured(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "folder.json").mkdir()
    for target, told in (("no/x.json", "there is no folder"), ("folder.json", "a folder")):
        for verb in ("latency", "throughput", "serve", "sweep"):
            result = cli("bench", verb, "--out", str(tmp_path / target))
            assert (result.code, result.out) == (2, "")
            assert told in result.err
    result = cli("bench", "latency", "--out", str(tmp_path / "x.hgrm"))
    assert result.code == 2
    assert "no requests" in result.err
    assert not (tmp_path / "state").exists()


def test_what_cannot_be_written_in_the_end_leaves_the_report(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up while the load runs: the numbers were printed by then."""
    path = store(tmp_path / "r.jsonl", closed_loop())

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    result = cli("bench", "report", str(path), "--out", str(tmp_path / "x.json"))
    assert result.code == 1
    assert "No space left" in result.err
    assert re.search(r"^rate +\d", result.out, re.M)


def test_runs_are_found_by_id(tmp_path: Path, cli: Cli) -> None:
    store(tmp_path / "state" / "nvcli" / "bench" / "abc123.jsonl", closed_loop())
    assert cli("bench", "report", "abc").out == cli("bench", "report", "last").out != ""
    assert cli("bench", "report", "zzz").code == 2


def test_card(tmp_path: Path, cli: Cli) -> None:
    out = cli("bench", "report", str(store(tmp_path / "r.jsonl", closed_loop()))).out
    assert "\x1b" not in out
    for text in ("closed, c = 4", "400 sent", "little    L", "ttft", "[95 % CI of p99]", "–"):
        assert text in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_full_disk_is_told_with_the_run_that_it_holds() -> None:
    told = pytest.raises(NvcliError, match=r"^cannot write /dev/full: No space")
    with told, RunWriter(Path("/dev/full"), HEADER):
        pass


@pytest.mark.parametrize("verb", ["latency", "throughput", "serve"])
def test_a_run_that_could_not_be_stored_is_not_begun(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    for name in ("nvcli.cli.bench.loaded", "nvcli.cli.bench_load.target_of"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("it was loaded"))
    result = cli("bench", verb)
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    assert "Not a directory" in result.err
