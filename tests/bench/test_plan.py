"""`bench plan` and the analysis of a sweep: arithmetic that needs no machine."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.workloads import SHAPES
from nvcli.bench import calibrate
from nvcli.bench.calibrate import Calibration
from nvcli.bench.limits import binding, graph_size, limit_rows, safe_slots
from nvcli.bench.machine import known_gpu
from nvcli.bench.perf_model import Cost, Hardware
from nvcli.bench.record import read_runs
from nvcli.bench.shape import Shape
from nvcli.bench.summary import Summary, summarize
from nvcli.bench.sweep import analyse, is_saturated, ladder, table
from nvcli.errors import NvcliError
from nvcli.models.resolve import demo_folder
from tests.bench.runs import closed_loop, store
from tests.cli.conftest import Cli


def test_limits_of_the_kv_cache() -> None:
    """1,000 blocks of 16, 96 in, 64 out: 16,000 / (96 + 32 + 8) on average, 1,000 // 10 at most."""
    rows = limit_rows(num_blocks=1000, block_size=16, slots=256, n_in=96, n_out=64)
    by_name = {r["resource"]: r for r in rows}
    assert by_name["KV, on average"]["allows"] == 16_000 // 136
    assert by_name["KV, never preempting"]["soft"] == 100
    assert binding(rows)["resource"] == "KV, on average"
    few = limit_rows(num_blocks=1000, block_size=16, slots=8, n_in=96, n_out=64)
    assert binding(few)["resource"] == "sequence slots"


def test_shared_prefix_counts_once() -> None:
    rows = limit_rows(num_blocks=1000, block_size=16, slots=256, n_in=96, n_out=64, prefix=80)
    assert rows[0]["allows"] == (1000 - 5) * 16 // (16 + 32 + 8)


def test_slots_for_a_load() -> None:
    assert safe_slots(21) == 35  # 21 + 3 sqrt(21) = 34.7
    assert graph_size(35) == 40
    assert [graph_size(n) for n in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, 16]
    assert [graph_size(n) for n in (250, 256, 257, 300)] == [256, 256, 272, 304]  # by 16 there


def test_ladder() -> None:
    assert ladder(16) == [1, 2, 4, 8, 16]
    assert ladder(10) == [1, 2, 4, 8, 10]
    assert ladder(1) == [1]


