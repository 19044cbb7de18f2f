"""Whatever a file holds, every report says something, and nothing prints NaN."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nvcli.bench import export, sweep
from nvcli.bench.card import card
from nvcli.bench.limits import resources
from nvcli.bench.perf_model import Cost, Hardware
from nvcli.bench.record import RequestRecord, Run, StepRecord, dump, read_runs
from nvcli.bench.summary import summarize
from nvcli.errors import UsageError
from tests.bench.runs import HEADER, MS, closed_loop, store
from tests.bench.test_perf_model import SMALL
from tests.cli.conftest import Cli


def everything(run: Run) -> str:
    """Every form of a report as one text; what is not JSON or names NaN fails here."""
    summary_of = summarize(run)
    forms = [
        "\n".join(card(summary_of)),
        export.report_json([summary_of]),
        export.to_csv([run]),
        export.to_markdown([summary_of]),
        "\n".join(sweep.table(sweep.analyse([summary_of]))),
        dump(sweep.analyse([summary_of]).as_json()),
    ]
    json.loads(forms[1], parse_constant=pytest.fail)
    text = "\n".join(forms)
    assert not re.search(r"(?<![a-z])nan(?![a-z])", text.lower())
    assert max(map(len, card(summary_of))) <= 110
    return text


def random_run(rng: random.Random) -> Run:
    """Anything that a client, a server, a kill or a hand could leave in a file."""
    load = rng.choice(
        [
            {"mode": "closed", "concurrency": rng.choice([1, 64]), "text": "c"},
            {"mode": "open", "rate": rng.choice([0.1, 1e6]), "arrival_cv": 13.2, "text": "o"},
            {"mode": "steps", "text": "s"},
            {},
        ]
    )
    header: dict[str, Any] = {
        "id": "x",
        "load": load,
        "warmup": rng.choice(["auto", "auto", 0, 1e9]),
        "slo": rng.choice([{}, {"ttft": 0.1, "tpot": 0.01}, {"e2e": 0, "stall": 0.2}]),
        "workload": rng.choice([{}, {"hash": "a", "text": "t", "cache": "cold", "prefix": "16:2"}]),
        "until_ci": rng.choice([None, None, 0.05]),
        "slots": rng.choice([1, 16]),
    }
    if rng.random() < 0.5:
        header["resources"] = resources(num_blocks=rng.choice([0, 9]), block_size=16, slots=1)
        header["model"] = {"num_blocks": 10, "block_size": 16}
    if rng.random() < 0.5:
        hardware = Hardware("x", 1e10, 1e11)
        header["perf_model"] = {
            "shape": asdict(SMALL),
            "cost": asdict(Cost.from_datasheet(SMALL, hardware)),
            "budget": 1024,
            "hardware": asdict(hardware),
        }
    run, t = Run(header), rng.randrange(10**12)
    for index in range(rng.choice([0, 1, 1, 2, 5, 30, 100])):
        t += rng.choice([0, 1, 10 * MS, rng.randrange(100 * MS)])
        s = t + rng.choice([0, 0, rng.randrange(50 * MS)])
        moment, chunks = s, []
        for _ in range(rng.choice([0, 1, 1, 2, 5, 30])):
            moment += rng.choice([0, 1, rng.randrange(20 * MS)])
            chunks.append((moment, rng.choice([0, 1, 1, 5])))
        record = RequestRecord(f"r{index}", t, s, moment, chunks=chunks)
        record.status = rng.choice(["ok"] * 5 + ["error", "timeout", "unfinished"])
        record.n_in, record.n_out = rng.choice([None, 0, 1, 100]), rng.choice([None, 0, 1, 9])
        record.cached, record.turn = rng.choice([None, 0, 16]), rng.choice([1, 1, 2])
        record.error = rng.choice([None, "HTTP 429: busy"])
        run.requests.append(record)
    for _ in range(rng.choice([0, 0, 1, 5])):
        run.steps.append(StepRecord(t - rng.randrange(10**9), rng.random() / 10, 1, 5, 0, 0))
        run.gauges.append({"t_ns": t, "running": 1.0, "waiting": 0.0, "power_w": 5.0})
    for number in rng.sample([0, 1, 9], rng.choice([0, 0, 2])):
        point = {"name": "p", "t_s": [0.1] * number, "floor_s": 0.0, "predicted_s": None}
        run.points.append(point)
    run.end = rng.choice([{}, {"planned": 1, "client_cpu_s": 0.1, "wall_s": 0.0}])
    return run


@pytest.mark.parametrize("seed", range(60))
def test_any_run_gives_every_report_without_nan(seed: int) -> None:
    everything(random_run(random.Random(seed)))


@pytest.mark.parametrize(
    "name", [*HEADER, "client", "slots", "resources", "perf_model", "until_ci"]
)
def test_a_null_is_a_field_that_the_run_lacks(tmp_path: Path, name: str) -> None:
    path = store(tmp_path / "r.jsonl", closed_loop(5))
    first, rest = path.read_text().split("\n", 1)
    header = json.loads(first)
    header.pop(name, None)
    found = []
    for given in ({}, {name: None}):
        path.write_text(f"{json.dumps({**header, **given})}\n{rest}")
        (run,) = read_runs(path)
        found.append(everything(run))
    assert found[0] == found[1]


@pytest.mark.parametrize("status", ["ok", "error", "timeout", "unfinished"])
def test_one_request(status: str) -> None:
    record = RequestRecord("r0", 0, 0, 5 * MS, status)
    if status == "ok":
        record.chunks = [(5 * MS, 1)]
    text = everything(Run(HEADER, [record], end={"interrupted": False, "planned": 1}))
    assert ("no request was answered" in text) == (status != "ok")


def test_answers_without_a_token_count_as_failed() -> None:
    records = closed_loop(10)
    for r in records[::2]:
        r.chunks = []
    text = everything(Run(HEADER, records, end={"interrupted": False, "planned": len(records)}))
    assert ">timeout" in text


def test_queue_wait_preemptions_and_refusals_are_numbers_of_their_own() -> None:
    """Waits of 1, 2, ... 4 ms; the counter goes from 2 to 7; two requests were refused."""
    records = closed_loop(1)
    for index, r in enumerate(records, 1):
        r.server = {"arrive": r.s_ns, "sched": r.s_ns + index * MS}
    for r in records[:2]:
        r.status, r.error = "error", "HTTP 503: full"
    gauges = [{"t_ns": i * MS, "preemptions": n} for i, n in enumerate((2, 5, 7))]
    found = summarize(Run(HEADER, records, gauges=gauges, end={})).json["beyond"]
    assert found == {"queue_ms": 2.5, "queue_p99_ms": None, "preemptions": 5, "rejected": 2}
    # Over HTTP by Little: 3 wait on average and 80 requests/s end: 37.5 ms
    gauges = [{"t_ns": i * 50 * MS, "running": 4, "waiting": 3} for i in range(100)]
    found = summarize(Run(HEADER, closed_loop(), gauges=gauges, end={})).json
    assert found["throughput"]["requests_per_s"] == pytest.approx(80, rel=0.02)
    assert found["beyond"]["queue_ms"] == pytest.approx(37.5, rel=0.02)


def test_repeats_give_the_interval_of_a_mean_over_runs(tmp_path: Path, cli: Cli) -> None:
    """Requests of 50, 55 and 60 ms: 80, 72.7 and 66.7 requests a second."""
    path = tmp_path / "r.jsonl"
    for ttft in (20, 25, 30):
        store(path, closed_loop(ttft_ms=ttft))
    found = json.loads(cli("bench", "report", str(path), "--json").out)["repeats"]
    (rows,) = found.values()
    assert rows["runs"] == 3
    low, high = rows["e2e_ms.mean"]["interval"]
    assert rows["e2e_ms.mean"]["mean"] == pytest.approx(55, rel=1e-3)
    # standard error 5 / sqrt(3), t of two degrees of freedom 4.303
    assert high - low == pytest.approx(2 * 4.303 * 5 / 3**0.5, rel=1e-2)
    assert "3 runs of" in cli("bench", "report", str(path), "-q").out


def test_overloaded_open_loop_is_refused() -> None:
    """10 a second into a server that does 5: the queue and the waits grow for ever."""
    records, free = [], 0
    for i in range(200):
        s = i * 100 * MS
        free = max(free, s) + 200 * MS
        records.append(RequestRecord(f"r{i}", s, s, free, chunks=[(free, 1)], n_in=1, n_out=1))
    header = {**HEADER, "warmup": "auto", "load": {"mode": "open", "rate": 10.0, "text": "o"}}
    found = summarize(Run(header, records, end={"interrupted": False, "planned": 200}))
    assert found.json["window"]["is_overloaded"]
    assert any("overloaded" in reason for reason in found.unsound)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ('"status": "ok"', '"status": "fine"'),
        ('"s_star_ns": 0', '"s_star_ns": "0"'),
        ('"s_ns": 0', '"s_ns": 0.5'),
        ('"n_in": 8', '"n_in": NaN'),
        ('"end_ns": 50000000', '"end_ns": null'),
        ('"id": "r0"', '"name": "r0"'),
    ],
)
def test_line_that_is_none_of_a_run_is_named_and_never_skipped(
    tmp_path: Path, field: str, value: str
) -> None:
    path = store(tmp_path / "r.jsonl", closed_loop(2))
    text = path.read_text()
    assert field in text
    path.write_text(text.replace(field, value, 1))
    with pytest.raises(UsageError, match="line 2"):
        read_runs(path)


def test_tokens_out_of_order_make_a_run_unsound() -> None:
    records = closed_loop()
    records[5].chunks[1], records[5].chunks[2] = records[5].chunks[2], records[5].chunks[1]
    records[9].s_ns += 25 * MS  # its first token came before it was sent
    found = summarize(Run(HEADER, records, end={"interrupted": False, "planned": 400}))
    assert any(reason.startswith("2 requests have tokens") for reason in found.unsound)


def test_l_max_and_the_rate_there() -> None:
    """4 slots and W = 50 ms: 80 a second, were a full server no slower; KV holds more.

    1,000 blocks of 16 for 8 in and 4 out: 16,000 / (8 + 2 + 8) = 888 on average.
    """
    header = {**HEADER, "resources": resources(num_blocks=1000, block_size=16, slots=4)}
    end = {"interrupted": False, "planned": 400}
    limits = summarize(Run(header, closed_loop(), end=end)).json["limits"]
    assert (limits["l_max"], limits["binds"]) == (4, "sequence slots")
    assert limits["rows"][0]["allows"] == 888
    assert limits["lambda_max"] == pytest.approx(80, rel=0.01)
    assert limits["in_use"] == pytest.approx(1, rel=0.02)
    hardware = Hardware("x", 1e9, 1e10)  # the model is slower than that
    header["perf_model"] = {
        "shape": asdict(SMALL),
        "cost": asdict(Cost.from_datasheet(SMALL, hardware)),
        "budget": 1024,
        "hardware": asdict(hardware),
    }
    found = summarize(Run({**header, "slots": 4}, closed_loop(), end=end)).json
    assert found["limits"]["lambda_max"] == found["model_max"]["requests_per_s"] < 80