def test_plan_of_experts(cli: Cli, tmp_path: Path) -> None:
    """30B-A3B on an H200: 6.1 GB of weights a step of one, 53 of 32, all 61 GB held."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-30b-a3b"].config()))
    flags = ["--gpu", "H200", "--in-len", "16", "--out-len", "64"]
    found = json.loads(cli("bench", "plan", str(tmp_path), *flags, "--json").out)
    tpot = {p["concurrency"]: p["tpot_ms"] for p in found["points"]}
    assert tpot[1] == pytest.approx(6.1e9 / (0.8 * 4.8e12) * 1e3, rel=0.02)
    assert tpot[32] == pytest.approx(53.1e9 / (0.8 * 4.8e12) * 1e3, rel=0.1)
    tokens = {r["resource"]: r for r in found["limits"]}["KV, on average"]["allows"] * (16 + 32 + 8)
    assert tokens * 98_304 == pytest.approx(0.9 * 141e9 - 61.1e9 - 1.1e9, rel=0.02)


def test_plan_by_datasheet(cli: Cli) -> None:
    flags = ["--gpu", "H200", "--in-len", "1024", "--out-len", "256"]
    result = cli("bench", "plan", "demo", *flags, "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out, parse_constant=pytest.fail)
    assert found["source"] == "datasheet"
    assert [p["concurrency"] for p in found["points"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    for p in found["points"]:  # Little, by construction
        assert p["requests_per_s"] * p["e2e_ms"] / 1e3 == pytest.approx(p["concurrency"])
    text = cli("bench", "plan", "demo", *flags, "--rate", "10", "--explain").out
    assert "Little" in text
    assert "café" in text
    assert "binds" in text
    huge = cli("bench", "plan", "demo", *flags, "--rate", "1000000", "--explain")
    assert huge.code == 0
    assert "beyond" in huge.out


def test_plan_wants_a_config_and_lengths_that_fit(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_bytes((demo_folder() / "config.json").read_bytes())
    for name in (folder, folder / "config.json"):  # no weights, no tokenizer
        result = cli("bench", "plan", str(name), "--gpu", "H200", "--json")
        assert (result.code, result.err) == (0, "")
        assert json.loads(result.out)["model"] == "some-model"
    result = cli(
        "bench", "plan", str(folder), "--gpu", "H200", "--in-len", "2000", "--out-len", "49"
    )
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        "nvcli: 2,000 tokens in and 49 out do not fit the context of some-model, 2,048 tokens. "
        "Lower --in-len or --out-len.\n"
    )
    assert cli("bench", "plan", str(folder), "--gpu", "H200", "--in-len", "1984").code == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dtype", "foo"), "--dtype must be one of auto, float32, float16, bfloat16, got 'foo'"),
        (("--dtype", "float64"), "--dtype must be one of"),
        (("--device", "tpu"), "--device must be one of auto, cuda, cpu, got 'tpu'"),
        (("--gpu-memory-utilization", "1.1"), "must be over 0 and at most 1, got 1.1"),
        (("--gpu-memory-utilization", "0"), "must be over 0 and at most 1, got 0.0"),
        (("--gpu-memory-utilization", "nan"), "must be over 0 and at most 1, got nan"),
        (("--gpu", "H200", "--device", "cpu"), "--gpu and --device contradict each other"),
        (("--arrival", "constant"), "--arrival is for an open loop; give --rate"),
        (("--model", "other"), "MODEL and --model name two models"),
        (("--gpu", "H2000"), "no datasheet of 'H2000' is known"),
        (("--gpu", "L40"), "no datasheet of 'L40' is known"),
    ],
)
def test_a_plan_looks_at_its_options_as_the_engine_does(
    cli: Cli, flags: tuple[str, ...], message: str
) -> None:
    result = cli("bench", "plan", "demo", *flags)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


def test_a_model_behind_the_command_wins_over_a_variable(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCLI_MODEL", "other")
    found = json.loads(cli("bench", "plan", "demo", "--gpu", "H200", "--json").out)
    assert found["model"] == "demo"


@pytest.mark.parametrize("command", ["bench plan", "bench latency", "bench throughput", "serve"])
@pytest.mark.parametrize("words", [("",), ("-m", "")])
def test_an_empty_name_is_not_the_built_in_model(
    cli: Cli, command: str, words: tuple[str, ...]
) -> None:
    result = cli(*command.split(), *words)
    assert result.code == 3
    assert "the name of the model is empty" in result.err


@pytest.mark.parametrize(
    ("device", "known"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_a_datasheet_is_that_of_the_device_and_of_no_longer_name(
    device: str, known: str | None
) -> None:
    found = known_gpu(device)
    assert (found and found.name) == known


def test_a_plan_takes_a_calibration_of_the_same_engine(cli: Cli) -> None:
    shape = Shape(256, 6, 4, 2, 128, 768, 4096, True, weight_bytes=4, kv_bytes=4)
    cost = Cost(0.0, 0.5e-3, 3e-3, 3e-6, 1.4e-11, 1.75e-11, 3e-3, source="calibrated")
    found = Calibration("k", shape, Hardware("a CPU", 1e10, 1e11), cost, 1024, model_name="demo")
    found.max_b, found.max_S, found.max_p = 16, 16_384, 2048
    found.slots, found.num_blocks, found.max_model_len = 3, 40, 256
    found.asked = {"dtype": "bfloat16"}
    calibrate.save(found)

    def plan(*flags: str) -> dict[str, Any]:
        result = cli("bench", "plan", "demo", *flags, "--json")
        assert result.code == 0, result.err
        return dict(json.loads(result.out))

    assert calibrate.find("demo") is None
    assert calibrate.find("demo", given={"dtype": "bfloat16", "max_num_seqs": 4}) is not None
    assert calibrate.find("demo", 2, {"dtype": "bfloat16"}) is None
    found.asked = {}
    calibrate.save(found)
    assert plan()["source"] == "calibrated"
    assert plan()["l_max"] == 3
    # It was measured with --max-num-seqs 3 --max-model-len 256: its costs hold, its limits do not.
    found.is_limited = True
    calibrate.save(found)
    whole = plan("--in-len", "1000")
    assert whole["source"] == "calibrated"
    assert whole["l_max"] == 16
    assert plan("--max-num-seqs", "5")["l_max"] == 5


def test_options_that_are_what_they_would_be_anyway_are_none() -> None:
    from dataclasses import asdict

    from nvcli.config import EngineConfig

    def asked(**options: Any) -> dict[str, Any]:
        return calibrate.options_of(asdict(EngineConfig(**options)))

    assert asked() == calibrate.options_of({}) == {}
    assert asked(device="auto", enforce_eager=False, block_size=16, max_num_seqs=4) == {}
    for given in ({"run_ahead": False}, {"run_ahead": True}, {"block_size": 256}):
        assert asked(**given) == calibrate.options_of(given) == given


def test_a_calibration_that_cannot_be_written_leaves_the_old_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    shape = Shape(256, 6, 4, 2, 128, 768, 4096, True)
    cost = Cost(0.0, 0.5e-3, 3e-3, 3e-6, 1.4e-11, 1.75e-11, 3e-3)
    found = Calibration("k", shape, Hardware("a CPU", 1e10, 1e11), cost, 1024, model_name="demo")
    path = calibrate.save(found)
    before = path.read_bytes()

    def refuse(temporary: Path, path: Path) -> None:
        assert temporary.exists()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(NvcliError, match=f"^cannot write {path}: No space left"):
        calibrate.save(found)
    assert (list(path.parent.iterdir()), path.read_bytes()) == ([path], before)


@pytest.mark.torch
def test_plan_of_fp8_weights(tmp_path: Path) -> None:
    from benchmarks.engine.workloads import write_shape
    from nvcli.bench.planner import make_plan

    def shape(gpu: str, name: str = "qwen3-8b-fp8") -> Shape:
        none: dict[str, Any] = dict.fromkeys(("device", "dtype", "share", "slots"))
        model = write_shape(tmp_path / name, name)
        return make_plan(model, gpu=gpu, n_in=128, n_out=128, **none).model.shape

    assert shape("H200").is_fp8
    assert not shape("A100-SXM4-80GB").is_fp8  # where they become bfloat16
    assert shape("A100-SXM4-80GB") == shape("A100-SXM4-80GB", "qwen3-8b")


def test_a_plan_for_a_gpu_knows_what_steps_are_padded_to(cli: Cli, tmp_path: Path) -> None:
    """Prompts of 0.6B up to 4,096 tokens are captured on CUDA; on a CPU nothing is."""
    from nvcli.bench.planner import make_plan
    from nvcli.engine.buckets import Buckets

    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"].config()))
    none = {"dtype": None, "share": None}
    lengths = {"n_in": 1024, "n_out": 64}
    model = make_plan(str(tmp_path), gpu="H200", device=None, slots=64, **none, **lengths).model
    assert model.buckets == Buckets.of(64, model.budget, model.shape.num_params)
    assert model.buckets.tokens[-1] == 4096
    on_cpu = make_plan(str(tmp_path), gpu=None, device="cpu", slots=64, **none, **lengths)
    assert on_cpu.model.buckets is None

    def first_token_ms(in_len: str) -> float:
        flags = ["--gpu", "H200", "--in-len", in_len, "--out-len", "64", "--json"]
        points = json.loads(cli("bench", "plan", str(tmp_path), *flags).out)["points"]
        return float(points[0]["ttft_ms"])

    assert first_token_ms("1025") > 1.15 * first_token_ms("1024")  # 1,280 tokens
    assert first_token_ms("512:1536") > 1.05 * first_token_ms("1024")  # 1,024 is no mean bucket


def test_sweep_finds_the_curve_it_was_made_of(tmp_path: Path) -> None:
    """Requests of 50 ms up to 4 places; with 8 places each takes 100 ms: the same rate."""
    path = tmp_path / "s.jsonl"
    for clients in (1, 2, 4):
        load = {"mode": "closed", "concurrency": clients, "text": f"c = {clients}"}
        records = closed_loop(60, clients=clients)
        store(path, records, load=load, slo={"e2e": 0.06})
    slow = closed_loop(60, clients=8, ttft_ms=40, gap_ms=20)
    load = {"mode": "closed", "concurrency": 8, "text": "c = 8"}
    store(path, slow, load=load, slo={"e2e": 0.06})
    summaries = [summarize(r) for r in read_runs(path)]
    assert not is_saturated(summaries[:3])
    assert is_saturated(summaries)
    found = analyse(summaries)
    assert [round(r["requests_per_s"]) for r in found.rows] == pytest.approx(
        [20, 40, 80, 80], rel=0.05
    )
    assert found.best_under_slo is not None
    assert found.best_under_slo["load"] == "c = 4"
    assert found.fit is not None
    text = "\n".join(table(found))
    assert "most under the limits: c = 4" in text
    assert "nan" not in text


def row(load: str, n: float, x: float, **more: object) -> dict[str, Any]:
    """What `analyse` reads of a summary."""
    return {
        "load": {"text": load},
        "concurrency": {"mean": n},
        "throughput": {"requests_per_s": x, "output_tokens_per_s": 8 * x},
        "window": {"is_overloaded": more.get("overloaded", False)},
        "ttft_ms": {"p50": 1.0, "p99": None},
        "tpot_ms": {"p50": 1.0},
        "e2e_ms": {"p99": None, "mean": 1e3 * n / x},
        "goodput": {"share_of_sent": 1.0, "slo_ms": {}},
        "little": {"verdict": "good"},
        "verdict": {"server_was_gone": False},
        "counts": {"sent": 9},
        "until_ci": None,
        "model_rows": [],
        "model_max": {
            "slots": 64,
            "requests_per_s": 22.2,
            "is_compute_bound": more.get("compute", False),
        },
    }


def test_what_arithmetic_bends_is_no_contention() -> None:
    """Amdahl with sigma = 0.05 up to 16; at 32 and 64 the products bind, a last point diverged."""
    points = [row(f"c = {n}", n, n / (1 + 0.05 * (n - 1))) for n in (1, 2, 4, 8, 16)]
    points += [row("c = 32", 32, 10.0, compute=True), row("c = 64", 64, 10.0, compute=True)]
    points.append(row("20/s", 500, 9.0, overloaded=True))
    found = analyse([Summary(p) for p in points])
    assert found.fit is not None
    assert found.fit.sigma == pytest.approx(0.05)
    assert found.fit.kappa == 0
    assert found.left_out == ["c = 32", "c = 64", "20/s"]
    assert found.as_json()["model_max"]["requests_per_s"] == 22.2
    text = "\n".join(table(found))
    assert "knee N = 19 (10.0 req/s, 1.90x the latency of a lone request)" in text
    assert "model max 22.2 at c = 64" in text
    assert "compute-bound, diverged or unsound: c = 32; c = 64; 20/s" in text


def test_an_unsound_point_is_not_in_the_fit() -> None:
    points = [Summary(row(f"c = {n}", n, n / (1 + 0.05 * (n - 1)))) for n in (1, 2, 4, 8)]
    points.insert(2, Summary(row("c = 3", 3, 9.0), unsound=["not steady"]))
    found = analyse(points)
    assert found.fit is not None
    assert found.fit.sigma == pytest.approx(0.05)
    assert found.left_out == ["c = 3"]
    few = analyse(points[:3])  # with fewer than three others it counts: a doubtful fit, said so
    assert few.fit is not None
    assert few.left_out == []
